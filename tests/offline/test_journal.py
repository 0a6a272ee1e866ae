"""Durable lines: torn tails, full disks, two writers."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from rollout.errors import OutputError
from rollout.offline.journal import Journal, whole_rows, write_whole
from rollout.offline.output import output_lock
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.small_jobs import small_files


def line(number: int) -> bytes:
    return json.dumps({"number": number}).encode() + b"\n"


def write(path: Path, *numbers: int) -> int:
    journal = Journal(path)
    for number in numbers:
        journal.append(line(number))
    journal.close()
    return journal.end


def test_offsets_are_where_rows_begin(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    journal = Journal(path)
    offsets = [journal.append(line(number)) for number in (5, 66, 777)]
    assert path.read_bytes() == line(5) + line(66) + line(777)  # before close: a kill loses none
    journal.close()
    found = list(whole_rows(path))
    assert [start for start, _, _ in found] == offsets
    assert [row["number"] for _, _, row in found] == [5, 66, 777]
    assert found[-1][1] == journal.end == path.stat().st_size


@pytest.mark.parametrize(
    "tail", [b"", b"{", b'{"number": 3', b'{"number": 3}', b"\0\0\0\n\0\0", b"\xff\n", b"3\n"]
)
def test_every_torn_tail_is_cut_on_resume(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    whole_end = write(path, 1, 2)
    with path.open("ab") as file:
        file.write(tail)
    rows = list(whole_rows(path))
    assert [row["number"] for _, _, row in rows] == [1, 2]
    assert rows[-1][1] == whole_end
    journal = Journal(path, whole_end)
    journal.append(line(3))
    journal.close()
    assert path.read_bytes() == line(1) + line(2) + line(3)


def test_a_cut_at_any_byte_leaves_whole_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    end = write(path, 1, 22, 333)
    content = path.read_bytes()
    for cut in range(end + 1):
        path.write_bytes(content[:cut])
        ends = [after for _, after, _ in whole_rows(path)]
        assert len(ends) == content[:cut].count(b"\n")
        assert all(content[after - 1 : after] == b"\n" for after in ends)


def test_a_broken_row_before_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line(1) + b"scribble\n" + line(2))
    with pytest.raises(OutputError, match="line 2 is not a row"):
        list(whole_rows(path))


MAX_BYTES = 4096


def test_a_full_disk_tears_no_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    journal = Journal(path)
    long = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    with small_files(MAX_BYTES):
        for _ in range(MAX_BYTES // len(long)):
            journal.append(long)
        with pytest.raises(
            OutputError, match=r"rows.jsonl cannot be written: .* run the same command"
        ):
            journal.append(long)  # of which the first part fits
        journal.close()
    assert path.read_bytes() == long * (MAX_BYTES // len(long))


def test_write_whole_keeps_the_old_content_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_whole(path, b"old")
    with small_files(MAX_BYTES), pytest.raises(OutputError, match="cannot be written"):
        write_whole(path, b"x" * (MAX_BYTES + 1))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"


def test_what_is_no_regular_file_is_refused() -> None:
    with pytest.raises(OutputError, match="/dev/full cannot be written"):
        Journal(Path("/dev/full"))


def test_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written: Not a directory"):
        Journal(tmp_path / "file" / "rows.jsonl")
    with (
        pytest.raises(OutputError, match="cannot be written"),
        output_lock(tmp_path / "file" / "rows.jsonl"),
    ):
        pass


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    output = tmp_path / "new" / "rows.jsonl"
    with output_lock(output):
        with (
            pytest.raises(OutputError, match=rf"another job \(process {os.getpid()}\)"),
            output_lock(output),
        ):
            pass
        with output_lock(output.with_name("other.jsonl")):
            pass
    with output_lock(output):
        pass
    assert list(output.parent.iterdir()) == []


def hold_lock_until_killed(output: Path, held: multiprocessing.synchronize.Event) -> None:
    with output_lock(output):
        held.set()
        signal.pause()


def test_a_killed_writer_leaves_no_lock_behind(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    process = context.Process(target=hold_lock_until_killed, args=(tmp_path / "out.jsonl", held))
    process.start()
    assert held.wait(HANG_SECONDS)
    with (
        pytest.raises(OutputError, match=f"process {process.pid}"),
        output_lock(tmp_path / "out.jsonl"),
    ):
        pass
    process.kill()
    process.join()
    with output_lock(tmp_path / "out.jsonl"):
        pass
