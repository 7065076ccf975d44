"""Messages of an asyncio client that a test carries out itself."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from caesura.client import AsyncSchedulerClient
from caesura.io_struct import Request

Kinds = type[Request] | tuple[type[Request], ...]
Act = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]


def intercept(client: AsyncSchedulerClient, kinds: Kinds, act: Act) -> None:
    """Answer messages of ``kinds`` with ``act``, whose argument sends the message after all."""
    start = client.start

    def started(request: Request, *arguments: Any) -> Any:
        if not isinstance(request, kinds):
            return start(request, *arguments)
        return asyncio.ensure_future(act(lambda: start(request, *arguments)))

    client.start = started  # type: ignore[method-assign]


def intercept_no_more(client: AsyncSchedulerClient) -> None:
    vars(client).pop("start", None)
