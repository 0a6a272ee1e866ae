"""Saved and loaded again, a corpus proposes the same; a bad file is refused whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ngram_native import Corpus
from tests.native.drafts import LARGEST, SMALL, answers, random_texts, worked_with

I32 = np.int32
seeds = st.integers(0, 2**32 - 1)


@settings(deadline=None, derandomize=True, database=None, max_examples=20)
@given(seed=seeds, other=seeds, cut=st.floats(0, 1), bit=st.integers(0, 7), flip=st.booleans())
def test_saved_is_what_is_loaded_and_a_failed_load_changes_nothing(
    tmp_path_factory, seed, other, cut, bit, flip
):
    path = tmp_path_factory.mktemp("corpus") / "saved"
    corpus, loaded = worked_with(seed), worked_with(other)
    corpus.save(path)
    good = path.read_bytes()
    at = min(int(cut * len(good)), len(good) - 1)
    damaged = bytearray(good)
    damaged[at] ^= 1 << bit
    path.write_bytes(bytes(damaged) if flip else good[:at])
    before = answers(loaded), loaded.num_tokens, loaded.counters()["weight_version"]
    with pytest.raises(ValueError, match="path="):
        loaded.load(path)
    assert (answers(loaded), loaded.num_tokens, loaded.counters()["weight_version"]) == before
    path.write_bytes(good)
    loaded.load(path)
    assert answers(loaded) == answers(corpus)
    for both in (corpus, loaded):  # and they go on the same
        both.insert(np.array(random_texts(seed, 1, 3000, 4)[0], I32), group=1)
        both.set_weight_version(7)
    assert answers(loaded) == answers(corpus)
    loaded.check_integrity()


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


def test_what_is_no_file_of_this_corpus_is_refused(tmp_path):
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
    larger, tokens = Corpus(vocab_size=11), np.array([10], I32)
    small = Corpus(vocab_size=10)
    larger.save(tmp_path / "empty of a larger vocabulary")
    small.load(tmp_path / "empty of a larger vocabulary")
    for add in (lambda: larger.insert(tokens), lambda: larger.add_external("x", [tokens])):
        larger.reset()
        add()
        larger.save(tmp_path / "larger")
        with pytest.raises(ValueError, match="damaged"):
            small.load(tmp_path / "larger")
