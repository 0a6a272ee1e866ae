"""Sampling masks and forbidden tokens, with drafts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from rollout import Rollout, RolloutEngine, SamplingParams
from tests.helpers.text_model import save_byte_model

PROMPTS = [[5, 6, 7], list(range(20, 40))]
CUTS: list[dict[str, Any]] = [
    {"top_p": 0.6},
    {"top_k": 4},
    {"min_p": 0.2, "temperature": 0.7},
    {"top_k": 20, "top_p": 0.8, "logit_bias": {9: 3.0}, "repetition_penalty": 1.3},
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> RolloutEngine:
    """A token is a byte."""
    folder = save_byte_model(tmp_path_factory.mktemp("byte-model"), max_positions=256)
    options = {"budget": "fixed", "min_probability": 0.0}
    return RolloutEngine.from_pretrained(folder, "ngram", spec_options=options, max_running=8)


def drafted(engine: RolloutEngine, **fields: Any) -> list[Rollout]:
    """Rollouts of which drafts were accepted; that this cannot be seen is in the parity matrix."""
    params = SamplingParams(**{"n": 2, "seed": 4, "max_new_tokens": 24} | fields)
    engine.generate(PROMPTS, params)
    rollouts = engine.generate(PROMPTS, params)
    assert sum(rollout.stats.accepted for rollout in rollouts) > 0
    return rollouts


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: " ".join(cut))
def test_a_mask_is_what_the_cut_leaves(engine, cut: dict[str, Any]) -> None:
    """Found again from all logprobs; renormalised over it, they are the sampling logprobs."""
    vocab = engine.vocab_size
    rollouts = drafted(
        engine, **cut, sampling_mask=True, sampling_logprobs=True,
        logprob_token_ids=list(range(vocab)),
    )  # fmt: skip
    for rollout in rollouts:
        extras = rollout.extras
        assert len(extras.sampling_masks) == len(rollout.token_ids)
        for token, logprob, own, mask, pairs in zip(
            rollout.token_ids, rollout.logprobs, extras.sampling_logprobs,
            extras.sampling_masks, extras.token_ids_logprobs, strict=True,
        ):  # fmt: skip
            assert [each for each, _ in pairs] == list(range(vocab))
            logprobs = np.array([value for _, value in pairs])
            assert logprobs[token] == logprob
            assert mask == left_by(logprobs, **cut)
            mass = math.log(np.exp(logprobs[mask]).sum())
            assert own == pytest.approx(logprob - mass, abs=1e-4)


def left_by(
    logprobs: np.ndarray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, **_: Any
) -> list[int]:
    order = np.argsort(-logprobs, kind="stable")
    left = order[: top_k or len(order)]
    probs = np.exp(logprobs[left])
    reached = np.cumsum(probs) - probs
    left = left[reached < top_p * probs.sum()]
    left = left[logprobs[left] >= logprobs.max() + math.log(min_p)] if min_p else left
    return sorted(left.tolist())


def test_forbidden_tokens_are_in_no_mask(engine) -> None:
    rollouts = drafted(
        engine, top_k=5, min_new_tokens=9, allowed_token_ids=[8, 30, 31, 32, 33],
        stop_token_ids=[8], sampling_mask=True,
    )  # fmt: skip
    for rollout in rollouts:
        masks = rollout.extras.sampling_masks
        assert masks[:9] == [[30, 31, 32, 33]] * 9
        assert masks[9:] == [[8, 30, 31, 32, 33]] * (len(masks) - 9)


def test_allowed_tokens_alone_are_drawn(engine) -> None:
    """And their logprobs are those of the whole vocabulary, which trainers recompute."""
    allowed = [7, 40, 41, 90]
    rollouts = drafted(engine, allowed_token_ids=allowed)
    for rollout in rollouts:
        assert set(rollout.token_ids) <= set(allowed)
        scored = engine.score(rollout.prompt_ids, rollout.token_ids, SamplingParams())
        assert rollout.logprobs == scored


def test_bad_words_are_not_completed(engine) -> None:
    """Not across a turn's beginning either: the prompt does not count."""
    encoder = engine.encoder
    letters = encoder.tokenizer("ab c", add_special_tokens=False)["input_ids"]
    fields: dict[str, Any] = {
        "allowed_token_ids": letters,
        "temperature": 4.0,
        "max_new_tokens": 60,
    }
    assert any("ab" in encoder.decode(each.token_ids) for each in drafted(engine, **fields))
    fields["bad_words"] = ["ab", "c"]
    rollouts = drafted(engine, **fields)
    for text in (encoder.decode(each.token_ids) for each in rollouts):
        assert "ab" not in text
        assert "c" not in text
    (a, b, *_) = letters
    continued = SamplingParams(allowed_token_ids=[b], bad_words=["ab"], max_new_tokens=2)
    (rollout,) = engine.generate([[a]], continued)
    assert rollout.token_ids == [b, b]
    engine.submit([a], continued, partial_ids=[b])
    (rollout,) = engine.step() or engine.step()
    assert rollout.token_ids == [b]


def test_an_output_that_no_token_may_begin_ends_alone(engine) -> None:
    asked = [
        SamplingParams(
            allowed_token_ids=[8], stop_token_ids=[8], min_new_tokens=2, max_new_tokens=4
        ),
        SamplingParams(max_new_tokens=4, ignore_eos=True),
    ]
    stuck, other = engine.generate(PROMPTS, asked)
    assert (stuck.finish_reason, stuck.token_ids) == ("error", [])
    assert "constraints" in stuck.error
    assert len(other.token_ids) == 4
