"""A scheduler process like any other, but that its wall clock jumps on request and that it looks for lost clients more often.

Invariants: nothing else differs from ``python -m caesura.scheduler``. ``time.time`` is replaced before anything imports it;
SIGUSR2 moves it by :data:`JUMP_S`, forwards and backwards in turn. The monotonic clock is never touched.

    python benchmarks/harness/faults/fault_engine.py <options of caesura scheduler>
"""

import signal
import sys
import time

JUMP_S = 86_400.0
KEEPALIVE_S = 0.25
"""Instead of two seconds, so that a fault takes less time; the mechanism is the same."""


def let_the_clock_jump() -> None:
    """From now on SIGUSR2 moves the wall clock of this process."""
    offset, original = [0.0], time.time

    def shifted() -> float:
        return original() + offset[0]

    def jump(number: int, frame: object) -> None:
        offset[0] = 0.0 if offset[0] else (JUMP_S if original() % 2 < 1 else -JUMP_S)

    time.time = shifted
    signal.signal(signal.SIGUSR2, jump)


def main() -> None:
    let_the_clock_jump()
    from caesura.scheduler import loop
    from caesura.scheduler.__main__ import _command

    loop.KEEPALIVE_S = KEEPALIVE_S
    _command()(sys.argv[1:])


if __name__ == "__main__":
    main()
