"""The budget learns from a step while the next one runs, and no step is lost."""

from __future__ import annotations

from rollout import RolloutEngine, SamplingParams
from rollout.config import engine_config
from spec_workers.budget import FixedBudget
from spec_workers.none import PlainWorker
from spec_workers.target import TargetWorker


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


def test_a_step_is_learned_from_after_the_next_one_was_launched_or_when_asked(
    small_model_path, device
) -> None:
    budget = NotingBudget()
    options = {"dtype": "float32", "kv_bytes": 1 << 20, "device": device.type, "graph_bytes": 0}
    engine = RolloutEngine.from_config(
        engine_config(str(small_model_path), options),
        lambda config, progress=None: PlainWorker(TargetWorker(config, progress), budget),
    )
    engine.submit([5], SamplingParams(max_new_tokens=4, ignore_eos=True))
    engine.step()
    assert [what for what, _ in budget.events] == ["choose"]
    engine.learned()
    assert [what for what, _ in budget.events] == ["choose", "learn"]
    while engine.has_unfinished:
        engine.step()
    _, first, second, third = (step for what, step in budget.events if what == "choose")
    assert budget.events[2:] == [
        ("choose", first), ("choose", second), ("learn", first), ("choose", third),
        ("learn", second), ("learn", third), ("forget", 0),
    ]  # fmt: skip
