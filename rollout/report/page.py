"""The page: one file with everything in it."""

from __future__ import annotations

import base64
import datetime
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from rollout.report import tables
from rollout.report.columns import number
from rollout.report.figures import figures
from rollout.report.plots import Picture
from rollout.report.run import Log
from rollout.report.tables import Table

_TEMPLATE = Path(__file__).with_name("page.html.j2")


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    caption: str
    table: Table
    missing: str  # in place of an empty table


def page(log: Log, pictures: list[Picture]) -> str:
    """HTML that needs nothing but itself."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["data_uri"] = _data_uri
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    by_run = [figures(run) for run in log.runs]
    return template.render(
        title=f"{log.path.name}: report of {_runs(log)}",
        subtitle=_subtitle(log),
        notes=_notes(log),
        runs=[run.number for run in log.runs],
        figures=[(name, [each[name] for each in by_run]) for name in by_run[0]],
        pictures=pictures,
        sections=_sections(log),
    )


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _runs(log: Log) -> str:
    if len(log.runs) == 1:
        return "one run" if log.runs[0].number == 1 else f"run {log.runs[0].number}"
    return f"{len(log.runs)} runs"


def _subtitle(log: Log) -> str:
    """The model, the prompts and the day, of each run where they differ."""
    parts = []
    for name in ("model", "data"):
        values = dict.fromkeys(str(run.settings[name]) for run in log.runs if name in run.settings)
        if values:
            parts.append(f"{name}: {', '.join(values)}")
    started = number(log.runs[0].settings.get("time"))
    if 0 < started < 4e9:
        when = datetime.datetime.fromtimestamp(started).astimezone()
        parts.append(f"begun {when:%Y-%m-%d %H:%M %Z}")
    return "; ".join(parts)


def _notes(log: Log) -> list[str]:
    notes = []
    if log.num_unreadable:
        lines = "1 line" if log.num_unreadable == 1 else f"{log.num_unreadable:,} lines"
        notes.append(
            f"{lines} of the log could not be read and did not count: torn when a run was killed, "
            "or of a kind this version does not know."
        )
    if len(log.runs) > 1:
        notes.append(
            "The runs are drawn one after the other, without the time between them; dashed lines "
            "are where one begins."
        )
    return notes


def _sections(log: Log) -> list[Section]:
    slowest, groups = tables.slowest_rollouts(log), tables.groups(log)
    if len(log.runs) == 1:
        slowest, groups = slowest.without("run"), groups.without("run")
    none_finished = "No rollout had finished when the log ended."
    sections = [
        Section(
            "Slowest rollouts",
            "From the first target forward to the end. A click on a column sorts by it.",
            slowest,
            none_finished,
        ),
        Section("Groups", "The samples of each prompt.", groups, none_finished),
    ]
    run = next((run for run in reversed(log.runs) if run.learned), log.runs[-1])
    values, learned = tables.draft_values(run), tables.learned_values(run)
    if values is not None:
        sections.append(Section(
            "What drafts were worth",
            "Accepted nodes against those the estimates expected, by what proposed them and how "
            "deep in the tree.",
            values, "",
        ))  # fmt: skip
    if learned is not None:
        sections.append(Section("What the engine learned", "As it stood at the end.", learned, ""))
    return sections
