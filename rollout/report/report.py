"""`specrollout report`: from a log to a folder with a page and its plots."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout.errors import InvalidInputError
from rollout.report.page import page
from rollout.report.plots import draw_all
from rollout.report.reading import read_log
from rollout.report.run import Log


@dataclass(frozen=True, slots=True)
class Report:
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
