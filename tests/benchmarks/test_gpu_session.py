"""A session on a GPU goes on after what fails, and says what it did not come to."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path

import gpu_session
import psutil
import pytest
from gpu_session import ROOT, Stage, run, stages

ROWS = 'import sys; open(sys.argv[-1], \'w\').write(\'[{"name": "a", "ok": false}]\')'

CUT = f"""
import subprocess, sys, time
with open(sys.argv[1], "w") as file:
    file.write(str(subprocess.Popen(["sleep", "300"]).pid))
try:
    time.sleep(60)
finally:
    {ROWS}
"""


def test_what_fails_or_hangs_costs_no_other(tmp_path: Path) -> None:
    outcomes = run(
        [
            Stage(name="fails", command=("-c", "print('why'); raise SystemExit(3)"), seconds=20),
            Stage(name="hangs", command=("-c", "import time; time.sleep(60)"), seconds=1),
            Stage(name="long", command=("-c", ""), seconds=1000),
            Stage(name="cut", command=("-c", CUT, str(tmp_path / "pid")), seconds=6),
            Stage(name="rows", command=("-c", ROWS), seconds=20),
        ],
        tmp_path,
        seconds=60,
    )
    assert [outcome.status for outcome in outcomes] == [
        "failed: exit status 3", "over its limit", "not begun", "over its limit", "ok",
    ]  # fmt: skip
    written = json.loads((tmp_path / "session.json").read_text())
    assert [each["name"] for each in written] == ["fails", "hangs", "long", "cut", "rows"]
    assert written[-1]["rows"] == written[-2]["rows"] == [{"name": "a", "ok": False}]
    with suppress(psutil.NoSuchProcess):  # what it started was ended with it
        assert psutil.Process(int((tmp_path / "pid").read_text())).status() == psutil.STATUS_ZOMBIE
    assert "why" in (tmp_path / "session.log").read_text()


def test_a_later_call_adds_to_what_an_earlier_one_found(tmp_path: Path) -> None:
    prints = "print('first')"
    run([Stage(name="early", command=("-c", ROWS), seconds=20)], tmp_path, seconds=60)
    cut = [
        Stage(name="early", command=("-c", ""), seconds=1000),
        Stage(name="late", command=("-c", f"{prints}; import time; time.sleep(60)"), seconds=20),
    ]
    first = run(cut, tmp_path, seconds=14)
    assert [outcome.status for outcome in first] == ["not begun", "cut short"]
    second = run([Stage(name="late", command=("-c", "1"), seconds=20)], tmp_path, seconds=60)
    assert [outcome.status for outcome in second] == ["ok"]
    written = json.loads((tmp_path / "session.json").read_text())
    assert [(each["name"], each["status"]) for each in written] == [("early", "ok"), ("late", "ok")]
    assert written[0]["rows"] == [{"name": "a", "ok": False}]
    assert "first" in (tmp_path / "session.log").read_text()
    (tmp_path / "session.json").write_text("[{")
    with pytest.raises(SystemExit, match=r"session\.json.*--output"):
        run([], tmp_path, seconds=60)


def test_stages_name_files_that_are_there() -> None:
    for stage in stages([Path("trace.npz")]):
        for part in stage.command:
            if part.startswith(("tests/", "benchmarks/")):
                assert (ROOT / part).exists(), stage.name
    assert gpu_session.ROOT in Path(sys.modules["gpu_session"].__file__ or "").parents
