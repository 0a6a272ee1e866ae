"""A session on a GPU goes on after what fails, loses nothing, and says what it did not come to."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import gpu_merge
import gpu_session
import psutil
import pytest
from gpu_session import MAX_BYTES, ROOT, Outcome, _command, failures_row, run, trim
from gpu_stages import Stage, stages
from harness.rows import append_record, finish, not_run, read_records
from harness.rows import row as make_row

ROWS = (
    "import sys; from pathlib import Path; sys.path.insert(0, 'benchmarks'); "
    "from harness.rows import append_record; append_record(Path(sys.argv[-1]), "
    "{'name': 'a', 'value': 1, 'unit': '', 'bar': 2, 'ok': False})"
)

CUT = f"""
import subprocess, sys, time
with open(sys.argv[1], "w") as file:
    file.write(str(subprocess.Popen(["sleep", "300"]).pid))
{ROWS}
time.sleep(60)
"""


def script(name: str, code: str, *arguments: object, seconds: float = 20, **options) -> Stage:
    return Stage(name=name, command=("-c", code, *map(str, arguments)), seconds=seconds, **options)


def marks(folder: Path) -> list[tuple[str, str]]:
    records = read_records(folder / "rows.jsonl")
    return [(each["stage"], each["status"]) for each in records if "stage" in each]


@pytest.fixture
def ended(tmp_path: Path):
    """The process whose id a stage wrote to `pid`, once it has ended."""

    def wait() -> None:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(int((tmp_path / "pid").read_text()))
            while process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)

    return wait


def test_what_fails_or_hangs_costs_no_other(tmp_path: Path, ended, capsys) -> None:
    outcomes = run(
        [
            script("fails", "print('why'); raise SystemExit(3)", rows=False),
            script("hangs", "import time; time.sleep(60)", seconds=1, rows=False),
            script("long", "", seconds=1000, rows=False),
            script("cut", CUT, tmp_path / "pid", seconds=6),
            script("none", "", needs_gpu=True),
            script("rows", ROWS),
        ],
        tmp_path,
        seconds=60,
        on_gpu=False,
    )
    statuses = [
        "failed: exit status 3", "over its limit", "not begun", "over its limit",
        "skipped: it needs a GPU", "ok",
    ]  # fmt: skip
    assert [outcome.status for outcome in outcomes] == statuses
    assert [mark for mark in marks(tmp_path) if mark[1] != "begun"] == [
        *zip(["fails", "hangs", "long", "cut", "none", "rows"], statuses, strict=True)
    ]
    for outcome in (outcomes[3], outcomes[5]):  # the one that was killed lost nothing
        assert [row["name"] for row in outcome.rows] == ["a"]
    ended()  # what it started was ended with it
    assert "why" in (tmp_path / "session.log").read_text()
    printed = capsys.readouterr().out
    assert "why" in printed  # a failed stage's last words need no log
    assert "MISSED  a: 1 , bar 2" in printed


def test_a_session_that_is_killed_loses_no_row_and_leaves_nothing_running(
    tmp_path: Path, ended
) -> None:
    own = CUT.replace('subprocess.Popen(["sleep", "300"]).pid', "__import__('os').getpid()")
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
from pathlib import Path
from gpu_session import run
from gpu_stages import Stage
run([Stage(name="cut", command=("-c", {own!r}, sys.argv[1]), seconds=200)], Path(sys.argv[2]), 300)
"""
    session = subprocess.Popen([sys.executable, "-c", code, tmp_path / "pid", tmp_path])
    rows = tmp_path / "rows.jsonl"
    while not any("name" in record for record in read_records(rows)):
        assert session.poll() is None
        time.sleep(0.05)
    session.kill()
    session.wait()
    ended()
    assert [record.get("name", record.get("stage")) for record in read_records(rows)] == [
        "cut", "a",
    ]  # fmt: skip


def session(folder: Path, begun: float, stage: str, status: str, **rows: float | None) -> Path:
    path = folder / "rows.jsonl"
    append_record(path, {"stage": stage, "status": "begun", "seconds": 0, "time": begun})
    for name, value in rows.items():
        known = not_run(name, "ms") if value is None else make_row(name, value, "ms", 2)
        finish("", [known], path)
    if status:
        append_record(path, {"stage": stage, "status": status, "seconds": 1, "time": begun + 1})
    return folder


def test_calls_are_merged_the_newest_row_first(tmp_path: Path, capsys) -> None:
    first = session(tmp_path / "1", 100, "smoke", "ok", a=1, b=1, c=3)
    session(first, 110, "step", "", d=4)  # killed
    second = session(tmp_path / "2", 200, "smoke", "cut short", b=2, c=None)
    results = tmp_path / "all.json"
    gpu_merge.main([str(second), str(first), "--json", str(results)])
    found = {row["name"]: row["value"] for row in json.loads(results.read_text())}
    assert found == {"a": 1, "b": 2, "c": 3, "d": 4}
    printed = capsys.readouterr().out
    assert "missing: step (begun)" in printed
    assert "missing: sweep (never asked for)" in printed
    assert "missing: smoke" not in printed
    with pytest.raises(SystemExit):
        gpu_merge.main([str(tmp_path)])


@pytest.mark.parametrize(
    ("counts", "value", "ok"),
    [
        ('tests="5" failures="1" errors="1" skipped="1"', 2, False),
        ('tests="5" failures="0" errors="0" skipped="1"', 0, True),
        ('tests="5" failures="0" errors="0" skipped="5"', None, None),  # not green: nothing was run
    ],
)
def test_tests_are_green_where_some_passed(tmp_path: Path, counts: str, value, ok) -> None:
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite {counts}/></testsuites>")
    row = failures_row("some", report)
    assert (row["value"], row["ok"], row["bar"]) == (value, ok, 0)
    report.write_text("<testsuites><")
    assert (
        failures_row("some", report)["ok"] is failures_row("some", tmp_path / "none")["ok"] is None
    )


def test_a_long_log_loses_its_middle(tmp_path: Path) -> None:
    log = tmp_path / "session.log"
    log.write_text("first" + "x" * 5000 + "last")
    trim(log, 1000)
    assert log.stat().st_size <= 1000
    assert log.read_text().startswith("firstx")
    assert log.read_text().endswith("xlast")
    assert "bytes are left out" in log.read_text()
    assert MAX_BYTES == 16 << 20


@pytest.mark.parametrize("on_gpu", [True, False])
def test_stages_name_files_that_are_there_and_options_that_are_known(on_gpu: bool) -> None:
    listed = stages([Path("trace.npz")], on_gpu=on_gpu)
    assert len({stage.name for stage in listed}) == len(listed)
    for stage in listed:
        for part in stage.command:
            if part.startswith(("tests/", "benchmarks/")):
                assert (ROOT / part).exists(), stage.name
        if stage.command[0].endswith("gpu_setup.py") or stage.tests:
            continue
        benchmark = importlib.import_module(Path(stage.command[0]).stem)
        given = _command(stage, Path("out"), Path("report"), None)[1:]
        options = benchmark.make_command().parse(given)  # exits where one is not known
        assert options.json == Path("out/rows.jsonl")
        assert not stage.floors or options.floors == Path("out/rows.jsonl")
        assert not stage.traces or options.traces == Path("out")
    by_default = stages()
    assert sum(each.seconds for each in by_default[:4]) <= 3 * 540
    # rows, log, compiled kernels, a trace for each case
    traces = sum(part == "--case" for stage in listed for part in stage.command)
    assert 3 + traces <= gpu_session.MAX_FILES


def test_the_three_commands_of_the_documentation_name_stages() -> None:
    text = (ROOT / "docs" / "kernels.md").read_text()
    commands = [line for line in text.splitlines() if "benchmarks/gpu_session.py --output" in line]
    assert len(commands) == 3
    named = [name for line in commands for name in line.split("--stage ")[1].split()]
    known = [stage.name for stage in stages()]
    assert named == [name for name in known[1:] if name in named]  # in the order of what they tell
    assert {"smoke", "step", "profile", "sweep", "replay", "overlap", "sleep"} <= set(named)


def test_the_exit_status_says_whether_all_went_well(tmp_path: Path, monkeypatch, capsys) -> None:
    def ends(status: str) -> None:
        def found(chosen, output, seconds, *, floors, on_gpu):
            assert floors is None
            output.mkdir(exist_ok=True)
            (output / "session.log").touch()
            return [Outcome(name=stage.name, status=status) for stage in chosen]

        monkeypatch.setattr(gpu_session, "run", found)
        forgotten = [
            part
            for option in ("--floors", "--trace", "--triton-cache")
            for part in (option, str(tmp_path / "forgotten"))
        ]
        gpu_session.main(["--output", str(tmp_path / "out"), "--stage", "smoke", *forgotten])

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(gpu_session, "has_gpu", lambda: False)
    monkeypatch.setattr(gpu_session, "TRITON_CACHE", tmp_path / "build" / "none")
    try:
        ends("ok")
        with pytest.raises(SystemExit) as error:
            ends("not begun")
        assert error.value.code == 1
        printed = capsys.readouterr().out
        for otherwise in ("floors are measured anew", "a made-up trace", "forgotten is not used"):
            assert otherwise in printed
    finally:
        signal.signal(signal.SIGTERM, before)


def test_stages_find_an_environments_own_programs_and_leave_things_in_build(tmp_path: Path) -> None:
    code = """
import os, shutil, sys, tempfile
assert os.access(shutil.which("python"), os.X_OK)
assert os.environ["PATH"].split(os.pathsep)[1] == os.path.dirname(sys.executable)
assert "build" in tempfile.gettempdir()
assert sys.pycache_prefix is None  # else all that is installed would be compiled anew
"""
    (outcome,) = run([script("environment", code, rows=False)], tmp_path, seconds=60)
    assert outcome.status == "ok", (tmp_path / "session.log").read_text()
