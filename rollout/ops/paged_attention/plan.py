"""The attention plan of a step: what attention needs besides queries and pools.

Legend: B entries, N draft nodes, T query rows, W columns: two blocks of positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from rollout.errors import InvalidInputError

if TYPE_CHECKING:
    from rollout.ops._cpu import AttentionSchedule
    from rollout.ops.paged_attention.work_list import WorkList

BLOCK = 64  # positions whose keys a GPU reads at once


@dataclass(frozen=True, slots=True, eq=False)
class NodeKeys:
    """Slots of each draft node's keys after the last whole block of its context, on a GPU.

    With context = start + run_len, column w is position context // 64 * 64 + w: the rest of the
    context, then the node's path in depth order, itself last. Columns from ``lens_N`` on are
    undefined.
    """

    slots_NW: torch.Tensor  # int32 [N, 128]
    lens_N: torch.Tensor  # int32, in [1, 127]; 0 for padding nodes


@dataclass(kw_only=True, slots=True, eq=False)
class AttentionPlan:
    """The layout of one step's attention, made by the runner and read by every layer. Never written
    to after the first layer.

    Tensors are contiguous, on one device.

    Entry b owns query rows [q_offsets[b], q_offsets[b + 1]): first the rows of its causal run, row
    j at position start + j, then its draft nodes. Draft node j of an entry is tree node j + 1; tree
    node 0, the root, is the run's last token. Parents come before their children. Rows of T past
    q_offsets[B] and nodes past node_offsets[B] are padding. An entry with fewer rows than run
    tokens and nodes has the last ones, maybe none: keys and values of the others are in the pools
    already.

    ``req_to_token[rows[b]]`` holds the entry's slots by position. Row j of the run sees the slots
    [0, start + j + 1). A node sees [0, start + run_len), then the slots of the draft nodes on its
    path in depth order, itself last: the keys of plain decoding, in position order.
    """

    req_to_token: torch.Tensor  # int32 [rows, max_context]: the whole table, rows may be strided
    rows_B: torch.Tensor  # int32, row of req_to_token
    q_offsets_B1: torch.Tensor  # int32
    starts_B: torch.Tensor  # int32, position of the run's first token
    run_lens_B: torch.Tensor  # int32
    node_offsets_B1: torch.Tensor  # int32; entry b owns nodes [offsets[b], offsets[b + 1])
    node_masks_N: torch.Tensor  # int64 bits: bit k set when tree node k is on the path; root bit 0
    node_slots_N: torch.Tensor  # int32
    # Derived forms for the CPU op and for a GPU, made at the first layer.
    schedule: AttentionSchedule | None = field(default=None, init=False, repr=False)
    work: WorkList | None = field(default=None, init=False, repr=False)
    node_keys: NodeKeys | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("req_to_token", "rows_B", "q_offsets_B1", "starts_B", "run_lens_B",
                     "node_offsets_B1", "node_masks_N", "node_slots_N"):  # fmt: skip
            tensor = getattr(self, name)
            dtype = torch.int64 if name == "node_masks_N" else torch.int32
            if tensor.dtype is not dtype:
                raise InvalidInputError(f"AttentionPlan.{name}", tensor.dtype, f"must be {dtype}")
            if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
                raise InvalidInputError(
                    f"AttentionPlan.{name}", tensor.stride(), "must be contiguous"
                )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionVariant:
    """A layer's options, the same in every step.

    window: a row sees its last ``window`` keys, itself included (Beltagy et al. 2020); None: all.
    soft_cap: scaled scores become ``soft_cap * tanh(score / soft_cap)`` (Gemma 2, 2024); None: they
        stay.
    sinks_H: float32, contiguous; a score per head that takes part in the softmax without a value
        (gpt-oss, 2025); None: there are none.
    """

    window: int | None = None
    soft_cap: float | None = None
    sinks_H: torch.Tensor | None = None


PLAIN = AttentionVariant()
