"""A small step is computed by one thread, whatever the engine has; a large one by all."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("diffusers")
from caesura.scheduler.images.request import ImageBatch
from caesura.scheduler.images.runner import ALONE, step_threads

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
