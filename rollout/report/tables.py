"""The tables of a page: which rollouts were slow, which groups long, what drafts were worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rollout.report.figures import UNKNOWN, count, decimal
from rollout.report.learned import NodeValues, node_values, scalars
from rollout.report.run import Log, Run, ratio, total

MAX_ROWS = 200


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell, and what its column is sorted by."""

    text: str
    sort_by: float | str  # NaN: at the end, whichever way


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under the names of their columns."""

    name: str
    columns: list[str]
    rows: list[list[Cell]]
    num_left_out: int = 0

    def without(self, column: str) -> Table:
        """The same table less that column."""
        left = [index for index, name in enumerate(self.columns) if name != column]
        rows = [[row[index] for index in left] for row in self.rows]
        return replace(self, columns=[self.columns[index] for index in left], rows=rows)

    @classmethod
    def of(cls, name: str, columns: list[str], rows: list[list[Cell]], by: int) -> Table:
        """The ``MAX_ROWS`` largest by column ``by``."""
        rows.sort(key=lambda row: _last_if_unknown(row[by].sort_by))
        return cls(name, columns, rows[:MAX_ROWS], max(0, len(rows) - MAX_ROWS))


def slowest_rollouts(log: Log) -> Table:
    """The rollouts of all runs, the slowest first."""
    columns = [
        "run", "prompt", "sample", "seconds", "forwards", "prompt tokens", "tokens",
        "finished by", "accept length", "proposed", "verified", "accepted", "gain ms",
        "ended at s",
    ]  # fmt: skip
    rows = []
    for run in log.runs:
        taken = run.ended_seconds - run.began_seconds
        by_time = np.argsort(-np.nan_to_num(taken, nan=-1.0), kind="stable")[:MAX_ROWS]
        for index in by_time:
            of = {name: float(values[index]) for name, values in run.rollouts.items()}
            accept_length = ratio(of["verify_steps"] + of["accepted"], of["verify_steps"])
            rows.append([
                _cell(run.number, count),
                _cell(of["prompt_index"], count),
                _cell(of["sample_index"], count),
                _cell(float(taken[index]), lambda value: decimal(value, 2)),
                _cell(of["verify_steps"], count),
                _cell(of["prompt_tokens"], count),
                _cell(of["generated_tokens"], count),
                Cell(run.finish_reasons[index], run.finish_reasons[index]),
                _cell(accept_length, lambda value: decimal(value, 2)),
                _cell(of["proposed"], count),
                _cell(of["drafted"], count),
                _cell(of["accepted"], count),
                _cell(of["gain_ms"], lambda value: decimal(value, 1)),
                _cell(run.offset + float(run.ended_seconds[index]),
                      lambda value: decimal(value, 2)),
            ])  # fmt: skip
    table = Table.of("slowest", columns, rows, columns.index("seconds"))
    num_rollouts = sum(run.num_rollouts for run in log.runs)
    return replace(table, num_left_out=num_rollouts - len(table.rows))


def groups(log: Log) -> Table:
    """The prompt groups of all runs, the longest rollout first."""
    columns = [
        "run", "prompt", "rollouts", "mean tokens", "shortest", "longest", "accept length",
        "verified", "accepted", "gain ms", "done at s",
    ]  # fmt: skip
    rows = []
    for run in log.runs:
        for members in members_of_groups(run).values():
            of = {name: values[members] for name, values in run.rollouts.items()}
            forwards = total(of["verify_steps"])
            lengths = of["generated_tokens"]
            rows.append([
                _cell(run.number, count),
                _cell(float(of["prompt_index"][0]), count),
                _cell(len(members), count),
                _cell(_of_known(np.mean, lengths), lambda value: decimal(value, 1)),
                _cell(_of_known(np.min, lengths), count),
                _cell(_of_known(np.max, lengths), count),
                _cell(ratio(forwards + total(of["accepted"]), forwards),
                      lambda value: decimal(value, 2)),
                _cell(total(of["drafted"]), count),
                _cell(total(of["accepted"]), count),
                _cell(total(of["gain_ms"]), lambda value: decimal(value, 1)),
                _cell(_of_known(np.max, run.offset + run.ended_seconds[members]),
                      lambda value: decimal(value, 2)),
            ])  # fmt: skip
    return Table.of("groups", columns, rows, columns.index("longest"))


def members_of_groups(run: Run) -> dict[str, np.ndarray]:
    """Indices of the rollouts of each group."""
    members: dict[str, list[int]] = {}
    for index, group in enumerate(run.groups):
        members.setdefault(group, []).append(index)
    return {group: np.array(indices) for group, indices in members.items()}


def draft_values(run: Run) -> Table | None:
    """How often the nodes of each source and depth were accepted, beside the estimates."""
    values: NodeValues | None = node_values(run.learned)
    if values is None:
        return None
    rows = []
    for row, source in enumerate(values.sources):
        cells = [Cell(source, source)]
        for accepted, expected in zip(
            values.accepted_SD[row], values.expected_SD[row], strict=True
        ):
            share = ratio(float(accepted), float(expected)) if np.isfinite(expected) else None
            shown = (
                UNKNOWN if share is None else f"{accepted:,.0f} of {expected:,.0f}, {share:.2f}x"
            )
            cells.append(Cell(shown, float("nan") if share is None else share))
        rows.append(cells)
    return Table("values", ["source", *(f"depth {depth}" for depth in values.depths)], rows)


def learned_values(run: Run) -> Table | None:
    """Every single number the engine learned; None where the log has none."""
    rows = [
        [Cell(name, name), Cell(f"{value:,.4g}" if isinstance(value, float) else str(value), name)]
        for name, value in scalars(run.learned)
    ]
    return Table("learned", ["what", "value"], rows) if rows else None


def _cell(value: float | None, text: Callable[[float | None], str]) -> Cell:
    return Cell(text(value), float("nan") if value is None else value)


def _of_known(reduce: Callable[[np.ndarray], float], values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(reduce(known)) if len(known) else None


def _last_if_unknown(value: float | str) -> float:
    assert not isinstance(value, str), "tables are cut by a number"
    return float("inf") if value != value else -value
