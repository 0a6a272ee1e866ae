"""External corpora are saved too; a bad file is refused whole. Others: test_properties.py."""

from __future__ import annotations

import numpy as np
import pytest

from ngram_native import Corpus
from tests.native.drafts import query

I32, I64 = np.int32, np.int64


def filled(seed=0, max_bytes=256 << 10):
    rng = np.random.default_rng(seed)
    corpus = Corpus(max_bytes=max_bytes)
    corpus.open(1, 1, rng.integers(0, 5, 30).astype(I32))
    for version in range(300):
        corpus.set_weight_version(version)
        corpus.insert(rng.integers(0, 5, 40).astype(I32), group=version % 3)
        corpus.propose(np.array([1], I64), np.array([9], I32), 0.0)
        corpus.extend(np.array([1], I64), rng.integers(0, 5, 2).astype(I32), np.array([0, 2], I64))
    corpus.add_external("notes", [rng.integers(0, 5, 100).astype(I32) for _ in range(3)])
    corpus.close(1)
    return corpus


def answers(corpus):
    rng = np.random.default_rng(1)
    return [query(corpus, group, rng.integers(0, 5, 20).tolist(), 30) for group in range(4)]


def test_external_corpora_are_saved_and_need_room(tmp_path):
    corpus = Corpus(max_bytes=256 << 10)
    corpus.add_external("empty", [])
    corpus.add_external(
        "a", [np.arange(5, dtype=I32), np.zeros(0, I32), np.full(9, 2**31 - 1, I32)]
    )
    corpus.add_external("b", [np.random.default_rng(0).integers(0, 9, 250_000).astype(I32)])
    corpus.save(tmp_path / "corpus")
    copy = Corpus(max_bytes=256 << 10, max_external_bytes=4_450_000)
    copy.add_external("gone", [np.zeros(250_000, I32)])  # its room is the file's
    copy.load(tmp_path / "corpus")
    assert copy.external_sizes() == corpus.external_sizes()
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]
    assert answers(copy) == answers(corpus)
    small = Corpus(max_bytes=256 << 10, max_external_bytes=256 << 10)
    small.add_external("kept", [np.arange(9, dtype=I32)])
    before = answers(small), small.counters()
    with pytest.raises(ValueError, match="max_external_bytes=262144"):
        small.load(tmp_path / "corpus")
    assert (answers(small), small.counters()) == before


def test_many_small_external_corpora_are_refused_before_they_take_memory(tmp_path):
    corpus = Corpus(max_bytes=256 << 10)
    for i in range(300):
        corpus.add_external(str(i), [])
    corpus.save(tmp_path / "corpus")
    small = Corpus(max_bytes=256 << 10, max_external_bytes=64 << 10)
    with pytest.raises(ValueError, match="max_external_bytes"):
        small.load(tmp_path / "corpus")
    assert small.external_names() == []
    assert small.counters()["external_bytes"] == 0


def test_bad_file_changes_nothing(tmp_path):
    corpus = filled(seed=2)
    before = answers(corpus)
    filled().save(tmp_path / "good")
    good = (tmp_path / "good").read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    bad = {
        "empty": b"",
        "truncated": good[:-1],
        "half": good[: len(good) // 2],
        "foreign": b"\x89PNG" * 1000,
        "flipped": bytes(flipped),
        "longer": good + b"x",
    }
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"path=.*{name}"):
            corpus.load(tmp_path / name)
        assert answers(corpus) == before
    with pytest.raises(FileNotFoundError):
        corpus.load(tmp_path / "none")
    with pytest.raises(ValueError, match="max_bytes=262144"):
        Corpus(max_bytes=512 << 10).load(tmp_path / "good")
    with pytest.raises(ValueError, match="vocabulary '', not of 'other'"):
        Corpus(max_bytes=256 << 10, vocabulary="other").load(tmp_path / "good")
    corpus.load(tmp_path / "good")
    assert answers(corpus) != before
    corpus.check_integrity()
