"""Engines that answer what the HTTP server asks of them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support.fake_scheduler import FakeScheduler, Handler, answer
from support.http_server import Listening, listening

from caesura.io_struct import ErrorCode, ErrorReply, Message, Request


def agreeing(request: Request) -> Iterable[Message | bytes]:
    try:
        return answer(request)
    except AssertionError:
        return [ErrorReply(id=request.id, code=ErrorCode.UNSUPPORTED, message="not here")]


@pytest.fixture(scope="module")
def agreeing_engine(tmp_path_factory) -> Iterator[FakeScheduler]:
    with FakeScheduler(f"ipc://{tmp_path_factory.mktemp('engine')}/s", agreeing) as engine:
        yield engine


@pytest.fixture
def serve(tmp_path) -> Iterator[Callable[..., tuple[FakeScheduler, Listening]]]:
    """Start an engine that ``handler`` scripts, and a server over it with the options of ``listening``."""
    with ExitStack() as stack:

        def start(handler: Handler = answer, **options: Any) -> tuple[FakeScheduler, Listening]:
            engine = stack.enter_context(FakeScheduler(f"ipc://{tmp_path}/engine", handler))
            server = listening(endpoint=engine.endpoint, connect_timeout=None, **options)
            return engine, stack.enter_context(server)

        yield start
