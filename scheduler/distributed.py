"""Which rank this process is, and the collectives that the engine calls.

Invariants: the value is frozen and passed explicitly, there is no ambient group; at world size 1 every collective is
a no-op that returns its own argument. Larger worlds are refused when the value is built, never half-supported.
"""

from dataclasses import dataclass

from ..io_struct import CaesuraError, ErrorCode


@dataclass(frozen=True, slots=True)
class ParallelState:
    """The engine's process group.

    Raises:
        CaesuraError: ``unsupported`` for more than one rank, ``invalid_request`` for a rank outside the world.
    """

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.world_size > 1:
            raise CaesuraError(
                ErrorCode.UNSUPPORTED,
                f"tensor parallelism is not built: one rank, not {self.world_size}",
                world_size=self.world_size,
            )
        if self.world_size < 1:
            raise CaesuraError(
                ErrorCode.INVALID_REQUEST,
                f"world_size = {self.world_size} must be at least 1",
                field="world_size",
                value=self.world_size,
            )
        if not 0 <= self.rank < self.world_size:
            raise CaesuraError(
                ErrorCode.INVALID_REQUEST,
                f"rank = {self.rank} must be in [0, {self.world_size})",
                field="rank",
                value=self.rank,
            )

    def all_reduce_min(self, value: int) -> int:
        """The smallest ``value`` of all ranks."""
        return value
