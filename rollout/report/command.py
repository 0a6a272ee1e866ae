"""The command line of `specrollout report`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rollout.report.report import write_report


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
