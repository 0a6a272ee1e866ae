"""The gated delta rule over long runs, a chunk of rows at a time, for ``exact=false``.

Within a chunk the rows' updates are one triangular system (the UT transform of Yang et al. 2024,
Parallelizing Linear Transformers with the Delta Rule over the Sequence Length; with decay in Yang,
Kautz and Hatamizadeh 2024, section 3.3), so that a chunk is a few matrix products. The same sums as
row after row, in another order: where a run is cut shows in the last bits.

A run is cut after each row whose state is kept. The pieces of a round depend on none of their own
round, so they are computed together; what is left over of a step, draft nodes above all, comes row
after row.

Legend: as in the op; R pieces of a round, N chunks of L rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rollout.ops.gated_delta_rule.reference import unit_length
from rollout.ops.state_plan import NO_STATE, StatePlan

CHUNK = 64
MIN_ROWS = 4 * CHUNK  # of an entry's run: shorter ones are left to the recurrence


@dataclass(kw_only=True, slots=True, eq=False)
class Round:
    """Pieces of runs, one after another in its rows, the longest first.

    Its chunks are all pieces' first ones, then the second ones of those that have two, and so on.
    """

    rows: torch.Tensor  # int64, of T
    lengths_R: list[int]
    offsets_R1: torch.Tensor  # int64: where each begins in ``rows``
    sources_R: torch.Tensor  # int64 slots, or NO_STATE
    targets_R: torch.Tensor  # int64 slots
    chunk_counts: list[int]  # of first chunks, of second ones, ...
    places: torch.Tensor  # int64: in chunk n at row l, each of ``rows`` is at n * L + l
    places_NL: torch.Tensor  # int64: and which of ``rows`` is there, or -1


PieceKernel = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""``(q, k, v, log_decay, beta, round, states_RGKV) -> (o, states)``, on the round's rows alone."""


@dataclass(kw_only=True, slots=True, eq=False)
class ChunkedPlan:
    """A step's `StatePlan` with the long runs taken out of it."""

    kernel: PieceKernel
    rounds: list[Round]
    rest: StatePlan  # of the other rows, alone
    rest_rows: torch.Tensor  # int64, of T: those rows


def chunked_plan(plan: StatePlan, device: torch.device, kernel: PieceKernel) -> ChunkedPlan | None:
    """The chunks of a plan on the CPU, for tensors on ``device``; None where no run is long."""
    offsets, sources = plan.q_offsets_B1.tolist(), plan.sources_B.tolist()
    parents, targets = plan.parents_T.tolist(), plan.targets_T.tolist()
    rounds: list[list[tuple[range, int, int]]] = []
    rest_offsets, rest_sources, rest_parents = [0], [], []
    rest_rows: list[int] = []
    for entry, source in enumerate(sources):
        first, end = offsets[entry], offsets[entry + 1]
        pieces = _pieces(range(first, end), parents, targets)
        taken = pieces[-1].stop - first if pieces else 0
        for index, piece in enumerate(pieces):
            if index == len(rounds):
                rounds.append([])
            before, source = source, targets[piece.stop - 1]
            rounds[index].append((piece, before, source))
        # The rows after the pieces continue the last one's state, or each other.
        moved = len(rest_rows) - (first + taken)
        rest_parents += [
            parent + moved if parent >= first + taken else -1
            for parent in parents[first + taken : end]
        ]
        rest_rows += range(first + taken, end)
        rest_offsets.append(len(rest_rows))
        rest_sources.append(source)
    if not rounds:
        return None

    def sent(tensor: torch.Tensor) -> torch.Tensor:
        if device.type == "cuda":  # from other memory a copy waits for all that came before
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    def tensor(values: list[int], dtype: torch.dtype) -> torch.Tensor:
        return sent(torch.tensor(values, dtype=dtype))

    def round_of(pieces: list[tuple[range, int, int]]) -> Round:
        pieces.sort(key=lambda piece: -len(piece[0]))
        lengths_R = [len(piece) for piece, _, _ in pieces]
        counts, places = _chunks(lengths_R)
        at_places = torch.full((sum(counts) * CHUNK,), -1)
        at_places[places] = torch.arange(len(places))
        return Round(
            rows=tensor([row for piece, _, _ in pieces for row in piece], torch.int64),
            lengths_R=lengths_R,
            offsets_R1=tensor([0, *itertools.accumulate(lengths_R)], torch.int64),
            sources_R=tensor([before for _, before, _ in pieces], torch.int64),
            targets_R=tensor([after for _, _, after in pieces], torch.int64),
            chunk_counts=counts,
            places=tensor(places, torch.int64),
            places_NL=sent(at_places.view(-1, CHUNK)),
        )

    return ChunkedPlan(
        kernel=kernel,
        rounds=[round_of(pieces) for pieces in rounds],
        rest=StatePlan(
            q_offsets_B1=tensor(rest_offsets, torch.int32),
            sources_B=tensor(rest_sources, torch.int32),
            parents_T=tensor(rest_parents, torch.int32),
            targets_T=tensor([targets[row] for row in rest_rows], torch.int32),
        ),
        rest_rows=tensor(rest_rows, torch.int64),
    )


def _pieces(rows: range, parents: list[int], targets: list[int]) -> list[range]:
    """The pieces of an entry's first rows, which continue each other, cut after each kept state.

    What is left of the entry continues the last of them alone, or itself.
    """
    pieces, start, end = [], rows.start, rows.stop
    for row in rows:
        if row > rows.start and parents[row] != row - 1:
            end = min(end, row, parents[row] + 1)
    for row in range(rows.start, end):
        if targets[row]:
            pieces.append(range(start, row + 1))
            start = row + 1
    while pieces and len(pieces[-1]) < CHUNK:  # draft nodes, or what a checkpoint has left over
        pieces.pop()
    return pieces if pieces and pieces[-1].stop - rows.start >= MIN_ROWS else []


def gated_delta_rule(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_TGV: torch.Tensor,
    log_decay_TG: torch.Tensor,
    beta_TG: torch.Tensor,
    states_SGKV: torch.Tensor,
    plan: ChunkedPlan,
    recurrent: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """The op with the plan's kernel on long runs, and ``recurrent``, the op, on what is left."""
    inputs = (q_THK, k_THK, v_TGV, log_decay_TG, beta_TG)
    out_TGV = torch.zeros_like(v_TGV, memory_format=torch.contiguous_format)
    for part in plan.rounds:
        before_RGKV = states_SGKV[part.sources_R]
        before_RGKV.masked_fill_((part.sources_R == NO_STATE).view(-1, 1, 1, 1), 0)
        out, after_RGKV = plan.kernel(*(x[part.rows] for x in inputs), part, before_RGKV)
        out_TGV[part.rows] = out
        states_SGKV[part.targets_R] = after_RGKV
    if plan.rest_rows.numel():
        rest = (x[plan.rest_rows] for x in inputs)
        out_TGV[plan.rest_rows] = recurrent(*rest, states_SGKV, plan.rest)
    return out_TGV


def chunked_pieces(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    part: Round,
    states_RGKV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """In plain torch, float32 inside; the pieces' first chunks together, then their second ones."""
    group = v.shape[1] // k.shape[1]
    rows_NL, no_row_NL = part.places_NL.clamp_min(0), part.places_NL < 0

    def chunked(x: torch.Tensor) -> torch.Tensor:
        """[N, heads, L, ...] of [rows, heads, ...], zero where a chunk has no row."""
        x_NL = x.float()[rows_NL]
        x_NL.masked_fill_(no_row_NL.view(*no_row_NL.shape, *[1] * (x.dim() - 1)), 0)
        return x_NL.transpose(1, 2)

    q_NGLK = chunked(unit_length(q) * q.shape[2] ** -0.5).repeat_interleave(group, dim=1)
    k_NGLK = chunked(unit_length(k)).repeat_interleave(group, dim=1)
    beta_NGL1 = chunked(beta).unsqueeze(3)
    decay_NGL = chunked(log_decay).cumsum(2)  # since the chunk's start
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between_NGLL = decay_NGL.unsqueeze(3) - decay_NGL.unsqueeze(2)
    between_NGLL = between_NGLL.masked_fill(later, -torch.inf).exp()
    decay_NGL1 = decay_NGL.exp().unsqueeze(3)

    # What each row learns of the chunk's own rows alone, and how much of the state it unlearns.
    system_NGLL = (beta_NGL1 * k_NGLK) @ k_NGLK.transpose(2, 3) * between_NGLL
    learned_NGLV, unlearned_NGLK = torch.linalg.solve_triangular(
        system_NGLL,
        torch.cat((beta_NGL1 * chunked(v), beta_NGL1 * decay_NGL1 * k_NGLK), dim=3),
        upper=False,
        unitriangular=True,
    ).split([v.shape[2], k.shape[2]], dim=3)
    seen_NGLL = q_NGLK @ k_NGLK.transpose(2, 3) * between_NGLL
    q_NGLK = q_NGLK * decay_NGL1
    k_NGLK = k_NGLK * (decay_NGL[..., -1:] - decay_NGL).exp().unsqueeze(3)
    end_NG11 = decay_NGL1[:, :, -1:]

    out_NGLV = torch.empty_like(learned_NGLV)
    state_RGKV = states_RGKV.clone()
    start = 0
    for count in part.chunk_counts:
        at, state = slice(start, start + count), state_RGKV[:count]
        delta = learned_NGLV[at] - unlearned_NGLK[at] @ state
        out_NGLV[at] = q_NGLK[at] @ state + seen_NGLL[at] @ delta
        state_RGKV[:count] = end_NG11[at] * state + k_NGLK[at].transpose(2, 3) @ delta
        start += count
    return out_NGLV.transpose(1, 2).flatten(0, 1)[part.places].to(v.dtype), state_RGKV


def _chunks(lengths_R: list[int]) -> tuple[list[int], list[int]]:
    """``chunk_counts`` and ``places`` of a `Round`."""
    counts = [
        sum(length > first for length in lengths_R) for first in range(0, max(lengths_R), CHUNK)
    ]
    starts = [0, *itertools.accumulate(counts)]
    places = [
        (starts[row // CHUNK] + piece) * CHUNK + row % CHUNK
        for piece, length in enumerate(lengths_R)
        for row in range(length)
    ]
    return counts, places
