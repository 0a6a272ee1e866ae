"""The host proposes for one half of the requests while the device computes the other."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from threading import Event

import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.config import EngineConfig, engine_config
from rollout.models.checkpoint import Progress
from spec_workers.draft_tree import only_roots
from spec_workers.spec_worker import SpecWorker
from spec_workers.target import TargetWorker
from tests.helpers.compared import outcome

FORWARD = 0.005  # seconds that the device takes for a step when it is waited for
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True, n=4, seed=2)


class Pending:
    """Samples that are there when the device has come to them."""

    def __init__(self, samples, done: Future, wanted: Event) -> None:
        self.samples, self.done, self.wanted = samples, done, wanted

    def read(self):
        self.wanted.set()
        self.done.result()
        return self.samples.read()


class SlowDevice(TargetWorker):
    """Works off what is launched in order, on a thread of its own; never done before somebody
    waits for it, however slow the machine is that runs the test."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.queue = ThreadPoolExecutor(1)
        self.unfinished: list[Future] = []

    def sample(self, batch, trees, logits_RV):
        wanted = Event()
        done = self.queue.submit(lambda: (wanted.wait(), time.sleep(FORWARD)))
        self.unfinished = [each for each in self.unfinished if not each.done()] + [done]
        return Pending(super().sample(batch, trees, logits_RV), done, wanted)

    @property
    def is_busy(self) -> bool:
        return any(not each.done() for each in self.unfinished)


class Proposing(SpecWorker):
    """Notes whether the device was busy throughout."""

    supports_overlap = True
    target: SlowDevice

    def __init__(self, target: SlowDevice) -> None:
        super().__init__(target)
        self.hidden: list[bool] = []
        self.proposed_for: list[set[int]] = []

    def propose(self, batch, floors_B):
        was_busy = self.target.is_busy
        time.sleep(FORWARD)
        self.hidden.append(was_busy and self.target.is_busy)
        self.proposed_for.append({entry.request.request_id for entry in batch.entries})
        return only_roots(len(batch.entries))


def build(config: EngineConfig, progress: Progress | None = None) -> Proposing:
    return Proposing(SlowDevice(config))


def run(model, overlap: str):
    engine = RolloutEngine.from_config(engine_config(model, {"overlap": overlap}), build)
    return engine.generate([[5, 6, 7]], PARAMS), engine.worker


def test_proposing_is_hidden_behind_the_other_half(tiny_model_path):
    whole, alone = run(str(tiny_model_path), "never")
    halves, worker = run(str(tiny_model_path), "always")
    assert outcome(halves) == outcome(whole)
    assert not any(alone.hidden)
    assert sum(worker.hidden) >= len(worker.hidden) - 3  # all but the first ones
    pairs = list(pairwise(worker.proposed_for[2:10]))  # siblings wait for the prompt
    assert len(pairs) > 6
    assert all(not one & other and len(one) == len(other) == 2 for one, other in pairs)


@pytest.mark.parametrize("spec", ["none", "ngram"])
def test_who_takes_turns(tiny_model_path, spec):
    engine = RolloutEngine.from_pretrained(str(tiny_model_path), spec)
    assert engine.worker.overlaps
    engine.generate([[5, 6, 7]], PARAMS)
    assert not engine.steps._overlap.wants(4)  # the CPU computes what the host would do meanwhile
