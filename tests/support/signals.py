"""Signals that a thread blocks for a while, as those of an engine do; its children inherit that."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def blocked(*signals: signal.Signals) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
