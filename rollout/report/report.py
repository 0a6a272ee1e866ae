"""`specrollout report`: from a log to a folder with a page and its plots."""

from __future__ import annotations

import argparse
import base64
import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from rollout.errors import InvalidInputError
from rollout.report import tables
from rollout.report.figures import figures
from rollout.report.plots import Picture, draw_all
from rollout.report.reading import read_log
from rollout.report.run import Log, number
from rollout.report.tables import Table

_TEMPLATE = Path(__file__).with_name("page.html.j2")


@dataclass(frozen=True, slots=True)
class Report:
    """The files that were written."""

    page: Path
    plots: list[Path]


def write_report(path: Path, folder: Path | None = None, run: str = "all") -> Report:
    """Write ``index.html`` and a PNG file per plot.

    ``folder``: by default beside the log, ``run.report`` of ``run.jsonl``; what an earlier report
    left there is replaced. ``run``: ``all``, ``last``, or the number of one. Raises
    InvalidInputError for a log that cannot be read, a run it does not have, a folder that cannot
    be written, and where matplotlib is missing; nothing was written then.
    """
    log = _chosen(read_log(path), run)
    pictures = draw_all(log)
    text = page(log, pictures)
    folder = path.with_suffix(".report") if folder is None else folder
    plots: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture in pictures:
            plot = folder / f"{picture.plot.name}.png"
            if picture.missing is None:
                plot.write_bytes(picture.light)
                plots.append(plot)
            else:
                plot.unlink(missing_ok=True)
        (folder / "index.html").write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(
            "output", str(folder), f"cannot be written: {error.strerror}; give another folder"
        ) from None
    return Report(folder / "index.html", plots)


def _chosen(log: Log, run: str) -> Log:
    if run == "all":
        return log
    if run == "last":
        return log.only(log.runs[-1])
    for each in log.runs:
        if run == str(each.number):
            return log.only(each)
    numbers = f"a number from 1 to {len(log.runs)}" if len(log.runs) > 1 else "1"
    raise InvalidInputError("run", run, f"must be all, last or {numbers}")


@dataclass(frozen=True, slots=True)
class Section:
    """A table of the page."""

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


def run_report(arguments: Sequence[str]) -> None:
    """Ends the process with code 2 for arguments it does not know; raises InvalidInputError."""
    parser = argparse.ArgumentParser(
        prog="specrollout report",
        description="Draw the log of a run: accept length and batch width over time, the tail, the "
        "cost of a step, calibration, where the time went, lengths by group, predicted and real "
        "gain. Writes index.html, a page that needs nothing else, and a PNG file per plot. A run "
        "writes its log with log.jsonl=FILE, and may still be going on.",
    )
    parser.add_argument("log", type=Path, metavar="RUN.jsonl", help="what log.jsonl named")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="default: beside the log, RUN.report",
    )
    parser.add_argument(
        "--run",
        default="all",
        metavar="all|last|N",
        help="which runs of a log that several went on with; default: all, one after the other",
    )
    given = parser.parse_args(arguments)
    report = write_report(given.log, given.output, given.run)
    print(f"wrote {report.page} and {len(report.plots)} plots beside it")
