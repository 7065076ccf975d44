"""The channel of a server's replicas: that of a fleet, which answers every command of one engine besides.

Invariant: every message has one reply of the type that one engine would send, or one error. What a command does on each replica is
``commands.py``; generations are the fleet's.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...io_struct import AbortReq, Message, Request
from ..connection.async_channel import Result
from .channel import FleetChannel
from .dispatcher import Dispatcher

if TYPE_CHECKING:
    from .commands import Commands


class CommandChannel(FleetChannel):
    """A fleet's channel with commands."""

    def __init__(self, dispatcher: Dispatcher, commands: "Commands") -> None:
        super().__init__(dispatcher)
        self._commands = commands

    def start_call(
        self, request: Request, expects: type[Message], buffers: Sequence[memoryview] = ()
    ) -> Result:
        """Send a message to whom it concerns: a command to all replicas."""
        self._prepare()
        if isinstance(request, AbortReq):
            work = self._commands.abort(request, self._abort(request))
        elif (found := self._commands.of(request, expects, buffers)) is not None:
            work = found
        else:
            return super().start_call(request, expects, buffers)
        task = asyncio.ensure_future(work)
        task.add_done_callback(_seen)  # whoever asked may have left
        return task


def _seen(task: "asyncio.Task[Message]") -> None:
    if not task.cancelled():
        task.exception()
