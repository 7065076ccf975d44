"""Speed of this machine right now, from three small loops that share nothing with the engine.

A time divided by the loop that resembles it holds from machine to machine, and from hour to hour on a shared
one, far better than the time itself.
"""

import time
from collections.abc import Callable
from statistics import fmean
from typing import Literal, get_args

import numpy as np
import torch

Kind = Literal["interpreter", "product", "copy"]
KINDS: tuple[Kind, ...] = get_args(Kind)
REPEATS = 5
"""Runs of which the mean counts: like a stage's sum, it grows with what shares the cores."""


def measure_yardsticks() -> dict[Kind, float]:
    """Return the milliseconds of each loop on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {kind: fmean(_milliseconds(_LOOPS[kind]()) for _ in range(REPEATS)) for kind in KINDS}
    finally:
        torch.set_num_threads(threads)


def _milliseconds(loop: Callable[[], object]) -> float:
    loop()
    started = time.perf_counter()
    loop()
    return 1e3 * (time.perf_counter() - started)


def _interpreter() -> Callable[[], object]:
    """Return a loop over dictionaries, calls and small arrays, as schedulers use them."""
    table, array = {number: [number] for number in range(256)}, np.arange(64)

    def loop() -> None:
        for turn in range(4000):
            row = table[turn % 256]
            row[0] += len(str(turn))
            array[turn % 64 : turn % 64 + 8] += 1

    return loop


def _product() -> Callable[[], object]:
    """Return a loop that reads a weight matrix beyond the first caches for few rows, as decoding does."""
    weight, rows = torch.ones(4096, 1024), torch.ones(16, 1024)

    def loop() -> None:
        for _ in range(20):
            torch.nn.functional.linear(rows, weight)

    return loop


def _copy() -> Callable[[], object]:
    source, destination = np.ones(32 << 20, np.uint8), np.zeros(32 << 20, np.uint8)

    def loop() -> None:
        for _ in range(4):
            np.copyto(destination, source)

    return loop


_LOOPS: dict[Kind, Callable[[], Callable[[], object]]] = {
    "interpreter": _interpreter,
    "product": _product,
    "copy": _copy,
}
