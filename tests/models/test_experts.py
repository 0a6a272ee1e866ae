"""The sparse block: against a plain loop, row by row bitwise, and its weights by every name."""

from __future__ import annotations

import pytest
import torch

from rollout.models.experts_config import ExpertsSpec
from rollout.models.layers import grouped_linear
from rollout.models.layers.experts import Experts
from rollout.models.layers.row_invariance import make_row_invariant
from rollout.models.layers.weight_factory import WeightFactory
from rollout.models.layers.weight_loader import mismatches
from rollout.ops.matmul.tiles import tiles
from rollout.parallel import ONE_RANK

CPU = torch.device("cpu")
HIDDEN, COUNT, CHOSEN, FFN, SHARED = 36, 11, 3, 20, 28


def tensors(shared: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    """A checkpoint's, expert by expert."""
    shapes = {"gate": (COUNT, HIDDEN)}
    ffns = {f"experts.{expert}": FFN for expert in range(COUNT)}
    if shared:
        shapes["shared_expert_gate"] = (1, HIDDEN)
        ffns["shared_expert"] = SHARED
    for name, ffn in ffns.items():
        shapes |= {f"{name}.{part}_proj": (ffn, HIDDEN) for part in ("gate", "up")}
        shapes[f"{name}.down_proj"] = (HIDDEN, ffn)
    generator = torch.Generator().manual_seed(seed)
    return {
        f"mlp.{name}.weight": torch.randn(shape, generator=generator) / shape[1] ** 0.5
        for name, shape in shapes.items()
    }


def fused(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: tensor for name, tensor in parts.items() if ".experts." not in name}
    gate, up, down = (
        torch.stack([parts[f"mlp.experts.{n}.{part}_proj.weight"] for n in range(COUNT)])
        for part in ("gate", "up", "down")
    )
    return found | {
        "mlp.experts.gate_up_proj": torch.cat([gate, up], 1),
        "mlp.experts.down_proj": down,
    }


def block(
    weights, *, dtype=torch.float32, normalizes=True, packing=True, stacked=False, ranks=ONE_RANK
) -> Experts:
    experts = Experts(
        ExpertsSpec(
            layers=(2,), num_experts=COUNT, experts_per_token=CHOSEN, ffn_size=FFN,
            shared_ffn_size=SHARED if "mlp.shared_expert_gate.weight" in weights else 0,
            normalizes=normalizes,
        ),
        2,
        WeightFactory(dtype=dtype, device=CPU, packing=packing, ranks=ranks, stacked=stacked),
        hidden_size=HIDDEN,
    )  # fmt: skip
    write(experts, weights)
    return experts


def write(experts: Experts, weights: dict[str, torch.Tensor]) -> None:
    weight_loaders = experts.weight_loaders("mlp")
    assert not mismatches(weight_loaders, {name: tuple(t.shape) for name, t in weights.items()})
    for name, tensor in weights.items():
        weight_loaders[name].write(tensor)
    for linear in experts.linears():
        linear.pack()


def plain(weights, x: torch.Tensor, normalizes: bool) -> torch.Tensor:
    """Row by row and expert by expert, in float64."""

    def mlp(name: str, row: torch.Tensor) -> torch.Tensor:
        gate, up, down = (
            weights[f"mlp.{name}.{part}_proj.weight"].double() for part in ("gate", "up", "down")
        )
        return down @ (torch.nn.functional.silu(gate @ row) * (up @ row))

    out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for t, row in enumerate(x.double()):
        probs = (weights["mlp.gate.weight"].double() @ row).softmax(0)
        chosen = probs.topk(CHOSEN)
        scale = chosen.values.sum() if normalizes else 1
        for expert, prob in zip(chosen.indices.tolist(), chosen.values, strict=True):
            out[t] += prob / scale * mlp(f"experts.{expert}", row)
        if "mlp.shared_expert_gate.weight" in weights:
            gate = weights["mlp.shared_expert_gate.weight"].double() @ row
            out[t] += gate.sigmoid() * mlp("shared_expert", row)
    return out


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[int, torch.Tensor]] = []

    def record(self, layer: int, experts_TX: torch.Tensor) -> None:
        self.calls.append((layer, experts_TX))


@pytest.mark.parametrize(
    ("shared", "packing", "stacked"),
    [(True, False, True), (True, True, False), (False, True, True), (False, False, False)],
)
@torch.inference_mode()
def test_is_a_loop_over_rows_and_experts(shared, packing, stacked, monkeypatch) -> None:
    """A GPU's stacked experts leave out the tiles that other products do."""
    normalizes, weights, told = shared, tensors(shared), []
    product = grouped_linear.grouped_matmul
    monkeypatch.setattr(
        grouped_linear,
        "grouped_matmul",
        lambda x, weights, groups, left_out: told.append(left_out) or product(x, weights, groups),
    )
    experts = block(weights, normalizes=normalizes, packing=packing, stacked=stacked)
    left_out = frozenset(tiles(torch.bfloat16)[:2])
    for linear in experts.linears():
        linear.left_out_tiles = left_out
    x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(1))
    routes = Recorder()
    y = experts(x, routes)
    torch.testing.assert_close(y.double(), plain(weights, x, normalizes), rtol=1e-4, atol=1e-5)
    ((layer, chosen),) = routes.calls
    assert layer == 2
    logits = x @ weights["mlp.gate.weight"].T
    assert torch.equal(chosen.long(), logits.topk(CHOSEN).indices)
    assert told == [left_out] * (2 if stacked else 0)
    assert experts(x[:0], routes).shape == (0, HIDDEN)


@pytest.mark.parametrize("packing", [False, True], ids=["plain", "packed"])
@torch.inference_mode()
def test_a_row_is_the_same_alone_and_in_any_company(packing) -> None:
    dtype = torch.bfloat16 if packing else torch.float32
    experts = block(tensors(shared=True), dtype=dtype, packing=packing)
    least = make_row_invariant(experts.linears(), 256)
    x = torch.randn(130, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[50:70] = x[50]  # one expert has many rows, others none
    together = experts(x)
    for count in range(least, 130, 7):
        for rows in (torch.arange(count), torch.arange(129, 129 - count, -1)):
            assert torch.equal(experts(x[rows]), together[rows]), count
    others = x.clone()
    others[1:] = torch.nan
    assert torch.equal(experts(others)[0], together[0])


def test_mismatches_name_what_is_missing_and_what_comes_twice() -> None:
    single = {name: tuple(tensor.shape) for name, tensor in tensors(shared=True).items()}
    whole = {name: tuple(tensor.shape) for name, tensor in fused(tensors(shared=True)).items()}
    weight_loaders = block(tensors(shared=True)).weight_loaders("mlp")
    del single["mlp.experts.3.up_proj.weight"]
    assert mismatches(weight_loaders, single) == ["missing: mlp.experts.3.up_proj.weight"]
    down = whole.pop("mlp.experts.down_proj")
    assert mismatches(weight_loaders, whole) == [
        f"missing: mlp.experts.{expert}.down_proj.weight" for expert in range(COUNT)
    ]
    part = "mlp.experts.0.down_proj.weight"
    assert mismatches(
        weight_loaders, {"mlp.experts.down_proj": down, part: (HIDDEN, FFN)}, partial=True
    ) == [f"comes twice: mlp.experts.down_proj holds {part} too"]
    assert mismatches(weight_loaders, {"mlp.experts.down_proj": (1, *down[1:])}, partial=True)
