"""Compiled kernels travel: what was compiled in one folder is found in another."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest
import triton_cache
from triton_cache import pack, unpack


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled")
def test_triton_finds_a_kernel_that_was_compiled_elsewhere(tmp_path: Path, monkeypatch) -> None:
    triton = pytest.importorskip("triton")
    from triton.compiler import ASTSource

    from rollout.ops.glu.triton import _gated_mul_kernel
    from tests.helpers.triton_compile import HOPPER

    def is_found(cache: Path) -> bool:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
        monkeypatch.setenv("TRITON_STORE_BINARY_ONLY", "1")
        found = []
        monkeypatch.setattr(
            triton.knobs.compilation, "listener", lambda **told: found.append(told["cache_hit"])
        )
        types = ("*bf16", "*bf16", "i32", "i32", "fp32", "fp32", "constexpr", "constexpr")
        source = ASTSource(
            fn=_gated_mul_kernel,
            signature=dict(zip(_gated_mul_kernel.arg_names, types, strict=True)),
            constexprs={(6,): 0, (7,): 1024},
        )
        kernel = triton.compile(source, target=HOPPER, options={"num_warps": 4})
        assert kernel.asm["cubin"]
        return found == [True]

    archive = tmp_path / "cache.tar.gz"
    assert not is_found(tmp_path / "there")
    pack(tmp_path / "there", archive, 16 << 20)
    (tmp_path / "there").rename(tmp_path / "gone")
    unpack(archive, tmp_path / "here")
    assert is_found(tmp_path / "here")
    assert archive.stat().st_size < 100_000
    assert not is_found(tmp_path / "empty")


def kernels(cache: Path, *names: str, size: int = 10) -> Path:
    """Folders as Triton lays them out, with the paths of the group's files."""
    for name in names:
        folder = cache / name
        folder.mkdir(parents=True)
        (folder / "kernel.cubin").write_bytes(bytes(size))
        paths = {"kernel.cubin": str(folder / "kernel.cubin")}
        (folder / "__grp__kernel.json").write_text(json.dumps({"child_paths": paths}))
    return cache


def test_what_was_compiled_elsewhere_is_found_here(tmp_path: Path) -> None:
    archive = tmp_path / "cache.tar.gz"
    assert "2 compiled kernels" in pack(kernels(tmp_path / "there", "a", "b"), archive, 16 << 20)
    here = kernels(tmp_path / "here", "b")
    (here / "b" / "kernel.cubin").write_bytes(b"own")
    assert "2 compiled kernels" in unpack(archive, here)
    paths = json.loads((here / "a" / "__grp__kernel.json").read_text())["child_paths"]
    assert paths == {"kernel.cubin": str(here / "a" / "kernel.cubin")}
    assert Path(paths["kernel.cubin"]).read_bytes() == bytes(10)
    assert (here / "b" / "kernel.cubin").read_bytes() == b"own"
    assert {path.name for path in tmp_path.iterdir()} == {"there", "here", "cache.tar.gz"}


def test_what_does_not_fit_is_left_out_and_told(tmp_path: Path) -> None:
    archive = tmp_path / "cache.tar.gz"
    cache = kernels(tmp_path / "cache", "small")
    kernels(cache, "large", size=3 << 20)
    assert "1 compiled kernels" in (told := pack(cache, archive, 2 << 20))
    assert told.endswith("; 1 do not fit")
    assert archive.stat().st_size < 2 << 20
    assert pack(tmp_path / "none", archive, 2 << 20) == "no kernel was compiled"


@pytest.mark.parametrize("harm", ["torn", "text", "absent", "foreign", "nameless", "listless"])
def test_a_damaged_or_foreign_archive_is_let_be(tmp_path: Path, monkeypatch, harm: str) -> None:
    archive, here = tmp_path / "cache.tar.gz", tmp_path / "here"
    cache = kernels(tmp_path / "there", "a")
    if harm == "listless":
        (cache / "a" / "__grp__kernel.json").write_text("[]")
    pack(cache, archive, 16 << 20)
    if harm == "torn":
        archive.write_bytes(archive.read_bytes()[:-40])
    elif harm == "text":
        archive.write_text("not an archive")
    elif harm == "absent":
        archive.unlink()
    elif harm == "foreign":
        monkeypatch.setattr(triton_cache, "made_by", lambda: {"triton": "0.1"})
    elif harm == "nameless":
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(cache / "a", "a")
    assert "is not used: " in unpack(archive, here)
    assert list(here.iterdir()) == []
