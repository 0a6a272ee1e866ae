"""An engine in lockstep: every step enters the same forwards, whatever there is to do."""

from __future__ import annotations

import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.engine.engine_loop import EngineLoop
from rollout.errors import InvalidInputError
from tests.helpers.tiny_draft import save_tiny_eagle3
from tests.helpers.tiny_model import save_tiny_llama
from tests.helpers.tiny_mtp import save_tiny_mtp

PROMPT = [5, 9, 3, 7, 1, 0, 8, 4, 6, 9, 10]  # two chunks of eight: a step that samples nothing
OPTIONS = {"topk": 4, "num_draft_tokens": 8, "min_probability": 0.0}
TARGET = ["target.forward", "target.logits"]
GROWN = ["draft.logits"] + ["draft.forward", "draft.logits"] * 2
EXTENDED = {
    "eagle": ["draft.fuse", "draft.forward"],
    "hybrid": ["draft.fuse", "draft.forward"],
    "mtp": ["draft.fuse"] + ["draft.forward"] * 3,
}


class Recorder:
    """A model that notes its calls."""

    def __init__(self, model, name, calls):
        self._model, self._name, self._calls = model, name, calls

    def __getattr__(self, name):
        found = getattr(self._model, name)
        if name not in ("forward", "logits", "fuse"):
            return found

        def call(*args, **kwargs):
            self._calls.append(f"{self._name}.{name}")
            return found(*args, **kwargs)

        return call


def in_lockstep(target, spec, **options):
    return RolloutEngine.from_pretrained(
        str(target), spec, spec_options={**OPTIONS, **options, "lockstep": True},
        kv_bytes=1 << 20, chunk_len=8, graph_bytes=0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A model of few tokens, so that a random draft is accepted now and then."""
    return save_tiny_llama(tmp_path_factory.mktemp("target"), vocab_size=11)


@pytest.fixture(scope="module")
def draft(target, tmp_path_factory):
    return str(save_tiny_eagle3(tmp_path_factory.mktemp("draft"), target))


@pytest.mark.parametrize("spec", EXTENDED)
def test_every_step_enters_the_same_forwards(spec, target, draft, tmp_path):
    if spec == "mtp":
        chain = save_tiny_mtp(tmp_path, "mimo", 3, vocab_size=11)
        engine = in_lockstep(chain, spec, num_steps=None)
    else:
        engine = in_lockstep(target, spec, draft_path=draft, num_steps=3)
    calls, worker = [], engine.worker
    worker.target.runner.model = Recorder(worker.target.model, "target", calls)
    for runner in worker.drafter.runners:
        runner.model = Recorder(runner.model, "draft", calls)
    for index, (prompt, length) in enumerate(((PROMPT, 24), (PROMPT[:3], 1), (PROMPT[2:], 7))):
        params = SamplingParams(max_new_tokens=length, ignore_eos=True, temperature=0.5 * index)
        engine.submit(prompt, params)
    idle = 0
    while idle < 3:
        idle += not engine.has_unfinished
        engine.step()
        assert calls == GROWN + TARGET + EXTENDED[spec]
        calls.clear()
    assert engine.metrics().accepted > 0


def test_a_step_of_nothing_runs_in_lockstep_alone(target, draft):
    plain = RolloutEngine.from_pretrained(str(target), "none", kv_bytes=1 << 20)
    for engine, steps in ((plain, 0), (in_lockstep(target, "eagle", draft_path=draft), 1)):
        assert engine.step() == []
        assert engine.metrics().steps == steps
        engine.pause_generation()
        assert engine.step() == []
        assert engine.metrics().steps == steps


def test_an_engine_loop_cannot_keep_the_step(target, draft):
    with pytest.raises(InvalidInputError, match="lockstep"):
        EngineLoop(in_lockstep(target, "eagle", draft_path=draft))
