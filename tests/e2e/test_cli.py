"""The `specrollout` command: exit codes, one-line errors, sweeps, Ctrl-C."""

from __future__ import annotations

import gc
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from rollout import __version__
from rollout.cli import main
from tests.helpers.forked import forked
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.run_logs import run_lines, write_lines
from tests.helpers.signalled_job import run_signalled
from tests.helpers.small_jobs import read_rows, write_rows

ROWS = [{"prompt": [5, 6, 7], "id": 0}, {"prompt": [8, 9], "id": 1}]
SMALL = (
    "sampling.max_new_tokens=8",
    "scheduler.max_running=4",
    "scheduler.max_step_tokens=16",
    "scheduler.chunk_len=8",
    "memory.max_kv_tokens=256",
    "num_threads=1",
)


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture
def arguments(tmp_path, tiny_model_path):
    prompts = write_rows(tmp_path / "prompts.jsonl", ROWS)
    return [f"model.path={tiny_model_path}", f"data.path={prompts}", *SMALL]


@pytest.fixture
def specrollout(monkeypatch, capsys, tmp_path, log_restored):
    """Runs the command in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["specrollout", *arguments])
        gc.collect()  # tasks that other tests left say so when they are found
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), shown.out, shown.err)

    yield run
    GlobalHydra.instance().clear()


def test_a_run_the_same_again_and_another(specrollout, arguments, tmp_path):
    job = (*arguments, "output.path=new/out.jsonl")
    first = specrollout(*job, "sampling.n=3")
    assert (first.code, first.err) == (0, "")
    assert "accept length" in first.out
    assert "new/out.jsonl" in first.out
    rows = read_rows(tmp_path / "new" / "out.jsonl")
    assert [row["id"] for row in rows] == [0, 0, 0, 1, 1, 1]
    words = [each.removeprefix("model.path=").removeprefix("data.path=") for each in job]
    again = specrollout(*words, "--n", "3")
    assert again.code == 0
    assert "is complete (6 rollouts), nothing to do" in again.out
    different = specrollout(*job, "sampling.n=2")
    assert different.code == 1
    assert "sampling.n was 3 and is 2" in different.err
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(prompts.read_text() + '{"prompt": \n' + '{"prompt": [96]}\n')
    stopped = specrollout(*arguments)
    assert stopped.code == 2
    assert "1 of 4 rows cannot be used:\n  line 3 is not JSON" in stopped.err
    skipped = specrollout(*arguments, "data.on_error=skip")
    assert skipped.code == 0
    assert "line 3 is not JSON" in skipped.out
    by_default = read_rows(tmp_path / "rollouts.jsonl")
    assert [row["prompt_index"] for row in by_default] == [0, 1, 3]


def test_what_it_says_of_itself(specrollout):
    shown = specrollout("--help")
    assert shown.code == 0
    for text in (
        "specrollout MODEL PROMPTS",
        "spec: block, eagle, hybrid, mtp, ngram, none",
        "experiment: demo",
        "specrollout report LOG ",
    ):
        assert text in shown.out
    assert max(map(len, shown.out.splitlines())) <= 100
    config = specrollout("--cfg", "job")
    assert config.code == 0
    assert "temperature: 1.0" in config.out
    assert specrollout("--version").out == f"specrollout {__version__}\n"
    unknown = specrollout("trian-draft", "--help")
    assert unknown.code == 2
    assert unknown.err.startswith("error: no command 'trian-draft', did you mean train-draft? ")


REFUSED = (
    ("sampling.temperature=nan", 2, "sampling.temperature=nan: must be a finite number"),
    ("data.path=nowhere.jsonl", 2, "data.path='nowhere.jsonl': there is no such file"),
    ("spec.nonsense=1", 2, "spec.nonsense=1: spec=ngram knows"),
    ("memory.kv_bytes=1", 1, "memory.kv_bytes=1"),
    ("model=/no/where", 1, "/no/where/config.json: no such file"),
    ("model=no/where", 2, "model.path='no/where': is no folder, and cannot be had from the hub: "),
    ("log.jsonl=/dev/full", 1, "log.jsonl='/dev/full' cannot be written: No space left"),
    ("output.path=folder.jsonl", 1, "[Errno 21] Is a directory: 'folder.jsonl.run.json'"),
    ("--hots=3", 2, "'--hots=3': no such flag"),
    # What Hydra refuses:
    ("sampling.max_tokens=3", 2, "did you mean sampling.max_new_tokens?"),
    ("sampling.n=many", 2, "sampling.n='many': Value 'many' of type"),
    ("cluster.kind=rai", 2, "cluster.kind='rai': Invalid value 'rai', expected one of [none, ray]"),
    (
        "spec=ngrm",
        2,
        "spec='ngrm': must be one of block, eagle, hybrid, mtp, ngram, none, did you mean",
    ),
    ("spec=none,ngram", 2, "spec='none,ngram': must be one value"),
    ("sampling.n=[1", 2, "sampling.n='[1': no viable alternative at input '[1'"),
    ("~sampling.x", 2, "sampling.x='': Could not delete from config"),
)


def test_bad_input_is_named(specrollout, arguments, monkeypatch):
    Path("folder.jsonl.run.json").mkdir()
    for override, code, message in REFUSED:
        shown = specrollout(*arguments, override)
        assert shown.code == code, override
        assert message in shown.err
        assert "Traceback" not in shown.err + shown.out
        assert shown.err.startswith("error: ")
        assert shown.err.count("\n") == 1
    ranks = specrollout(*arguments, "parallel=tensor", "parallel.size=7")  # none is started
    assert ranks.code == 2
    assert ranks.err.startswith("error: parallel.size=7: must divide the model's")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert "Traceback" in specrollout(*arguments, "sampling.top_p=0").err


def test_a_sweep_writes_one_file_per_job(specrollout, arguments, tmp_path):
    sweep = ["-m", *arguments, "hydra.sweep.dir=sweep", "sampling.n=2", "spec=none,ngram"]
    swept = specrollout(*sweep, "sampling.temperature=0.6,1.0")
    assert (swept.code, swept.err) == (0, "")
    rows = [read_rows(tmp_path / "sweep" / str(job) / "rollouts.jsonl") for job in range(4)]
    assert [len(each) for each in rows] == [4] * 4
    assert rows[0] == rows[2]  # speculation cannot be seen
    assert rows[1] == rows[3]
    assert rows[0] != rows[1]
    assert len(list(tmp_path.glob("sweep/*/rollouts.jsonl.log"))) == 4
    assert swept.out.count("jobs of the sweep") == 1
    again = specrollout(*sweep, "sampling.temperature=0.6")
    assert " ".join(again.out.split()).count("nothing to do; output.overwrite=true") >= 1
    shared = specrollout("-m", *arguments, "spec=none,ngram", "output.path=one.jsonl")
    assert shared.code == 2
    assert "output.path='one.jsonl': another job of this sweep" in shared.err
    assert len(read_rows(tmp_path / "one.jsonl")) == 2  # the first job's


def test_a_failing_job_does_not_stop_the_sweep(specrollout, arguments, tmp_path):
    swept = specrollout("-m", *arguments, "hydra.sweep.dir=sweep", "sampling.top_p=0,0.9,2")
    assert swept.code == 2
    assert swept.err.count("error: sampling.top_p=") == 2
    assert "Traceback" not in swept.err + swept.out
    assert [path.parent.name for path in tmp_path.glob("sweep/*/rollouts.jsonl")] == ["1"]


def test_stopped_and_run_again(specrollout, arguments, tmp_path):
    write_rows(tmp_path / "prompts.jsonl", ROWS * 40)
    arguments = [*arguments, "sampling.max_new_tokens=24", "output.path=out.jsonl"]
    output, log = tmp_path / "out.jsonl", tmp_path / "log"
    for number, status in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)):
        process = forked(run_signalled, str(tmp_path), 3, number, *arguments, log=log)
        process.join(HANG_SECONDS)
        assert process.exitcode == status, log.read_text()
    shown = log.read_text()
    done = len(output.read_bytes().splitlines())
    assert 6 <= done < 80
    assert f"stopped by SIGINT: {done} rollouts are in out.jsonl. The same command" in shown
    assert shown.splitlines()[-1] == shlex.join(["specrollout", *arguments])
    last = specrollout(*arguments)
    assert last.code == 0
    assert f"resuming: {done} of 80 rollouts are in out.jsonl" in last.out
    assert "specrollout report out.jsonl.log" in last.out
    assert (tmp_path / "out.jsonl.log").read_text().count('"kind":"run"') == 3
    assert specrollout(*arguments, "output.path=whole.jsonl", "spec=none").code == 0
    assert read_rows(output) == read_rows(tmp_path / "whole.jsonl")


def test_a_report(specrollout, tmp_path):
    log = write_lines(tmp_path / "run.jsonl", run_lines(num_steps=4))
    page = tmp_path / "page.html"
    shown = specrollout("report", str(log), "--output", str(page))
    assert (shown.code, shown.err) == (0, "")
    assert "forward" in shown.out
    assert shown.out.endswith(f"wrote {page}\n")
    assert page.read_text().endswith("</html>")
    assert "--output" in specrollout("report", "--help").out
    assert specrollout("report").code == 2
    assert specrollout("report", str(log), "--colour").code == 2
    missing = specrollout("report", "nowhere.jsonl")
    assert (missing.code, missing.out) == (2, "")
    assert missing.err.startswith("error: log=")
    assert missing.err.count("\n") == 1
