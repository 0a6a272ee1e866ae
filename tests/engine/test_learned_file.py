"""The file beside the corpus: what was learned for speed, and what becomes of a bad one."""

from __future__ import annotations

import json
import os
import random
import stat
from copy import deepcopy

import numpy as np
import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.engine.learned_file import learned_file, load_learned, save_learned
from rollout.errors import InvalidInputError
from spec_workers.budget import FixedBudget

PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]
PARAMS = SamplingParams(temperature=0.9, max_new_tokens=30, seed=3, n=2, ignore_eos=True)


def make_engine(model, calibration_seconds=0.0, max_running=4, **options):
    options |= {"corpus_bytes": 1 << 20, "calibration_seconds": calibration_seconds}
    return RolloutEngine.from_pretrained(
        model, spec_options=options, max_running=max_running, num_threads=1
    )  # fmt: skip


@pytest.fixture
def no_calibration(monkeypatch):
    def refuse(*args) -> None:
        pytest.fail("times forwards")

    monkeypatch.setattr("spec_workers.budget.cost_run.time_forwards", refuse)


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


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[1]", b"3", b"null", b"\xff\xfe{}", b'{"a": 1}',
        b'{"a": {"b": NaN}}', b'{"a": {"b": -Infinity}}', b'{"a": {"b": 1e999}}',
        b'{"a": {"b": 1' + b"0" * 5000 + b"}}",
        b'{"a": {"b": ' + b"[" * 100_000,
        b'{"a": {"b": ' + b"[" * 100 + b"]" * 100 + b"}}",
        b'{"a": {"b": "' + b"x" * (64 << 20) + b'"}}',
    ],
    ids=lambda content: content[:24],
)  # fmt: skip
def test_what_is_damaged_is_refused(tmp_path, content):
    path = tmp_path / "learned"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"\w"):
        load_learned(path)
    path.unlink()  # one is large


def test_what_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(OSError, match="directory"):
        load_learned(tmp_path)


def test_an_engine_goes_on_without_calibrating(tiny_model_path, saved, no_calibration):
    first, path = saved
    second = make_engine(tiny_model_path, 5.0, corpus_path=str(path))
    learned, again = first.learned()["budget"], second.learned()["budget"]
    for name in ("device", "request_ms", "values"):
        assert again[name] == learned[name]
    assert again["cost"]["milliseconds"] == [
        pytest.approx(row, rel=1e-4) for row in learned["cost"]["milliseconds"]
    ]
    assert second.scheduler.lengths.learned() == first.scheduler.lengths.learned()
    assert len(second.scheduler.lengths) == len(PROMPTS)


def test_a_fixed_budget_loses_nothing_that_was_learned(tiny_model_path, saved, tmp_path):
    first, path = saved
    fixed = make_engine(tiny_model_path, corpus_path=str(path), budget="fixed")
    fixed.generate(PROMPTS, PARAMS)
    fixed.save_corpus(tmp_path / "corpus")
    kept = load_learned(learned_file(tmp_path / "corpus"))["budget"]
    assert kept == load_learned(learned_file(path))["budget"]
    third = make_engine(tiny_model_path, corpus_path=str(tmp_path / "corpus"))
    assert third.worker.budget.cost.is_known
    assert third.learned()["budget"]["values"] == first.learned()["budget"]["values"]


def test_a_fixed_budget_has_learned_nothing_of_its_own():
    budget = FixedBudget()
    assert budget.learned() == {}
    budget.restore({"device": "here"})
    budget.restore({})  # a corpus with nothing beside it
    assert budget.learned() == {"device": "here"}


def test_an_engine_of_another_width_uses_it_all(tiny_model_path, saved, no_calibration, caplog):
    first, path = saved
    second = make_engine(tiny_model_path, 5.0, max_running=64, corpus_path=str(path))
    learned, again = first.learned()["budget"], second.learned()["budget"]
    assert caplog.text == ""
    assert again["cost"]["rows"] != learned["cost"]["rows"]
    for name in ("device", "request_ms", "values"):
        assert again[name] == learned[name]
    rows = np.arange(1, 9)
    curves = first.worker.budget.cost.curve, second.worker.budget.cost.curve
    ours, theirs = (curve.milliseconds(rows, 100) for curve in curves)
    np.testing.assert_allclose(theirs, ours, rtol=1e-4)


def test_a_corpus_loaded_later_brings_it_too(tiny_model_path, saved):
    first, path = saved
    second = make_engine(tiny_model_path)
    assert not second.worker.budget.cost.is_known
    second.load_corpus(path)
    assert second.worker.budget.cost.is_known
    assert second.learned()["budget"]["values"] == first.learned()["budget"]["values"]


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


DAMAGE = {
    "": [
        lambda learned: json.dumps(learned).encode()[:-9],
        lambda learned: b"[]",
        dumped(lambda learned: learned.update(budget=3)),
        lambda learned: b'{"budget": ' + b"[" * 100_000,
    ],
    "budget of ": [
        dumped(lambda learned: learned["budget"].update(cost=[])),
        dumped(lambda learned: learned["budget"]["cost"].update(milliseconds={})),
        dumped(lambda learned: learned["budget"]["request_ms"].update(sampling={"step": None})),
        dumped(lambda learned: learned["budget"].update(elsewhere=[1])),
        dumped(lambda learned: learned["budget"].update(values=None)),
        dumped(lambda learned: learned["budget"]["cost"]["milliseconds"][0].__setitem__(0, 1e200)),
        dumped(lambda learned: learned["budget"]["request_ms"]["drafting"].update(step=10**400)),
        dumped(lambda learned: learned["budget"]["values"]["accepted"][0].__setitem__(0, 1e300)),
    ],
    "lengths of ": [dumped(lambda learned: learned["lengths"].update(recent=3))],
}


@pytest.mark.parametrize(
    ("part", "damage"), [(part, each) for part, all_of_it in DAMAGE.items() for each in all_of_it]
)
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


WRONG = [
    None, True, "", "1e3", [], {}, [[]], -1, 0, 1e-320, 1e200, -1e308, 2**31, 2**64, 10**400,
    {"cost": {}}, [1, [2]],
]  # fmt: skip


def change_somewhere(learned, rng):
    """One value, however deep, becomes another, is lost, or comes twice."""
    budget = learned.get("budget")
    place = budget if isinstance(budget, (dict, list)) and rng.random() < 0.8 else learned
    while place:
        key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
        below = place[key]
        if not isinstance(below, (dict, list)) or not below or rng.random() < 0.1:
            break
        place = below
    else:
        return  # nothing is left of it
    match rng.choice(["wrong", "wrong", "scaled", "lost", "twice"]):
        case "scaled" if type(below) in (int, float):
            place[key] = below * 10 ** rng.randint(-300, 300)
        case "lost":
            del place[key]
        case "twice" if isinstance(place, list):
            place.insert(key, below)
        case _:
            place[key] = rng.choice(WRONG)


def test_whatever_the_file_holds_the_engine_generates(tiny_model_path, saved, tmp_path):
    """It is used or it is not; the tokens are the same, and what is saved then is whole."""
    _, path = saved
    params = SamplingParams(temperature=0.9, max_new_tokens=6, seed=3, n=2, ignore_eos=True)
    engine = make_engine(tiny_model_path)
    expected = [rollout.token_ids for rollout in engine.generate(PROMPTS, params)]
    rng = random.Random(5)
    used = 0
    for turn in range(80):
        learned = json.loads(learned_file(path).read_text())
        learned["budget"]["elsewhere"]["another device"] = deepcopy(
            {name: learned["budget"][name] for name in ("cost", "request_ms")}
        )
        for _ in range(rng.randint(1, 3)):
            change_somewhere(learned, rng)
        copy = damaged(path, tmp_path, lambda _, content=learned: json.dumps(content).encode())
        engine.load_corpus(copy)
        used += engine.worker.budget.cost.is_known
        assert [rollout.token_ids for rollout in engine.generate(PROMPTS, params)] == expected
        if turn % 8 == 0:
            engine.save_corpus(tmp_path / "again")
            load_learned(learned_file(tmp_path / "again"))
    assert used
    engine.check_integrity()


def test_a_damaged_corpus_file_changes_nothing(tiny_model_path, saved, tmp_path):
    _, path = saved
    engine = make_engine(tiny_model_path)
    engine.generate(PROMPTS[:1], PARAMS)
    before = engine.learned(), engine.scheduler.lengths.learned(), engine.corpus_tokens
    expected = [
        rollout.token_ids for rollout in make_engine(tiny_model_path).generate(PROMPTS, PARAMS)
    ]
    rng, whole = random.Random(6), path.read_bytes()
    copy = tmp_path / "corpus"
    learned_file(copy).write_bytes(learned_file(path).read_bytes())
    for _ in range(150):
        content = bytearray(whole)
        if rng.random() < 0.3:
            del content[rng.randrange(len(content)) :]
        else:
            for _ in range(rng.choice([1, 1, 20])):
                content[rng.randrange(len(content))] ^= rng.randint(1, 255)
        copy.write_bytes(content)
        with pytest.raises(InvalidInputError, match="path="):
            engine.load_corpus(copy)
        assert before == (
            engine.learned(), engine.scheduler.lengths.learned(), engine.corpus_tokens
        )  # fmt: skip
        engine.worker.corpus.check_integrity()
    assert [rollout.token_ids for rollout in engine.generate(PROMPTS, PARAMS)] == expected


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


def test_a_corpus_without_the_file_is_no_trouble(tiny_model_path, saved, tmp_path, caplog):
    _, path = saved
    copy = tmp_path / "corpus"
    copy.write_bytes(path.read_bytes())
    engine = make_engine(tiny_model_path, 1.0, corpus_path=str(copy))
    assert caplog.text == ""
    assert engine.worker.budget.cost.is_known
