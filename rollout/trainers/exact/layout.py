"""Where the sequences of a batch lie: padded on either side, or packed one after the other.

Legend: B sequences of the batch, T their length with padding, S sequences, N their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.errors import InvalidInputError
from rollout.ops.paged_attention import AttentionPlan
from rollout.ops.ragged import offsets_of, ranges


@dataclass(frozen=True, slots=True, eq=False)
class SequenceLayout:
    """The sequences among the B * T rows of a batch, and one step of all of them."""

    rows_N: torch.Tensor | None  # int64, of tokens; None: every row is one, in order
    positions_N: torch.Tensor  # int64
    slots_N: torch.Tensor  # int64; slot 0 is nobody's
    lens: list[int]
    plan: AttentionPlan

    @staticmethod
    def of(
        shape: tuple[int, int],
        mask_BT: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        device: torch.device,
    ) -> SequenceLayout:
        """
        Args:
            shape: B and T.
            mask_BT: whether a row is a token; None: every one is.
            position_ids: [B, T] or [1, T]; looked at without a mask: sequences that are packed
                begin where they do not go on by one.

        Raises InvalidInputError for a mask with gaps.
        """
        batch, length = shape
        if mask_BT is None:
            starts, lens = _packed(batch, length, position_ids)
        else:
            starts, lens = _masked(mask_BT.cpu().numpy().astype(bool))
        rows_N = ranges(starts, lens)
        whole = len(rows_N) == batch * length
        offsets_S1 = offsets_of(lens)
        slots_N = np.arange(1, len(rows_N) + 1)
        table = np.zeros((len(lens), max(lens, default=0) + 1), dtype=np.int32)
        for row, (first, own) in enumerate(zip(offsets_S1, lens, strict=False)):
            table[row, :own] = slots_N[first : first + own]

        def ints(values: NDArray) -> torch.Tensor:
            return torch.from_numpy(values.astype(np.int32)).to(device)

        none = ints(np.zeros(0))
        plan = AttentionPlan(
            req_to_token=ints(table),
            rows_B=ints(np.arange(len(lens))),
            q_offsets_B1=ints(offsets_S1),
            starts_B=ints(np.zeros(len(lens))),
            run_lens_B=ints(lens),
            node_offsets_B1=ints(np.zeros(len(lens) + 1)),
            node_masks_N=none.long(),
            node_slots_N=none,
        )
        return SequenceLayout(
            rows_N=None if whole else torch.from_numpy(rows_N).to(device),
            positions_N=torch.from_numpy(ranges(np.zeros_like(lens), lens)).to(device),
            slots_N=torch.from_numpy(slots_N).to(device),
            lens=lens.tolist(),
            plan=plan,
        )

    def taken(self, of_rows: torch.Tensor) -> torch.Tensor:
        """The tokens' rows of [B * T, ...], as a new tensor."""
        return of_rows.clone() if self.rows_N is None else of_rows[self.rows_N]

    def placed(self, of_tokens: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Tokens' values at their rows, [B * T, ...]; zeros elsewhere."""
        if self.rows_N is None:
            return of_tokens
        return of_tokens.new_zeros(num_rows, *of_tokens.shape[1:]).index_copy(
            0, self.rows_N, of_tokens
        )


def _packed(
    batch: int, length: int, position_ids: torch.Tensor | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First rows and lengths of sequences that fill all rows."""
    if position_ids is None:
        positions_BT = np.broadcast_to(np.arange(length), (batch, length))
    else:
        positions_BT = np.broadcast_to(position_ids.cpu().numpy(), (batch, length))
    begins_BT = np.ones((batch, length), dtype=bool)
    begins_BT[:, 1:] = positions_BT[:, 1:] != positions_BT[:, :-1] + 1
    starts = begins_BT.reshape(-1).nonzero()[0].astype(np.int64)
    return starts, np.diff(starts, append=batch * length)


def _masked(mask_BT: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    lens = mask_BT.sum(axis=1).astype(np.int64)
    first = mask_BT.argmax(axis=1)
    places = np.arange(mask_BT.shape[1])
    runs = (places >= first[:, None]) & (places < (first + lens)[:, None])
    if (mask_BT != runs).any():
        raise InvalidInputError(
            "attention_mask", "a mask with gaps", "the tokens of a sequence must be side by side"
        )
    starts = np.arange(len(mask_BT)) * mask_BT.shape[1] + first
    return starts[lens > 0], lens[lens > 0]
