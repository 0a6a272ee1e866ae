"""The file beside the corpus: the lengths of rollouts, and what becomes of a bad one."""

from __future__ import annotations

import os
import stat

import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.engine.learned_file import learned_file, load_learned, save_learned
from rollout.errors import InvalidInputError

PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]
PARAMS = SamplingParams(temperature=0.9, max_new_tokens=30, seed=3, n=2, ignore_eos=True)


def make_engine(model, calibration_seconds=0.0, max_running=4, **options):
    options |= {"corpus_bytes": 1 << 20, "calibration_seconds": calibration_seconds}
    return RolloutEngine.from_pretrained(
        model, spec_options=options, max_running=max_running, num_threads=1
    )  # fmt: skip


@pytest.fixture(scope="module")
def saved(tiny_model_path, tmp_path_factory):
    """An engine that has run, and where it saved its corpus."""
    engine = make_engine(tiny_model_path)
    engine.generate(PROMPTS, PARAMS)
    path = tmp_path_factory.mktemp("saved") / "corpus"
    engine.save_corpus(path)
    return engine, path


def test_what_is_saved_is_loaded(tmp_path):
    path = learned_file(tmp_path / "corpus")
    assert path.name == "corpus.learned.json"
    assert load_learned(path) == {}
    for learned in ({"lengths": {"a": [1, None]}}, {}):
        save_learned(path, learned)
        assert load_learned(path) == learned
    assert os.listdir(tmp_path) == [path.name]


DAMAGED = (
    b"", b"{", b"[1]", b"\xff\xfe{}",
    b'{"a": {"b": 1' + b"0" * 5000 + b"}}",
    b'{"a": {"b": ' + b"[" * 100_000,
    b'{"a": {"b": "' + b"x" * (64 << 20) + b'"}}',
)  # fmt: skip


def test_what_is_damaged_is_refused(tmp_path):
    path = tmp_path / "learned"
    for content in DAMAGED:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"\w"):
            load_learned(path)
    with pytest.raises(OSError, match="directory"):
        load_learned(tmp_path)


def test_an_engine_goes_on_with_the_lengths_or_without(tiny_model_path, saved, tmp_path, caplog):
    first, path = saved
    second = make_engine(tiny_model_path, corpus_path=str(path))
    assert caplog.text == ""
    assert second.scheduler.lengths.learned() == first.scheduler.lengths.learned()
    assert len(second.scheduler.lengths) == len(PROMPTS)
    copy, whole = tmp_path / "corpus", learned_file(path).read_text()
    copy.write_bytes(path.read_bytes())
    for damage in (whole[:-9], whole.replace('"recent": [', '"recent": [-1, ')):
        caplog.clear()
        learned_file(copy).write_text(damage)
        engine = make_engine(tiny_model_path, corpus_path=str(copy))
        (message,) = caplog.messages
        assert message.startswith(f"{learned_file(copy)} is not used: ")
        assert engine.scheduler.lengths.is_empty
        assert engine.worker.corpus.num_tokens > 0


def test_a_corpus_is_saved_in_place_of_a_file_alone(saved, tmp_path):
    """A device would be replaced by a file of its name."""
    engine, _ = saved
    (tmp_path / "folder").mkdir()
    (tmp_path / "beside.learned.json").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = sorted(os.listdir(tmp_path))
    for name in ("folder", "beside", "pipe"):
        with pytest.raises(InvalidInputError, match="is no file"):
            engine.save_corpus(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == before
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
