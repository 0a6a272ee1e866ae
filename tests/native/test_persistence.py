"""External corpora are saved too; a bad file is refused whole. Others: test_properties.py."""

from __future__ import annotations

import numpy as np
import pytest

from ngram_native import Corpus
from tests.native.drafts import LARGEST, SMALL, answers, worked_with

I32 = np.int32


def test_external_corpora_are_saved_and_need_room(tmp_path):
    corpus = Corpus(max_bytes=SMALL)
    corpus.add_external("empty", [])
    corpus.add_external("a", [np.arange(5, dtype=I32), np.zeros(0, I32), np.full(9, LARGEST, I32)])
    tokens = LARGEST - np.random.default_rng(0).integers(0, 9, 250_000)
    corpus.add_external("b", [tokens.astype(I32)])
    corpus.save(tmp_path / "corpus")
    copy = Corpus(max_bytes=SMALL, max_external_bytes=4_450_000)
    copy.add_external("gone", [np.zeros(250_000, I32)])  # its room is the file's
    copy.load(tmp_path / "corpus")
    assert copy.external_sizes() == corpus.external_sizes()
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]
    assert answers(copy) == answers(corpus)
    small = Corpus(max_bytes=SMALL, max_external_bytes=256 << 10)
    small.add_external("kept", [np.full(9, LARGEST, I32)])
    before = answers(small), small.counters()
    with pytest.raises(ValueError, match="max_external_bytes=262144"):
        small.load(tmp_path / "corpus")
    assert (answers(small), small.counters()) == before


def test_many_small_external_corpora_are_refused_before_they_take_memory(tmp_path):
    corpus = Corpus(max_bytes=SMALL)
    for i in range(300):
        corpus.add_external(str(i), [])
    corpus.save(tmp_path / "corpus")
    small = Corpus(max_bytes=SMALL, max_external_bytes=64 << 10)
    with pytest.raises(ValueError, match="max_external_bytes"):
        small.load(tmp_path / "corpus")
    assert small.external_names() == []
    assert small.counters()["external_bytes"] == 0


def test_bad_file_changes_nothing(tmp_path):
    corpus = worked_with(2)
    before = answers(corpus)
    worked_with(0).save(tmp_path / "good")
    good = (tmp_path / "good").read_bytes()
    bad = {"empty": b"", "foreign": b"\x89PNG" * 1000, "longer": good + b"x"}
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
        Corpus(max_bytes=SMALL, vocabulary="other").load(tmp_path / "good")
    corpus.load(tmp_path / "good")
    assert answers(corpus) != before
    corpus.check_integrity()
