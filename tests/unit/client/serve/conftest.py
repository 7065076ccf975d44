"""An engine that agrees to whatever the HTTP server asks of it."""

from collections.abc import Iterable, Iterator

import pytest
from support.fake_scheduler import FakeScheduler, answer

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
