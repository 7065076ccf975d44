"""``AsyncControlClient``: everything but generation, from coroutines. Same methods, arguments and errors as
the blocking :class:`~.control_client.ControlClient`.

Invariants: no cancelled or timed-out call changes anything in the engine, except that a weight session which it made
is aborted. All calls come from one event loop. No call can wait for ever on an engine that is gone.
"""
# ruff: noqa: ASYNC109  (the same arguments as the blocking client's)

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack

from ..io_struct import (
    BeginWeightUpdateReqInput,
    BeginWeightUpdateReqOutput,
    CaesuraError,
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    ControlRequest,
    DestroyWeightsUpdateGroupReqInput,
    DestroyWeightsUpdateGroupReqOutput,
    EndWeightUpdateReqInput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetMemoryHistoryReqInput,
    GetMemoryHistoryReqOutput,
    GetStatusReqInput,
    GetStatusReqOutput,
    InitWeightsUpdateGroupReqInput,
    InitWeightsUpdateGroupReqOutput,
    MemoryTag,
    Message,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    PauseMode,
    ReleaseMemoryOccupationReqInput,
    ReleaseMemoryOccupationReqOutput,
    RenewPauseLeaseReqInput,
    RenewPauseLeaseReqOutput,
    Request,
    ResumeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqOutput,
    ShutdownReqInput,
    ShutdownReqOutput,
    TensorSpec,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromCheckpointEngineReqInput,
    WeightsCheckerReqInput,
    WeightsCheckerReqOutput,
    WeightUpdateReqOutput,
)
from ..io_struct.control import LeaseAction
from ..io_struct.weights import DEFAULT_BUCKET_BYTES, DEFAULT_GROUP_NAME
from .async_channel import LoopChannel
from .async_handle import wait_for
from .exceptions import NoSession, NotIdle, NotOwner, WeightMismatch, is_answer
from .options import CheckerAction, UpdateOptions, WeightUpdate, id_of

if TYPE_CHECKING:
    from .tensors import NamedTensors, SharedBuckets, Steps, WeightUpdateGroup

ReplyT = TypeVar("ReplyT", bound=Message)

_STILL_OPEN = (WeightMismatch, NotIdle, NotOwner)
"""Refusals of an ``end`` that leave its session open."""


class AsyncControlClient:
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
        self._channel = LoopChannel(endpoint, connect_timeout=connect_timeout)

    @property
    def channel(self) -> LoopChannel:
        """What the messages go through, for callers that make their own (the tokenizer manager)."""
        return self._channel

    async def pause(
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
            id=id_of(message_id), mode=mode, owner=owner, lease_s=lease_s, on_lease_expiry=on_lease_expiry
        )
        return await self._call(request, PauseGenerationReqOutput, timeout)

    async def continue_generation(
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
            id=id_of(message_id), torch_empty_cache=torch_empty_cache, owner=owner, force=force
        )
        return await self._call(request, ContinueGenerationReqOutput, timeout)

    async def renew_pause_lease(
        self, owner: str | None = None, *, message_id: str | None = None, timeout: float | None = None
    ) -> RenewPauseLeaseReqOutput:
        """A sign of life from the pause's owner; every other command of the owner renews the lease as well."""
        request = RenewPauseLeaseReqInput(id=id_of(message_id), owner=owner)
        return await self._call(request, RenewPauseLeaseReqOutput, timeout)

    async def flush_cache(
        self,
        *,
        torch_empty_cache: bool = True,
        timeout_s: float = 0.0,
        message_id: str | None = None,
        timeout: float | None = None,
    ) -> FlushCacheReqOutput:
        """Clear the engine's prefix cache; the engine waits up to ``timeout_s`` seconds to become idle."""
        request = FlushCacheReqInput(
            id=id_of(message_id), torch_empty_cache=torch_empty_cache, timeout_s=timeout_s
        )
        return await self._call(request, FlushCacheReqOutput, timeout)

    async def update_weights_from_disk(
        self,
        model_path: str | os.PathLike[str],
        *,
        load_format: str | None = None,
        message_id: str | None = None,
        timeout: float | None = None,
        **options: Unpack[UpdateOptions],
    ) -> WeightUpdateReqOutput:
        """Load a checkpoint folder of the same architecture in place. The path is read by the engine's process."""
        request = UpdateWeightFromDiskReqInput(
            id=id_of(message_id), model_path=os.fspath(model_path), load_format=load_format, **options
        )
        return await self._call(request, WeightUpdateReqOutput, timeout)

    async def update_weights_from_tensor(
        self,
        named_tensors: "NamedTensors",
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout: float | None = None,
        **options: Unpack[UpdateOptions],
    ) -> WeightUpdateReqOutput:
        """Send weights over the socket.

        ``named_tensors`` are checkpoint names and tensors; more than ``bucket_bytes`` of them are sent in a session of
        their own, unless :meth:`weight_update` has one open. ``timeout`` bounds each bucket. Needs torch.
        """
        from .tensors import tensor_steps

        steps = tensor_steps(
            named_tensors, dict(options), bucket_bytes=bucket_bytes, in_session=self._in_session
        )
        return await self._drive(steps, timeout)

    async def update_weights_from_ipc(
        self,
        named_tensors: "NamedTensors",
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout: float | None = None,
        **options: Unpack[UpdateOptions],
    ) -> WeightUpdateReqOutput:
        """Hand weights over through shared memory; the engine runs on this host under the same user.

        Arguments as of :meth:`update_weights_from_tensor`. Needs torch.
        """
        from .tensors import SharedBuckets, ipc_steps

        if self._shared is None:
            self._shared = SharedBuckets()
        steps = ipc_steps(
            named_tensors,
            dict(options),
            bucket_bytes=bucket_bytes,
            in_session=self._in_session,
            shared=self._shared,
        )
        return await self._drive(steps, timeout)

    async def update_weights_from_distributed(
        self,
        named_tensors: "NamedTensors",
        *,
        group: "WeightUpdateGroup",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout: float | None = None,
        **options: Unpack[UpdateOptions],
    ) -> WeightUpdateReqOutput:
        """Broadcast weights over ``group``, whose only other rank is this engine.

        Other arguments as of :meth:`update_weights_from_tensor`. Needs torch. :meth:`WeightUpdateGroup.update` does this for several engines.
        """
        steps = group.steps(
            named_tensors, dict(options), bucket_bytes=bucket_bytes, in_session=self._in_session
        )
        return await self._drive(steps, timeout)

    async def update_weights_from_checkpoint_engine(
        self,
        zmq_handles: dict[str, str],
        *,
        timeout_s: float = 300.0,
        message_id: str | None = None,
        timeout: float | None = None,
        **options: Unpack[UpdateOptions],
    ) -> WeightUpdateReqOutput:
        """Let a checkpoint-engine parameter server drive an update; ``zmq_handles`` is device uuid to its address.

        The engine gives up after ``timeout_s`` seconds of silence. It must have been started with ``allow_legacy_pickle``.
        """
        request = UpdateWeightsFromCheckpointEngineReqInput(
            id=id_of(message_id), zmq_handles=zmq_handles, timeout_s=timeout_s, **options
        )
        return await self._call(request, WeightUpdateReqOutput, timeout)

    async def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        *,
        rank_offset: int,
        world_size: int,
        group_name: str = DEFAULT_GROUP_NAME,
        backend: Literal["gloo", "nccl"] | None = None,
        timeout_s: float = 60.0,
        message_id: str | None = None,
        timeout: float | None = None,
    ) -> InitWeightsUpdateGroupReqOutput:
        """Have the engine join a process group as rank ``rank_offset``; returns when every rank has joined.

        Blocks until the trainer, rank 0, joins as well: call it beside that, or let ``WeightUpdateGroup.create`` do both.
        """
        request = InitWeightsUpdateGroupReqInput(
            id=id_of(message_id),
            master_address=master_address,
            master_port=master_port,
            rank_offset=rank_offset,
            world_size=world_size,
            group_name=group_name,
            backend=backend,
            timeout_s=timeout_s,
        )
        return await self._call(request, InitWeightsUpdateGroupReqOutput, timeout)

    async def destroy_weights_update_group(
        self,
        group_name: str = DEFAULT_GROUP_NAME,
        *,
        message_id: str | None = None,
        timeout: float | None = None,
    ) -> DestroyWeightsUpdateGroupReqOutput:
        """Have the engine leave a process group."""
        request = DestroyWeightsUpdateGroupReqInput(id=id_of(message_id), group_name=group_name)
        return await self._call(request, DestroyWeightsUpdateGroupReqOutput, timeout)

    async def release_memory(
        self,
        tags: Sequence[MemoryTag] | None = None,
        *,
        message_id: str | None = None,
        timeout: float | None = None,
    ) -> ReleaseMemoryOccupationReqOutput:
        """Give device memory back, by tag (None: all); weights come back without their values."""
        request = ReleaseMemoryOccupationReqInput(
            id=id_of(message_id), tags=None if tags is None else list(tags)
        )
        return await self._call(request, ReleaseMemoryOccupationReqOutput, timeout)

    async def resume_memory(
        self,
        tags: Sequence[MemoryTag] | None = None,
        *,
        message_id: str | None = None,
        timeout: float | None = None,
    ) -> ResumeMemoryOccupationReqOutput:
        """Take released memory back, all of ``tags`` (None: of what is released) or none."""
        request = ResumeMemoryOccupationReqInput(
            id=id_of(message_id), tags=None if tags is None else list(tags)
        )
        return await self._call(request, ResumeMemoryOccupationReqOutput, timeout)

    async def begin_weight_update(
        self,
        *,
        manifest: list[TensorSpec] | None = None,
        deadline_s: float | None = None,
        message_id: str | None = None,
        timeout: float | None = None,
    ) -> BeginWeightUpdateReqOutput:
        """Open an explicit session: what follows is committed together by :meth:`end_weight_update`."""
        request = BeginWeightUpdateReqInput(id=id_of(message_id), manifest=manifest, deadline_s=deadline_s)
        reply = await self._call(request, BeginWeightUpdateReqOutput, timeout)
        self._in_session = True
        return reply

    async def end_weight_update(
        self,
        *,
        commit: bool = True,
        weight_version: str | None = None,
        message_id: str | None = None,
        timeout: float | None = None,
    ) -> WeightUpdateReqOutput:
        """Close the session: commit it, or abort it (weights stay valid only if nothing was written).

        A commit that is refused (tensors are missing, frozen requests forbid its flush) leaves it open.
        """
        request = EndWeightUpdateReqInput(
            id=id_of(message_id),
            commit=commit,
            weight_version=weight_version,
        )
        self._in_session = False
        try:
            return await self._call(request, WeightUpdateReqOutput, timeout)
        except _STILL_OPEN:
            self._in_session = True
            raise

    @contextlib.asynccontextmanager
    async def weight_update(
        self,
        *,
        weight_version: str | None = None,
        manifest: list[TensorSpec] | None = None,
        deadline_s: float | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[WeightUpdate]:
        """A session around a block: committed at its end (``.result`` then holds the reply), aborted if that or the block fails.

        ``timeout`` bounds each of the two calls, not the block.
        """
        begun = False
        try:
            session = WeightUpdate(
                await self.begin_weight_update(manifest=manifest, deadline_s=deadline_s, timeout=timeout)
            )
            begun = True
            yield session
            session.result = await self.end_weight_update(weight_version=weight_version, timeout=timeout)
        except BaseException as error:
            if begun or not is_answer(error):  # a session that was refused to us may be another's
                await self._abort_session(error, timeout)
            raise

    async def check_weights(
        self,
        action: CheckerAction = "checksum",
        *,
        message_id: str | None = None,
        timeout: float | None = None,
    ) -> WeightsCheckerReqOutput:
        """Prove what the weights are: checksums, or a comparison with an earlier snapshot."""
        return await self._call(
            WeightsCheckerReqInput(id=id_of(message_id), action=action), WeightsCheckerReqOutput, timeout
        )

    async def status(
        self, *, message_id: str | None = None, timeout: float | None = None
    ) -> GetStatusReqOutput:
        """One consistent snapshot of the engine; answered during pauses and updates too."""
        return await self._call(GetStatusReqInput(id=id_of(message_id)), GetStatusReqOutput, timeout)

    async def memory_history(
        self, *, after: int = 0, message_id: str | None = None, timeout: float | None = None
    ) -> GetMemoryHistoryReqOutput:
        """The engine's memory events with a ``seq`` over ``after``, oldest first; where there are ``more``, ask again."""
        request = GetMemoryHistoryReqInput(id=id_of(message_id), after=after)
        return await self._call(request, GetMemoryHistoryReqOutput, timeout)

    async def shutdown(
        self,
        *,
        drain: bool | None = None,
        drain_s: float | None = None,
        message_id: str | None = None,
        timeout: float | None = None,
    ) -> ShutdownReqOutput:
        """Stop the engine: it answers this, ends every request and exits.

        Args:
            drain: True lets the requests that are there go on for up to ``drain_s`` seconds, False ends them at once. None:
                as the engine's ``shutdown_mode`` says.
            drain_s: None: the engine's ``drain_timeout_s``.
        """
        request = ShutdownReqInput(id=id_of(message_id), drain=drain, timeout_s=drain_s)
        return await self._call(request, ShutdownReqOutput, timeout)

    async def close(self) -> None:
        """Close the connection; whoever still waits gets :class:`EngineDied`. The engine goes on. Idempotent."""
        self._channel.close()
        if self._shared is not None:
            self._shared.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def in_session(self) -> bool:
        """A weight session that this client began is open."""
        return self._in_session

    def start(
        self, request: Request, expects: type[Message], buffers: Sequence[memoryview] = ()
    ) -> asyncio.Future[Any]:
        """Send a message and go on; the future gets its reply, or raises the typed error."""
        self._sign(request)
        return self._channel.start_call(request, expects, buffers)

    async def _drive(self, steps: "Steps", timeout: float | None) -> WeightUpdateReqOutput:
        """Do what ``steps`` asks for (tensors/steps.py); ``timeout`` bounds each wait for an answer."""
        from .tensors import Await, Send

        try:
            wanted = next(steps)
            while True:
                try:
                    if isinstance(wanted, Send):
                        came = self.start(wanted.request, wanted.expects, wanted.buffers)
                    elif isinstance(wanted, Await):
                        came = await wait_for(wanted.ticket, wanted.request.id, timeout)
                    else:
                        came = await asyncio.to_thread(wanted.work)
                except BaseException as error:  # noqa: BLE001  the generator ends its session, and raises it again
                    wanted = steps.throw(error)
                else:
                    wanted = steps.send(came)
        except StopIteration as stop:
            final: WeightUpdateReqOutput = stop.value
            return final

    async def _abort_session(self, error: BaseException, timeout: float | None) -> None:
        """End the session without a commit, whatever has become of it; waits for that only where something was answered."""
        self._in_session = False
        request = EndWeightUpdateReqInput(commit=False)
        try:
            answer = self.start(request, WeightUpdateReqOutput)
            if is_answer(error):
                await wait_for(answer, request.id, timeout)
        except NoSession:  # it had ended before
            pass
        except CaesuraError as second:
            error.add_note(f"the weight session could not be aborted either: {second}")

    async def _call(self, request: Request, expects: type[ReplyT], timeout: float | None) -> ReplyT:
        reply: ReplyT = await wait_for(self.start(request, expects), request.id, timeout)
        return reply

    def _sign(self, request: Request) -> None:
        if isinstance(request, ControlRequest) and request.owner is None:
            request.owner = self.owner
