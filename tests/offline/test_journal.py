"""Durable lines: torn tails, full disks, two writers."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from rollout.errors import OutputError
from rollout.offline.journal import Journal, whole_rows, write_whole
from rollout.offline.output import output_lock
from tests.helpers.small_jobs import small_files


def line(number: int) -> bytes:
    return json.dumps({"number": number}).encode() + b"\n"


def write(path: Path, *numbers: int) -> int:
    journal = Journal(path)
    for number in numbers:
        journal.append(line(number))
    journal.close()
    return journal.end


def test_offsets_are_where_rows_begin(tmp_path):
    path = tmp_path / "rows.jsonl"
    journal = Journal(path, sync_seconds=0.0)
    offsets = [journal.append(line(number)) for number in (5, 66, 777)]
    assert path.read_bytes() == line(5) + line(66) + line(777)  # before close: a kill loses none
    journal.close()
    found = list(whole_rows(path))
    assert [start for start, _, _ in found] == offsets
    assert [row["number"] for _, _, row in found] == [5, 66, 777]
    assert found[-1][1] == journal.end == path.stat().st_size


TAILS = (b"", b"{", b'{"number": 3', b'{"number": 3}', b"\0\0\0\n\0\0", b"\xff\n", b"3\n")


def test_every_torn_tail_is_cut_on_resume(tmp_path):
    path = tmp_path / "rows.jsonl"
    for tail in TAILS:
        path.unlink(missing_ok=True)
        whole_end = write(path, 1, 2)
        with path.open("ab") as file:
            file.write(tail)
        rows = list(whole_rows(path))
        assert [row["number"] for _, _, row in rows] == [1, 2]
        assert rows[-1][1] == whole_end
        journal = Journal(path, whole_end)
        journal.append(line(3))
        journal.close()
        assert path.read_bytes() == line(1) + line(2) + line(3), tail


def test_a_broken_row_before_others_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line(1) + b"scribble\n" + line(2))
    with pytest.raises(OutputError, match="line 2 is not a row"):
        list(whole_rows(path))


MAX_BYTES = 4096


def test_a_full_disk_tears_no_line(tmp_path):
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


def test_write_whole_keeps_the_old_content_when_it_fails(tmp_path):
    path = tmp_path / "run.json"
    write_whole(path, b"old")
    with small_files(MAX_BYTES), pytest.raises(OutputError, match="cannot be written"):
        write_whole(path, b"x" * (MAX_BYTES + 1))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"


def test_places_that_cannot_be_written(tmp_path):
    with pytest.raises(OutputError, match="/dev/full cannot be written"):
        Journal(Path("/dev/full"))
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "rows.jsonl"
    with pytest.raises(OutputError, match="cannot be written: Not a directory"):
        Journal(path)
    with pytest.raises(OutputError, match="cannot be written"), output_lock(path):
        pass


def test_lines_that_cannot_be_made_durable_are_told(tmp_path, monkeypatch):
    def fails(_: int) -> None:
        raise OSError(errno.EIO, "the disk fails")

    journal, path = Journal(tmp_path / "rows.jsonl"), tmp_path / "others.jsonl"
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OutputError, match="cannot be written: the disk fails"):
        journal.close()
    with pytest.raises(OutputError, match=r"others\.jsonl cannot be written"):
        Journal(path)
    assert path.read_bytes() == b""


def cut(path: Path) -> None:
    os.truncate(path, 0)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"{}\n")


def put_another_in_its_place(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


@pytest.mark.parametrize("change", [cut, append, put_another_in_its_place, Path.unlink])
@pytest.mark.parametrize("at_end", [False, True])
def test_an_output_that_others_change_meanwhile(tmp_path, change, at_end):
    path = tmp_path / "rows.jsonl"
    journal = Journal(path)
    journal.append(line(1))
    change(path)
    end = journal.close if at_end else lambda: journal.append(line(2))
    with pytest.raises(OutputError, match=r"rows\.jsonl was changed or moved by another process"):
        end()
    if not at_end:
        journal.close()


def test_one_writer_at_a_time(tmp_path):
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
