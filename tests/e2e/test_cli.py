"""The `specrollout` command: exit codes, one-line errors, sweeps, Ctrl-C."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from rollout.cli import main
from tests.helpers.forked import forked
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.run_logs import run_lines, write_lines
from tests.helpers.signalled_job import run_signalled
from tests.helpers.small_jobs import read_rows, small_files, write_rows
from tests.helpers.tiny_model import save_tiny_llama

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
def arguments(tmp_path: Path, tiny_model_path: Path) -> list[str]:
    prompts = write_rows(tmp_path / "prompts.jsonl", ROWS)
    return [f"model.path={tiny_model_path}", f"data.path={prompts}", *SMALL]


@pytest.fixture
def specrollout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Command]:
    """Runs the command in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    handlers = list(logging.getLogger().handlers)

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["specrollout", *arguments])
        gc.collect()  # tasks that other tests left say so when they are found
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), shown.out, shown.err)

    yield run
    GlobalHydra.instance().clear()
    logging.getLogger().handlers[:] = handlers


def test_a_run_and_the_same_run_again(
    specrollout: Command, arguments: list[str], tmp_path: Path
) -> None:
    first = specrollout(*arguments, "sampling.n=3", "output.path=new/out.jsonl")
    assert (first.code, first.err) == (0, "")
    assert "accept length" in first.out
    assert "new/out.jsonl" in first.out
    rows = read_rows(tmp_path / "new" / "out.jsonl")
    assert [row["id"] for row in rows] == [0, 0, 0, 1, 1, 1]
    again = specrollout(*arguments, "sampling.n=3", "output.path=new/out.jsonl")
    assert again.code == 0
    assert "is complete with 6 rollouts: nothing to do" in again.out
    different = specrollout(*arguments, "sampling.n=2", "output.path=new/out.jsonl")
    assert different.code == 1
    assert "sampling.n was 3 and is 2" in different.err
    by_default = specrollout(*arguments)
    assert by_default.code == 0
    assert len(read_rows(tmp_path / "rollouts.jsonl")) == 2


def test_the_next_epoch_starts_warm(
    specrollout: Command, arguments: list[str], tmp_path: Path
) -> None:
    small = (*arguments, "spec.corpus_bytes=1048576", "sampling.n=2")
    assert specrollout(*small, "output.path=first.jsonl").code == 0
    warm = (*small, "output.path=second.jsonl", "spec.corpus_path=first.jsonl.corpus")
    second = specrollout(*warm)
    assert (second.code, second.err) == (0, "")
    assert re.search(r"corpus .* warm, \d+ tokens; \d+ tokens now", second.out)
    assert read_rows(tmp_path / "second.jsonl") == read_rows(tmp_path / "first.jsonl")
    for wrong, reason in (
        ("spec.corpus_path=third.jsonl.corpus", "spec.corpus_path='third.jsonl.corpus': there is"),
        ("spec.corpus_bytes=2097152", "saved with spec.corpus_bytes=1048576"),
        ("+spec.external_corpora.code=code.jsonl", "spec.external_corpora.code='code.jsonl': ther"),
    ):
        refused = specrollout(*warm, wrong, "output.overwrite=true")
        assert refused.code == 2
        assert reason in refused.err


def test_help_and_cfg(specrollout: Command) -> None:
    shown = specrollout("--help")
    assert shown.code == 0
    for text in (
        "model.path=FOLDER",
        "spec: eagle, hybrid, mtp, ngram, none",
        "experiment: demo",
        "-m spec=",
    ):
        assert text in shown.out
    assert max(map(len, shown.out.splitlines())) <= 100
    config = specrollout("--cfg", "job")
    assert config.code == 0
    assert "temperature: 1.0" in config.out


@pytest.mark.parametrize(
    ("override", "code", "message"),
    [
        ("sampling.temperature=nan", 2, "sampling.temperature=nan: must be a finite number"),
        ("data.path=nowhere.jsonl", 2, "data.path='nowhere.jsonl': there is no such file"),
        ("spec.nonsense=1", 2, "spec.nonsense=1: spec_workers.ngram.build knows"),
        ("memory.kv_bytes=1", 1, "memory.kv_bytes=1"),
        ("model.path=nowhere", 1, "nowhere"),
        ("model=no/where", 1, "no/where/config.json: no such file"),
        # Hydra's own messages:
        ("samplng.n=3", 2, "Key 'samplng' not in 'RunConfig'"),
        ("sampling.top_q=1", 2, "Could not override 'sampling.top_q'."),
        ("sampling.n=many", 2, "Error merging override sampling.n=many\nValue 'many' of type"),
        ("cluster.kind=rai", 2, "Invalid value 'rai', expected one of [none, ray]"),
        ("spec=nonsense", 2, "Available options in 'spec':\n\teagle\n\thybrid"),
        ("spec=none,ngram", 2, "Ambiguous value for argument 'spec=none,ngram'"),
        ("sampling.n=[1", 2, "no viable alternative at input '[1'"),
        ("+sampling.n=1", 2, "Could not append to config"),
    ],
)
def test_bad_input_is_named(
    specrollout: Command, arguments: list[str], override: str, code: int, message: str
) -> None:
    shown = specrollout(*arguments, override)
    assert shown.code == code
    assert message in shown.err
    assert "Traceback" not in shown.err + shown.out
    if shown.err.startswith("error: "):
        assert shown.err.count("\n") == 1
    assert not Path("rollouts.jsonl").exists()


def test_the_version_is_the_package_s(specrollout: Command) -> None:
    shown = specrollout("--version")
    assert (shown.code, shown.out) == (0, f"specrollout {version('specrollout')}\n")


def test_a_command_there_is_not(specrollout: Command) -> None:
    shown = specrollout("trian-draft", "--help")
    assert shown.code == 2
    assert (
        shown.err
        == "error: no command 'trian-draft', did you mean train-draft? compare, report, serve, "
        "train-draft, or KEY=VALUE ...\n"
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--cfg", "job"], ["report", "--help"]], ids=str)
def test_a_reader_that_leaves_ends_the_command_quietly(
    arguments: list[str], unbuffered: str
) -> None:
    """The reader of a pipe, like `| head -1`, has left before anything is written."""
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(
        [sys.executable, "-m", "rollout.cli", *arguments],
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=HANG_SECONDS,
    )
    os.close(write)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("redirection", "code", "says"),
    [
        (
            ">/dev/full",
            os.EX_IOERR,
            "error: standard output cannot be written: No space left on device\n",
        ),
        ("<&- >&- 2>&-", 0, ""),  # what is opened next must not get their numbers
    ],
)
def test_an_output_that_takes_nothing(
    tmp_path: Path, redirection: str, code: int, says: str
) -> None:
    log = write_lines(tmp_path / "run.jsonl", run_lines(num_steps=4))
    ended = subprocess.run(
        ["bash", "-c", f'exec "$@" {redirection}', "-", sys.executable, "-m", "rollout.cli",
         "report", str(log)],
        stderr=subprocess.PIPE,
        text=True,
        timeout=HANG_SECONDS,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (code, says)
    assert (tmp_path / "run.html").read_text().endswith("</html>")


def test_names_that_the_output_s_encoding_lacks_are_escaped(tmp_path: Path) -> None:
    log = write_lines(tmp_path / "\N{GREEK SMALL LETTER ALPHA}.jsonl", run_lines(num_steps=4))
    ended = subprocess.run(
        [sys.executable, "-m", "rollout.cli", "report", str(log)],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.endswith("\\u03b1.html\n")


def test_no_ranks_are_started_for_a_model_they_cannot_share(
    specrollout: Command, arguments: list[str]
) -> None:
    shown = specrollout(*arguments, "parallel=tensor", "parallel.size=7")
    assert shown.code == 2
    assert shown.err.startswith("error: parallel.size=7: must divide the model's")
    assert shown.err.count("\n") == 1


def test_ranks_that_fail_end_with_their_own_code_and_leave_no_folder(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "rollout.parallel.launcher", "2"]
    ended = subprocess.run(
        [*launcher, "timeit", "--nonsense"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert not list(tmp_path.iterdir())
    assert ended.returncode == 2
    assert "option --nonsense not recognized" in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr


def test_broken_prompts(specrollout: Command, arguments: list[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(prompts.read_text() + '{"prompt": \n' + '{"prompt": [96]}\n')
    stopped = specrollout(*arguments)
    assert stopped.code == 2
    assert "1 of 4 rows cannot be used:\n  line 3 is not JSON" in stopped.err
    assert not (tmp_path / "rollouts.jsonl").exists()
    skipped = specrollout(*arguments, "data.on_error=skip")
    assert skipped.code == 0
    assert "warning: " in skipped.out
    assert "line 3 is not JSON" in skipped.out
    assert [row["prompt_index"] for row in read_rows(tmp_path / "rollouts.jsonl")] == [0, 1, 3]


@pytest.mark.parametrize("damage", ["no weights", "truncated", "missing shard", "wrong shape"])
def test_a_broken_model_folder(
    specrollout: Command, arguments: list[str], tmp_path: Path, damage: str
) -> None:
    folder = save_tiny_llama(tmp_path / "model")
    weights = folder / "model.safetensors"
    if damage == "no weights":
        weights.unlink()
    elif damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "missing shard":
        index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        weights.unlink()
    else:
        config = json.loads((folder / "config.json").read_text())
        config["intermediate_size"] += 8
        (folder / "config.json").write_text(json.dumps(config))
    shown = specrollout(*arguments, f"model.path={folder}")
    assert shown.code == 1
    assert shown.err.startswith("error: ")
    assert "Traceback" not in shown.err
    assert not (tmp_path / "rollouts.jsonl").exists()


def test_a_sweep_writes_one_file_per_job(
    specrollout: Command, arguments: list[str], tmp_path: Path
) -> None:
    sweep = ["-m", *arguments, "hydra.sweep.dir=sweep", "sampling.n=2"]
    swept = specrollout(*sweep, "spec=none,ngram", "sampling.temperature=0.6,1.0")
    assert (swept.code, swept.err) == (0, "")
    rows = [read_rows(tmp_path / "sweep" / str(job) / "rollouts.jsonl") for job in range(4)]
    assert [len(each) for each in rows] == [4] * 4
    assert rows[0] == rows[2]  # speculation cannot be seen
    assert rows[1] == rows[3]
    assert rows[0] != rows[1]
    assert swept.out.count("jobs of the sweep") == 1
    again = specrollout(*sweep, "spec=none,ngram", "sampling.temperature=0.6,1.0")
    assert " ".join(again.out.split()).count("nothing to do. Generate it anew") == 4


def test_two_jobs_of_a_sweep_cannot_share_a_file(
    specrollout: Command, arguments: list[str], tmp_path: Path
) -> None:
    swept = specrollout("-m", *arguments, "spec=none,ngram", "output.path=one.jsonl")
    assert swept.code == 2
    assert "output.path='one.jsonl': another job of this sweep" in swept.err
    assert len(read_rows(tmp_path / "one.jsonl")) == 2  # the first job's
    named = "output.path=${hydra:job.num}.jsonl"
    assert specrollout("-m", *arguments, "spec=none,ngram", named).code == 0
    assert read_rows(tmp_path / "0.jsonl") == read_rows(tmp_path / "1.jsonl")


def test_a_failing_job_does_not_stop_the_sweep(
    specrollout: Command, arguments: list[str], tmp_path: Path
) -> None:
    swept = specrollout("-m", *arguments, "hydra.sweep.dir=sweep", "sampling.top_p=0,0.9,2")
    assert swept.code == 2
    assert swept.err.count("error: sampling.top_p=") == 2
    assert "Traceback" not in swept.err + swept.out
    assert [path.parent.name for path in tmp_path.glob("sweep/*/rollouts.jsonl")] == ["1"]


def test_other_files_that_fail(specrollout: Command, arguments: list[str]) -> None:
    log = "log.jsonl=/dev/full"
    shown = specrollout(*arguments, log)
    assert shown.code == 1
    assert "error: log.jsonl='/dev/full' cannot be written: No space left" in shown.err
    Path("folder.jsonl.run.json").mkdir()
    shown = specrollout(*arguments, "output.path=folder.jsonl")
    assert shown.code == 1
    assert shown.err.startswith("error: [Errno 21] Is a directory: 'folder.jsonl.run.json'")


def test_the_whole_error_on_request(
    specrollout: Command, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    shown = specrollout(*arguments, "sampling.top_p=0")
    assert shown.code == 2
    assert "Traceback" in shown.err


def test_a_full_disk(specrollout: Command, arguments: list[str], tmp_path: Path) -> None:
    write_rows(tmp_path / "prompts.jsonl", ROWS * 20)
    with small_files(12_000):  # Hydra's own record of the run fits
        full = specrollout(*arguments, "output.path=out.jsonl")
    assert full.code == 1
    assert "error: out.jsonl cannot be written: " in full.err
    assert "run the same command again" in full.err
    written = read_rows(tmp_path / "out.jsonl")
    assert 0 < len(written) < 40
    assert specrollout(*arguments, "output.path=out.jsonl").code == 0
    whole = read_rows(tmp_path / "out.jsonl")
    assert len(whole) == 40
    assert [row for row in whole if row in written] == written


def test_stopped_and_run_again(specrollout: Command, arguments: list[str], tmp_path: Path) -> None:
    write_rows(tmp_path / "prompts.jsonl", ROWS * 100)
    arguments = [*arguments, "sampling.max_new_tokens=24", "output.path=out.jsonl"]
    output, log = tmp_path / "out.jsonl", tmp_path / "log"
    for number, status in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)):
        process = forked(run_signalled, str(tmp_path), 3, number, *arguments, log=log)
        process.join(HANG_SECONDS)
        assert process.exitcode == status, log.read_text()
    shown = log.read_text()
    done = len(output.read_bytes().splitlines())
    assert 6 <= done < 200
    assert f"stopped by SIGINT: {done} rollouts are in out.jsonl. The same command" in shown
    assert shown.splitlines()[-1] == shlex.join(["specrollout", *arguments])
    last = specrollout(*arguments)
    assert last.code == 0
    assert f"{done} of 200 rollouts are in out.jsonl already" in last.out
    assert specrollout(*arguments, "output.path=whole.jsonl", "spec=none").code == 0
    assert read_rows(output) == read_rows(tmp_path / "whole.jsonl")
