"""One generation of a group, which outlives the engine that began it.

Invariants:
- The caller sees one :class:`Generation`: every token once, in order, and one result per sample.
- One engine at a time is followed for a sample: only the loss of its attempt makes the sample wait for
  another. What an engine sends after it was given up is ignored.
- A token is passed on only if the group has committed the epoch that sampled it; an engine with another epoch
  is fenced. A sample continues on weights at least as new as those that sampled its tokens.
- An abort by the caller and an error of the request itself end it; the end of an engine does not.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from ... import io_struct as wire
from .. import exceptions as errors
from ..connection.async_channel import Deltas, Result
from ..connection.connection import Generation
from ..connection.results import GenerateOutput, TokenDelta
from .continuation import Part, continuation, ended_here, joined
from .members import Member, foreign_commit

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

LOST = (errors.EngineDied, errors.EngineRestarting, errors.ShuttingDown)
"""Errors of an engine that has ended or is ending."""
UNFIT = (errors.EpochBehind, errors.WeightsInvalid, errors.WeightsPoisoned, errors.MemoryReleased)
"""Errors of an engine that does not have the weights that the group assumes."""
FULL = (errors.QueueFull, errors.EnginePaused)
"""Errors of an engine that takes no request now."""
_ABORTED = wire.FinishReason(type="abort", message="Aborted")


@dataclass(slots=True)
class _Sample:
    index: int
    part: Part
    """Tokens that have arrived, over all attempts."""
    attempt: "Attempt | None" = None
    """None while it waits for a member, and when it has ended."""
    ended: bool = False
    aborted: bool = False


class Attempt:
    def __init__(
        self, flow: "Flow", member: Member, request: wire.GenerateReqInput, samples: list[_Sample]
    ) -> None:
        self.flow, self.member, self.request = flow, member, request
        self.rid = request.rid or request.id
        self.bases = {sample.index: sample.part.copy() for sample in samples}
        self.left = set(self.bases)
        self.given_up = False
        self.tail: TokenDelta | None = None
        """Last tokens of a sample, without details: the result that follows names their weights."""
        flow.dispatcher.router.charge(member, len(samples))
        member.attempts[self] = None

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
        self.flow.on_tokens(msgspec.structs.replace(delta, start=delta.start + base), self.member)

    def _knows(self, weights: Iterable[wire.DeltaWeights | wire.WeightVersionSpan]) -> bool:
        """Return True if tokens of ``weights`` may be passed on; fence a member with foreign ones."""
        if not self.given_up:
            foreign = next((each for each in weights if not self.member.has_given(each.epoch)), None)
            if foreign is not None:  # this gives up all attempts on the member
                reason = foreign_commit(foreign.version, foreign.epoch)
                self.flow.dispatcher.fence(self.member, reason)
        return not self.given_up

    def on_end(self, waiter: Result) -> None:
        error = waiter.exception() if not waiter.cancelled() else None
        output = error.output if isinstance(error, errors.EngineError) else None
        if output is not None and not self._knows(output.weight_versions):
            return
        left = self.leave_all()
        if not self.given_up and isinstance(error, errors.EngineError):
            self.flow.on_failed(self, left, error)

    def give_up(self) -> None:
        self.given_up = True
        if self.leave_all():
            self.abort()

    def abort(self, index: int | None = None) -> None:
        with suppress(errors.EngineError):
            self.member.client.channel.start_call(
                wire.AbortReq(rid=self.rid, index=index), wire.AbortReqOutput
            )

    def leave(self, index: int) -> None:
        if index in self.left:
            self.left.remove(index)
            self.flow.dispatcher.router.charge(self.member, -1)
            if not self.left:
                self.member.attempts.pop(self, None)

    def leave_all(self) -> list[int]:
        left = sorted(self.left)
        for index in left:
            self.leave(index)
        return left


class Flow:
    """A request to a group, from its arrival to its last sample."""

    def __init__(
        self,
        dispatcher: "Dispatcher",
        request: wire.GenerateReqInput,
        generation: Generation[Result, Deltas],
        *,
        key: str | None,
    ) -> None:
        self.generation = generation
        self.dispatcher = dispatcher
        self.key = key
        self.refused_by: dict[str, errors.EngineError] = {}
        """Members that had no room for it, since the last one that took a part of it."""
        self.moves = 0
        self.request = request
        self._samples = {
            index: _Sample(index, Part())
            for index in range(request.first_sample, request.first_sample + request.sampling_params.n)
        }
        self._attempts: set[Attempt] = set()
        self._began = time.monotonic()

    @property
    def waits(self) -> bool:
        return not self.generation.waiter.done() and any(self._waiting())

    def fits(self) -> Callable[[Member], bool]:
        """Return what tells if a member can take what waits: by its weights, and by its adapter.

        Neither may be older than what has sampled tokens of what waits.
        """
        name, parts = self.request.adapter, [each.part for each in self._waiting()]
        known = [self.request.min_weights_epoch, *(part.newest_epoch for part in parts)]
        epoch = max((each for each in known if each is not None), default=None)
        of_adapter = max([1, *(part.newest_adapter_epoch for part in parts)])

        def fits(member: Member) -> bool:
            has_adapter = name is None or member.adapters.get(name, 0) >= of_adapter
            return has_adapter and member.own_epoch(epoch) is not None

        return fits

    def dispatch(self, member: Member) -> None:
        waiting = list(self._waiting())
        untouched = len(waiting) == len(self._samples) and not any(len(each.part) for each in waiting)
        for samples in [waiting] if untouched else [[each] for each in waiting]:
            if samples[0].attempt is None:  # otherwise a failed start has sent them elsewhere
                self._start(member, samples)

    def leave(self, member: Member) -> None:
        for attempt in [each for each in self._attempts if each.member is member]:
            lost = sorted(attempt.left)
            attempt.give_up()
            self._attempts.discard(attempt)
            self._again(attempt, lost)

    def abort(self, index: int | None = None) -> int:
        """Abort one sample or all, and return the number of those that were live."""
        live = [each for each in self._samples.values() if not each.ended and index in (None, each.index)]
        for sample in live:
            sample.aborted = True
        for attempt in list(self._attempts):
            attempt.abort(index)
        for sample in live:
            if sample.attempt is None:
                self._end(sample, self._ended_here(sample, _ABORTED))
        return len(live)

    def fail(self, error: errors.EngineError) -> None:
        """End the whole request with ``error``, and abort it on the engines that work on it."""
        if self.generation.waiter.done():
            return
        failed = next((each for each in self._samples.values() if not each.ended and len(each.part)), None)
        if failed is not None and error.output is None:
            reason = wire.FinishReason(type="error", message=error.message, code=str(error.code))
            error.output = self._ended_here(failed, reason)
        self.generation.fail(error)
        self.drop()

    def drop(self) -> None:
        for attempt in list(self._attempts):
            attempt.give_up()
        self._attempts.clear()
        self.dispatcher.ended(self)

    def on_end(self, waiter: Result) -> None:
        """Drop it if no engine has ended it: the caller's sink has raised, or its waiter was cancelled."""
        if not waiter.cancelled():
            waiter.exception()  # counts as seen
        if self.dispatcher.flows.get(self.generation.rid) is self:
            self.drop()

    def on_tokens(self, delta: TokenDelta, member: Member) -> None:
        sample = self._samples[delta.index]
        if delta.details is not None:
            sample.part.add(delta, member.group_epoch)
        detailed = self.request.stream_details
        self.generation.deliver(delta if detailed else msgspec.structs.replace(delta, details=None))

    def on_finished(self, attempt: Attempt, output: GenerateOutput) -> None:
        """End one sample, or continue it elsewhere if its engine has ended it because it ends itself."""
        sample = self._samples[output.index]
        reason = output.finish_reason
        whole = self._whole(attempt, output)
        engine_ends = reason.code in (wire.ErrorCode.SHUTTING_DOWN, wire.ErrorCode.ENGINE_DIED)
        if engine_ends and not self.dispatcher.ending:
            sample.part = Part.of(whole)
            self.dispatcher.lost(
                attempt.member, errors.EngineDied(reason.message or f"{attempt.member.name} ends")
            )
            self._again(attempt, [output.index])
        else:
            self._end(sample, replace(whole, e2e_latency=time.monotonic() - self._began))

    def on_failed(self, attempt: Attempt, indices: list[int], error: errors.EngineError) -> None:
        """Continue ``indices`` elsewhere, or fail if ``error`` is one of the request."""
        self._attempts.discard(attempt)
        unfinished = [index for index in indices if not self._samples[index].ended]
        if not unfinished:
            return
        if isinstance(error, LOST):
            self.dispatcher.lost(attempt.member, error)
        elif isinstance(error, UNFIT) or (
            isinstance(error, errors.UnknownAdapter) and self.request.adapter in self.dispatcher.adapters
        ):
            if attempt.member.serves:
                self.dispatcher.fence(attempt.member, f"it refuses requests: {error.message}")
        elif isinstance(error, FULL):
            self.refused_by[attempt.member.name] = error
        else:
            error.output = error.output and self._whole(attempt, error.output)
            self.fail(error)
            return
        self._again(attempt, unfinished)

    def _start(self, member: Member, samples: list[_Sample]) -> None:
        first = samples[0]
        original = self.request
        rid = f"{self.generation.rid[:90]}~{wire.new_id()[:12]}" if self.moves else self.generation.rid
        if len(first.part) or self.moves:
            request = continuation(original, first.index, first.part, rid=rid, message_id=wire.new_id())
        else:
            request = msgspec.structs.replace(original, id=wire.new_id(), rid=rid)
        if len(samples) > 1:
            request = msgspec.structs.replace(
                request, first_sample=original.first_sample, sampling_params=original.sampling_params
            )
        own = member.own_epoch(request.min_weights_epoch)
        request = msgspec.structs.replace(request, stream=True, stream_details=True, min_weights_epoch=own)
        attempt = Attempt(self, member, request, samples)
        for sample in samples:
            sample.attempt = attempt
        self._attempts.add(attempt)
        try:
            generation = member.client.channel.start_generation(request, attempt)
        except errors.EngineError as error:
            attempt.leave_all()
            self.on_failed(attempt, sorted(attempt.bases), error)
            return
        generation.waiter.add_done_callback(attempt.on_end)

    def _again(self, attempt: Attempt, indices: Iterable[int]) -> None:
        """Have these samples of ``attempt`` wait for another member, unless one has them already."""
        if self.generation.waiter.done():
            return
        for sample in (self._samples[index] for index in indices):
            if sample.attempt is not attempt:
                continue
            sample.attempt = None
            if sample.aborted:  # its engine has died before it said so
                self._end(sample, self._ended_here(sample, _ABORTED))
        if self.waits:
            self.moves += 1
            self.dispatcher.place(self)

    def _end(self, sample: _Sample, output: GenerateOutput) -> None:
        sample.ended, sample.attempt = True, None
        self.refused_by.clear()
        if self.generation.complete(output):
            self.dispatcher.ended(self)

    def _waiting(self) -> Iterable[_Sample]:
        return (each for each in self._samples.values() if each.attempt is None and not each.ended)

    def _whole(self, attempt: Attempt, output: GenerateOutput) -> GenerateOutput:
        base, epoch_of = attempt.bases[output.index], attempt.member.group_epoch
        return joined(self.request, base, output, epoch_of, rid=self.generation.rid)

    def _ended_here(self, sample: _Sample, reason: wire.FinishReason) -> GenerateOutput:
        return ended_here(self.request, sample.index, sample.part, reason, rid=self.generation.rid)
