"""Two sides decode the same work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

from rollout import RolloutEngine, SamplingParams
from rollout.offline.compare.comparison import Comparison, Work


def test_each_side_decodes_in_its_own_context(tiny_model_path: Path) -> None:
    engine = RolloutEngine.from_pretrained(str(tiny_model_path), "none", max_kv_tokens=512)
    steps: Counter[str] = Counter()
    entered: list[str] = []

    @contextmanager
    def side(name: str, engine: RolloutEngine) -> Iterator[None]:
        entered.append(name)
        before = engine.metrics().steps
        yield
        steps[name] += engine.metrics().steps - before

    comparison = Comparison(
        engine, baseline=partial(side, "fixed"), speculation=partial(side, "learned")
    )
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    work = Work(prompts=[[5, 6, 7]] * 12, params=params, width=2)
    comparison.teach(work)
    assert set(entered) == {"learned"}
    steps.clear()
    entered.clear()
    compared = comparison.run(work, seconds=600)
    assert len(compared.times) == 6
    assert not compared.differing
    assert steps["fixed"] == steps["learned"] >= 6 * 4
    pairs = [entered[index : index + 2] for index in range(0, 12, 2)]
    assert {tuple(pair) for pair in pairs} == {("fixed", "learned"), ("learned", "fixed")}


def test_two_engines_step_in_turns_and_change_sides(tiny_model_path: Path) -> None:
    engines = [RolloutEngine.from_pretrained(str(tiny_model_path), "ngram") for _ in range(2)]
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
    assert sum(one != other for one, other in pairwise(turns)) > len(turns) / 4
    assert all(engine.steps.worker is engine.worker for engine in engines)


def test_a_request_that_ends_makes_room_for_the_next_of_its_stretch(tiny_model_path) -> None:
    engine = RolloutEngine.from_pretrained(tiny_model_path, "ngram")
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    work = Work(prompts=[[5, 6, 7]] * 12, params=params, width=2, rounds=3)
    widths = []
    step = engine.step

    def watched():
        widths.append(engine.scheduler.num_running + engine.scheduler.num_waiting)
        return step()

    engine.step = watched
    compared = Comparison(engine).run(work, seconds=600)
    assert len(compared.times) == 2
    assert compared.rollouts == 12
    assert not compared.differing
    assert max(widths) == 2
