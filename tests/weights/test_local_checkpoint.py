"""A local checkpoint follows published versions, and never holds a half of one."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.errors import CheckpointError, InvalidInputError
from rollout.models.checkpoint import Checkpoint
from rollout.models.pulled_folder import pulls_held_off
from rollout.weights.local_checkpoint import LocalCheckpoint

pytest.importorskip("zstandard")
pytest.importorskip("blake3")
from tests.helpers.slime_publisher import CHECKSUMS, publish

Tensors = dict[str, torch.Tensor]
INDEX = "model.safetensors.index.json"


def tensors(seed: int) -> Tensors:
    """bfloat16 and float32, of odd sizes; one that never changes."""
    torch.manual_seed(seed)
    a = torch.arange(35.0).reshape(5, 7)
    a[seed % 5] = torch.randn(7)
    return {"a": a, "b": torch.randn(3).bfloat16(), "same": torch.ones(11)}


def held(folder: Path) -> Tensors:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


class Run:
    """A trainer's versions 0, 1, 2, ... and the folders."""

    def __init__(self, folder: Path, **options: str) -> None:
        self.base, self.source, self.local = folder / "base", folder / "source", folder / "local"
        self.versions = [tensors(0)]
        self.options = options
        self.base.mkdir()
        self.source.mkdir()
        first, second = {"a": self.versions[0]["a"]}, dict(self.versions[0])
        del second["a"]
        save_file(first, self.base / "model-1.safetensors")
        save_file(second, self.base / "model-2.safetensors")
        weight_map = {"a": "model-1.safetensors"} | dict.fromkeys(second, "model-2.safetensors")
        (self.base / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        (self.base / "config.json").write_text("{}")

    def publish(self, **metadata: str) -> Path:
        old, new = self.versions[-1], tensors(len(self.versions))
        self.versions.append(new)
        number = len(self.versions) - 1
        return publish(self.source, number, old, new, metadata=metadata, **self.options)

    def publish_whole(self) -> None:
        self.versions.append(tensors(len(self.versions)))
        folder = self.source / f"weight_v{len(self.versions) - 1:06d}"
        folder.mkdir()
        save_file(self.versions[-1], folder / "model.safetensors")

    def pull_only(self, version: int) -> None:
        LocalCheckpoint(self.local, self.base, self.source).pull(version)

    def pull(self, version: int) -> None:
        checkpoint = LocalCheckpoint(self.local, self.base, self.source)
        checkpoint.pull(version)
        assert checkpoint.version == version
        assert_same(held(self.local), self.versions[version])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("checksum", sorted(CHECKSUMS))
def test_versions_one_after_the_other(tmp_path: Path, encoding: str, checksum: str) -> None:
    run = Run(tmp_path, encoding=encoding, checksum=checksum)
    run.pull(0)
    assert (run.local / "config.json").exists()
    for version in (1, 2, 3):
        run.publish()
        run.pull(version)
        run.pull(version)  # again, as each rank of a host would


def test_a_folder_that_comes_late(run: Run) -> None:
    """It replays differences, from the last whole version on."""
    run.publish()
    run.publish()
    run.pull(2)
    run.publish_whole()
    run.publish()
    run.pull(4)
    assert not (run.local / "model-1.safetensors").exists()
    shutil.rmtree(run.local)
    shutil.rmtree(run.source / "weight_v000001")  # older ones may be pruned
    run.pull(4)


def test_an_earlier_runs_folder_begins_anew(run: Run) -> None:
    run.publish()
    run.publish()
    run.pull(2)
    run.pull(0)
    run.pull(1)


def test_an_interrupted_write_begins_anew(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A xor that was applied and not noted must not be applied again."""
    run.publish()
    run.pull(1)
    run.publish()
    with monkeypatch.context() as patch:

        def stop(self: LocalCheckpoint, version: int) -> None:
            raise KeyboardInterrupt

        patch.setattr(LocalCheckpoint, "_commit", stop)
        with pytest.raises(KeyboardInterrupt):
            run.pull(2)
    with pytest.raises(CheckpointError, match="has not ended"), pulls_held_off(run.local):
        pass
    with pytest.raises(CheckpointError, match="has not ended"):
        Checkpoint(run.local)  # as a server that is started with it opens it
    run.pull(2)
    with pulls_held_off(run.local):
        Checkpoint(run.local)


def test_loads_and_pulls_keep_out_of_each_other(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.publish()
    run.pull(1)
    with pulls_held_off(run.local):
        run.pull(1)  # a pull that writes nothing does not wait
        with (run.local / ".weight_sync" / "lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    run.publish()
    give_up = LocalCheckpoint._give_up

    def load_meanwhile(self: LocalCheckpoint) -> None:
        with pytest.raises(CheckpointError, match="under way"), pulls_held_off(run.local):
            pass
        give_up(self)

    monkeypatch.setattr(LocalCheckpoint, "_give_up", load_meanwhile)
    run.pull(2)


def test_a_part_of_a_version_is_refused_and_the_last_one_stays(run: Run) -> None:
    run.publish()
    run.pull(1)
    file = run.publish()
    whole = file.read_bytes()
    file.unlink()
    for part, word in (
        (None, "may not have arrived"),
        (whole[:-1], "truncated"),
        (b"x", "damaged"),
    ):
        if part is not None:
            file.write_bytes(part)
        with pytest.raises(CheckpointError, match=word):
            run.pull(2)
        assert_same(held(run.local), run.versions[1])
        with pulls_held_off(run.local):
            pass
    file.write_bytes(whole)
    run.pull(2)


def test_a_part_of_a_whole_version_is_refused(run: Run) -> None:
    run.pull(0)
    folder = run.source / "weight_v000001"
    shutil.copytree(run.base, folder)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match="1 of 2 shards missing"):
        run.pull_only(1)
    (folder / INDEX).unlink()
    (folder / "model-1.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="is one of 2"):
        run.pull_only(1)
    assert_same(held(run.local), run.versions[0])


@pytest.mark.parametrize("field", ["version", "base_version"])
@pytest.mark.parametrize("value", ["seven", None, [1], {}])
def test_an_index_that_says_no_number(run: Run, field: str, value: object) -> None:
    run.publish(**{field: value})
    with pytest.raises(CheckpointError, match="its index says"):
        run.pull(1)


@pytest.mark.parametrize("later", [1, 2])
def test_another_runs_version_of_the_same_number(tmp_path: Path, later: int) -> None:
    run = Run(tmp_path)
    run.publish()
    run.pull(1)
    shutil.rmtree(run.source)
    run.source.mkdir()
    del run.versions[1:]
    run.versions.append(tensors(7))
    publish(run.source, 1, run.versions[0], run.versions[1])
    if later == 2:
        run.publish()
    run.pull(later)


def test_another_base_or_source(run: Run, tmp_path: Path) -> None:
    run.pull(0)
    (tmp_path / "other").mkdir()
    other = Run(tmp_path / "other")
    other.local = run.local
    save_file({"a": torch.ones(5, 7)}, other.base / "model-1.safetensors")
    other.versions[0]["a"] = torch.ones(5, 7)
    other.pull(0)
    other.publish_whole()
    other.pull(1)
    run.publish_whole()
    run.versions[1]["a"] += 1
    save_file(run.versions[1], run.source / "weight_v000001" / "model.safetensors")
    run.pull(1)


def test_a_pruned_version_is_gone_on_from(run: Run) -> None:
    run.publish()
    run.pull(1)
    shutil.rmtree(run.source / "weight_v000001")
    run.publish()
    run.pull(2)


@pytest.mark.parametrize("which", ["base", "source"])
@pytest.mark.parametrize("where", ["self", "link", "above", "in"])
def test_a_pull_onto_what_it_reads_is_refused(run: Run, which: str, where: str) -> None:
    run.pull(0)
    link = run.local.parent / "link"
    link.symlink_to(run.local)
    other = {"self": run.local, "link": link, "above": run.local.parent, "in": link / "x"}[where]
    folders = {"base": run.base, "source": run.source} | {which: other}
    with pytest.raises(InvalidInputError, match="lie in each other"):
        LocalCheckpoint(run.local, **folders)
    assert_same(held(run.local), run.versions[0])


def test_links_are_not_written_through(run: Run) -> None:
    run.pull(0)
    sync, elsewhere = run.local / ".weight_sync", run.local.parent / "elsewhere"
    (sync / "lock").unlink()
    (sync / "lock").symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic link"):
        run.pull(0)
    assert not elsewhere.exists()
    sync.rename(elsewhere)
    sync.symlink_to(elsewhere)
    with pytest.raises(InvalidInputError, match="is a link"):
        run.pull(0)


def test_a_version_whose_folder_is_refused(run: Run) -> None:
    run.publish()

    def refuse(folder: Path) -> None:
        raise InvalidInputError("source_dir", os.fspath(folder), "leads elsewhere")

    with pytest.raises(InvalidInputError, match="weight_v000001"):
        LocalCheckpoint(run.local, run.base, run.source, refuse).pull(1)


def test_what_is_damaged_is_named_and_not_kept(run: Run) -> None:
    file = run.publish()
    data = bytearray(file.read_bytes())
    good = bytes(data)
    data[-3] ^= 0xFF
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model-00000.*: (a|b) (has another|is damaged)"):
        run.pull(1)
    file.write_bytes(good)
    run.pull(1)


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({"base_version": "000005"}, "base_version"),
        ({"version": "000005"}, "version"),
        ({"delta_encoding": "sum"}, "delta_encoding='sum'"),
        ({"compression_format": "lz4"}, "compression_format='lz4'"),
        ({"checksum_format": "md5"}, "checksum_format='md5'"),
    ],
)
def test_what_is_not_read_is_refused(run: Run, metadata: dict[str, str], word: str) -> None:
    run.pull(0)
    run.publish(**metadata)
    with pytest.raises(CheckpointError, match=word):
        run.pull(1)
    assert_same(held(run.local), run.versions[0])


def test_a_version_that_was_not_published(run: Run) -> None:
    run.publish()
    with pytest.raises(CheckpointError, match="version 2 was not published"):
        run.pull(2)


def test_other_contents_are_left_alone(run: Run) -> None:
    run.local.mkdir()
    (run.local / "thesis.txt").write_text("mine")
    with pytest.raises(InvalidInputError, match=r"local_checkpoint_dir.*something else"):
        run.pull(0)
    assert (run.local / "thesis.txt").exists()


def test_a_frame_that_says_too_much(run: Run) -> None:
    """Nothing is decompressed that could not fit."""
    zstandard = pytest.importorskip("zstandard")
    frame = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    file = run.publish()
    found = load_file(file)
    save_file(found | {"a": torch.frombuffer(bytearray(frame), dtype=torch.uint8)}, file)
    assert "a" in found
    with pytest.raises(CheckpointError, match="says 16777216 bytes"):
        run.pull(1)
