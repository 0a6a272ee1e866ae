"""The attention plan of a step: all that attention needs besides queries and pools.

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

BLOCK = 64  # positions whose keys are taken at once on a GPU


@dataclass(frozen=True, slots=True, eq=False)
class NodeKeys:
    """Slots of the positions from the last whole block of the context on, by draft node, on a
    GPU: found once per step.

    With context = start + run_len, column w is position context // 64 * 64 + w: what is left of the
    context, then the node's path in depth order, itself last. Columns past ``lens_N`` hold nothing.
    """

    slots_NW: torch.Tensor  # int32 [N, 128]
    lens_N: torch.Tensor  # int32, between 1 and 127; 0 for nodes that are no entry's


@dataclass(kw_only=True, slots=True, eq=False)
class AttentionPlan:
    """Made by the runner for one step, read by every layer, never written to after the first.

    Tensors contiguous, on one device.

    Entry b owns query rows [q_offsets[b], q_offsets[b + 1]): first the rows of its causal run, row
    j at position start + j, then its draft nodes. Draft node j of an entry is tree node j + 1; tree
    node 0, the root, is the run's last token. Parents come before their children. Rows of T past
    q_offsets[B] are padding. Where there are fewer rows than run tokens and nodes, they are
    the last ones: keys and values of the others are in the pools already. So an entry may have no
    rows at all, and nodes past node_offsets[B] are padding.

    With ``req_to_token[rows[b]]`` the entry's slots by position, row j of the run sees the slots
    [0, start + j + 1) and a node sees [0, start + run_len), then the slots of the draft nodes on
    its path in depth order, itself last: in position order, the keys plain decoding would see.
    """

    req_to_token: torch.Tensor  # int32 [rows, max_context]: the whole table, rows may be strided
    rows_B: torch.Tensor  # int32, row of req_to_token
    q_offsets_B1: torch.Tensor  # int32
    starts_B: torch.Tensor  # int32, position of the run's first token
    run_lens_B: torch.Tensor  # int32
    node_offsets_B1: torch.Tensor  # int32; entry b owns nodes [offsets[b], offsets[b + 1])
    node_masks_N: torch.Tensor  # int64 bits: bit k set when tree node k is on the path; root bit 0
    node_slots_N: torch.Tensor  # int32
    longest: int | None = None  # no run ends past it; None: the table's width. Spares a GPU work
    # The CPU op's own form of the above, and a GPU's, made at the first layer.
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
                    f"AttentionPlan.{name}", tensor.stride(), "must be adjacent in memory"
                )
