"""Sends one message to several replicas, and makes one answer of theirs.

Invariant: an error names the replicas that it is of, unless all have the same one: then it is what one engine would have said.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from ...io_struct import Message, Request
from ..connection.async_channel import wait_for
from ..exceptions import EngineError, EngineRestarting, error_for
from .combining import combined
from .members import Member
from .session import Answers

RequestT = TypeVar("RequestT", bound=Request)


def sent_to(
    request: RequestT,
    expects: type[Message],
    buffers: Sequence[memoryview] = (),
    change: Callable[[Member, RequestT], RequestT] = lambda _, request: request,
) -> Callable[[Member], Awaitable[Any]]:
    """What sends ``request``, as ``change`` makes it for a member, and waits for the reply."""

    async def send(member: Member) -> Any:
        own = change(member, msgspec.structs.replace(request))
        return await wait_for(member.client.start(own, expects, buffers), own.id, None)

    return send


def combined_answer(answers: Answers, position: Callable[[Member], int], tp: int) -> Any:
    """The one reply.

    Raises:
        EngineError: a replica has refused or failed, or none has answered. EngineRestarting: none was there.
    """
    if answers.failed:
        raise one_error(answers.failed, among=len(answers.failed) + len(answers.replies))
    if not answers.replies and not answers.out:
        raise EngineRestarting("no replica is there now")
    if not answers.replies:
        raise one_error(answers.out, among=len(answers.out))
    return combined({position(member): reply for member, reply in answers.replies.items()}, tp)


def uniform(errors: Mapping[Any, EngineError]) -> bool:
    """Whether all say the same."""
    return len({(str(error.code), error.message) for error in errors.values()}) == 1


def one_error(errors: Mapping[Member, EngineError], *, among: int) -> EngineError:
    """The first of ``errors``, which are those of some of ``among`` replicas."""
    first = next(iter(errors.values()))
    if len(errors) == among and uniform(errors):
        return first
    told = "; ".join(f"{member.name}: {error.message}" for member, error in errors.items())
    members = {member.name: error.message for member, error in errors.items()}
    return error_for(str(first.code), told, {**first.detail, "members": members})
