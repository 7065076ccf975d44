"""The two-phase weight session of a group: every member loads and verifies, then all commit, or none does.

Invariants:
- No member is told to commit before every member that takes part has loaded and agrees with the rest.
- A refusal or failure of a serving member fails the session for all. A member that has ended, is late, or was
  not serving and fails, is out: the rest go on without it.
- The session has one name on all members: the message id of its ``begin`` (docs/reference/lifecycle.md).
- No member generates between the first commit and the last: the caller has paused all of them.
- A session that has failed is open until its caller aborts it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from ...io_struct import TensorSpec, new_id
from ..exceptions import EngineDied, EngineError, EngineRestarting, InternalError, ShuttingDown, TimedOut
from .members import Member

OUT = (EngineDied, EngineRestarting, ShuttingDown, TimedOut)
"""Errors of a member that takes no further part, as opposed to those of a wrong update."""
Verify = Literal["counts", "checksums"]
"""``counts`` compares the number of written tensors, ``checksums`` the bytes of every parameter."""
LEAST_COMMIT_S, ABORT_S = 30.0, 30.0
"""Seconds that members may take to commit, however late it is, and to abort."""
SPARE_S = 60.0
"""Seconds by which the engines' own deadline of a session is later than the group's."""


class FleetUpdateFailed(EngineError):  # noqa: N818  (as the errors of one engine)
    """An update of a fleet was not committed anywhere: no member serves the new weights.

    Members that had written a byte are poisoned and fenced; the others serve the weights that they had.

    Attributes:
        reasons: the error of each member that had one, by name.
        serving: names of the members that still serve, with the weights of before.
    """

    error_code = EngineError.error_code

    def __init__(self, reasons: Mapping[str, EngineError], serving: list[str]) -> None:
        messages = {name: error.message for name, error in reasons.items()}
        told = "; ".join(f"{name}: {message}" for name, message in messages.items())
        super().__init__(f"no engine was updated: {told}", members=messages, serving=serving)
        self.reasons = dict(reasons)
        self.serving = serving
        first = next(iter(reasons.values()), None)
        if first is not None:
            self.code = first.code


@dataclass(slots=True)
class Answers:
    replies: dict[Member, Any] = field(default_factory=dict)
    failed: dict[Member, EngineError] = field(default_factory=dict)
    """Refusals and failures of members that are there."""
    out: dict[Member, EngineError] = field(default_factory=dict)
    """Errors of members that have ended, or had not answered in time."""

    def add(self, member: Member, answer: Any) -> None:
        if isinstance(answer, OUT):
            self.out[member] = answer
        elif isinstance(answer, EngineError):
            self.failed[member] = answer
        else:
            self.replies[member] = answer

    def raise_first(self) -> None:
        """Raise the first error, if there is one, with the member's name as a note."""
        for member, error in (self.failed | self.out).items():
            error.add_note(f"engine {member.name}")
            raise error


Load = Callable[[Sequence[Member], str, float], Awaitable[Answers]]
"""Sends weights to the members within the session of that name and the seconds."""


async def everywhere(
    members: Sequence[Member], act: Callable[[Member], Awaitable[Any]], timeout: float | None
) -> Answers:
    """Do the same on all members at once, and wait at most ``timeout`` seconds for them."""
    tasks = {asyncio.ensure_future(act(member)): member for member in members}
    answers = Answers()
    if not tasks:
        return answers
    try:
        _, late = await asyncio.wait(tasks, timeout=None if timeout is None else max(0.0, timeout))
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        raise
    for task, member in tasks.items():
        if task in late:
            task.cancel()
            answers.add(member, TimedOut(f"no answer within {timeout:g} s", timeout=timeout))
            continue
        error = task.exception()
        if error is not None and not isinstance(error, EngineError):
            raise error
        answers.add(member, task.result() if error is None else error)
    return answers


class Session:
    """An update of several members, from ``begin`` to its commit or abort."""

    def __init__(self, *, verify: Verify, session_id: str | None = None) -> None:
        self.id = session_id or new_id()
        self.committing = False
        """True once members are told to commit: it then runs to the end, whoever stops waiting."""
        self.members: list[Member] = []
        self.out: dict[Member, EngineError] = {}
        self._verify: Verify = verify

    async def begin(
        self,
        paused: Answers,
        *,
        timeout: float,
        deadline_s: float | None,
        manifest: list[TensorSpec] | None = None,
    ) -> None:
        """Open it on the members that have answered ``paused``; raise FleetUpdateFailed if one refuses."""

        async def begin(member: Member) -> Any:
            if not member.serves:  # an earlier update may have left a session open there
                with suppress(EngineError):
                    await member.client.end_weight_update(commit=False, force=True)
            return await member.client.begin_weight_update(
                message_id=self.id, deadline_s=deadline_s, manifest=manifest
            )

        self.members = list(paused.replies)
        self.settle(paused)
        self.settle(await everywhere(self.members, begin, timeout))

    async def commit(self, label: str | None, timeout: float) -> Answers:
        """Verify, then commit everywhere; return the commits' replies, and the members that are out.

        Raises:
            FleetUpdateFailed: before any member was told to commit; or all refused to.
        """
        self.settle(await _verified(self.members, self._verify, timeout))
        self.committing = True
        answers = await everywhere(
            self.members,
            lambda member: member.client.end_weight_update(
                commit=True, session_id=self.id, weight_version=label
            ),
            max(timeout, LEAST_COMMIT_S),
        )
        lost = answers.out | answers.failed
        if not answers.replies:
            raise _failure(self.out | lost)
        self.out |= lost
        return Answers(answers.replies, out=self.out)

    async def abort(self) -> None:
        """End it everywhere without a commit."""
        await everywhere(
            self.members,
            lambda member: member.client.end_weight_update(commit=False, session_id=self.id),
            ABORT_S,
        )

    def settle(self, answers: Answers) -> None:
        """Go on with the members that have replied. Raises as :meth:`begin`."""
        if any(member.serves for member in self.members):
            for member in [each for each in answers.failed if not each.serves]:
                answers.out[member] = answers.failed.pop(member)
        self.out |= answers.out
        self.members = [member for member in self.members if member not in self.out]
        if answers.failed or not self.members:
            raise _failure({**answers.failed, **self.out})


async def two_phase(
    session: Session, paused: Answers, load: Load, *, label: str | None, deadline_s: float
) -> Answers:
    """Update all members within ``deadline_s`` seconds. A failure before the commit aborts it."""
    deadline = time.monotonic() + deadline_s

    def left() -> float:
        return max(0.0, deadline - time.monotonic())

    try:
        await session.begin(paused, timeout=left(), deadline_s=deadline_s + SPARE_S)
        session.settle(await load(session.members, session.id, left()))
        return await session.commit(label, left())
    except (FleetUpdateFailed, asyncio.CancelledError):
        if not session.committing:
            await session.abort()
        raise


async def _verified(members: Sequence[Member], verify: Verify, timeout: float) -> Answers:
    """Compare what the members have loaded; one that differs from the first serving member has failed."""

    async def look(member: Member) -> Any:
        if verify == "checksums":
            return (await member.client.check_weights("checksum")).total
        session = (await member.client.status()).session
        return None if session is None else session.written_tensors

    answers = await everywhere(members, look, timeout)
    serving_first = sorted(answers.replies, key=lambda member: not member.serves)
    expected = answers.replies[serving_first[0]] if serving_first else None
    for member, found in list(answers.replies.items()):
        if found != expected or found is None:
            del answers.replies[member]
            answers.failed[member] = InternalError(
                f"it has loaded other weights than the others: {verify} {found}, not {expected}"
            )
    return answers


def _failure(reasons: Mapping[Member, EngineError]) -> FleetUpdateFailed:
    return FleetUpdateFailed({member.name: error for member, error in reasons.items()}, [])
