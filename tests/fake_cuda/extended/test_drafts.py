"""A neural draft's proposal on a GPU: sent once, read once, and all between can be captured."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.runner.graphs.capture import CudaCapture
from rollout.runner.graphs.graph_runner import GraphRunner
from spec_workers.neural.guesses import Guesser
from spec_workers.neural.tree_proposer import TreeProposer, TreesToGrow
from tests.helpers.fake_cuda import FakeGpu, Kind
from tests.helpers.requests import decode_batch, make_request

TOPK, STEPS, VOCAB, HIDDEN = 4, 4, 32_003, 64
ASKED = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "truncated": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
}


class NoLevels:
    """`DraftLevels` without networks: undefined values on the device."""

    def is_warm(self) -> bool:
        return True

    def inputs(self, rows_G, padding) -> dict:
        return {}

    def changes(self, rows_G) -> dict:
        return {}

    def apply(self, tensors, rows_G) -> None: ...

    def roots(self, inputs) -> torch.Tensor:
        return torch.empty(len(inputs["rows"]), 1, HIDDEN, device="cuda")

    def run(self, level, nodes, above, inputs):
        assert nodes.tokens_GN.shape == (len(inputs["rows"]), level * TOPK)
        return above.expand(-1, TOPK, -1), above

    def logits(self, level, hidden_RE) -> torch.Tensor:
        return torch.empty(len(hidden_RE), VOCAB, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("asked", ASKED)
def test_a_proposal_waits_once(gpu: FakeGpu, asked, count) -> None:
    device = torch.device("cuda")
    graphs = GraphRunner(
        "proposals", max_bytes=lambda: 1 << 30, capture=CudaCapture(device), device=device
    )
    token_ids_D = torch.empty(VOCAB, dtype=torch.int64, device=device)
    guesser = Guesser(TOPK, STEPS, token_ids_D)
    proposer = TreeProposer(
        NoLevels(), guesser, topk=TOPK, num_steps=STEPS, device=device, on_host=False,
        lockstep=False, graphs=graphs,
    )  # fmt: skip
    requests = [make_request([3] * 9, request_id=g, seed=g, **ASKED[asked]) for g in range(count)]
    wanted = TreesToGrow(
        batch=decode_batch(requests), entries_G=list(range(count)), rows_G=np.arange(count),
        ends_G=np.full(count, 9), sizes_G=np.full(count, 8), depths_G=np.full(count, STEPS),
        floor=0.1,
    )  # fmt: skip
    for _ in range(4):
        with gpu.seen.since() as seen:
            proposal = proposer.propose(wanted)
        assert not [str(event) for event in seen.of(Kind.STALL, Kind.FORBIDDEN)]
        assert len(seen.of(Kind.UPLOAD)) == len(seen.of(Kind.READ)) == 1
    assert not graphs.failure
    assert gpu.seen.of(Kind.REPLAY)
    assert proposal.tokens_GC.shape == (count, TOPK * (1 + TOPK * (STEPS - 1)))
