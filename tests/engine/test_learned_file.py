"""The file beside the corpus: what was learned for speed, and what becomes of a bad one."""

from __future__ import annotations

import json
import os
import stat

import numpy as np
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
    for learned in ({"budget": {"a": [1.5, None]}}, {}):
        save_learned(path, learned)
        assert load_learned(path) == learned
    assert os.listdir(tmp_path) == [path.name]


DAMAGED = (
    b"", b"{", b"[1]", b"\xff\xfe{}", b'{"a": 1}', b'{"a": {"b": NaN}}', b'{"a": {"b": 1e999}}',
    b'{"a": {"b": 1' + b"0" * 5000 + b"}}",
    b'{"a": {"b": ' + b"[" * 100_000,
    b'{"a": {"b": ' + b"[" * 11 + b"]" * 11 + b"}}",
    b'{"a": {"b": "' + b"x" * (64 << 20) + b'"}}',
)  # fmt: skip


def test_what_is_damaged_is_refused(tmp_path):
    path = tmp_path / "learned"
    for content in DAMAGED:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"\w"):
            load_learned(path)
    path.write_bytes(b'{"a": {"b": ' + b"[" * 10 + b"]" * 10 + b"}}")
    assert load_learned(path).keys() == {"a"}
    with pytest.raises(OSError, match="directory"):
        load_learned(tmp_path)


@pytest.mark.parametrize("max_running", [4, 64])
def test_an_engine_of_any_width_goes_on_without_calibrating(
    tiny_model_path, saved, monkeypatch, caplog, max_running
):
    def refuse(*args):
        pytest.fail("times forwards")

    monkeypatch.setattr("spec_workers.budget.cost_run.time_forwards", refuse)
    first, path = saved
    second = make_engine(tiny_model_path, 5.0, max_running, corpus_path=str(path))
    assert caplog.text == ""
    learned, again = first.learned()["budget"], second.learned()["budget"]
    for name in ("device", "request_ms", "values"):
        assert again[name] == learned[name]
    assert (again["cost"]["rows"] == learned["cost"]["rows"]) == (max_running == 4)
    rows = np.arange(1, 9)
    curves = first.worker.budget.cost.curve, second.worker.budget.cost.curve
    ours, theirs = (curve.milliseconds(rows, 100) for curve in curves)
    np.testing.assert_allclose(theirs, ours, rtol=1e-4)
    assert second.scheduler.lengths.learned() == first.scheduler.lengths.learned()
    assert len(second.scheduler.lengths) == len(PROMPTS)


def damaged(path, tmp_path, damage):
    """A copy of the saved corpus, with another file beside it."""
    copy = tmp_path / "corpus"
    copy.write_bytes(path.read_bytes())
    learned_file(copy).write_bytes(damage(json.loads(learned_file(path).read_text())))
    return copy


def dumped(change):
    def damage(learned):
        change(learned)
        return json.dumps(learned).encode()

    return damage


DAMAGE = [
    ("", lambda learned: json.dumps(learned).encode()[:-9]),
    ("budget of ", dumped(lambda learned: learned["budget"].update(cost=[]))),
    ("budget of ", dumped(lambda learned: learned["budget"]["cost"].update(rows=[2, 1]))),
    ("budget of ", dumped(lambda learned: learned["budget"]["request_ms"].update(sampling={}))),
    ("budget of ", dumped(lambda learned: learned["budget"]["values"].update(sources=[]))),
    ("lengths of ", dumped(lambda learned: learned["lengths"].update(recent=3))),
]


@pytest.mark.parametrize(("part", "damage"), DAMAGE)
def test_an_engine_goes_on_without_the_part_that_is_damaged(
    tiny_model_path, saved, tmp_path, caplog, part, damage
):
    first, path = saved
    copy = damaged(path, tmp_path, damage)
    engine = make_engine(tiny_model_path, corpus_path=str(copy))
    (message,) = caplog.messages
    verb = "are" if part == "lengths of " else "is"
    assert message.startswith(f"{part}{learned_file(copy)} {verb} not used: ")
    if part == "budget of ":
        assert engine.scheduler.lengths.learned() == first.scheduler.lengths.learned()
    else:
        assert engine.scheduler.lengths.is_empty
    assert engine.worker.budget.cost.is_known == (part == "lengths of ")
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
