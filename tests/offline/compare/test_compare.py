"""`specrollout compare`: two sides decode the same work; rows, advice, refusals."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.errors import InvalidInputError
from rollout.offline.compare.command import run_compare
from rollout.offline.compare.comparison import Comparison, Work
from rollout.offline.compare.paired_times import PairedTimes, SpeedupVerdict
from tests.helpers.tiny_draft import save_tiny_eagle3


def drawn(rng: np.random.Generator, speedup: float, pairs: int, noise: float) -> PairedTimes:
    """Pairs whose pace drifts by a factor of three, each side with noise of its own."""
    times = PairedTimes()
    for pace in np.geomspace(1.0, 3.0, pairs):
        plain, speculative = pace * rng.lognormal(0.0, noise, 2)
        times.add(plain, speculative / speedup)
    return times


@pytest.mark.parametrize(
    ("speedup", "verdict"),
    [(1.4, SpeedupVerdict.PAYS), (0.8, SpeedupVerdict.COSTS), (1.0, SpeedupVerdict.UNCLEAR)],
)
def test_verdicts(speedup, verdict):
    times = drawn(np.random.default_rng(1), speedup, 24, 0.05)
    assert times.verdict is verdict
    assert times.speedup == pytest.approx(speedup, rel=0.06)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(2)
    intervals = [drawn(rng, 1.3, 20, 0.1).interval() for _ in range(300)]
    covered = sum(low <= 1.3 <= high for low, high in intervals)
    assert 260 <= covered <= 298  # of 300; the percentile bootstrap is a little narrow


def test_the_speedup_is_of_all_time_and_not_a_mean_of_ratios():
    times = PairedTimes([9.0, 1.0], [6.0, 2.0])
    assert times.speedup == 10 / 8


def test_too_few_pairs_say_nothing():
    times = PairedTimes([2.0] * 5, [1.0] * 5)
    assert times.verdict is SpeedupVerdict.UNCLEAR
    assert "too few" in str(times)
    times.add(2.0, 1.0)
    assert times.verdict is SpeedupVerdict.PAYS
    assert str(times) == "2.00x \N{PLUS-MINUS SIGN} 0.00"
    assert PairedTimes().speedup == 1.0


def test_two_engines_step_in_turns_and_change_sides(tiny_model_path):
    options = {"budget": "fixed"}  # drafts on a busy machine too
    engines = [
        RolloutEngine.from_pretrained(str(tiny_model_path), "ngram", spec_options=options)
        for _ in range(2)
    ]
    steps: list[tuple[int, bool]] = []
    for index, engine in enumerate(engines):

        def watched(index=index, engine=engine, step=engine.step):
            steps.append((index, engine.steps.worker is engine.worker))
            return step()

        engine.step = watched
    comparison = Comparison(*engines)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    work = Work(prompts=[[5, 6, 7]] * 8, params=params, width=2)
    comparison.teach(work)
    assert {index for index, _ in steps} == {0, 1}
    steps.clear()
    compared = comparison.run(work, seconds=600)
    assert len(compared.times) == 4
    assert not compared.differing
    assert compared.accept_length > 1
    assert set(steps) == {(0, True), (0, False), (1, True), (1, False)}
    turns = [index for index, _ in steps]
    assert sum(one != other for one, other in pairwise(turns)) > 16  # 8 if one ran after the other
    assert all(engine.steps.worker is engine.worker for engine in engines)


SMALL = (
    "sampling.max_new_tokens=12",
    "sampling.n=2",
    "scheduler.max_running=4",
    "memory.max_kv_tokens=512",
    "num_threads=1",
)


@pytest.fixture
def arguments(tmp_path, tiny_model_path):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": [5 + index, 6, 7]} for index in range(6)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"model.path={tiny_model_path}", f"data.path={prompts}", *SMALL]


def test_every_temperature_and_width_has_a_row(
    arguments, tmp_path, tiny_model_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    draft = save_tiny_eagle3(tmp_path / "draft", tiny_model_path)
    spec = ["spec=eagle", f"spec.draft_path={draft}", "spec.calibration_seconds=0"]
    cells = ["--widths=1,4", "--temperatures=0,0.8", f"--json={tmp_path / 'rows.jsonl'}"]
    assert run_compare([*spec, *arguments, *cells]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["spec"], row["temperature"], row["width"]) for row in rows] == [
        ("eagle", temperature, width) for temperature in (0, 0.8) for width in (1, 4)
    ]
    assert [row["pairs"] for row in rows] == [12, 3] * 2
    assert all(row["rollouts"] == 12 and row["differing"] == 0 for row in rows)
    assert all(row["low"] <= row["speedup"] <= row["high"] for row in rows if row["pairs"] == 12)
    assert all(row["low"] is row["high"] is None for row in rows if row["pairs"] == 3)
    _, _, last = capsys.readouterr().out.strip().rpartition("\n")
    assert "same tokens and logprobs: 48 of 48" in last
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl", "rows.jsonl", "draft"}


def test_rollouts_that_differ_are_said_and_fail(arguments, capsys, monkeypatch):
    decode = Comparison._decode

    def wrong(self, work, stretch, engines):
        made = decode(self, work, stretch, engines)
        if False in made and (3, 1) in made[False].rollouts:
            made[False].rollouts[3, 1].logprobs[-1] += 1e-6
        return made

    monkeypatch.setattr(Comparison, "_decode", wrong)
    assert run_compare([*arguments, "--widths=12"]) == 1
    assert "1 of 12 rollouts differ" in capsys.readouterr().out


def test_refusals_name_the_argument(arguments, tmp_path):
    prompts, link = tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
    before = prompts.read_bytes()
    link.symlink_to(prompts)
    for more, says in (
        ("spec=none", "what drafts are compared with"),
        ("spec=ngarm", "hybrid"),
        ("spec.num_draft_token=3", r"spec\.num_draft_token=3"),
        ("cluster=ray", "one engine"),
        ("--widths=0", "--widths"),
        ("--widths=4,x", "--widths"),
        ("--minutes=0", "--minutes"),
        ("--epochs=0", "--epochs"),
        ("data.path=missing.jsonl", "there is no such file"),
        (f"--json={prompts}", r"--json=.*is data\.path"),
        (f"--json={link}", r"--json=.*is data\.path"),
        (f"--json={tmp_path}", r"--json=.*must name a file"),
        (f"--json={tmp_path / 'missing' / 'rows.jsonl'}", r"--json=.*must name a file"),
    ):
        with pytest.raises(InvalidInputError, match=says):
            run_compare([*arguments, more])
    assert prompts.read_bytes() == before
