"""A local checkpoint follows published versions, and never holds a half of one."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.errors import CheckpointError, InvalidInputError
from rollout.weights.local_checkpoint import LocalCheckpoint, refuse_half_pulled

pytest.importorskip("zstandard")
pytest.importorskip("blake3")
from tests.helpers.slime_publisher import CHECKSUMS, publish

Tensors = dict[str, torch.Tensor]


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
    with pytest.raises(CheckpointError, match="has not ended"):
        refuse_half_pulled(run.local)
    run.pull(2)
    refuse_half_pulled(run.local)


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
    save_file({"a": torch.frombuffer(bytearray(frame), dtype=torch.uint8)}, file)
    assert "a" in found
    with pytest.raises(CheckpointError, match="says 16777216 bytes"):
        run.pull(1)
