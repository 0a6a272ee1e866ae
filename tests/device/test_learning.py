"""The budget learns from a step while the next one runs, and no step is lost."""

from __future__ import annotations

from rollout import RolloutEngine, SamplingParams
from rollout.config import engine_config
from spec_workers.budget import FixedBudget
from spec_workers.none import PlainWorker
from spec_workers.target import TargetWorker

from .test_engine import engine_options


class NotingBudget(FixedBudget):
    """Notes which steps it was asked about and which it learned from, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []

    def choose(self, batch, proposed):
        self.events.append(("choose", batch.step))
        return super().choose(batch, proposed)

    def observe(self, batch, verified, results, times):
        assert [entry.samples for entry in batch.entries] == [bool(r.token_ids) for r in results]
        assert times.forward > 0
        assert times.sample >= 0
        self.events.append(("learn", batch.step))

    def forget(self, request) -> None:
        self.events.append(("forget", request.request_id))


def test_a_step_is_learned_from_after_the_next_one_was_launched(small_model_path) -> None:
    budget = NotingBudget()
    config = engine_config(str(small_model_path), engine_options("float32", graph_bytes=0))
    engine = RolloutEngine.from_config(
        config, lambda config, progress=None: PlainWorker(TargetWorker(config, progress), budget)
    )
    engine.generate([[5]], SamplingParams(max_new_tokens=3, ignore_eos=True))
    steps = [step for what, step in budget.events if what == "choose"]
    assert [step for what, step in budget.events if what == "learn"] == steps
    first, second = (
        budget.events.index(("learn", steps[0])),
        budget.events.index(("choose", steps[1])),
    )
    assert first > second, "the first step is learned from when the second has been chosen"
    assert budget.events[-2:] == [("learn", steps[-1]), ("forget", 0)], "before its request goes"


def test_who_asks_what_was_learned_is_told_all(small_model_path) -> None:
    budget = NotingBudget()
    config = engine_config(str(small_model_path), engine_options("float32", graph_bytes=0))
    engine = RolloutEngine.from_config(
        config, lambda config, progress=None: PlainWorker(TargetWorker(config, progress), budget)
    )
    engine.submit([5], SamplingParams(max_new_tokens=4, ignore_eos=True))
    engine.step()
    assert [what for what, _ in budget.events] == ["choose"]
    engine.learned()
    assert [what for what, _ in budget.events] == ["choose", "learn"]
    engine.step()
    assert [what for what, _ in budget.events] == ["choose", "learn", "choose"]
