"""The tables of a page: rollouts with their texts, prompts, and the value of drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rollout.report.key_figures import UNKNOWN, count, decimal
from rollout.report.learned import SOURCES, calibration
from rollout.report.rollout_texts import RolloutText, RolloutTexts
from rollout.report.run import Log, Run, ratio, total

MAX_ROWS = 200
_FEWEST_EXPECTED = 10
"""Expected draft tokens below which their ratio to the accepted ones says nothing."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A table's cell."""

    text: str
    sort_by: float | str  # NaN sorts to the end in either direction


@dataclass(frozen=True, slots=True)
class Row:
    """A table's row, and the rollout that it opens to where its text is known."""

    cells: list[Cell]
    opened: RolloutText | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """A table that the page can sort by any column, or the reason why it is empty."""

    name: str
    title: str
    caption: str
    columns: list[str]
    rows: list[Row]
    missing: str = "No rollout had finished when the log ended."

    def without(self, column: str) -> Table:
        """The table without the column of that name."""
        index = self.columns.index(column)
        rows = [replace(row, cells=row.cells[:index] + row.cells[index + 1 :]) for row in self.rows]
        return replace(self, columns=self.columns[:index] + self.columns[index + 1 :], rows=rows)


def tables(log: Log, texts: RolloutTexts) -> list[Table]:
    """All tables of a log."""
    found = [_rollouts(log, texts), _prompts(log, texts)]
    if len(log.runs) == 1:
        found = [table.without("run") for table in found]
    values = [_draft_values(run) for run in log.runs]
    known = [table for table in values if table is not None]
    return [*found, *(replace(run, name=f"{run.name}-{index}") for index, run in enumerate(known))]


def _rollouts(log: Log, texts: RolloutTexts) -> Table:
    columns = [
        "prompt", "run", "sample", "seconds", "prompt tokens", "tokens", "finished by",
        "accept length", "drafted", "accepted", "reward", "ended at s",
    ]  # fmt: skip
    rows = []
    for run in log.runs:
        for index in texts.chosen[id(run)]:
            of = {name: float(values[index]) for name, values in run.rollouts.items()}
            opened = texts.of(run, index)
            rows.append(Row([
                Cell(texts.title(run, index), of["prompt_index"]),
                Cell(run.name, run.name),
                _cell(of["sample_index"], count),
                _cell(float(run.ended_seconds[index] - run.began_seconds[index]), _hundredths),
                _cell(of["prompt_tokens"], count),
                _cell(of["generated_tokens"], count),
                Cell(run.finish_reasons[index], run.finish_reasons[index]),
                _cell(run.accept_length(index), _hundredths),
                _cell(of["drafted"], count),
                _cell(of["accepted"], count),
                _cell(opened.reward if opened else None, _hundredths),
                _cell(float(run.ended_seconds[index]), _hundredths),
            ], opened))  # fmt: skip
    _sort_down(rows, columns.index("seconds"))
    num_rollouts = sum(run.num_rollouts for run in log.runs)
    sampled = (
        f"{len(rows)} of {num_rollouts:,}: the slowest, and as many spread over the rest."
        if num_rollouts > len(rows)
        else "The slowest first."
    )
    table = Table(
        "rollouts",
        "Rollouts",
        f"{sampled} Click a row for its prompt and text, a column to sort by it.",
        columns,
        rows,
    )
    has_reward = any(row.opened and row.opened.reward is not None for row in rows)
    return table if has_reward else table.without("reward")


def _prompts(log: Log, texts: RolloutTexts) -> Table:
    columns = [
        "prompt", "run", "rollouts", "mean tokens", "shortest", "longest", "accept length",
        "drafted", "accepted", "done at s",
    ]  # fmt: skip
    rows = []
    for run in log.runs:
        for members in members_of_groups(run).values():
            of = {name: values[members] for name, values in run.rollouts.items()}
            forwards = total(of["verify_steps"])
            lengths = of["generated_tokens"]
            rows.append(Row([
                Cell(texts.title(run, int(members[0])), float(of["prompt_index"][0])),
                Cell(run.name, run.name),
                _cell(len(members), count),
                _cell(_of_known(np.mean, lengths), lambda value: decimal(value, 1)),
                _cell(_of_known(np.min, lengths), count),
                _cell(_of_known(np.max, lengths), count),
                _cell(ratio(forwards + total(of["accepted"]), forwards), _hundredths),
                _cell(total(of["drafted"]), count),
                _cell(total(of["accepted"]), count),
                _cell(_of_known(np.max, run.ended_seconds[members]), _hundredths),
            ]))  # fmt: skip
    _sort_down(rows, columns.index("longest"))
    left_out = f" The {MAX_ROWS} with the longest of {len(rows):,}." if len(rows) > MAX_ROWS else ""
    return Table(
        "prompts", "Prompts", f"The samples of each prompt.{left_out}", columns, rows[:MAX_ROWS]
    )


def members_of_groups(run: Run) -> dict[str, np.ndarray]:
    """Indices of the rollouts of each group."""
    members: dict[str, list[int]] = {}
    for index, group in enumerate(run.groups):
        members.setdefault(group, []).append(index)
    return {group: np.array(indices) for group, indices in members.items()}


def _draft_values(run: Run) -> Table | None:
    """Accepted against claimed draft tokens by source; None if nothing was learned."""
    found = calibration(run.learned)
    if found is None:
        return None
    rows = []
    of_sources = (found.accepted_SK.sum(1).tolist(), found.expected_SK.sum(1).tolist())
    for source, accepted, expected in zip(found.sources, *of_sources, strict=True):
        words = SOURCES.get(source, source)
        share = ratio(accepted, expected) if expected >= _FEWEST_EXPECTED else None
        shown = UNKNOWN if share is None else f"{accepted:,.0f} of {expected:,.0f}, {share:.2f}x"
        rows.append(Row([Cell(words, words), Cell(shown, np.nan if share is None else share)]))
    return Table(
        "values",
        f"Acceptance of drafts{f': {run.name}' if run.name else ''}",
        "Accepted draft tokens against those that drafts claimed, by source. 1.00x: the claims "
        f"are right. Fewer than {_FEWEST_EXPECTED} are not shown, and older ones count less.",
        ["drafts from", "accepted"],
        rows,
    )


def _cell(value: float | None, text: Callable[[float | None], str]) -> Cell:
    return Cell(text(value), float("nan") if value is None else value)


def _hundredths(value: float | None) -> str:
    return decimal(value, 2)


def _of_known(reduce: Callable[[np.ndarray], float], values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(reduce(known)) if len(known) else None


def _sort_down(rows: list[Row], column: int) -> None:
    """Sort rows by a column of numbers, the largest first and what is unknown last."""

    def key(row: Row) -> float:
        value = row.cells[column].sort_by
        assert not isinstance(value, str), "a column of numbers"
        return float("inf") if value != value else -value

    rows.sort(key=key)
