"""An engine of two ranks in a program that no launcher started."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from rollout import RolloutEngine
from rollout.config import engine_config
from rollout.engine.rank_processes import open_on_ranks
from rollout.engine.worker_factory import worker_factory
from rollout.errors import CheckpointError, InvalidInputError, ParallelError, WeightUpdateError
from tests.helpers.hang import wait_until
from tests.helpers.tensor_cases import PARAMS, PROMPTS, changed, numbers, stored
from tests.helpers.tiny_model import save_tiny_llama

OPTIONS = {"kv_bytes": 1 << 20, "dtype": "float32", "num_threads": 1}
TWO = {"parallel": {"mode": "tensor", "size": 2}}
NGRAM = {"budget": "fixed", "min_probability": 0.0, "calibration_seconds": 0}


def opened(folder, **overrides) -> RolloutEngine:
    config = engine_config(str(folder), OPTIONS | TWO | overrides)
    return open_on_ranks(config, worker_factory("ngram", **NGRAM))


def child_ranks() -> list[psutil.Process]:
    """The ranks that this process has started."""
    children = psutil.Process().children()
    return [each for each in children if "rollout.engine.rank_processes" in each.cmdline()]


@pytest.fixture(scope="module")
def two(tiny_model_path):
    engine = opened(tiny_model_path)
    yield engine
    engine.close()


def rolled_out(engine: RolloutEngine) -> list:
    requests = [engine.submit(prompt, PARAMS, prompt_index=i) for i, prompt in enumerate(PROMPTS)]
    ended = {}
    while engine.has_unfinished:
        ended |= {rollout.request_id: rollout for rollout in engine.step()}
    return numbers([ended[request.request_id] for request in requests])


def test_rollouts_and_weights_are_those_of_one_rank(two, tiny_model_path):
    config = engine_config(str(tiny_model_path), OPTIONS)
    one = open_on_ranks(config, worker_factory("ngram", **NGRAM))
    assert isinstance(one, RolloutEngine)
    assert "WORLD_SIZE" not in os.environ
    assert rolled_out(two) == rolled_out(one)
    new = changed(stored(str(tiny_model_path)))
    for engine in (one, two):
        engine.update_weights_from_tensor(new.items())
    assert two.weights_digest() == one.weights_digest()
    assert rolled_out(two) == rolled_out(one)
    ranks = two.check_weights("checksum")
    assert [each.keys() for each in ranks] == [one.check_weights("checksum")[0].keys()] * 2
    assert ranks[0] != ranks[1]  # each has its own slices
    two.check_weights("snapshot")
    two.check_weights("reset_tensors")
    assert not two.can_run
    two.update_weights_from_tensor(stored(str(tiny_model_path)).items())
    with pytest.raises(WeightUpdateError, match=r"rank 0: .* differ from the snapshot"):
        two.check_weights("compare")
    two.update_weights_from_tensor(new.items())
    two.check_weights("compare")
    assert rolled_out(two) == rolled_out(one)


def test_what_cannot_be_opened_leaves_no_rank_behind(two, tmp_path):
    (rank,) = child_ranks()
    odd = save_tiny_llama(tmp_path / "odd", num_heads=3, num_kv_heads=3, hidden_size=24)
    with pytest.raises(InvalidInputError, match=r"parallel\.size=2.*3 query heads"):
        opened(odd)
    broken = save_tiny_llama(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError):
        opened(broken)
    assert child_ranks() == [rank]


def test_ranks_end_with_the_engine(two, caplog):
    two.close()
    assert not child_ranks()
    assert not caplog.records


def test_a_killed_rank_is_named(tiny_model_path, caplog):
    engine = opened(tiny_model_path)
    (rank,) = child_ranks()
    rank.send_signal(signal.SIGKILL)
    with pytest.raises(ParallelError):
        rolled_out(engine)
    wait_until(lambda: "rank 1 of 2 was killed by SIGKILL" in caplog.text)
    engine.close()
