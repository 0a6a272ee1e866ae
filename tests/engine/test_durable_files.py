"""Files that are written whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rollout.engine.durable_files import whole_file


@pytest.fixture(params=[False, True], ids=["alone", "shared"])
def shared(request):
    return request.param


def test_a_name_is_made_durable(tmp_path, monkeypatch, shared):
    """The file before it gets its name, the folder after."""
    path, synced, real = tmp_path / "file", [], os.fsync

    def fsync(descriptor):
        found = os.fstat(descriptor)
        synced.append(("folder" if stat.S_ISDIR(found.st_mode) else found.st_size, path.exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with whole_file(path, shared=shared) as file:
        file.write(b"new")
    assert synced == [(3, False), ("folder", True)]
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


def write(path: Path, error: type[BaseException] | None = None, **options: bool) -> None:
    with whole_file(path, **options) as file:
        file.write(b"half")
        if error is not None:
            raise error


def test_what_fails_leaves_the_old_file(tmp_path, shared):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    (tmp_path / "folder").mkdir()
    with pytest.raises(KeyboardInterrupt):
        write(path, KeyboardInterrupt, shared=shared)
    with pytest.raises(IsADirectoryError):
        write(tmp_path / "folder", shared=shared)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write(tmp_path / "nowhere" / "file", shared=shared)
    assert path.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_writers_of_one_path_do_not_meet(tmp_path):
    path = tmp_path / "file"
    with whole_file(path, shared=True) as first, whole_file(path, shared=True) as second:
        first.write(b"first")
        second.write(b"second")
    assert path.read_bytes() == b"first"  # whose block ended last
    assert os.listdir(tmp_path) == ["file"]
