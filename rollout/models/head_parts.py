"""The partition of attention heads among tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rollout.errors import InvalidInputError
from rollout.models.spec import ModelSpec
from rollout.parallel import ModelRanks


@dataclass(frozen=True, slots=True)
class HeadParts:
    """Query heads of each rank, and the kv heads they read. Ranks may share a kv head."""

    queries: tuple[range, ...]
    keys: tuple[range, ...]

    @staticmethod
    def of(spec: ModelSpec, size: int) -> HeadParts:
        """The partition of the whole model's heads, which `check_shares` has found even."""
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        each = heads // size
        queries = tuple(range(rank * each, (rank + 1) * each) for rank in range(size))
        shared_by = heads // kv_heads
        keys = tuple(range(q.start // shared_by, (q.stop - 1) // shared_by + 1) for q in queries)
        return HeadParts(queries, keys)


def check_shares(spec: ModelSpec, size: int, field: str = "parallel.size") -> None:
    """Raise InvalidInputError naming ``field`` unless the heads can be split evenly among ``size``
    ranks."""
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    if heads % size or (kv_heads % size and size % kv_heads):
        raise InvalidInputError(
            field, size,
            f"must divide the model's {heads} query heads, and divide its {kv_heads} kv heads "
            "or be a multiple of them",
        )  # fmt: skip
    linear = spec.linear_attention
    if linear is not None and linear.num_key_heads % size:
        raise InvalidInputError(
            field, size,
            f"must divide the {linear.num_key_heads} key heads of linear attention",
        )  # fmt: skip


def spec_of_rank(spec: ModelSpec, ranks: ModelRanks) -> ModelSpec:
    """The spec of this rank's part: its heads, with their keys, values and states.

    Raises InvalidInputError if the heads cannot be split evenly.
    """
    group = ranks.tensor
    if group.size == 1:
        return spec
    check_shares(spec, group.size, f"parallel.{'tensor_' if ranks.rows.size > 1 else ''}size")
    heads = HeadParts.of(spec, group.size)
    linear = spec.linear_attention
    if linear is not None:
        linear = replace(
            linear,
            num_key_heads=linear.num_key_heads // group.size,
            num_value_heads=linear.num_value_heads // group.size,
        )
    return replace(
        spec,
        num_heads=len(heads.queries[group.rank]),
        num_kv_heads=len(heads.keys[group.rank]),
        linear_attention=linear,
        whole=spec,
    )
