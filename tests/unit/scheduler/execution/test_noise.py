"""The noise of sampled tokens: uniform, independent, and a function of its arguments alone."""

import numpy as np
import pytest
from scipy import stats

from caesura.scheduler.execution.sampler import noise, noise_stream, splitmix64


def test_splitmix64_known_outputs():
    outputs = splitmix64(np.full(3, 1234567, np.uint64), np.arange(3))
    assert outputs.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def vary(name: str, count: int, offset: int = 0) -> np.ndarray:
    line = np.arange(offset, offset + count)
    constant = np.full(count, 3, np.int64)
    seeds = line.astype(np.uint64) if name == "seed" else np.full(count, 42, np.uint64)
    streams = noise_stream(seeds, line if name == "index" else constant)
    return noise(streams, line if name == "position" else constant)


@pytest.mark.parametrize("name", ["seed", "index", "position"])
def test_noise_is_uniform(name):
    values = vary(name, 50_000)
    assert values.dtype == np.float64
    assert values.min() >= 0.0
    assert values.max() < 1.0
    assert stats.kstest(values, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("name", ["seed", "index", "position"])
def test_neighbouring_noise_is_independent(name):
    values = vary(name, 50_000)
    for lag in (1, 2, 16):
        later = vary(name, 50_000, offset=lag)
        table, _, _ = np.histogram2d(values, later, bins=16, range=[[0, 1], [0, 1]])
        assert stats.chisquare(table.ravel()).pvalue > 1e-3, lag


def test_noise_of_neighbouring_streams_is_independent():
    count = 50_000
    positions = np.arange(count)
    base, *others = (noise(noise_stream(seed, index), positions) for seed, index in ((7, 0), (8, 0), (7, 1)))
    for other in others:
        table, _, _ = np.histogram2d(base, other, bins=16, range=[[0, 1], [0, 1]])
        assert stats.chisquare(table.ravel()).pvalue > 1e-3
        assert len(np.intersect1d(base, other)) == 0


def test_noise_is_a_pure_function_of_its_arguments():
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, 100, dtype=np.uint64)
    index, positions = rng.integers(0, 1000, 100), rng.integers(0, 10**6, 100)
    together = noise(noise_stream(seeds, index), positions)
    order = rng.permutation(100)
    shuffled = noise(noise_stream(seeds[order], index[order]), positions[order])
    np.testing.assert_array_equal(shuffled, together[order])
    alone = [noise(noise_stream(seeds[i], index[i]), positions[i : i + 1])[0] for i in range(100)]
    np.testing.assert_array_equal(alone, together)
