"""The arithmetic of a step, against the published formulas written down once more in float64."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from caesura.io_struct import SdeParams
from caesura.scheduler.images.image_request import ImageBatch
from caesura.scheduler.images.memory_limit import MemoryLimit
from caesura.scheduler.images.runner import ALONE, step_threads
from caesura.scheduler.images.scheduler_step import (
    INITIAL,
    advance,
    coefficients,
    log_prob,
    noise_of,
    problem_of,
)

GRIDS = {
    "even": [1.0, 0.8, 0.6, 0.4, 0.2, 0.0],
    "shifted": [1.0, 0.9, 0.75, 0.5, 0.001, 0.0],
    "late": [0.9, 0.5, 0.1, 0.0],
    "one step": [1.0, 0.0],
}
TYPES = ["ode", "sde", "cps", "dance"]
CASES = [
    (kind, name, step) for kind in TYPES for name, grid in GRIDS.items() for step in range(len(grid) - 1)
]


def reference(kind: str, x: np.ndarray, v: np.ndarray, sigmas: np.ndarray, step: int, eta: float):
    now, after = sigmas[step], sigmas[step + 1]
    dt = after - now
    x0, x1 = x - now * v, x + (1 - now) * v
    if kind == "ode":
        return x + v * dt, 0.0
    if kind == "sde":  # Flow-GRPO
        s = eta * math.sqrt(now / (1 - (sigmas[1] if now == 1 else now)))
        mean = x * (1 + s**2 / (2 * now) * dt) + v * (1 + s**2 * (1 - now) / (2 * now)) * dt
        return mean, s * math.sqrt(-dt)
    if kind == "dance":  # DanceGRPO: Euler, and a correction by the score
        score = -(x - x0 * (1 - now)) / now**2
        return x + v * dt - 0.5 * eta**2 * score * dt, eta * math.sqrt(-dt)
    std = after * math.sin(eta * math.pi / 2)
    return x0 * (1 - after) + x1 * math.sqrt(max(after**2 - std**2, 0.0)), std


def grid(name: str) -> np.ndarray:
    return np.asarray(GRIDS[name], np.float32)


def pair(seed: int = 0):
    generator = np.random.default_rng(seed)
    return generator.standard_normal((2, 4, 6, 6)).astype(np.float32) * 1.5


@pytest.mark.parametrize("eta", [0.3, 0.7, 1.0])
@pytest.mark.parametrize(("kind", "name", "step"), CASES)
def test_mean_std_and_log_prob_are_those_of_the_formulas(kind, name, step, eta):
    x, v = pair()
    sigmas, sde = grid(name), SdeParams(type=kind, noise_level=eta)
    row = coefficients(sde, sigmas, step)
    mean64, std64 = reference(
        kind, x.astype(np.float64), v.astype(np.float64), sigmas.astype(np.float64), step, eta
    )
    assert row.std == pytest.approx(std64, rel=1e-12, abs=1e-15)
    noise = torch.from_numpy(np.random.default_rng(1).standard_normal((1, *x.shape)).astype(np.float32))
    after, mean = advance(torch.from_numpy(x)[None], torch.from_numpy(v)[None], [row], noise)
    scale = max(1.0, abs(row.a), abs(row.b))
    np.testing.assert_allclose(mean[0].numpy(), mean64, rtol=0, atol=2e-6 * scale)
    np.testing.assert_allclose(after[0].numpy(), mean64 + std64 * noise[0].numpy(), rtol=0, atol=2e-6 * scale)
    if std64 == 0.0:
        assert float(log_prob(after[0], mean[0], row.std, sde)) == 0.0
        return
    distance = (after[0].numpy().astype(np.float64) - mean[0].numpy().astype(np.float64)) ** 2
    density = -distance / (2 * std64**2) - math.log(std64) - 0.5 * math.log(2 * math.pi)
    for form, each in (("density", density), ("squared_error", -distance)):
        for over, expected in (("mean", each.mean()), ("sum", each.sum())):
            chosen = SdeParams(type=kind, noise_level=eta, log_prob=over, log_prob_form=form)
            found = float(log_prob(after[0], mean[0], row.std, chosen))
            assert found == pytest.approx(expected, rel=4e-6, abs=1e-6)


@pytest.mark.parametrize("kind", TYPES)
def test_a_step_outside_the_window_is_that_of_ode(kind):
    sigmas = grid("even")
    inside = SdeParams(type=kind, steps=[1, 2])
    for step in (0, 3, 4):
        assert coefficients(inside, sigmas, step) == coefficients(SdeParams(type="ode"), sigmas, step)
    for step in (1, 2):
        assert coefficients(inside, sigmas, step) == coefficients(SdeParams(type=kind), sigmas, step)


def test_without_noise_every_type_is_ode():
    sigmas = grid("shifted")
    for kind in TYPES:
        for step in range(5):
            row = coefficients(SdeParams(type=kind, noise_level=0.0), sigmas, step)
            assert row == coefficients(SdeParams(type="ode"), sigmas, step)


def test_rows_of_a_batch_have_their_own_steps():
    x, v = torch.from_numpy(pair()), torch.from_numpy(pair(1))
    sigmas, sde = grid("shifted"), SdeParams(type="sde")
    rows = [coefficients(sde, sigmas, step) for step in (0, 3)]
    noise = torch.ones_like(x)
    together = advance(x, v, rows, noise)[0]
    alone = [advance(x[i : i + 1], v[i : i + 1], [rows[i]], noise[:1])[0][0] for i in range(2)]
    assert torch.equal(together, torch.stack(alone))


def test_bf16_is_computed_in_float32():
    x, v = torch.from_numpy(pair()), torch.from_numpy(pair(1)).bfloat16()
    row = coefficients(SdeParams(type="sde"), grid("even"), 1)
    assert torch.equal(advance(x, v, [row, row], None)[0], advance(x, v.float(), [row, row], None)[0])


def correlations(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    spectra = torch.fft.fft(one.flatten().double()), torch.fft.fft(other.flatten().double())
    return torch.fft.ifft(spectra[0] * spectra[1].conj()).real.abs() / one.numel()


def test_noise_is_a_function_of_seed_sample_and_step():
    shape = (4, 16, 16)
    first = noise_of(7, 2, 3, shape)
    assert torch.equal(first, noise_of(7, 2, 3, shape))
    assert float(correlations(first, first)[1:].max()) < 0.25
    others = (8, 2, 3), (7, 3, 3), (7, 2, 4), (8, 1, 3), (8, 2, 2), (7, 2, INITIAL), (2**63 - 1, 0, 0)
    for key in others:
        assert float(correlations(first, noise_of(*key, shape)).max()) < 0.25, key
    many = torch.stack([noise_of(1, sample, INITIAL, shape) for sample in range(64)])
    assert abs(float(many.mean())) < 0.02
    assert abs(float(many.std()) - 1) < 0.01


def test_only_a_grid_that_falls_is_taken():
    for sigmas in ([1.0, 0.5, 0.001], [1.0]):
        assert problem_of(sigmas) is None
    for sigmas in ([1.0, 1.0], [0.5, 0.7], [1.1], [0.0], [1.0, math.nan], [1.0, 1.0 - 1e-9], [1e-60]):
        assert problem_of(sigmas) is not None, sigmas


pytest.importorskip("diffusers")
GB = 1 << 30


def samples(count, *, latent=1, kept=0, prompt=0):
    conditioning = SimpleNamespace(nbytes=prompt)
    return [
        SimpleNamespace(conditioning=conditioning, latent_bytes=latent, kept_bytes=kept) for _ in range(count)
    ]


def starting(limit, running, waiting, most):
    running, count = [*running], 0
    for sample in waiting[:most]:
        if not limit.allows(running, sample):
            break
        running.append(sample)
        count += 1
    return count


@pytest.mark.parametrize(
    ("device", "host", "sample", "expected"),
    [
        (10, None, {"latent": 3}, 3),
        (10, None, {"latent": 3, "kept": 2}, 2),
        (10, None, {"latent": 3, "prompt": 4}, 2),
        (10, 4, {"latent": 3, "kept": 2}, 2),
        (10, 100, {"latent": 3, "kept": 2}, 3),
        (None, 4, {"latent": 3, "kept": 2}, 2),
        (None, None, {"latent": 3, "kept": 2}, 6),
        (0, None, {"latent": 3}, 1),
    ],
)
def test_images_that_fit_together_start_together(device, host, sample, expected):
    assert starting(MemoryLimit(device, host), [], samples(9, **sample), 6) == expected


def test_running_requests_leave_less_memory():
    limit, running = MemoryLimit(10, None), samples(2, latent=2, prompt=3)
    assert starting(limit, running, samples(9, latent=2), 6) == 1
    assert starting(limit, running, samples(9, latent=4), 6) == 0
    assert starting(limit, running, [*samples(1, latent=4), *samples(9, latent=1)], 6) == 0, "in their order"
    assert starting(limit, running, [], 6) == 0


def memory(free):
    return SimpleNamespace(mem_get_info=lambda: (free, 80 * GB))


@pytest.mark.parametrize(
    ("device", "on_host", "expected"),
    [
        (memory(40 * GB), False, (15 * GB, 32 * GB)),
        (memory(40 * GB), True, (15 * GB, None)),
        (memory(8 * GB), False, (0, 32 * GB)),
        (memory(0), False, (None, 32 * GB)),
        (SimpleNamespace(), False, (None, 32 * GB)),
    ],
)
def test_the_limit_is_a_share_of_free_memory(device, on_host, expected):
    limit = MemoryLimit.of_free_memory(device, memory(64 * GB), 0.5, kept_free=10 * GB, on_host=on_host)
    assert (limit.device, limit.host) == expected


TOKENS, WIDTH, CHANNELS = 64, 128, 16


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def family():
    config = SimpleNamespace(num_attention_heads=4, attention_head_dim=WIDTH // 4)
    return SimpleNamespace(
        transformer=SimpleNamespace(config=config),
        vae_channels=CHANNELS,
        image_tokens=lambda shape: shape[0],
    )


def batch(kind, rows, *, guided=False, side=32):
    sample = SimpleNamespace(shape=(TOKENS,), size=(side, side), conditioning=SimpleNamespace(guided=guided))
    return ImageBatch(kind=kind, samples=[sample] * rows, prompts=[])


def inside(step):
    with step_threads(family(), step):
        return torch.get_num_threads()


FULL = ALONE // (TOKENS * WIDTH)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (batch("denoise", FULL), 1),
        (batch("denoise", FULL + 1), 2),
        (batch("denoise", FULL // 2, guided=True), 1),
        (batch("denoise", FULL, guided=True), 2),
        (batch("decode", ALONE // (CHANNELS * 32**2)), 1),
        (batch("decode", 1, side=64), 2),
        (batch("encode", 1), 2),
    ],
)
def test_the_number_follows_from_the_size_of_the_step(two_threads, step, expected):
    assert inside(step) == expected
    assert torch.get_num_threads() == 2


def test_a_step_that_fails_leaves_the_number_as_it_was(two_threads):
    with pytest.raises(ZeroDivisionError), step_threads(family(), batch("denoise", 1)):
        _ = 1 / 0
    assert torch.get_num_threads() == 2


def test_an_engine_of_one_thread_keeps_it():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert inside(batch("denoise", 10 * FULL)) == 1
    finally:
        torch.set_num_threads(before)
