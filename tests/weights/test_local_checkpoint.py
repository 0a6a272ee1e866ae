"""A local checkpoint follows published versions, and never holds a half of one."""

from __future__ import annotations

import fcntl
import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.errors import CheckpointError, InvalidInputError
from rollout.models.checkpoint import Checkpoint
from rollout.models.pulled_folder import pulls_held_off
from rollout.weights.local_checkpoint import LocalCheckpoint

pytest.importorskip("zstandard")
pytest.importorskip("xxhash")
from tests.helpers.delta_publisher import publish

INDEX = "model.safetensors.index.json"


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """bfloat16 and float32, of odd sizes; one that never changes."""
    torch.manual_seed(seed)
    a = torch.arange(35.0).reshape(5, 7)
    a[seed % 5] = torch.randn(7)
    return {"a": a, "b": torch.randn(3).bfloat16(), "same": torch.ones(11)}


class Run:
    """A trainer's versions 0, 1, 2, ... and the folders."""

    def __init__(self, folder: Path) -> None:
        self.base, self.source, self.local = folder / "base", folder / "source", folder / "local"
        self.versions = [tensors(0)]
        self.base.mkdir()
        self.source.mkdir()
        second = dict(self.versions[0])
        save_file({"a": second.pop("a")}, self.base / "model-1.safetensors")
        save_file(second, self.base / "model-2.safetensors")
        weight_map = {"a": "model-1.safetensors"} | dict.fromkeys(second, "model-2.safetensors")
        (self.base / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        (self.base / "config.json").write_text("{}")

    def publish(self, **fields: object) -> Path:
        old, new = self.versions[-1], tensors(len(self.versions))
        self.versions.append(new)
        number = len(self.versions) - 1
        return publish(self.source, number, old, new, fields)

    def assert_holds(self, version: int) -> None:
        expected = self.versions[version]
        files = self.local.glob("*.safetensors")
        found = {name: it for file in files for name, it in load_file(file).items()}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())

    def pull(self, version: int) -> None:
        checkpoint = LocalCheckpoint(self.local, self.base, self.source)
        checkpoint.pull(version)
        assert checkpoint.version == version
        self.assert_holds(version)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_versions_one_after_the_other(run: Run) -> None:
    run.pull(0)
    assert (run.local / "config.json").exists()
    for version in (1, 2, 3):
        run.publish()
        run.pull(version)
        run.pull(version)  # again, as each rank of a host would
    run.pull(0)  # an earlier run's folder begins anew
    run.pull(1)
    with pytest.raises(CheckpointError, match="version 4 was not published"):
        run.pull(4)


def test_a_folder_that_comes_late_and_versions_that_are_pruned(run: Run) -> None:
    run.publish()
    run.publish()
    run.pull(2)
    shutil.rmtree(run.source / "delta-00000001")
    shutil.rmtree(run.source / "delta-00000002")
    run.publish()
    run.pull(3)
    shutil.rmtree(run.local)
    with pytest.raises(CheckpointError, match="version 1 was not published"):
        run.pull(3)


def test_an_interrupted_write_begins_anew(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A xor that was applied and not noted must not be applied again."""
    run.publish()
    run.pull(1)
    run.publish()
    with monkeypatch.context() as patch:
        patch.setattr(LocalCheckpoint, "_commit", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run.pull(2)
    with pytest.raises(CheckpointError, match="has not ended"), pulls_held_off(run.local):
        pass
    with pytest.raises(CheckpointError, match="has not ended"):
        Checkpoint(run.local)  # as a server that is started with it opens it
    run.pull(2)
    with pulls_held_off(run.local):
        Checkpoint(run.local)


def test_a_part_of_a_version_is_refused_and_the_last_one_stays(run: Run) -> None:
    run.publish()
    run.pull(1)
    file = run.publish()
    whole = file.read_bytes()
    file.unlink()
    for part, word in ((b"", "arrived"), (whole[:-1], "truncated"), (b"x", "damaged")):
        if part:
            file.write_bytes(part)
        with pytest.raises(CheckpointError, match=word):
            run.pull(2)
        run.assert_holds(1)
        with pulls_held_off(run.local):
            pass
    wrong = bytearray(whole)
    wrong[-3] ^= 0xFF  # found as it is applied
    file.write_bytes(wrong)
    with pytest.raises(CheckpointError, match=r"model-00000.*: (a|b) (has|is|says)"):
        run.pull(2)
    file.write_bytes(whole)
    run.pull(2)


def test_a_part_of_the_base_is_refused(run: Run) -> None:
    (run.base / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match="1 of 2 shards missing"):
        run.pull(0)


def test_a_manifest_that_cannot_be_followed_is_refused(run: Run) -> None:
    run.pull(0)
    odd = [{"name": "a", "checksum": "0", "checksum_algorithm": "sha256"}]
    for fields, word in (
        ({"version": 7}, "it must be"),
        ({"version": "seven"}, "is not what SkyRL writes"),
        ({"base_version": 5}, "it must be"),
        ({"tensors": [{"name": "a"}]}, "is not what SkyRL writes"),
        ({"tensors": odd}, "xxh3-128 is read"),
    ):
        file = run.publish(**fields)
        with pytest.raises(CheckpointError, match=word):
            run.pull(1)
        run.assert_holds(0)
        shutil.rmtree(file.parent)
        del run.versions[1:]


def test_another_runs_version_of_the_same_number(run: Run) -> None:
    run.publish()
    run.pull(1)
    shutil.rmtree(run.source)
    run.source.mkdir()
    del run.versions[1:]
    run.versions.append(tensors(7))
    publish(run.source, 1, run.versions[0], run.versions[1])
    run.publish()
    run.pull(2)


def test_a_folder_that_a_pull_would_destroy_is_refused(run: Run) -> None:
    run.pull(0)
    link = run.local.parent / "link"
    link.symlink_to(run.local)
    for which in ("base", "source"):
        for other in (run.local, link, run.local.parent, run.local / "x"):
            folders = {"base": run.base, "source": run.source} | {which: other}
            with pytest.raises(InvalidInputError, match="lie in each other"):
                LocalCheckpoint(run.local, **folders)
    run.assert_holds(0)
    run.local = run.local.parent / "other"
    run.local.mkdir()
    (run.local / "thesis.txt").write_text("mine")
    with pytest.raises(InvalidInputError, match=r"local_checkpoint_dir.*something else"):
        run.pull(0)
    assert (run.local / "thesis.txt").exists()


def test_a_version_whose_folder_is_refused(run: Run) -> None:
    run.publish()

    def refuse(folder: Path) -> None:
        raise InvalidInputError("source_dir", str(folder), "leads elsewhere")

    with pytest.raises(InvalidInputError, match="delta-00000001"):
        LocalCheckpoint(run.local, run.base, run.source, refuse).pull(1)


def test_loads_and_pulls_keep_out_of_each_other(run: Run) -> None:
    run.pull(0)
    lock = run.local / ".weight_sync" / "lock"
    with pulls_held_off(run.local), lock.open() as pull:
        run.pull(0)  # a pull that writes nothing does not wait
        with pytest.raises(BlockingIOError):
            fcntl.flock(pull, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with lock.open() as pull:
        fcntl.flock(pull, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="under way"), pulls_held_off(run.local):
            pass
