"""`specrollout report`: a verdict in the terminal and a page of one file, from logs of runs."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rollout.errors import InvalidInputError
from rollout.report.charts import charts
from rollout.report.key_figures import figures, name_runs
from rollout.report.log_reader import read_log
from rollout.report.page import render_page, save_page
from rollout.report.rollout_texts import RolloutTexts
from rollout.report.run import Log, Run, number
from rollout.report.tables import tables
from rollout.report.verdict import Verdict, print_verdicts, verdicts

MAX_RUNS = 6  # more could not be told apart in a chart


def write_report(
    paths: Sequence[Path], page: Path | None = None, run: str = "all"
) -> tuple[Path, list[Verdict]]:
    """Write the page of one or several logs. Returns its path, and the verdict on each run.

    Args:
        paths: the logs; the runs of all are drawn over each other, each from its start.
        page: the HTML file; default: beside the first log, ``run.html`` for ``run.jsonl``. An
            earlier page is replaced, and no other file.
        run: of each log, ``all``, ``last``, or the number of a run.

    Raises InvalidInputError for a log that cannot be read, a run it does not have, or a page that
    cannot be written; nothing is written then.
    """
    log = _chosen(paths, run)
    name_runs(log.runs)
    texts = RolloutTexts(log.runs)
    found = verdicts(log.runs)
    by_run = [figures(each) for each in log.runs]
    html = render_page(
        f"{', '.join(path.name for path in paths)}: report of {_how_many(log.runs)}",
        charts(log, texts),
        subtitle=_subtitle(log.runs),
        notes=[*_notes(log), *texts.notes],
        verdicts=found,
        runs=[each.name for each in log.runs],
        figures=[(name, [each[name] for each in by_run]) for name in by_run[0]],
        tables=tables(log, texts),
    )
    page = paths[0].with_suffix(".html") if page is None else page
    save_page(page, html)
    return page, found


def _chosen(paths: Sequence[Path], run: str) -> Log:
    logs = [read_log(path) for path in paths]
    runs = [each for log in logs for each in _runs(log.runs, run)]
    num_left_out = max(len(runs) - MAX_RUNS, 0)
    num_unreadable = sum(log.num_unreadable for log in logs)
    return Log(runs=runs[num_left_out:], num_unreadable=num_unreadable, num_left_out=num_left_out)


def _runs(runs: list[Run], run: str) -> list[Run]:
    if run == "all":
        return runs
    if run == "last":
        return runs[-1:]
    for each in runs:
        if run == str(each.number):
            return [each]
    numbers = f"a number from 1 to {len(runs)}" if len(runs) > 1 else "1"
    raise InvalidInputError("run", run, f"must be all, last or {numbers}: {runs[0].path}")


def _how_many(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs"
    return "one run" if runs[0].number == 1 else f"run {runs[0].number}"


def _subtitle(runs: Sequence[Run]) -> str:
    parts = []
    for name in ("model", "data"):
        values = dict.fromkeys(str(run.settings[name]) for run in runs if name in run.settings)
        if values:
            parts.append(f"{name}: {', '.join(values)}")
    started = number(runs[0].settings.get("time"))
    if 0 < started < 4e9:
        when = datetime.datetime.fromtimestamp(started).astimezone()
        parts.append(f"begun {when:%Y-%m-%d %H:%M %Z}")
    return "; ".join(parts)


def _notes(log: Log) -> list[str]:
    notes = []
    if log.num_unreadable:
        lines = "1 line" if log.num_unreadable == 1 else f"{log.num_unreadable:,} lines"
        notes.append(
            f"{lines} of the log could not be read: cut off when a run was killed, or written by "
            "another version."
        )
    if log.num_left_out:
        notes.append(
            f"The last {MAX_RUNS} runs; --run N shows one of the {log.num_left_out:,} before them."
        )
    return notes


def run_report(arguments: Sequence[str]) -> None:
    """Run the subcommand. Exits with code 2 for unknown arguments; raises InvalidInputError."""
    parser = argparse.ArgumentParser(
        prog="specrollout report",
        description="Print speed, speedup and time shares of a run, and write a page with its "
        "charts, prompts and rollouts: one self-contained HTML file. Several logs are compared. A "
        "job writes its log beside its output, and may still be running.",
    )
    parser.add_argument("logs", type=Path, nargs="+", metavar="LOG", help="a job's <output>.log")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="default: beside the first log, with .html"
    )
    parser.add_argument(
        "--run",
        default="all",
        metavar="all|last|N",
        help="which runs of a log with several; default: all, drawn over each other",
    )
    given = parser.parse_args(arguments)
    page, found = write_report(given.logs, given.output, given.run)
    console = Console(highlight=False, soft_wrap=True)
    print_verdicts(console, found)
    console.print(f"wrote {page}", markup=False)
