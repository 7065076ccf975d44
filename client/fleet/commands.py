"""Commands of a :class:`FleetClient`: one message, carried out on every member, and one reply for all of them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ... import io_struct as wire
from ..exceptions import Unsupported

if TYPE_CHECKING:
    from .fleet import Fleet


class Commands:
    """Carries out the commands of one fleet's clients."""

    def __init__(self, fleet: "Fleet") -> None:
        self._fleet = fleet

    async def carry_out(
        self, request: wire.Request, expects: type[wire.Message], buffers: Sequence[memoryview]
    ) -> wire.Message:
        raise Unsupported(f"a fleet has no {type(request).__name__}")
