"""A draft that is trained in a process of its own, which may die."""

from __future__ import annotations

import os
import signal
import time

from spec_workers.draft_training.candidate import CandidateVerdict
from spec_workers.draft_training.co_training_process import CoTrainingProcess
from spec_workers.draft_training.engine_draft import SwapResult
from tests.helpers.draft_training import CONFIG, PARAMS, PROMPTS, TRAINING, accept_length
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.tiny_model import save_tiny_llama


def wait_for_round(process: CoTrainingProcess):
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        done = process.poll()
        if done is not None and done.judgement.verdict is not CandidateVerdict.NOT_JUDGED:
            return done
        assert not process.unavailable_reason, process.unavailable_reason
        time.sleep(0.02)
    raise TimeoutError


def test_another_process_trains_and_may_die(engine, setting, tmp_path):
    with CoTrainingProcess(engine, CONFIG, training=TRAINING, niceness=0) as process:
        assert wait_for_round(process).swap is SwapResult.SWAPPED
        assert engine.weight_versions == {"target": 0, "draft": 1}
        assert accept_length(engine) > setting.accept_length + 0.02

        # The policy moves: the target's embedding and head go over, and training goes on.
        engine.update_weights_from_disk(save_tiny_llama(tmp_path, seed=5), selector="target")
        engine.generate(PROMPTS, PARAMS)
        while (done := wait_for_round(process)).newest_version < 1:
            pass
        assert done.sequences
        assert engine.weight_versions["draft"] == process.tally.swaps

        digest = engine.weights_digest("draft")
        os.kill(process._process.pid, signal.SIGKILL)
        process._process.wait()
        while not process.unavailable_reason:
            process.poll()
        assert "exit status -9" in process.unavailable_reason
        assert process.counters()["is_training"] == 0
        assert process.poll() is None
        assert engine.weights_digest("draft") == digest
        assert engine.generate(PROMPTS, PARAMS)[0].token_ids

        process.restart()
        assert not process.unavailable_reason
        wait_for_round(process)
    assert process.poll() is None
    assert engine.can_run
