"""A process reads tensors that another has on the GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import torch

from rollout.weights.cuda_ipc import CudaIpcSender
from tests.helpers.hang import HANG_SECONDS


def test_cuda_ipc_between_processes():
    """A process that knows nothing but the handles reads what this one has on the GPU."""
    script = (
        "import sys, json; from rollout.weights.shared_memory import HandleReceiver\n"
        "receiver = HandleReceiver()\n"
        "for line in sys.stdin:\n"
        "    tensors = receiver.tensors(json.loads(line))\n"
        "    print(json.dumps({n: t.sum().item() for n, t in tensors}), flush=True)"
    )
    tensors = {f"t{i}": torch.full((16,), float(i), device="cuda") for i in range(6)}
    tensors["large"] = torch.arange(4096.0, device="cuda")[1024:]
    heard = {}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as receiver:
        for handle in CudaIpcSender(128).handles(tensors.items()):
            print(json.dumps(handle), file=receiver.stdin, flush=True)
            heard |= json.loads(receiver.stdout.readline())
        receiver.stdin.close()
        assert receiver.wait(HANG_SECONDS) == 0
    assert heard == {name: tensor.sum().item() for name, tensor in tensors.items()}
