"""The gated delta rule over long runs, a chunk of rows at a time, for ``exact=false``.

The updates of a chunk's rows are one triangular system (the UT transform of Yang et al. 2024,
Parallelizing Linear Transformers with the Delta Rule over the Sequence Length; with decay in Yang,
Kautz and Hatamizadeh 2024, section 3.3), so that a chunk is a few matrix products. The sums are
those of the recurrence in another order, so the last bits depend on where a run is cut.

A run is cut into sections, after each row whose state is stored. The sections of a round do not
depend on each other and are computed together. The rest of a step, mostly draft nodes, is computed
row after row.

Legend: as in the op; R sections of a round, N chunks of L rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rollout.ops.gated_delta_rule.reference import unit_length
from rollout.ops.state_plan import NO_STATE, StatePlan

CHUNK = 64
MIN_ROWS = 4 * CHUNK  # of an entry's run: shorter ones use the recurrence


@dataclass(kw_only=True, slots=True, eq=False)
class Round:
    """Sections of runs, one after another in its rows, the longest first.

    Its chunks are the first chunks of all sections, then the second ones, and so on.
    """

    rows: torch.Tensor  # int64, of T
    lengths_R: list[int]
    offsets_R1: torch.Tensor  # int64: offset of each section in ``rows``
    sources_R: torch.Tensor  # int64 slots, or NO_STATE
    targets_R: torch.Tensor  # int64 slots
    chunk_counts: list[int]  # number of first chunks, of second chunks, ...
    positions: torch.Tensor  # int64: n * L + l for each of ``rows``, which is row l of chunk n
    rows_NL: torch.Tensor  # int64: the inverse: index into ``rows``, or -1 for none


ChunkedKernel = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""``(q, k, v, log_decay, beta, round, states_RGKV) -> (o, states)``, on the round's rows alone."""


@dataclass(kw_only=True, slots=True, eq=False)
class ChunkedPlan:
    """A step's `StatePlan`, split into long runs and the rest."""

    kernel: ChunkedKernel
    rounds: list[Round]
    rest: StatePlan  # of the other rows
    rest_rows: torch.Tensor  # int64, of T: the other rows


def chunked_plan(
    plan: StatePlan, device: torch.device, kernel: ChunkedKernel
) -> ChunkedPlan | None:
    """The chunks of a CPU plan, for tensors on ``device``; None if no run is long enough."""
    offsets, sources = plan.q_offsets_B1.tolist(), plan.sources_B.tolist()
    parents, targets = plan.parents_T.tolist(), plan.targets_T.tolist()
    rounds: list[list[tuple[range, int, int]]] = []
    rest_offsets, rest_sources, rest_parents = [0], [], []
    rest_rows: list[int] = []
    for entry, source in enumerate(sources):
        first, end = offsets[entry], offsets[entry + 1]
        sections = _sections(range(first, end), parents, targets)
        taken = sections[-1].stop - first if sections else 0
        for index, section in enumerate(sections):
            if index == len(rounds):
                rounds.append([])
            before, source = source, targets[section.stop - 1]
            rounds[index].append((section, before, source))
        # The rows after the sections continue the last section's state, or each other.
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
        if device.type == "cuda":  # a copy from pageable memory would wait for earlier work
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    def tensor(values: list[int], dtype: torch.dtype) -> torch.Tensor:
        return sent(torch.tensor(values, dtype=dtype))

    def round_of(sections: list[tuple[range, int, int]]) -> Round:
        sections.sort(key=lambda section: -len(section[0]))
        lengths_R = [len(section) for section, _, _ in sections]
        counts, positions = _chunks(lengths_R)
        inverse = torch.full((sum(counts) * CHUNK,), -1)
        inverse[positions] = torch.arange(len(positions))
        return Round(
            rows=tensor([row for section, _, _ in sections for row in section], torch.int64),
            lengths_R=lengths_R,
            offsets_R1=tensor([0, *itertools.accumulate(lengths_R)], torch.int64),
            sources_R=tensor([before for _, before, _ in sections], torch.int64),
            targets_R=tensor([after for _, _, after in sections], torch.int64),
            chunk_counts=counts,
            positions=tensor(positions, torch.int64),
            rows_NL=sent(inverse.view(-1, CHUNK)),
        )

    return ChunkedPlan(
        kernel=kernel,
        rounds=[round_of(sections) for sections in rounds],
        rest=StatePlan(
            q_offsets_B1=tensor(rest_offsets, torch.int32),
            sources_B=tensor(rest_sources, torch.int32),
            parents_T=tensor(rest_parents, torch.int32),
            targets_T=tensor([targets[row] for row in rest_rows], torch.int32),
        ),
        rest_rows=tensor(rest_rows, torch.int64),
    )


def _sections(rows: range, parents: list[int], targets: list[int]) -> list[range]:
    """The sections of an entry's first rows, which form a chain, cut after each stored state.

    The entry's other rows continue the last section's state, or each other.
    """
    sections, start, end = [], rows.start, rows.stop
    for row in rows:
        if row > rows.start and parents[row] != row - 1:
            end = min(end, row, parents[row] + 1)
    for row in range(rows.start, end):
        if targets[row]:
            sections.append(range(start, row + 1))
            start = row + 1
    while sections and len(sections[-1]) < CHUNK:  # draft nodes, or rows after a checkpoint
        sections.pop()
    return sections if sections and sections[-1].stop - rows.start >= MIN_ROWS else []


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
    """The op with the plan's kernel for long runs, and ``recurrent``, the op itself, for the
    rest."""
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


def torch_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    part: Round,
    states_RGKV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A `ChunkedKernel` in plain torch, float32 inside: all first chunks together, then the
    second."""
    group = v.shape[1] // k.shape[1]
    rows_NL, no_row_NL = part.rows_NL.clamp_min(0), part.rows_NL < 0

    def chunked(x: torch.Tensor) -> torch.Tensor:
        """[N, heads, L, ...] from [rows, heads, ...]; zero where a chunk has no row."""
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

    # Each row's update from the chunk's own rows alone, and its correction by the state.
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
    return out_NGLV.transpose(1, 2).flatten(0, 1)[part.positions].to(v.dtype), state_RGKV


def _chunks(lengths_R: list[int]) -> tuple[list[int], list[int]]:
    """``chunk_counts`` and ``positions`` of a `Round`."""
    counts = [
        sum(length > first for length in lengths_R) for first in range(0, max(lengths_R), CHUNK)
    ]
    starts = [0, *itertools.accumulate(counts)]
    positions = [
        (starts[row // CHUNK] + section) * CHUNK + row % CHUNK
        for section, length in enumerate(lengths_R)
        for row in range(length)
    ]
    return counts, positions
