"""Carries out the steps of an update.

Invariant: every exception of a step, interrupts and cancellations included, is thrown into the steps, which then end their session.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from ...io_struct import Message, Request, WeightUpdateReqOutput
from ..connection.async_channel import Result, run, wait_for
from .steps import Await, Send, Steps


class Start(Protocol):
    """A client's ``start``: sends, and returns a ticket."""

    def __call__(
        self, request: Request, expects: type[Message], buffers: Sequence[memoryview] = ()
    ) -> Result: ...


async def drive(
    steps: Steps, start: Start, timeout: float | None, failed: Callable[[Request, BaseException], None]
) -> WeightUpdateReqOutput:
    """Carry out ``steps``. ``timeout`` limits each wait for an answer; ``failed`` is called with a request and the error it got."""
    try:
        wanted = next(steps)
        while True:
            try:
                if isinstance(wanted, Send):
                    came = start(wanted.request, wanted.expects, wanted.buffers)
                elif isinstance(wanted, Await):
                    came = await wait_for(wanted.ticket, wanted.request.id, timeout)
                else:
                    came = await run(wanted.work)
            except BaseException as error:  # noqa: BLE001  the generator ends its session, and raises it again
                if isinstance(wanted, Await):
                    failed(wanted.request, error)
                wanted = steps.throw(error)
            else:
                wanted = steps.send(came)
    except StopIteration as stop:
        final: WeightUpdateReqOutput = stop.value
        return final
