"""Estimates of what the target samples, against what it does sample, by the real op and noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.ops.categorical import categorical
from rollout.ops.truncation import truncation_threshold
from rollout.ops.uniforms import reference
from spec_workers.neural.arrays import Arrays
from spec_workers.neural.mixture import LearnedMixture, Reliability, contexts, corrected, mixed
from spec_workers.neural.shared_noise import (
    SHARPNESS,
    WIDTHS,
    Candidates,
    component_probabilities,
    component_tables,
    drawn_from,
    likeliest,
    noise_inputs,
    sharpened_probabilities,
    window_probabilities,
)
from tests.helpers.requests import make_request

VOCAB = 200
ROWS = 256
COUNT = 32
TABLES = component_tables()


def candidates(requests, logits: torch.Tensor, position: int, count: int) -> Candidates:
    """The candidates of each request's row, on the host's arrays."""
    ends = np.full(len(requests), position)
    inputs = {
        name: torch.from_numpy(each)
        for name, each in noise_inputs(requests, ends, padding=0, num_levels=1).items()
    }
    rows = torch.arange(len(requests))
    logits = drawn_from(logits.clone(), inputs, rows)
    index, probs, ends_RC = likeliest(logits, inputs["uniforms"][:, 0], count)
    greedy = inputs["is_greedy"].numpy() > 0 if "is_greedy" in inputs else None
    return Candidates(
        index_RC=index.numpy(), probs_RC=probs.numpy(), ends_RC=ends_RC.numpy(),
        uniforms_R=inputs["uniforms"][:, 0].numpy(), is_greedy_R=greedy,
    )  # fmt: skip


def logits_pair(round_: int, error: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's logits and a draft's that is off by so much: some rows sharp, some flat."""
    generator = torch.Generator().manual_seed(round_)
    sharpness = 1 + 4 * torch.rand(ROWS, 1, generator=generator)
    target = torch.randn(ROWS, VOCAB, generator=generator) * sharpness
    return target, target + error * torch.randn(ROWS, VOCAB, generator=generator)


def truncated(logits, params, temperature):
    """The target's logits at temperature 1 with the truncation that the sampler applies."""
    logits = logits / (temperature or 1)
    if not params:
        return logits
    threshold = truncation_threshold(
        logits,
        torch.ones(ROWS),
        torch.full((ROWS,), params.get("top_k", -1)),
        torch.full((ROWS,), params.get("top_p", 1.0)),
        torch.full((ROWS,), params.get("min_p", 0.0)),
    )
    return logits.masked_fill(logits < threshold[:, None], float("-inf"))


def run(error: float, temperature: float, rounds: int = 24, **truncation):
    """Each round's candidates, their estimates and which came true, the mixture learning."""
    requests = [
        make_request(seed=seed, temperature=temperature, **truncation) for seed in range(ROWS)
    ]
    mixture, reliability, arrays = LearnedMixture(), Reliability(), Arrays()
    for round_ in range(rounds):
        positions = np.full(ROWS, 10 + round_)
        target, draft = logits_pair(round_, error)
        uniforms_R = reference.noise(np.arange(ROWS, dtype=np.uint64), positions)
        sampled = categorical(
            truncated(target, truncation, temperature),
            torch.full((ROWS,), float(temperature > 0)),
            torch.from_numpy(uniforms_R),
        )[0].numpy()
        found = candidates(requests, draft, 10 + round_, COUNT)
        components = component_probabilities(arrays, found, TABLES)
        contexts_R = contexts(found.is_greedy_R, 0, found.probs_RC.max(axis=1))
        by_mixture = mixed(components, contexts_R, mixture.weights())
        estimates = corrected(arrays, by_mixture, contexts_R, reliability.tables())
        came_true = found.index_RC == sampled[:, None]
        came_true &= components.any(axis=2)
        mixture.learn(contexts_R, components, came_true)
        reliability.learn(contexts_R, by_mixture, came_true)
        if round_ >= rounds // 3:
            yield found, estimates, came_true


@pytest.mark.parametrize(
    ("error", "temperature", "truncation"),
    [
        (0.1, 1.0, {}),
        (1.5, 0.6, {}),
        (0.5, 0.0, {}),
        (0.5, 1.0, {"top_p": 0.8}),
        (1.5, 1.2, {"top_k": 20, "min_p": 0.02}),
    ],
)
def test_estimates_come_true_as_often_as_they_say(error, temperature, truncation):
    estimates, came_true = [], []
    for _, estimates_RC, came_true_RC in run(error, temperature, **truncation):
        estimates.append(estimates_RC.ravel())
        came_true.append(came_true_RC.ravel())
    estimates, came_true = np.concatenate(estimates), np.concatenate(came_true)
    # Of most rows the target's token is a candidate; of the others the mixture knows too.
    assert estimates.sum() == pytest.approx(came_true.sum(), rel=0.07)
    for low, high in ((0.02, 0.1), (0.1, 0.3), (0.3, 0.6), (0.6, 0.9), (0.9, 1.01)):
        within = (estimates >= low) & (estimates < high)
        if within.sum() > 300:
            assert estimates[within].mean() == pytest.approx(came_true[within].mean(), abs=0.15)


def test_the_noise_tells_more_than_the_likeliest_token():
    by_noise = by_mode = 0
    for found, estimates_RC, came_true_RC in run(0.5, 1.0):
        rows = np.arange(ROWS)
        by_noise += came_true_RC[rows, estimates_RC.argmax(axis=1)].sum()
        by_mode += came_true_RC[rows, found.probs_RC.argmax(axis=1)].sum()
    assert by_noise > 1.5 * by_mode


def test_components_against_a_sum_over_every_point():
    random = np.random.default_rng(0)
    probs = random.dirichlet(np.full(9, 0.4), size=20).astype(np.float64)
    ends, noise = probs.cumsum(axis=1), random.random(20)
    noise[:2] = 0.0, 1.0 - 2**-53
    rows = Candidates(
        index_RC=np.arange(9), probs_RC=probs, ends_RC=ends, uniforms_R=noise, is_greedy_R=None
    )
    found = window_probabilities(Arrays(), rows, np.array(WIDTHS))
    assert np.allclose(found.sum(axis=1), 1.0, atol=1e-6)  # of all tokens, under each component
    assert np.allclose(found[:, :, 0], probs, atol=1e-6)
    points = (np.arange(20_000) + 0.5) / 20_000
    for row in range(20):
        token_of = np.searchsorted(ends[row], points, side="right")
        for k, width in enumerate(WIDTHS):
            within = np.abs(points - noise[row]) <= width
            shares = np.bincount(token_of[within], minlength=9)[:9] / within.sum()
            assert np.allclose(found[row, :, k], shares, atol=0.01)
    sharpened = sharpened_probabilities(Arrays(), probs, np.array(SHARPNESS))
    for k, power in enumerate([1, *SHARPNESS[1:]]):
        powers = probs**power
        assert np.allclose(sharpened[:, :, k], powers / powers.sum(axis=1, keepdims=True))


def test_the_token_at_the_noise_is_among_the_candidates():
    requests = [make_request(seed=seed) for seed in range(64)]
    positions = np.full(64, 7)
    logits = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(0))
    found = candidates(requests, logits, 7, 4)
    noise = torch.from_numpy(reference.noise(np.arange(64, dtype=np.uint64), positions))
    at_noise = categorical(logits, torch.ones(64), noise)[0]
    assert np.array_equal(found.index_RC[:, 0], at_noise)
    again = (found.index_RC[:, 1:] == at_noise.numpy()[:, None]).any(axis=1)
    assert np.array_equal(found.probs_RC[:, 0] == 0, again)
    assert again.any()
    assert not again.all()
