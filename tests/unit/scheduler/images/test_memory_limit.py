"""How many samples start: what they hold together, on one memory or on two."""

from types import SimpleNamespace

import pytest

pytest.importorskip("diffusers")
from caesura.scheduler.images.memory_limit import MemoryLimit

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
def test_the_limit_is_a_share_of_what_is_free_beside_what_is_still_to_come(device, on_host, expected):
    limit = MemoryLimit.of_free_memory(device, memory(64 * GB), 0.5, kept_free=10 * GB, on_host=on_host)
    assert (limit.device, limit.host) == expected
