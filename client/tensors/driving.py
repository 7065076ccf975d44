"""Does what the steps of an update ask for, in a blocking client and in an asyncio one.

Invariant: whatever happens to a step, an interrupt and a cancellation included, is thrown into the steps, which end their session.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ...io_struct import Request, WeightUpdateReqOutput
from .steps import Await, Send, Steps

Failed = Callable[[Request, BaseException], None]
"""Is told which request got no reply, but which error."""


def drive(
    steps: Steps, start: Callable[[Send], Any], wait: Callable[[Await], Any], failed: Failed
) -> WeightUpdateReqOutput:
    """``start`` sends and returns a ticket, ``wait`` returns its reply or raises."""
    try:
        wanted = next(steps)
        while True:
            try:
                if isinstance(wanted, Send):
                    came = start(wanted)
                elif isinstance(wanted, Await):
                    came = wait(wanted)
                else:
                    came = wanted.work()
            except BaseException as error:  # noqa: BLE001  the generator ends its session, and raises it again
                if isinstance(wanted, Await):
                    failed(wanted.request, error)
                wanted = steps.throw(error)
            else:
                wanted = steps.send(came)
    except StopIteration as stop:
        final: WeightUpdateReqOutput = stop.value
        return final


async def drive_async(
    steps: Steps, start: Callable[[Send], Any], wait: Callable[[Await], Awaitable[Any]], failed: Failed
) -> WeightUpdateReqOutput:
    """:func:`drive` on an event loop, which work that may block does not stop."""
    try:
        wanted = next(steps)
        while True:
            try:
                if isinstance(wanted, Send):
                    came = start(wanted)
                elif isinstance(wanted, Await):
                    came = await wait(wanted)
                else:
                    came = await asyncio.to_thread(wanted.work)
            except BaseException as error:  # noqa: BLE001  as above
                if isinstance(wanted, Await):
                    failed(wanted.request, error)
                wanted = steps.throw(error)
            else:
                wanted = steps.send(came)
    except StopIteration as stop:
        final: WeightUpdateReqOutput = stop.value
        return final
