"""When the engine stands still: the barrier that ends the step in flight, and what keeps an engine from
idling.
"""

from collections.abc import Generator
from typing import TYPE_CHECKING

from ..runtime.config import PAGE_SIZE
from .operations import Wait

if TYPE_CHECKING:
    from ..runtime.engine import Engine


def barrier(engine: "Engine") -> Generator[Wait, None, None]:
    """Wait until no step is in flight and the forward stream is idle; the caller has closed the gate."""
    while engine.batcher.in_flight:
        yield Wait.STEP
    engine.runner.synchronize()


def is_idle(engine: "Engine") -> bool:
    """Return True if nothing is held, in flight or written, nor waits, unless the engine is paused."""
    waiting_blocks = len(engine.waiting) > 0 and engine.state.generation != "paused"
    holding = engine.batcher.num_holding > 0 or engine.batcher.in_flight
    return not (holding or waiting_blocks or engine.sessions.is_working)


def held_kind(engine: "Engine") -> str:
    """Return the word for what a pause in place freezes: KV, or latents."""
    return "KV" if engine.batcher.images is None else "latents"


def pending(engine: "Engine") -> dict[str, int]:
    """Return counts of the work that keeps the engine from being idle, as details of an error."""
    return {
        "running": engine.batcher.num_running,
        "prefilling": engine.batcher.num_prefilling,
        "waiting": len(engine.waiting),
        "held_tokens": engine.cache.usage().held * PAGE_SIZE,
    }
