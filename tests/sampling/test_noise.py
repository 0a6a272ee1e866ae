import numpy as np
from scipy import stats

from rollout.ops.uniforms.reference import noise
from rollout.sampling.noise import derive_seed


def test_noise_is_a_function_of_seed_and_position_alone():
    seeds = np.array([7, 8, 2**64 - 1], dtype=np.uint64)
    positions = np.array([0, 5, 2**40], dtype=np.int64)
    together = noise(seeds, positions)
    order = [2, 0, 1]
    assert np.array_equal(noise(seeds[order], positions[order]), together[order])
    assert together[1] == noise(seeds[1:2], positions[1:2])[0]


def test_noise_is_uniform_along_positions_and_along_seeds():
    count = 200_000
    fixed, running = np.full(count, 3), np.arange(count)
    for seeds, positions in ((fixed, running), (running, fixed), (running, running)):
        values = noise(seeds.astype(np.uint64), positions.astype(np.int64))
        assert 0 <= values.min() < values.max() < 1
        assert stats.kstest(values, "uniform").pvalue > 1e-4
        pairs = np.histogram2d(values[:-1], values[1:], bins=16)[0]
        assert stats.chisquare(pairs.ravel()).pvalue > 1e-4


def test_request_seeds_differ_by_each_index():
    seeds = {derive_seed(run, p, s) for run in range(8) for p in range(32) for s in range(32)}
    assert len(seeds) == 8 * 32 * 32
    assert derive_seed(-1, 0, 0) == derive_seed(2**64 - 1, 0, 0)
