"""Two-phase updates: every member loads and verifies in a session of its own, then all commit, or none does.

Invariants:
- No member is told to commit before every member that takes part has loaded and agrees with the others.
- A refusal or a failure of one member that serves aborts all. A member that has ended, or has not answered at the deadline, is out:
  it is fenced, nobody waits for it, and the others go on without it; so is one that did not serve and cannot take part.
- The session has the same name everywhere: the message id of its ``begin`` (docs/reference/lifecycle.md, "Session ownership").
- Between the first commit and the last, no member runs: the caller has paused all of them, and continues them afterwards.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from ...io_struct import TensorSpec, WeightUpdateReqOutput, new_id
from ..exceptions import EngineDied, EngineError, EngineRestarting, InternalError, ShuttingDown, TimedOut
from .errors import FleetUpdateFailed
from .members import Member

OUT = (EngineDied, EngineRestarting, ShuttingDown, TimedOut)
"""What says that a member takes no further part, rather than that the update is wrong."""

Verify = Literal["counts", "checksums"]
"""``counts``: every member has written as many tensors. ``checksums``: every member has the same bytes in every parameter."""

LEAST_COMMIT_S, ABORT_S = 30.0, 30.0
"""How long members may take to commit, however late it is, and to abort."""
SPARE_S = 60.0
"""By how much the engines' own deadline of a session is later than the fleet's."""

Load = Callable[[Sequence[Member], str, float], Awaitable[Mapping[Member, Any]]]
"""Gives the members the weights within the session of that name and the seconds; a member's value is its reply, or its error."""


@dataclass(slots=True)
class Answers:
    """What the members answered to one command."""

    replies: dict[Member, Any] = field(default_factory=dict)
    failed: dict[Member, EngineError] = field(default_factory=dict)
    """Refusals and failures of members that are there."""
    out: dict[Member, EngineError] = field(default_factory=dict)
    """Members that have ended, or had not answered in time."""

    def sort(self, member: Member, answer: Any) -> None:
        """Put an answer where it belongs."""
        if isinstance(answer, OUT):
            self.out[member] = answer
        elif isinstance(answer, EngineError):
            self.failed[member] = answer
        else:
            self.replies[member] = answer

    def raise_first(self) -> None:
        """Raise the first error of a member, if there is one, with the member's name as a note."""
        for member, error in (self.failed | self.out).items():
            error.add_note(f"engine {member.name}")
            raise error


async def everywhere(
    members: Sequence[Member], act: Callable[[Member], Awaitable[Any]], timeout: float | None
) -> Answers:
    """Do the same on all members at once; what has not ended after ``timeout`` seconds is not waited for."""
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
            answers.sort(member, TimedOut(f"no answer within {timeout:g} s", timeout=timeout))
            continue
        error = task.exception()
        if error is not None and not isinstance(error, EngineError):
            raise error
        answers.sort(member, task.result() if error is None else error)
    return answers


@dataclass(frozen=True, slots=True)
class Committed:
    """An update that the fleet has committed."""

    replies: dict[Member, WeightUpdateReqOutput]
    """The reply to the commit, of each member that has the new weights."""
    out: dict[Member, EngineError]
    """Members that have ended or were too late: they do not have the new weights, or nobody knows."""


class FleetSession:
    """One update of several members, from ``begin`` to its commit or abort; the members are paused by its owner before the commit."""

    def __init__(self, *, verify: Verify, session_id: str | None = None) -> None:
        self.id = session_id or new_id()
        """Name of the session on every member."""
        self.committing = False
        """Whether members are being told to commit: it goes on to the end then, whoever stops waiting."""
        self.out: dict[Member, EngineError] = {}
        """Members that were lost on the way."""
        self._verify: Verify = verify
        self._members: list[Member] = []

    @property
    def members(self) -> list[Member]:
        """Those that take part, now."""
        return list(self._members)

    async def begin(
        self,
        paused: Answers,
        *,
        timeout: float,
        deadline_s: float | None,
        manifest: list[TensorSpec] | None = None,
    ) -> None:
        """Open it on the members that ``paused``, the answers to a pause, says are there.

        Raises:
            FleetUpdateFailed: of this and the following: a member refused or failed, or none is left; all are aborted.
        """

        async def begin(member: Member) -> Any:
            if not member.serves:  # what an earlier update left open there
                with suppress(EngineError):
                    await member.client.end_weight_update(commit=False, force=True)
            return await member.client.begin_weight_update(
                message_id=self.id, deadline_s=deadline_s, manifest=manifest
            )

        self._members = list(paused.replies)
        await self._settle(paused)
        await self._settle(await everywhere(self._members, begin, timeout))

    async def load(self, load: Load, timeout: float) -> dict[Member, Any]:
        """Give every member weights; their replies. Raises as :meth:`begin`."""
        loaded = Answers()
        for member, answer in (await load(list(self._members), self.id, timeout)).items():
            loaded.sort(member, answer)
        await self._settle(loaded)
        return loaded.replies

    async def commit(self, label: str | None, timeout: float) -> Committed:
        """Verify, then commit everywhere. Raises as :meth:`begin`, before any member was told to commit."""
        await self._settle(await _verified(self._members, self._verify, timeout))
        self.committing = True
        answers = await everywhere(
            self._members,
            lambda member: member.client.end_weight_update(
                commit=True, session_id=self.id, weight_version=label
            ),
            max(timeout, LEAST_COMMIT_S),
        )
        lost = answers.out | answers.failed
        if not answers.replies:
            raise self._failure(self.out | lost)
        self.out |= lost
        return Committed(answers.replies, self.out)

    async def abort(self) -> None:
        """End it everywhere without a commit."""
        await everywhere(
            self._members,
            lambda member: member.client.end_weight_update(commit=False, session_id=self.id),
            ABORT_S,
        )

    async def _settle(self, answers: Answers) -> None:
        """Go on with those that answered well, or abort all if one refused or nobody is left."""
        if any(member.serves for member in self._members):
            for member in [each for each in answers.failed if not each.serves]:
                answers.out[member] = answers.failed.pop(member)
        self.out |= answers.out
        self._members = [member for member in self._members if member not in self.out]
        if answers.failed or not self._members:
            await self.abort()
            raise self._failure({**answers.failed, **self.out})

    @staticmethod
    def _failure(reasons: Mapping[Member, EngineError]) -> FleetUpdateFailed:
        return FleetUpdateFailed({member.name: error for member, error in reasons.items()}, [])


async def two_phase(
    session: FleetSession, paused: Answers, load: Load, *, label: str | None, deadline_s: float
) -> Committed:
    """A whole update within ``deadline_s``. Cancelled before its commit: aborted.

    Raises:
        FleetUpdateFailed: as :meth:`FleetSession.begin`.
    """
    deadline = time.monotonic() + deadline_s

    def left() -> float:
        return max(0.0, deadline - time.monotonic())

    try:
        await session.begin(paused, timeout=left(), deadline_s=deadline_s + SPARE_S)
        await session.load(load, left())
        return await session.commit(label, left())
    except asyncio.CancelledError:
        await session.abort()
        raise


async def _verified(members: Sequence[Member], verify: Verify, timeout: float) -> Answers:
    """Whether all members have loaded the same; a member that differs from the first has failed."""

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
