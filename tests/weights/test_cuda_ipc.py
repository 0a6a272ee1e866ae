"""CUDA IPC, with memory of the CPU in the driver's place."""

from __future__ import annotations

import json

import pytest
import torch

from rollout.errors import InvalidInputError, WeightUpdateError
from rollout.parallel import SingleRank
from rollout.weights import cuda_ipc
from rollout.weights.cuda_ipc import CudaIpcHandle, CudaIpcSender, ExportedBuffer
from rollout.weights.receiver import WeightReceiver
from rollout.weights.shared_memory import HandleReceiver, HandleSource
from rollout.weights.transaction import WeightTransaction
from tests.helpers.plain_part import PlainPart

TENSORS = {f"t{i}": torch.full((16,), float(i)) for i in range(6)}


def received(handles) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in HandleReceiver().tensors(handles)}


@pytest.fixture
def exported(monkeypatch) -> dict[bytes, torch.UntypedStorage]:
    """The shared storages by handle. A handle is of a whole storage, as the driver's are."""
    found: dict[bytes, torch.UntypedStorage] = {}

    def share(buffer: torch.Tensor) -> ExportedBuffer:
        storage = buffer.untyped_storage()
        # Version and kind come first, as torch writes them.
        memory = b"\x01c" + storage.data_ptr().to_bytes(8, "little")
        found[memory] = storage
        return ExportedBuffer(
            device_uuid="GPU-0", memory=memory, storage_bytes=storage.nbytes(), storage_offset=0,
            counter=b"counter", counter_offset=0, event=b"event", event_sync=True,
        )  # fmt: skip

    def mapped(buffer: ExportedBuffer, field: str) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(found[buffer.memory])

    monkeypatch.setattr(cuda_ipc, "_exported", share)
    monkeypatch.setattr(cuda_ipc, "_mapped", mapped)
    return found


def test_a_stream_of_handles(exported):
    sender = CudaIpcSender(128)
    for _ in range(2):
        handles = (json.loads(json.dumps(handle)) for handle in sender.handles(TENSORS.items()))
        found = received(handles)
        assert list(found) == list(TENSORS)
        assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert len(exported) == 1, "one buffer, shared once, for every bucket of every update"


def test_a_buffer_is_mapped_once_for_an_update(exported, monkeypatch):
    part = PlainPart({name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()})
    receiver = WeightReceiver(
        WeightTransaction({"target": part}), torch.device("cpu"), SingleRank()
    )
    mapped, fields = cuda_ipc._mapped, []
    monkeypatch.setattr(cuda_ipc, "_mapped", lambda *given: fields.append(1) or mapped(*given))
    with CudaIpcSender(128) as sender:
        for one_call in (True, False, False):
            fields.clear()
            if one_call:
                receiver.update(HandleSource(sender.handles(TENSORS.items())), {})
            else:
                receiver.begin(None, {})
                for handle in sender.handles(TENSORS.items()):
                    receiver.update(HandleSource(handle), {})
                receiver.end()
            assert len(fields) == 1
            assert all(torch.equal(part.own[name], tensor) for name, tensor in TENSORS.items())
            for tensor in part.own.values():
                tensor.zero_()


def test_large_tensors_and_views_are_copied_into_the_senders_own_buffer(exported):
    """A parameter may be a view of its trainer's flat storage, which is never shared."""
    trainers = torch.arange(4096, dtype=torch.float32)
    tensors = {"small": trainers[16:24], "large": trainers[640:1640], "last": trainers[64:80]}
    found = received(CudaIpcSender(128).handles(tensors.items()))
    assert list(found) == list(tensors)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    own = trainers.untyped_storage().data_ptr()
    assert own not in {storage.data_ptr() for storage in exported.values()}
    assert torch.equal(trainers, torch.arange(4096, dtype=torch.float32))


def test_a_handle_is_refused_once_its_buffer_holds_another_bucket(exported):
    handles = list(CudaIpcSender(128).handles(TENSORS.items()))
    assert len(handles) == 3
    with pytest.raises(InvalidInputError, match=r"handles\[1\].*same buffer as handles\[0\]"):
        HandleReceiver().tensors(handles)
    with pytest.raises(InvalidInputError, match=r"handles\[0\]\.nonce.*no longer"):
        HandleReceiver().tensors(handles[0])
    assert list(received(handles[2])) == ["t4", "t5"]

    stream = CudaIpcSender(128).handles(TENSORS.items())
    first = next(stream)
    tensors = iter(HandleReceiver().tensors(first))
    next(tensors)
    next(stream)
    with pytest.raises(WeightUpdateError, match="refilled"):
        list(tensors)
    with pytest.raises(InvalidInputError, match=r"handles\[0\]\.nonce.*no longer"):
        list(HandleReceiver().tensors(handle for handle in [first]))


def cuda_handle() -> dict:
    return {
        "kind": "cuda_ipc", "device_uuid": "GPU-0", "memory": "ab" * 64, "storage_bytes": 4096,
        "nonce": "01" * 16, "storage_offset": 0, "counter": "cd" * 8, "counter_offset": 3,
        "event": "ef" * 64,
        "event_sync": True, "layout": {"num_bytes": 64, "entries": [
            {"name": "w", "dtype": "float32", "shape": [16], "start": 0, "end": 64}]},
    }  # fmt: skip


def test_malformed_and_foreign_handles_are_refused_by_field():
    assert CudaIpcHandle.from_json(cuda_handle()).to_json() == cuda_handle()
    for field, value in (
        ("device_uuid", ""), ("memory", "x"), ("storage_bytes", 127), ("storage_bytes", "64"),
        ("storage_offset", -1), ("counter", 1), ("counter_offset", -1), ("event", None),
        ("event_sync", 1), ("nonce", "00" * 16), ("kind", "shared_memory"),
    ):  # fmt: skip
        with pytest.raises(InvalidInputError) as error:
            CudaIpcHandle.from_json(cuda_handle() | {field: value})
        assert error.value.field == f"handle.{field}"
    with pytest.raises(InvalidInputError, match=r"handles\[0\]\.device_uuid"):
        received(cuda_handle())
    with pytest.raises(InvalidInputError, match="must be on a GPU"):
        next(CudaIpcSender(128).handles(TENSORS.items()))
