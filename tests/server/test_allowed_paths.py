"""Paths that clients name lead nowhere but below a root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollout.errors import InvalidInputError
from rollout.server.allowed_paths import AllowedPaths


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A root with a file and a folder, and a secret beside it."""
    (tmp_path / "root" / "weights").mkdir(parents=True)
    (tmp_path / "root" / "corpus.jsonl").write_text('"text"\n')
    (tmp_path / "root" / "weights" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "rootless").mkdir()
    (tmp_path / "rootless" / "secret").write_text("secret")
    return tmp_path


@pytest.fixture
def root(places: Path) -> AllowedPaths:
    return AllowedPaths("server.root", [places / "root"])


def refused(root: AllowedPaths, path: object) -> str:
    with pytest.raises(InvalidInputError) as file:
        root.file("file_path", str(path))
    with pytest.raises(InvalidInputError) as folder:
        root.folder("file_path", str(path))
    assert file.value.field == folder.value.field == "file_path"
    return file.value.remedy


def test_relative_and_absolute_paths_below_the_root(root: AllowedPaths, places: Path) -> None:
    for given in ("corpus.jsonl", "./corpus.jsonl", str(places / "root" / "corpus.jsonl")):
        assert root.file("file_path", given) == places / "root" / "corpus.jsonl"
    assert root.folder("model_path", "weights") == places / "root" / "weights"
    assert root.folder("model_path", "weights/") == places / "root" / "weights"
    assert root.folder("model_path", ".") == places / "root"


def test_paths_elsewhere_are_refused_alike_whether_they_exist_or_not(
    root: AllowedPaths, places: Path
) -> None:
    below = f"must lead below {places / 'root'}; server.root says so"
    for path, remedy in (
        ("../rootless/secret", "without '..'"),
        ("weights/../../rootless/secret", "without '..'"),
        ("weights/../corpus.jsonl", "without '..'"),  # harmless, and no reason to allow it
        ("", "without '..'"),
        ("corpus.jsonl\0.txt", "without '..'"),
        ("weights/\ud800", "encode"),
        (places / "rootless" / "secret", below),
        (places / "rootless" / "nothing", below),
        (places / "rootless", below),  # its name begins as the root's does
        ("/", below),
        (places, below),
        ("nothing", "there is no such file"),
        ("x" * 5000, "there is no such file"),
    ):
        assert remedy in refused(root, path), path


def test_links_are_resolved(root: AllowedPaths, places: Path) -> None:
    inside = places / "root"
    (inside / "same").symlink_to(inside / "corpus.jsonl")
    assert root.file("file_path", "same") == inside / "corpus.jsonl"
    (inside / "out").symlink_to(places / "rootless" / "secret")
    (inside / "out_folder").symlink_to(places / "rootless")
    (inside / "up").symlink_to("..")
    (inside / "dangling").symlink_to(places / "rootless" / "nothing")
    for path in ("out", "out_folder", "out_folder/secret", "up/rootless/secret", "dangling"):
        assert "must lead below" in refused(root, path)
    (inside / "loop").symlink_to("loop")
    assert "there is no such" in refused(root, "loop")


def test_entries_of_a_folder_may_not_lead_elsewhere(root: AllowedPaths, places: Path) -> None:
    weights = places / "root" / "weights"
    (weights / "shared.safetensors").symlink_to(places / "root" / "corpus.jsonl")
    assert root.folder("model_path", "weights") == weights
    (weights / "config.json").symlink_to(places / "rootless" / "secret")
    with pytest.raises(InvalidInputError, match=r"config\.json is a link that leads elsewhere"):
        root.folder("model_path", "weights")
    (weights / "config.json").unlink()
    os.mkfifo(weights / "config.json")  # opening it would wait for ever
    assert "there is no such file" in refused(root, "weights/config.json")
    with pytest.raises(InvalidInputError, match="neither a file nor a folder"):
        root.folder("model_path", "weights")


def test_without_a_root_no_path_is_taken() -> None:
    assert "without server.root" in refused(AllowedPaths("server.root", []), "/etc/passwd")
