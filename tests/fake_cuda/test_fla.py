"""Another package's kernels are taken only where they work."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from rollout.ops.gated_delta_rule.chunked import torch_kernel
from rollout.ops.gated_delta_rule.fla import chunked_kernel


def test_a_package_that_raises_is_left_alone(gpu, monkeypatch, caplog) -> None:
    def of_another_version(*args: object, **kwargs: object) -> None:
        raise TypeError("unexpected keyword argument 'cu_seqlens'")

    package = "fla.ops.gated_delta_rule"
    for name in ("fla", "fla.ops", package):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(
        sys.modules[package], "chunk_gated_delta_rule", of_another_version, raising=False
    )
    states = torch.empty(1, 4, 24, 40, device="cuda")
    with caplog.at_level("WARNING"):
        assert chunked_kernel(states, torch.bfloat16) is torch_kernel
    assert "cu_seqlens" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_the_package_ours_is_taken(gpu, monkeypatch, dtype) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    assert chunked_kernel(torch.empty(1, 4, 24, 40, device="cuda"), dtype) is torch_kernel
