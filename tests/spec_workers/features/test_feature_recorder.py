"""Recorded features equal the target's own of the same tokens, however the request was run."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from rollout import RolloutEngine, SamplingParams
from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.types import FinishReason
from spec_workers.features.feature_recorder import FeatureRecorder
from spec_workers.features.feature_ring import FeatureRing
from tests.helpers.tiny_model import save_tiny_llama

FEATURES = AuxHiddenStates(layers=(0, 2), final=True)
PROMPTS = [[5, 9, 11, 3, 70] * 6, [1, 2, 3, 4], list(range(20, 60))]
PARAMS = SamplingParams(max_new_tokens=40, seed=4, ignore_eos=True)


def recording_engine(path, num_bytes: int = 8 << 20, every: int = 1, **options) -> RolloutEngine:
    options = {"spec": "ngram", "spec_options": {"budget": "fixed"}, "chunk_len": 16} | options
    engine = RolloutEngine.from_pretrained(path, **options)
    hidden_size = engine.worker.target.model.spec.hidden_size
    ring = FeatureRing(num_bytes, FEATURES, hidden_size, torch.float32)
    engine.worker.record(FeatureRecorder(ring, every))
    return engine


def recorded(engine: RolloutEngine) -> list:
    return engine.worker.recorder.ring.read(0)


@functools.cache
def plain_engine(path) -> RolloutEngine:
    return recording_engine(
        path, spec="none", spec_options={}, chunk_len=512, prefix_cache=False, max_running=1
    )


def assert_true(path, sequence) -> None:
    """Compare with the features of a run of all the tokens by a request of its own."""
    engine = plain_engine(path)
    tokens = sequence.token_ids_L.tolist()
    engine.generate([tokens], SamplingParams(max_new_tokens=1, ignore_eos=True))
    alone = recorded(engine)[-1]
    assert alone.first_position == 0
    first, count = sequence.first_position, len(sequence.features_NF)
    assert torch.equal(sequence.features_NF, alone.features_NF[first : first + count])


def test_rows_are_those_of_the_tokens(tiny_model_path):
    """With chunked prefill, accepted drafts, several requests a step, and preemptions."""
    engine = recording_engine(tiny_model_path, max_kv_tokens=110, max_running=3)
    rollouts = [each for _ in range(2) for each in engine.generate(PROMPTS, PARAMS)]
    assert engine.metrics().accepted > 20
    assert engine.metrics().preemptions
    sequences = {tuple(each.token_ids_L.tolist()): each for each in recorded(engine)}
    assert len(sequences) == len(PROMPTS)  # the second time they are the same
    for rollout in rollouts[:3]:
        sequence = sequences[tuple(rollout.prompt_ids + rollout.token_ids)]
        assert sequence.prompt_len == len(rollout.prompt_ids)
        assert sequence.weight_version == 0
        # The last token is emitted and never run.
        assert sequence.first_position + len(sequence.features_NF) == len(sequence.token_ids_L) - 1
        assert_true(tiny_model_path, sequence)


@pytest.mark.parametrize("flush_cache", [True, False])
def test_a_sequence_has_one_weight_version(tiny_model_path, tmp_path, flush_cache):
    folder = save_tiny_llama(tmp_path, seed=9)
    engine = recording_engine(tiny_model_path, spec="none", spec_options={})
    request = engine.submit(PROMPTS[0], PARAMS)
    for _ in range(10):
        engine.step()
    generated = len(request.token_ids)
    assert generated > 3
    engine.update_weights_from_disk(folder, flush_cache=flush_cache)
    while engine.has_unfinished:
        engine.step()
    (sequence,) = recorded(engine)
    assert sequence.weight_version == 1
    if flush_cache:
        assert sequence.first_position == 0
        assert_true(folder, sequence)
    else:
        assert sequence.first_position == len(PROMPTS[0]) + generated - 1
    assert sequence.first_position + len(sequence.features_NF) == len(request.tokens) - 1


def test_a_long_request_is_written_in_several_sequences(tiny_model_path):
    engine = recording_engine(tiny_model_path, num_bytes=160_000)
    params = SamplingParams(max_new_tokens=150, seed=4, ignore_eos=True)
    (rollout,) = engine.generate(PROMPTS[:1], params)
    sequences, at = recorded(engine), 0
    assert len(sequences) > 3
    for sequence in sequences:
        assert sequence.first_position == at
        at += len(sequence.features_NF)
        assert_true(tiny_model_path, sequence)
    assert at == len(rollout.prompt_ids + rollout.token_ids) - 1


def test_unwritten_rows_take_no_more_than_the_ring(tiny_model_path):
    engine = recording_engine(tiny_model_path, num_bytes=48_000, max_running=8)
    recorder = engine.worker.recorder
    for index in range(8):
        engine.submit(PROMPTS[0], PARAMS, sample_index=index)
    most = 0
    while engine.has_unfinished:
        engine.step()
        most = max(most, recorder.counters()["unwritten_bytes"])
    step_bytes = 8 * 17 * recorder.ring.row_bytes
    assert recorder.ring.capacity - step_bytes < most <= recorder.ring.capacity + step_bytes
    assert recorder.counters()["unwritten_bytes"] == 0


def test_each_nth_request_is_followed(tiny_model_path):
    short = SamplingParams(max_new_tokens=20, ignore_eos=True)
    engine = recording_engine(tiny_model_path, every=3)
    rollouts = engine.generate([[1, 2, index] for index in range(7)], short)
    first = {tuple(each.prompt_ids) for each in rollouts[::3]}
    assert {tuple(each.token_ids_L.tolist()[:3]) for each in recorded(engine)} == first


def test_a_cached_prefix_nan_and_aborted_requests_leave_no_rows(tiny_model_path):
    engine = recording_engine(tiny_model_path, max_running=1)
    engine.generate(PROMPTS[2:], replace(PARAMS, max_new_tokens=10, n=3))
    sequences = recorded(engine)
    assert [each.first_position for each in sequences] == [0, 39, 39]
    for sequence in sequences:
        assert_true(tiny_model_path, sequence)
    for prompt in PROMPTS[:2]:
        engine.submit(prompt, PARAMS)
    engine.step()
    engine.pause_generation("abort")
    assert len(recorded(engine)) == 3 + 1  # what the first step computed
    assert engine.worker.counters()["features/unwritten_bytes"] == 0
    engine.continue_generation()
    tensors = load_file(tiny_model_path / "model.safetensors")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], torch.nan)
    engine.update_weights_from_tensor(tensors)
    (rollout,) = engine.generate(PROMPTS[:1], PARAMS)
    assert rollout.finish_reason is FinishReason.ERROR
    assert len(recorded(engine)) == 3 + 1
