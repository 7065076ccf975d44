"""What waits for an answer: a thread's future or an event loop's, and how it gets what came."""

from typing import Any, Protocol, TypeVar

from ..exceptions import EngineError


class Waiter(Protocol):
    """What ``concurrent.futures.Future`` and ``asyncio.Future`` have in common."""

    def done(self) -> bool: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, exception: BaseException, /) -> None: ...


WaiterT = TypeVar("WaiterT", bound=Waiter)


def resolve(waiter: Waiter, result: Any) -> None:
    """Give ``waiter`` its result, or the error."""
    if waiter.done():  # cancelled by its event loop
        return
    if isinstance(result, EngineError):
        waiter.set_exception(result)
    else:
        waiter.set_result(result)
