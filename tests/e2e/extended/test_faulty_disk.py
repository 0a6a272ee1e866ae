"""A disk that fails, and a process killed just before it changes one: the job goes on."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.extended.faulty_disk import FAILED
from tests.helpers.hang import HANG_SECONDS


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    built = tmp_path_factory.mktemp("disk-faults") / "disk_faults.so"
    source = Path(__file__).with_name("disk_faults.c")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", built, source], check=True, timeout=HANG_SECONDS
    )
    return built


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": [5, index], "id": index}) + "\n"
                            for index in range(2)))  # fmt: skip
    return path


def run_jobs(library: Path, folder: Path, jobs: list[tuple[str, ...]]) -> list[tuple[int, str]]:
    (folder / "jobs.json").write_text(json.dumps(jobs))
    ended = subprocess.run(
        [sys.executable, "-m", "tests.e2e.extended.faulty_disk", folder / "jobs.json"],
        env=os.environ | {"LD_PRELOAD": str(library)},
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=HANG_SECONDS,
    )
    return [(status, message) for status, message in json.loads(ended.stdout)]


KILL = 0
FAULTS = {  # one after the other, on one output
    "out.jsonl": [
        ("rename", "run.json", 1, errno.EIO),
        ("ftruncate", "out.jsonl", 1, errno.EIO),
        ("write", "out.jsonl.run.json", 1, errno.ENOSPC),
        ("fsync", "out.jsonl", 3, errno.EIO),
        ("rename", "run.json", 2, KILL),
    ],
    "out.parquet": [
        ("rename", "run.json", 1, KILL),
        ("write", "partial", 1, errno.EDQUOT),
        ("write", "partial", 2, KILL),
        ("write", "out.parquet.tmp", 1, errno.ENOSPC),
        ("fsync", "out.parquet.tmp", 1, errno.EIO),
        ("rename", "out.parquet", 2, errno.EIO),  # the record's is the first
        ("rename", "out.parquet", 2, KILL),
        ("write", "run.json.tmp", 2, errno.ENOSPC),
        ("rename", "run.json", 2, KILL),
        ("unlink", "partial", 1, KILL),
    ],
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_whatever_fails_the_job_goes_on(library, tmp_path, tiny_model_path, prompts, name):
    whole, output = (tmp_path / folder / name for folder in ("whole", "faulty"))
    faults = FAULTS[name]
    job = (str(tiny_model_path), str(prompts), str(output))
    failing = [(*job, f"{call} {part} {nth} {code}") for call, part, nth, code in faults]
    undisturbed = (*job[:2], str(whole), "")
    unremovable = (*job, f"unlink {name} 1 {errno.EROFS}")  # hinders nobody
    jobs = [undisturbed, *failing, unremovable, (*job, "")]
    first, *ended, completed, last = run_jobs(library, tmp_path, jobs)
    assert first == completed == last == (0, "")
    for (status, message), (call, part, _, code) in zip(ended, faults, strict=True):
        if code == KILL:
            assert status == signal.SIGKILL, (call, part, message)
        else:
            assert os.waitstatus_to_exitcode(status) == FAILED, (call, part, message)
            assert name in message
            assert f"cannot be written: {os.strerror(code)}" in message
            assert "run the same command again" in message
    if name == "out.parquet":
        assert output.read_bytes() == whole.read_bytes()
    else:
        assert sorted(output.read_text().splitlines()) == sorted(whole.read_text().splitlines())
    names = [name, f"{name}.log", f"{name}.run.json"]
    assert sorted(path.name for path in output.parent.iterdir()) == names
