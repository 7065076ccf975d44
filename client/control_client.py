"""``ControlClient``: pause, weights, memory and status of an engine, from ordinary threads; what a trainer needs.

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
from concurrent.futures import Future
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
from .channel import ThreadChannel
from .exceptions import NoSession, NotIdle, NotOwner, WeightMismatch, is_answer
from .handle import wait_for
from .options import CheckerAction, UpdateOptions, WeightUpdate, id_of

if TYPE_CHECKING:
    from .tensors import NamedTensors, SharedBuckets, Steps, WeightUpdateGroup

ReplyT = TypeVar("ReplyT", bound=Message)

_STILL_OPEN = (WeightMismatch, NotIdle, NotOwner)
"""Refusals of an ``end`` that leave its session open."""


class ControlClient:
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
            id=id_of(message_id), mode=mode, owner=owner, lease_s=lease_s, on_lease_expiry=on_lease_expiry
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
            id=id_of(message_id), torch_empty_cache=torch_empty_cache, owner=owner, force=force
        )
        return self._call(request, ContinueGenerationReqOutput, timeout)

    def renew_pause_lease(
        self, owner: str | None = None, *, message_id: str | None = None, timeout: float | None = None
    ) -> RenewPauseLeaseReqOutput:
        """A sign of life from the pause's owner; every other command of the owner renews the lease as well."""
        request = RenewPauseLeaseReqInput(id=id_of(message_id), owner=owner)
        return self._call(request, RenewPauseLeaseReqOutput, timeout)

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
            id=id_of(message_id), torch_empty_cache=torch_empty_cache, timeout_s=timeout_s
        )
        return self._call(request, FlushCacheReqOutput, timeout)

    def update_weights_from_disk(
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
        return self._call(request, WeightUpdateReqOutput, timeout)

    def update_weights_from_tensor(
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
        return self._drive(steps, timeout)

    def update_weights_from_ipc(
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
        return self._drive(steps, timeout)

    def update_weights_from_distributed(
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
        return self._drive(steps, timeout)

    def update_weights_from_checkpoint_engine(
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
        return self._call(request, WeightUpdateReqOutput, timeout)

    def init_weights_update_group(
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
        return self._call(request, InitWeightsUpdateGroupReqOutput, timeout)

    def destroy_weights_update_group(
        self,
        group_name: str = DEFAULT_GROUP_NAME,
        *,
        message_id: str | None = None,
        timeout: float | None = None,
    ) -> DestroyWeightsUpdateGroupReqOutput:
        """Have the engine leave a process group."""
        request = DestroyWeightsUpdateGroupReqInput(id=id_of(message_id), group_name=group_name)
        return self._call(request, DestroyWeightsUpdateGroupReqOutput, timeout)

    def release_memory(
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
        return self._call(request, ReleaseMemoryOccupationReqOutput, timeout)

    def resume_memory(
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
        return self._call(request, ResumeMemoryOccupationReqOutput, timeout)

    def begin_weight_update(
        self,
        *,
        manifest: list[TensorSpec] | None = None,
        deadline_s: float | None = None,
        message_id: str | None = None,
        timeout: float | None = None,
    ) -> BeginWeightUpdateReqOutput:
        """Open an explicit session: what follows is committed together by :meth:`end_weight_update`."""
        request = BeginWeightUpdateReqInput(id=id_of(message_id), manifest=manifest, deadline_s=deadline_s)
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
            return self._call(request, WeightUpdateReqOutput, timeout)
        except _STILL_OPEN:
            self._in_session = True
            raise

    @contextlib.contextmanager
    def weight_update(
        self,
        *,
        weight_version: str | None = None,
        manifest: list[TensorSpec] | None = None,
        deadline_s: float | None = None,
        timeout: float | None = None,
    ) -> Iterator[WeightUpdate]:
        """A session around a block: committed at its end (``.result`` then holds the reply), aborted if that or the block fails.

        ``timeout`` bounds each of the two calls, not the block.
        """
        begun = False
        try:
            session = WeightUpdate(
                self.begin_weight_update(manifest=manifest, deadline_s=deadline_s, timeout=timeout)
            )
            begun = True
            yield session
            session.result = self.end_weight_update(weight_version=weight_version, timeout=timeout)
        except BaseException as error:
            if begun or not is_answer(error):  # a session that was refused to us may be another's
                self._abort_session(error, timeout)
            raise

    def check_weights(
        self,
        action: CheckerAction = "checksum",
        *,
        message_id: str | None = None,
        timeout: float | None = None,
    ) -> WeightsCheckerReqOutput:
        """Prove what the weights are: checksums, or a comparison with an earlier snapshot."""
        return self._call(
            WeightsCheckerReqInput(id=id_of(message_id), action=action), WeightsCheckerReqOutput, timeout
        )

    def status(self, *, message_id: str | None = None, timeout: float | None = None) -> GetStatusReqOutput:
        """One consistent snapshot of the engine; answered during pauses and updates too."""
        return self._call(GetStatusReqInput(id=id_of(message_id)), GetStatusReqOutput, timeout)

    def memory_history(
        self, *, after: int = 0, message_id: str | None = None, timeout: float | None = None
    ) -> GetMemoryHistoryReqOutput:
        """The engine's memory events with a ``seq`` over ``after``, oldest first; where there are ``more``, ask again."""
        request = GetMemoryHistoryReqInput(id=id_of(message_id), after=after)
        return self._call(request, GetMemoryHistoryReqOutput, timeout)

    def shutdown(
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
        return self._call(request, ShutdownReqOutput, timeout)

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

    @property
    def in_session(self) -> bool:
        """A weight session that this client began is open."""
        return self._in_session

    def start(
        self, request: Request, expects: type[Message], buffers: Sequence[memoryview] = ()
    ) -> Future[Any]:
        """Send a message and go on; the future gets its reply, or raises the typed error."""
        self._sign(request)
        return self._channel.start_call(request, expects, buffers)

    def expect_exit(self) -> None:
        """The launcher watches this engine's process and will call :meth:`engine_exited`."""
        self._channel.expect_exit()

    def engine_exited(self, reason: str) -> None:
        """The engine's process has ended: what is pending and every later call fails with ``reason``."""
        self._channel.engine_exited(reason)

    def _drive(self, steps: "Steps", timeout: float | None) -> WeightUpdateReqOutput:
        """Do what ``steps`` asks for (tensors/steps.py); ``timeout`` bounds each wait for an answer."""
        from .tensors import Await, Send

        try:
            wanted = next(steps)
            while True:
                try:
                    if isinstance(wanted, Send):
                        came = self.start(wanted.request, wanted.expects, wanted.buffers)
                    elif isinstance(wanted, Await):
                        came = wait_for(wanted.ticket, wanted.request.id, timeout)
                    else:
                        came = wanted.work()
                except BaseException as error:  # noqa: BLE001  the generator ends its session, and raises it again
                    wanted = steps.throw(error)
                else:
                    wanted = steps.send(came)
        except StopIteration as stop:
            final: WeightUpdateReqOutput = stop.value
            return final

    def _abort_session(self, error: BaseException, timeout: float | None) -> None:
        """End the session without a commit, whatever has become of it; waits for that only where something was answered."""
        self._in_session = False
        request = EndWeightUpdateReqInput(commit=False)
        try:
            answer = self.start(request, WeightUpdateReqOutput)
            if is_answer(error):
                wait_for(answer, request.id, timeout)
        except NoSession:  # it had ended before
            pass
        except CaesuraError as second:
            error.add_note(f"the weight session could not be aborted either: {second}")

    def _call(self, request: Request, expects: type[ReplyT], timeout: float | None) -> ReplyT:
        reply: ReplyT = wait_for(self.start(request, expects), request.id, timeout)
        return reply

    def _sign(self, request: Request) -> None:
        if isinstance(request, ControlRequest) and request.owner is None:
            request.owner = self.owner
