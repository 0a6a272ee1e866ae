"""Updates that bring what has changed are bitwise what full ones are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import InvalidInputError, RolloutEngine
from tests.helpers.tensor_cases import changed, stored
from tests.helpers.thread_ranks import on_ranks
from tests.helpers.tiny_moe import save_tiny_moe
from tests.helpers.weight_transports import opened
from tests.weights.conftest import Policy, outputs
from tests.weights.test_rank_weights import CASES, RankModel, same

EMBEDDING = "model.embed_tokens.weight"
UP = "model.layers.0.mlp.up_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.norm.weight"
Tensors = dict[str, torch.Tensor]


def delta(old: Tensors, new: Tensors) -> Tensors:
    """What has changed: matrices by their elements, an embedding by its rows, vectors whole."""
    found: Tensors = {}
    for name, tensor in new.items():
        differs = tensor != old[name]
        if not differs.any():
            continue
        if tensor.dim() == 1:
            found[name] = tensor
        elif name == EMBEDDING:
            found[f"{name}:rows"] = differs.any(dim=1).nonzero().flatten()
            found[f"{name}:values"] = tensor[found[f"{name}:rows"]]
        else:
            found[f"{name}:elements"] = differs.view(-1).nonzero().flatten().int()
            found[f"{name}:values"] = tensor.view(-1)[found[f"{name}:elements"]]
    return found


def stepped(tensors: Tensors, share: float, seed: int = 0) -> Tensors:
    """All tensors, some of their elements after a step of training."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(
            torch.rand(tensor.shape, generator=generator) < share, tensor * 1.5 + 0.01, tensor
        )
        for name, tensor in tensors.items()
    }


@pytest.fixture
def new(policies: list[Policy]) -> Tensors:
    """Small changes in three tensors."""
    old = policies[0].tensors
    return old | stepped({name: old[name] for name in (EMBEDDING, UP, DOWN, NORM)}, 0.02)


@pytest.fixture
def wanted(engine: RolloutEngine, policies: list[Policy], new: Tensors) -> str:
    """The digest that a full update of them gives."""
    engine.update_weights_from_tensor(new.items())
    found = engine.weights_digest()
    engine.update_weights_from_tensor(policies[0].tensors.items(), weight_version=0)
    return found


@pytest.mark.parametrize("kind", ["generator", "disk", "distributed"])
def test_a_delta_gives_what_a_full_update_gives(
    engine, policies, new, wanted, tmp_path: Path, kind: str
) -> None:
    changes = delta(policies[0].tensors, new)
    assert sum(each.nbytes for each in changes.values()) < 0.2 * sum(
        each.nbytes for each in new.values()
    )
    with opened(kind, engine, tmp_path) as update:
        update(changes, base_version=0)
        assert engine.weights_digest() == wanted
        assert engine.weight_version == 1
        update(delta(new, policies[0].tensors), base_version=1)
    assert engine.weights_digest() == policies[0].digest
    assert outputs(engine) == policies[0].outputs


def test_a_delta_to_a_version_that_is_not_in_use_is_refused(engine, policies, new, wanted) -> None:
    changes = delta(policies[0].tensors, new)
    for base in (1, 7):
        with pytest.raises(InvalidInputError, match="version 0") as refused:
            engine.update_weights_from_tensor(changes, base_version=base)
        assert refused.value.field == "base_version"
    with pytest.raises(InvalidInputError) as refused:
        engine.update_weights_from_tensor(changes, partial=True)
    assert refused.value.field == "base_version"
    assert outputs(engine) == policies[0].outputs
    engine.update_weights_from_tensor(changes, base_version=0)
    with pytest.raises(InvalidInputError, match="version 1"):
        engine.update_weights_from_tensor(changes, base_version=0)
    assert engine.weights_digest() == wanted
    engine.update_weights_from_tensor(policies[0].tensors, weight_version=9)
    assert engine.weights_digest() == policies[0].digest


WRONG_CHANGES: list[tuple[dict[str, Any], str]] = [
    ({f"{UP}:elements": [2, 2]}, "ascending"),
    ({f"{UP}:elements": [-1, 2]}, "ascending"),
    ({f"{UP}:elements": [0, 80 * 48]}, "ascending"),
    ({f"{UP}:elements": [0.0, 1.0]}, "int32 or int64"),
    ({f"{UP}:elements": [0, 1, 2]}, "values of"),
    ({f"{UP}:elements": [0] * 10**5, f"{UP}:values": [0.0] * 10**5}, "must be at most"),
    ({f"{UP}:elements": None}, "needs"),
    ({f"{UP}:values": None}, "needs"),
    ({f"{UP}:values": [1.0, float("nan")]}, "NaN"),
    ({f"{UP}:values": [1, 2]}, "wrong dtype"),
    ({UP: 0.0}, "comes twice"),
    ({"x:elements": [0], "x:values": [1.0]}, "unexpected: x"),
    ({f"{EMBEDDING}:rows": [0], f"{EMBEDDING}:values": [1.0]}, "values of"),
    ({f"{EMBEDDING}:rows": [97], f"{EMBEDDING}:values": [[1.0] * 48]}, "ascending"),
]


def test_a_wrong_change_is_refused_before_anything_is_written(engine, policies) -> None:
    for change, word in WRONG_CHANGES:
        changes: dict[str, Any] = {f"{UP}:elements": [4, 9], f"{UP}:values": [1.0, 2.0]} | change
        tensors = [(NORM, policies[0].tensors[NORM] * 2)]
        for name, values in changes.items():
            if name == UP:
                values = policies[0].tensors[UP]
            if values is not None:
                tensors.append((name, torch.as_tensor(values)))
        with pytest.raises(InvalidInputError, match=word):
            engine.update_weights_from_tensor(tensors, base_version=0, check_finite=True)
        assert engine.weights_digest() == policies[0].digest, change
    assert outputs(engine) == policies[0].outputs


@pytest.mark.parametrize("case", ["biases, shared kv heads", "interleaved rows"])
def test_a_rank_writes_what_of_a_change_it_stores(case: str, tmp_path: Path) -> None:
    save, size = CASES[case]
    folder = save(tmp_path)
    first = stored(folder)
    new = stepped(first, 0.05)
    changes = delta(first, new)
    assert any(name.endswith(":elements") for name in changes)

    def on_rank(group: Any) -> None:
        rank = RankModel(folder, group)
        rank.update(new.items())
        wanted = rank.own()
        rank.update(changed(first).items())
        rank.update(first.items(), weight_version=8)
        rank.update(changes.items(), base_version=8, partial=True)
        assert same(rank.own(), wanted)

    on_ranks(size, on_rank)


def test_a_rank_adds_its_part_of_an_adapter_to_its_base(tmp_path: Path) -> None:
    """The second adapter replaces the first; weights that it leaves out get their base again."""
    folder = save_tiny_moe(tmp_path)
    first = stored(folder)
    names = [name for name in first if name.endswith(("q_proj.weight", "o_proj.weight"))]

    def on_rank(group: Any) -> None:
        rank = RankModel(folder, group)
        for adapted in (names, names[:1]):
            adapter, merged = {}, dict(first)
            for name in adapted:
                rows, columns = first[name].shape
                a = torch.linspace(-1, 1, 2 * columns).view(2, columns)
                b = torch.linspace(1, 3, 2 * rows).view(rows, 2)
                stem = f"base_model.model.{name.removesuffix('weight')}"
                adapter |= {f"{stem}lora_A.weight": a, f"{stem}lora_B.weight": b}
                merged[name] = first[name] + (b @ a) * 0.5
            whole = RankModel(folder, group)
            whole.update(merged.items())
            rank.update(adapter.items(), lora_scaling=0.5, partial=True)
            assert same(rank.own(), whole.own())

    on_ranks(2, on_rank)
