"""``SchedulerClient``: the engine, from ordinary threads.

Invariants:
- One background thread owns the socket; callers register under a lock, post a frame and wait on a future. Any number of
  threads may share one client.
- No call can wait for ever on an engine that is gone: when the connection or the launched process ends, every waiter
  gets :class:`EngineDied`.
- A timeout is the caller's patience, not the command's: after :class:`TimedOut` the command may still complete.
  Repeating the call with the same ``message_id`` attaches to it (docs/wire.md, "Idempotence").
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from ..io_struct import (
    AbortReq,
    AbortReqOutput,
    BeginWeightUpdateReqInput,
    BeginWeightUpdateReqOutput,
    CaesuraError,
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    ControlRequest,
    EndWeightUpdateReqInput,
    FetchResultReqInput,
    FetchResultReqOutput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GenerateReqInput,
    GetStatusReqInput,
    GetStatusReqOutput,
    Message,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    PauseMode,
    RenewPauseLeaseReqInput,
    RenewPauseLeaseReqOutput,
    Request,
    SamplingParams,
    ShutdownReqInput,
    ShutdownReqOutput,
    TensorSpec,
    UpdateWeightFromDiskReqInput,
    WeightsCheckerReqInput,
    WeightsCheckerReqOutput,
    WeightUpdateReqOutput,
    new_id,
)
from ..io_struct.control import LeaseAction
from ..io_struct.weights import DEFAULT_BUCKET_BYTES
from .channel import Deltas, Result, ThreadChannel
from .connection import Generation
from .exceptions import EngineError, TimedOut
from .handle import GenerationHandle, wait_for
from .prompts import Plan, plan, token_ids
from .results import CheckerAction, GenerateOutput, WeightUpdate, decode_output

if TYPE_CHECKING:
    from .tensors import NamedTensors, SharedBuckets

ReplyT = TypeVar("ReplyT", bound=Message)


class SchedulerClient:
    """A connection to one engine.

    ``connect_timeout`` (seconds) bounds how long a call waits for a scheduler to appear at ``endpoint``; None waits for
    ever. Every method's ``timeout`` (seconds) bounds that call; None waits until the engine answers or dies.
    ``owner`` is the token under which this client pauses and sends commands; it renews the lease of its pause.
    """

    def __init__(
        self, endpoint: str, *, connect_timeout: float | None = 10.0, owner: str | None = None
    ) -> None:
        self.endpoint = endpoint
        self.owner = owner
        self._in_session = False
        self._shared: SharedBuckets | None = None
        self._channel = ThreadChannel(endpoint, connect_timeout=connect_timeout)

    @overload
    def generate(
        self,
        input_ids: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = ...,
        *,
        return_logprob: bool = ...,
        return_raw_logprob: bool = ...,
        return_sampled_logprob: bool = ...,
        rid: str | Sequence[str] | None = ...,
        cache_salt: str = ...,
        min_weights_epoch: int | None = ...,
        message_id: str | None = ...,
        timeout: float | None = ...,
    ) -> list[GenerateOutput]: ...

    @overload
    def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = ...,
        *,
        return_logprob: bool = ...,
        return_raw_logprob: bool = ...,
        return_sampled_logprob: bool = ...,
        rid: str | Sequence[str] | None = ...,
        cache_salt: str = ...,
        min_weights_epoch: int | None = ...,
        message_id: str | None = ...,
        timeout: float | None = ...,
    ) -> GenerateOutput | Any: ...  # a list when n > 1, which no type says

    def generate(
        self,
        input_ids: Sequence[int] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        return_logprob: bool = False,
        return_raw_logprob: bool = False,
        return_sampled_logprob: bool = False,
        rid: str | Sequence[str] | None = None,
        cache_salt: str = "",
        min_weights_epoch: int | None = None,
        message_id: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Generate and wait. One prompt gives one output (a list of ``n`` when n > 1); a list of prompts gives a list,
        prompt by prompt, the ``n`` samples of each together.

        Raises:
            TimedOut: not everything ended within ``timeout``; the generations go on.
            EngineError: the first prompt that was refused or failed; the others of this call are aborted.
        """
        work = plan(
            input_ids,
            sampling_params,
            rid=rid,
            message_id=message_id,
            return_logprob=return_logprob,
            return_raw_logprob=return_raw_logprob,
            return_sampled_logprob=return_sampled_logprob,
            cache_salt=cache_salt,
            min_weights_epoch=min_weights_epoch,
        )
        return self._generate(work, timeout)

    def submit(
        self,
        input_ids: Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        return_logprob: bool = False,
        return_raw_logprob: bool = False,
        return_sampled_logprob: bool = False,
        stream: bool = False,
        rid: str | None = None,
        cache_salt: str = "",
        min_weights_epoch: int | None = None,
        message_id: str | None = None,
    ) -> GenerationHandle:
        """Start one prompt and return at once; refusals are raised by the handle."""
        request = GenerateReqInput(
            id=_id(message_id),
            rid=rid,
            input_ids=token_ids(input_ids),
            sampling_params=sampling_params or SamplingParams(),
            return_logprob=return_logprob,
            return_raw_logprob=return_raw_logprob,
            return_sampled_logprob=return_sampled_logprob,
            stream=stream,
            cache_salt=cache_salt,
            min_weights_epoch=min_weights_epoch,
        )
        return GenerationHandle(self.abort, self._channel.start_generation(request))

    def abort(
        self,
        rid: str | None = None,
        *,
        abort_all: bool = False,
        message_id: str | None = None,
        timeout: float | None = None,
    ) -> AbortReqOutput:
        """End generations now, by rid or all of them; each answers its own caller with its partial output."""
        return self._call(AbortReq(id=_id(message_id), rid=rid, abort_all=abort_all), AbortReqOutput, timeout)

    def pause(
        self,
        mode: PauseMode = "abort",
        *,
        owner: str | None = None,
        lease_s: float | None = None,
        on_lease_expiry: LeaseAction = "continue",
        message_id: str | None = None,
        timeout: float | None = None,
    ) -> PauseGenerationReqOutput:
        """Stop at the next step boundary; when this returns, no step is in flight."""
        request = PauseGenerationReqInput(
            id=_id(message_id), mode=mode, owner=owner, lease_s=lease_s, on_lease_expiry=on_lease_expiry
        )
        return self._call(request, PauseGenerationReqOutput, timeout)

    def continue_generation(
        self,
        *,
        torch_empty_cache: bool = True,
        owner: str | None = None,
        force: bool = False,
        message_id: str | None = None,
        timeout: float | None = None,
    ) -> ContinueGenerationReqOutput:
        """Go on; the device allocator's unused blocks are returned first. A no-op on a running engine."""
        request = ContinueGenerationReqInput(
            id=_id(message_id), torch_empty_cache=torch_empty_cache, owner=owner, force=force
        )
        return self._call(request, ContinueGenerationReqOutput, timeout)

    def renew_pause_lease(
        self, owner: str | None = None, *, message_id: str | None = None, timeout: float | None = None
    ) -> RenewPauseLeaseReqOutput:
        """A sign of life from the pause's owner; every other command of the owner renews the lease as well."""
        request = RenewPauseLeaseReqInput(id=_id(message_id), owner=owner)
        return self._call(request, RenewPauseLeaseReqOutput, timeout)

    def fetch_result(
        self, rid: str, *, message_id: str | None = None, timeout: float | None = None
    ) -> list[GenerateOutput]:
        """Results of generation ``rid`` that ended while its client could not be reached, kept for a while by the engine;
        empty where nothing is kept."""
        request = FetchResultReqInput(id=_id(message_id), rid=rid)
        reply = self._call(request, FetchResultReqOutput, timeout)
        return [decode_output(result) for result in reply.results]

    def flush_cache(
        self,
        *,
        torch_empty_cache: bool = True,
        timeout_s: float = 0.0,
        message_id: str | None = None,
        timeout: float | None = None,
    ) -> FlushCacheReqOutput:
        """Clear the engine's prefix cache; the engine waits up to ``timeout_s`` seconds to become idle."""
        request = FlushCacheReqInput(
            id=_id(message_id), torch_empty_cache=torch_empty_cache, timeout_s=timeout_s
        )
        return self._call(request, FlushCacheReqOutput, timeout)

    def update_weights_from_disk(
        self,
        model_path: str | os.PathLike[str],
        *,
        weight_version: str | None = None,
        flush_cache: bool = True,
        torch_empty_cache: bool = False,
        abort_all_requests: bool = False,
        load_format: str | None = None,
        message_id: str | None = None,
        timeout: float | None = None,
    ) -> WeightUpdateReqOutput:
        """Load a checkpoint folder of the same architecture in place. The path is read by the engine's process."""
        request = UpdateWeightFromDiskReqInput(
            id=_id(message_id),
            model_path=os.fspath(model_path),
            weight_version=weight_version,
            flush_cache=flush_cache,
            torch_empty_cache=torch_empty_cache,
            abort_all_requests=abort_all_requests,
            load_format=load_format,
        )
        return self._call(request, WeightUpdateReqOutput, timeout)

    def update_weights_from_tensor(
        self,
        named_tensors: "NamedTensors",
        *,
        weight_version: str | None = None,
        flush_cache: bool = True,
        torch_empty_cache: bool = False,
        abort_all_requests: bool = False,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout: float | None = None,
    ) -> WeightUpdateReqOutput:
        """Send weights over the socket.

        ``named_tensors`` are checkpoint names and tensors; more than ``bucket_bytes`` of them are sent in a session of
        their own, unless :meth:`weight_update` has one open. ``timeout`` bounds each bucket. Needs torch.
        """
        options = {
            "weight_version": weight_version,
            "flush_cache": flush_cache,
            "torch_empty_cache": torch_empty_cache,
            "abort_all_requests": abort_all_requests,
        }
        return self._send_tensors(named_tensors, options, bucket_bytes, timeout, shared=False)

    def update_weights_from_ipc(
        self,
        named_tensors: "NamedTensors",
        *,
        weight_version: str | None = None,
        flush_cache: bool = True,
        torch_empty_cache: bool = False,
        abort_all_requests: bool = False,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout: float | None = None,
    ) -> WeightUpdateReqOutput:
        """Hand weights over through shared memory; the engine runs on this host under the same user.

        ``named_tensors`` are checkpoint names and tensors; more than ``bucket_bytes`` of them are sent in a session of
        their own, unless :meth:`weight_update` has one open. ``timeout`` bounds each bucket. Needs torch.
        """
        options = {
            "weight_version": weight_version,
            "flush_cache": flush_cache,
            "torch_empty_cache": torch_empty_cache,
            "abort_all_requests": abort_all_requests,
        }
        return self._send_tensors(named_tensors, options, bucket_bytes, timeout, shared=True)

    def begin_weight_update(
        self,
        *,
        manifest: list[TensorSpec] | None = None,
        deadline_s: float | None = None,
        message_id: str | None = None,
        timeout: float | None = None,
    ) -> BeginWeightUpdateReqOutput:
        """Open an explicit session: what follows is committed together by :meth:`end_weight_update`."""
        request = BeginWeightUpdateReqInput(id=_id(message_id), manifest=manifest, deadline_s=deadline_s)
        reply = self._call(request, BeginWeightUpdateReqOutput, timeout)
        self._in_session = True
        return reply

    def end_weight_update(
        self,
        *,
        commit: bool = True,
        weight_version: str | None = None,
        message_id: str | None = None,
        timeout: float | None = None,
    ) -> WeightUpdateReqOutput:
        """Close the session: commit it, or abort it (weights stay valid only if nothing was written)."""
        request = EndWeightUpdateReqInput(
            id=_id(message_id),
            commit=commit,
            weight_version=weight_version,
        )
        self._in_session = False
        return self._call(request, WeightUpdateReqOutput, timeout)

    @contextlib.contextmanager
    def weight_update(
        self,
        *,
        weight_version: str | None = None,
        manifest: list[TensorSpec] | None = None,
        deadline_s: float | None = None,
        timeout: float | None = None,
    ) -> Iterator[WeightUpdate]:
        """A session around a block: committed at its end (``.result`` then holds the reply), aborted if it raises.

        ``timeout`` bounds each of the two calls, not the block.
        """
        session = WeightUpdate(
            self.begin_weight_update(manifest=manifest, deadline_s=deadline_s, timeout=timeout)
        )
        try:
            yield session
        except BaseException as error:
            try:
                self.end_weight_update(commit=False, timeout=timeout)
            except CaesuraError as second:
                error.add_note(f"the weight session could not be aborted either: {second}")
            raise
        session.result = self.end_weight_update(weight_version=weight_version, timeout=timeout)

    def check_weights(
        self,
        action: CheckerAction = "checksum",
        *,
        message_id: str | None = None,
        timeout: float | None = None,
    ) -> WeightsCheckerReqOutput:
        """Prove what the weights are: checksums, or a comparison with an earlier snapshot."""
        return self._call(
            WeightsCheckerReqInput(id=_id(message_id), action=action), WeightsCheckerReqOutput, timeout
        )

    def status(self, *, message_id: str | None = None, timeout: float | None = None) -> GetStatusReqOutput:
        """One consistent snapshot of the engine; answered during pauses and updates too."""
        return self._call(GetStatusReqInput(id=_id(message_id)), GetStatusReqOutput, timeout)

    def shutdown(self, *, message_id: str | None = None, timeout: float | None = None) -> ShutdownReqOutput:
        """Stop the engine: it ends every request, answers this and exits."""
        return self._call(ShutdownReqInput(id=_id(message_id)), ShutdownReqOutput, timeout)

    def close(self) -> None:
        """Close the connection; whoever still waits gets :class:`EngineDied`. The engine goes on. Idempotent."""
        self._channel.close()
        if self._shared is not None:
            self._shared.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def expect_exit(self) -> None:
        """The launcher watches this engine's process and will call :meth:`engine_exited`."""
        self._channel.expect_exit()

    def engine_exited(self, reason: str) -> None:
        """The engine's process has ended: what is pending and every later call fails with ``reason``."""
        self._channel.engine_exited(reason)

    def _generate(self, work: Plan, timeout: float | None) -> Any:
        generations: list[Generation[Result, Deltas]] = []
        try:
            for request in work.requests:
                generations.append(self._channel.start_generation(request))  # noqa: PERF401 (kept if the next raises)
            futures = [generation.waiter for generation in generations]
            wait(futures, timeout, return_when=FIRST_EXCEPTION)
            return work.collect(futures, timeout)
        except TimedOut:
            raise
        except BaseException:
            self._abandon(generations)
            raise

    def _abandon(self, generations: list[Generation[Result, Deltas]]) -> None:
        """Abort what is unfinished, without waiting: its caller is leaving with another error."""
        for generation in generations:
            if not generation.waiter.done():
                with contextlib.suppress(EngineError):
                    self._channel.start_call(AbortReq(rid=generation.rid), AbortReqOutput)

    def _send_tensors(
        self,
        named_tensors: "NamedTensors",
        options: dict[str, Any],
        bucket_bytes: int,
        timeout: float | None,
        *,
        shared: bool,
    ) -> WeightUpdateReqOutput:

        from . import tensors

        if self._shared is None:
            self._shared = tensors.SharedBuckets()
        steps = tensors.update_steps(
            named_tensors,
            options,
            bucket_bytes=bucket_bytes,
            in_session=self._in_session,
            shared=self._shared.get if shared else None,
        )
        try:
            request, buffers = next(steps)
            while True:
                expects = (
                    BeginWeightUpdateReqOutput
                    if isinstance(request, BeginWeightUpdateReqInput)
                    else WeightUpdateReqOutput
                )
                try:
                    reply = self._call(request, expects, timeout, buffers)
                except CaesuraError as error:
                    request, buffers = steps.throw(error)
                else:
                    request, buffers = steps.send(reply)
        except StopIteration as stop:
            final: WeightUpdateReqOutput = stop.value
            return final

    def _call(
        self,
        request: Request,
        expects: type[ReplyT],
        timeout: float | None,
        buffers: Sequence[memoryview] = (),
    ) -> ReplyT:
        if isinstance(request, ControlRequest) and request.owner is None:
            request.owner = self.owner
        reply: ReplyT = wait_for(self._channel.start_call(request, expects, buffers), request.id, timeout)
        return reply


def _id(message_id: str | None) -> str:
    return new_id() if message_id is None else message_id
