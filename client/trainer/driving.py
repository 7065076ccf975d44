# Generated from trainer/async_driving.py by `python client/_blocking/generate.py`: edit that file.
"""Carries out the steps of an update.

Invariant: every exception of a step, interrupts and cancellations included, is thrown into the steps, which
then end their session.
"""

from collections.abc import Callable
from typing import Any

from ..connection.channel import run
from .steps import Run, Send, Steps


def drive(steps: Steps, start: Callable[[Send], Any], wait: Callable[[Any, Any], Any]) -> Any:
    """Carry out ``steps`` and return their reply.

    Args:
        start: sends a message and returns its ticket.
        wait: waits for the answer, given the ticket and the request.
    """
    try:
        wanted = next(steps)
        while True:
            try:
                if isinstance(wanted, Send):
                    came = start(wanted)
                elif isinstance(wanted, Run):
                    came = run(wanted.work)
                else:
                    came = wait(wanted.ticket, wanted.request)
            except BaseException as error:  # noqa: BLE001  the steps raise it again
                wanted = steps.throw(error)
            else:
                wanted = steps.send(came)
    except StopIteration as stop:
        return stop.value
