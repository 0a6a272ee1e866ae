"""Noise: the same bits in numpy, C++ and Triton; and its distribution."""

from __future__ import annotations

import numpy as np
import torch
from scipy import stats

from rollout.ops.uniforms import uniforms
from rollout.ops.uniforms.reference import noise
from rollout.sampling.seeds import derive_seed


def test_the_noise_is_bitwise_the_reference(device) -> None:
    generator = np.random.default_rng(0)
    seeds = generator.integers(0, 2**64, 200, dtype=np.uint64)
    seeds[:4] = [0, 1, 2**63, 2**64 - 1]
    positions = generator.integers(0, 2**40, 200)
    positions[:4] = [0, 1, 2, 2**62]
    expected = noise(seeds, positions).tolist()
    on_device = [torch.from_numpy(a).to(device) for a in (seeds.view(np.int64), positions)]
    assert uniforms(*on_device).tolist() == expected
    assert uniforms(*(a[:0] for a in on_device)).tolist() == []
    assert uniforms(*(a[7:9] for a in on_device)).tolist() == expected[7:9]
    assert uniforms(*(a[::2] for a in on_device)).tolist() == expected[::2]


def test_noise_is_uniform_along_positions_and_along_seeds() -> None:
    count = 200_000
    fixed, running = np.full(count, 3), np.arange(count)
    for seeds, positions in ((fixed, running), (running, fixed), (running, running)):
        values = noise(seeds.astype(np.uint64), positions.astype(np.int64))
        assert 0 <= values.min() < values.max() < 1
        assert stats.kstest(values, "uniform").pvalue > 1e-4
        pairs = np.histogram2d(values[:-1], values[1:], bins=16)[0]
        assert stats.chisquare(pairs.ravel()).pvalue > 1e-4


def test_request_seeds_differ_by_each_index() -> None:
    seeds = {derive_seed(run, p, s) for run in range(8) for p in range(32) for s in range(32)}
    assert len(seeds) == 8 * 32 * 32
    assert derive_seed(-1, 0, 0) == derive_seed(2**64 - 1, 0, 0)
