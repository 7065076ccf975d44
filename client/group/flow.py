"""One generation of a fleet: as long as a member serves, no end of another one ends it.

Invariants:
- The caller sees one :class:`Generation`: every token once, in order, and one result per sample, whoever sampled its tokens.
- At most one engine at a time is followed for a sample: only the loss of the attempt that has it makes it wait
  for another. What an engine sends after it was given up is ignored.
- A token is passed on only if the fleet has committed the epoch that sampled it. An engine with another epoch is fenced.
- A sample is continued from the tokens that had arrived, on weights that are at least as new as those that sampled them.
- What the caller did (an abort) and what is wrong with the request itself end it; the end of an engine does not.
"""

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from ...io_struct import (
    AbortReq,
    AbortReqOutput,
    DeltaWeights,
    ErrorCode,
    FinishReason,
    GenerateReqInput,
    WeightVersionSpan,
    new_id,
)
from ..connection.async_channel import Deltas, Result
from ..connection.connection import Generation
from ..connection.results import GenerateOutput, TokenDelta
from ..exceptions import (
    EngineDied,
    EngineError,
    EnginePaused,
    EngineRestarting,
    EpochBehind,
    MemoryReleased,
    QueueFull,
    ShuttingDown,
    WeightsInvalid,
    WeightsPoisoned,
)
from .continuation import Part, continuation, ended_here, joined
from .members import Member, foreign_commit

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

LOST = (EngineDied, EngineRestarting, ShuttingDown)
"""The engine is gone, or goes."""
UNFIT = (EpochBehind, WeightsInvalid, WeightsPoisoned, MemoryReleased)
"""The engine answers, but not with the weights that the fleet takes it for."""
_ABORTED = FinishReason(type="abort", message="Aborted")
FULL = (QueueFull, EnginePaused)
"""The engine takes nothing now."""


@dataclass(slots=True)
class _Sample:
    """One sample of a flow."""

    index: int
    part: Part
    """The tokens that have arrived, over all attempts."""
    attempt: "_Attempt | None" = None
    """None: it waits for a member, or has ended."""
    ended: bool = False
    aborted: bool = False
    """Its caller does not want more of it."""


class _Attempt:
    """Some samples of a flow on one member: takes what that member sends of them."""

    def __init__(
        self, flow: "Flow", member: Member, request: GenerateReqInput, samples: list[_Sample]
    ) -> None:
        self.flow, self.member, self.request = flow, member, request
        self.rid = request.rid or request.id
        self.bases = {sample.index: sample.part.copy() for sample in samples}
        """What each sample had before."""
        self.left = set(self.bases)
        """The samples that have not ended here."""
        self.given_up = False
        self.tail: TokenDelta | None = None
        """The last tokens of a sample, without details: the result, which follows at once, says which weights sampled them."""
        member.load += len(samples)

    def on_tokens(self, delta: TokenDelta) -> None:
        if delta.details is None:
            self.tail = delta
        elif self._knows(delta.details.weights):
            self._pass_on(delta)

    def on_finished(self, output: GenerateOutput) -> None:
        tail, self.tail = self.tail, None
        if not self._knows(output.weight_versions):
            return
        if tail is not None:
            self._pass_on(tail)
        self.leave(output.index)
        self.flow.on_finished(self, output)

    def _pass_on(self, delta: TokenDelta) -> None:
        base = len(self.bases[delta.index])
        self.flow.on_tokens(replace(delta, start=delta.start + base), self.member)

    def _knows(self, weights: Iterable[DeltaWeights | WeightVersionSpan]) -> bool:
        """Return True if tokens of ``weights`` may be passed on; fence the member if somebody else has committed them."""
        if not self.given_up:
            foreign = next((each for each in weights if not self.member.has_given(each.epoch)), None)
            if foreign is not None:
                self.flow.on_foreign(self.member, foreign)
        return not self.given_up

    def on_end(self, waiter: Result) -> None:
        """The member has answered all of it, or cannot any more."""
        error = waiter.exception() if not waiter.cancelled() else None
        output = error.output if isinstance(error, EngineError) else None
        if output is not None and not self._knows(output.weight_versions):
            return
        left = sorted(self.left)
        for index in left:
            self.leave(index)
        if not self.given_up and isinstance(error, EngineError):
            self.flow.on_failed(self, left, error)

    def give_up(self) -> None:
        """Nothing that the member still sends counts."""
        self.given_up = True
        left = sorted(self.left)
        for index in left:
            self.leave(index)
        if left:
            self.abort()

    def abort(self, index: int | None = None) -> None:
        """Tell the member, without waiting for its reply."""
        with suppress(EngineError):
            self.member.client.channel.start_call(AbortReq(rid=self.rid, index=index), AbortReqOutput)

    def leave(self, index: int) -> None:
        """The member has no more to do with this sample."""
        if index in self.left:
            self.left.remove(index)
            self.member.load -= 1


class Flow:
    """A request to a fleet, from its arrival to its last sample."""

    def __init__(
        self,
        dispatcher: "Dispatcher",
        request: GenerateReqInput,
        generation: Generation[Result, Deltas],
        *,
        key: str | None,
    ) -> None:
        self.generation = generation
        self.key = key
        """Its routing key."""
        self._dispatcher = dispatcher
        self._request = request
        """As the caller sent it, with a seed."""
        self._samples = {
            index: _Sample(index, Part())
            for index in range(request.first_sample, request.first_sample + request.sampling_params.n)
        }
        self._attempts: set[_Attempt] = set()
        self._refused_by: dict[str, EngineError] = {}
        self._began = time.monotonic()
        self.moves = 0
        """How often a sample of it was continued on another engine."""

    @property
    def waits(self) -> bool:
        """Whether a sample of it waits for a member."""
        return not self.generation.waiter.done() and any(self._waiting())

    @property
    def prompt(self) -> list[int]:
        """The caller's prompt."""
        return self._request.input_ids

    @property
    def least_epoch(self) -> int | None:
        """The fleet's epoch that a member must have reached to take what waits of it; None: any."""
        seen = [each.part.newest_epoch for each in self._waiting()]
        known = [each for each in (self._request.min_weights_epoch, *seen) if each is not None]
        return max(known, default=None)

    @property
    def salt(self) -> str:
        """The cache salt of the request."""
        return self._request.cache_salt

    @property
    def refused_by(self) -> dict[str, EngineError]:
        """Members that had no room for it, since the last one that took a part of it."""
        return self._refused_by

    def dispatch(self, member: Member) -> None:
        """Give ``member`` all samples that wait."""
        waiting = list(self._waiting())
        untouched = len(waiting) == len(self._samples) and not any(len(each.part) for each in waiting)
        for samples in [waiting] if untouched else [[each] for each in waiting]:
            if samples[0].attempt is None:  # else a start that failed has sent them elsewhere
                self._start(member, samples)

    def leave(self, member: Member) -> None:
        """Give up on ``member``; what it had waits for another one."""
        for attempt in [each for each in self._attempts if each.member is member]:
            lost = sorted(attempt.left)
            attempt.give_up()
            self._attempts.discard(attempt)
            self._again(attempt, lost)

    def abort(self, index: int | None = None) -> int:
        """As the caller asked; returns how many samples were live."""
        live = [each for each in self._samples.values() if not each.ended and index in (None, each.index)]
        for sample in live:
            sample.aborted = True
        for attempt in list(self._attempts):
            attempt.abort(index)
        for sample in live:
            if sample.attempt is None:
                self._end(sample, self._ended_here(sample, _ABORTED))
        return len(live)

    def fail(self, error: EngineError) -> None:
        """End the whole request with ``error``; engines that work on it are told."""
        if self.generation.waiter.done():
            return
        failed = next((each for each in self._samples.values() if not each.ended and len(each.part)), None)
        if failed is not None and error.output is None:
            reason = FinishReason(type="error", message=error.message, code=str(error.code))
            error.output = self._ended_here(failed, reason)
        self.generation.fail(error)
        self.drop()

    def drop(self) -> None:
        """The caller has its answer, or wants none: engines that still work on it are told."""
        for attempt in list(self._attempts):
            attempt.give_up()
        self._attempts.clear()
        self._dispatcher.ended(self)

    def on_end(self, waiter: Result) -> None:
        """Drop what no engine has ended: the caller's sink has raised, or its waiter was cancelled."""
        if not waiter.cancelled():
            waiter.exception()  # counts as seen
        if self._dispatcher.flows.get(self.generation.rid) is self:
            self.drop()

    def on_tokens(self, delta: TokenDelta, member: Member) -> None:
        """New tokens of one sample, at their place in the whole output."""
        sample = self._samples[delta.index]
        if delta.details is not None:
            sample.part.add(delta, member.fleet_epoch)
        self.generation.deliver(delta if self._request.stream_details else replace(delta, details=None))

    def on_foreign(self, member: Member, weights: DeltaWeights | WeightVersionSpan) -> None:
        """``member`` has sampled with weights that somebody else has committed; that gives up all its attempts."""
        self._dispatcher.fence(member, foreign_commit(weights.version, weights.epoch))

    def on_finished(self, attempt: _Attempt, output: GenerateOutput) -> None:
        """One sample has ended, or its engine has ended it for reasons of its own."""
        sample = self._samples[output.index]
        reason = output.finish_reason
        whole = joined(
            self._request,
            attempt.bases[output.index],
            output,
            attempt.member.fleet_epoch,
            rid=self.generation.rid,
        )
        engine_ends = reason.code in (ErrorCode.SHUTTING_DOWN, ErrorCode.ENGINE_DIED)
        if engine_ends and not self._dispatcher.ending:
            sample.part = Part.of(whole)
            self._dispatcher.lost(attempt.member, EngineDied(reason.message or f"{attempt.member.name} ends"))
            self._again(attempt, [output.index])
        else:
            self._end(sample, replace(whole, e2e_latency=time.monotonic() - self._began))

    def on_failed(self, attempt: _Attempt, indices: list[int], error: EngineError) -> None:
        """The member cannot, or will not, go on with ``indices``."""
        self._attempts.discard(attempt)
        unfinished = [index for index in indices if not self._samples[index].ended]
        if not unfinished:
            return
        if isinstance(error, LOST):
            self._dispatcher.lost(attempt.member, error)
        elif isinstance(error, UNFIT):
            self._dispatcher.unfit(attempt.member, error)
        elif isinstance(error, FULL):
            self._refused_by[attempt.member.name] = error
        else:
            error.output = error.output and self._whole(attempt, error.output)
            self.fail(error)
            return
        self._again(attempt, unfinished)

    def _start(self, member: Member, samples: list[_Sample]) -> None:
        first = samples[0]
        original = self._request
        rid = f"{self.generation.rid[:90]}~{new_id()[:12]}" if self.moves else self.generation.rid
        if len(first.part) or self.moves:
            request = continuation(original, first.index, first.part, rid=rid, message_id=new_id())
        else:
            request = msgspec.structs.replace(original, id=new_id(), rid=rid)
        if len(samples) > 1:
            request = msgspec.structs.replace(
                request, first_sample=original.first_sample, sampling_params=original.sampling_params
            )
        own = member.own_epoch(request.min_weights_epoch)
        request = msgspec.structs.replace(request, stream=True, stream_details=True, min_weights_epoch=own)
        attempt = _Attempt(self, member, request, samples)
        for sample in samples:
            sample.attempt = attempt
        self._attempts.add(attempt)
        try:
            generation = member.client.channel.start_generation(request, attempt)
        except EngineError as error:
            for index in sorted(attempt.left):
                attempt.leave(index)
            self.on_failed(attempt, sorted(attempt.bases), error)
            return
        generation.waiter.add_done_callback(attempt.on_end)

    def _again(self, attempt: _Attempt, indices: Iterable[int]) -> None:
        """These samples of ``attempt`` wait for another member, unless one has them already."""
        if self.generation.waiter.done():
            return
        for sample in (self._samples[index] for index in indices):
            if sample.attempt is not attempt:
                continue
            sample.attempt = None
            if sample.aborted:  # its engine did not live to say so
                self._end(sample, self._ended_here(sample, _ABORTED))
        if self.waits:
            self.moves += 1
            self._dispatcher.place(self)

    def _end(self, sample: _Sample, output: GenerateOutput) -> None:
        sample.ended, sample.attempt = True, None
        self._refused_by.clear()
        if self.generation.complete(output):
            self._dispatcher.ended(self)

    def _waiting(self) -> Iterable[_Sample]:
        return (each for each in self._samples.values() if each.attempt is None and not each.ended)

    def _whole(self, attempt: _Attempt, output: GenerateOutput) -> GenerateOutput:
        base, epoch_of = attempt.bases[output.index], attempt.member.fleet_epoch
        return joined(self._request, base, output, epoch_of, rid=self.generation.rid)

    def _ended_here(self, sample: _Sample, reason: FinishReason) -> GenerateOutput:
        return ended_here(self._request, sample.index, sample.part, reason, rid=self.generation.rid)
