"""Where the sequences of a batch lie: padded on either side, packed one after the other, or as the
paths of a tree.

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
    slots_N: torch.Tensor  # int64, from 1
    lens: list[int]
    plan: AttentionPlan
    visible_NN: torch.Tensor | None = None  # of a tree of tokens, which is one "sequence"

    @staticmethod
    @torch.inference_mode(False)  # later forwards of the same batch may have gradients
    def of(
        shape: tuple[int, int],
        mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        cu_seq_lens: torch.Tensor | None,
        device: torch.device,
    ) -> SequenceLayout:
        """
        Args:
            shape: B and T.
            mask: [B, T], whether a row is a token; [1, 1, T, T], the rows that each row of a tree
                sees: its path in order, itself last; None: every row is a token.
            position_ids: [B, T], or [1, T] for all. They count a sequence's tokens from 0. Without
                a mask each 0 begins a packed sequence. With one they are checked, unless they
                count rows, as transformers does by default.
            cu_seq_lens: [S + 1], the rows where packed sequences begin, and their end.

        Raises InvalidInputError for other shapes, a mask with gaps, a mask of a packed batch, and
        positions that do not begin at 0.
        """
        if mask is not None and mask.dim() == 4:
            return SequenceLayout._of_tree(shape, mask, device)
        batch, length = shape
        positions_BT = None
        if position_ids is not None:
            positions_BT = np.broadcast_to(position_ids.cpu().numpy(), shape)
        if mask is None and cu_seq_lens is not None:
            bounds = cu_seq_lens.cpu().numpy().astype(np.int64)
            starts, lens = bounds[:-1], np.diff(bounds)
            if bounds[0] != 0 or bounds[-1] != batch * length or (lens < 1).any():
                raise InvalidInputError(
                    "cu_seq_lens_q", bounds.tolist(), f"must go up from 0 to {batch * length}"
                )
        elif mask is None:
            starts, lens = _packed(shape, positions_BT)
        elif tuple(mask.shape) == shape:
            starts, lens = _masked(mask.cpu().numpy().astype(bool))
        else:
            raise InvalidInputError("attention_mask", list(mask.shape), f"must be {list(shape)}")
        rows_N = ranges(starts, lens)
        if positions_BT is not None:
            _check_positions(positions_BT, rows_N, ranges(np.zeros_like(lens), lens))
        offsets_S1 = offsets_of(lens)
        slots = np.arange(1, len(rows_N) + 1)
        paths = [slots[first : first + own] for first, own in zip(offsets_S1, lens, strict=False)]
        is_whole = len(rows_N) == batch * length
        return SequenceLayout(
            rows_N=None if is_whole else torch.from_numpy(rows_N).to(device),
            positions_N=torch.from_numpy(ranges(np.zeros_like(lens), lens)).to(device),
            slots_N=torch.from_numpy(slots).to(device),
            lens=lens.tolist(),
            plan=_plan(paths, np.zeros_like(lens), device),
        )

    @staticmethod
    def _of_tree(
        shape: tuple[int, int], mask: torch.Tensor, device: torch.device
    ) -> SequenceLayout:
        length = shape[1]
        if tuple(mask.shape) != (1, 1, length, length) or shape[0] != 1:
            raise InvalidInputError(
                "attention_mask", list(mask.shape), f"must be {[1, 1, length, length]}"
            )
        visible_NN = mask[0, 0].bool()
        seen = visible_NN.cpu().numpy()
        if not _is_tree(seen):
            raise InvalidInputError(
                "attention_mask", "a mask of four dimensions",
                "must be a tree's: each row sees what its parent sees, and itself",
            )  # fmt: skip
        lens = seen.sum(axis=1).astype(np.int64)
        paths = np.split(seen.nonzero()[1] + 1, lens.cumsum()[:-1])
        return SequenceLayout(
            rows_N=None,
            positions_N=torch.from_numpy(lens - 1).to(device),
            slots_N=torch.arange(1, length + 1, device=device),
            lens=[length],
            plan=_plan(paths, lens - 1, device),
            visible_NN=visible_NN.to(device).clone(),
        )

    def scattered(self, of_tokens: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Tokens' values at their rows, [B * T, ...]; zeros elsewhere."""
        if self.rows_N is None:
            return of_tokens
        zeros = of_tokens.new_zeros(num_rows, *of_tokens.shape[1:])
        return zeros.index_copy(0, self.rows_N, of_tokens)


def _is_tree(seen_NN: NDArray[np.bool_]) -> bool:
    if not seen_NN.diagonal().all() or np.triu(seen_NN, 1).any():
        return False
    above_NN = np.tril(seen_NN, -1)
    has_parent = above_NN.any(axis=1)
    parents = len(seen_NN) - 1 - above_NN[:, ::-1].argmax(axis=1)
    return bool((above_NN[has_parent] == seen_NN[parents[has_parent]]).all())


def _plan(
    paths: list[NDArray[np.int64]], starts: NDArray[np.int64], device: torch.device
) -> AttentionPlan:
    """A step of entries, each with the slots of its path; those from its start on are its rows."""
    lens = np.array([len(path) for path in paths], dtype=np.int64)
    table = np.zeros((len(paths), lens.max(initial=0) + 1), dtype=np.int32)
    for row, path in zip(table, paths, strict=True):
        row[: len(path)] = path

    def ints(values: NDArray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(device)

    none = ints(np.zeros(0))
    return AttentionPlan(
        req_to_token=ints(table),
        rows_B=ints(np.arange(len(paths))),
        q_offsets_B1=ints(offsets_of(lens - starts)),
        starts_B=ints(starts),
        run_lens_B=ints(lens - starts),
        node_offsets_B1=ints(np.zeros(len(paths) + 1)),
        node_masks_N=none.long(),
        node_slots_N=none,
    )


def _packed(
    shape: tuple[int, int], positions_BT: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First rows and lengths of sequences that fill all rows."""
    begins_BT = np.zeros(shape, dtype=bool)
    if positions_BT is not None:
        begins_BT |= positions_BT == 0
    begins_BT[:, :1] = True
    starts = begins_BT.reshape(-1).nonzero()[0].astype(np.int64)
    return starts, np.diff(starts, append=begins_BT.size)


def _check_positions(
    positions_BT: NDArray[np.int64], rows_N: NDArray[np.int64], expected_N: NDArray[np.int64]
) -> None:
    """Raise InvalidInputError for given positions other than the tokens' own."""
    counts_rows = (positions_BT == np.arange(positions_BT.shape[1])).all()
    if not counts_rows and (positions_BT.reshape(-1)[rows_N] != expected_N).any():
        raise InvalidInputError(
            "position_ids", "other positions", "must count each sequence's tokens from 0"
        )


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
