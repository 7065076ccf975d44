"""The lease of a server's pause, counted beside the engines.

An engine counts the lease of its own pause. This count is for what no engine knows: that all have died, that one has come back since
and was paused without a lease, or that the weights of all are half an update that its sender has left.

Invariant: it is not over before an engine's own, which the same commands renew.
"""

from collections.abc import Coroutine
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, TypeVar

from ...io_struct.control import LeaseAction

ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class PauseLease:
    """How long the owner of the pause may send nothing, and what happens then."""

    seconds: float
    action: LeaseAction
    _under_way: int = 0
    _renewed: float = field(default_factory=monotonic)

    @property
    def left_s(self) -> float:
        """Seconds until it is over."""
        return self.seconds - (0.0 if self._under_way else monotonic() - self._renewed)

    async def renewed_by(self, command: Coroutine[Any, Any, ResultT]) -> ResultT:
        """What ``command``, one of the owner's, returns: the lease is not over before it has ended, and begins again then."""
        self._under_way += 1
        try:
            return await command
        finally:
            self._under_way -= 1
            self._renewed = monotonic()
