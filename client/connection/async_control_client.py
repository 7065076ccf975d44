"""``AsyncControlClient``: trainers' commands, for coroutines of one event loop.

Invariants:
- When the connection or the launched process ends, every pending call raises :class:`EngineDied`.
- A timeout ends the wait, not the command: repeated with the same ``message_id`` it attaches (wire.md,
  "Idempotence").
- A call that times out or is interrupted changes nothing else, but aborts a weight session that it opened.
- Every command carries the client's owner token, unless it is given another.
"""

import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack

from ... import io_struct as wire
from ...io_struct.control import LeaseAction
from ...io_struct.weights import DEFAULT_BROADCAST_TIMEOUT_S, DEFAULT_BUCKET_BYTES, DEFAULT_GROUP_NAME
from ..exceptions import (
    DeadlineExceeded,
    EngineDied,
    NoSession,
    NotIdle,
    NotOwner,
    TimedOut,
    WeightMismatch,
    is_answer,
)
from .async_channel import Channel, LoopChannel, Result, run, wait_for
from .client_options import (
    CallOptions,
    ChannelOptions,
    ConnectionOptions,
    SessionOptions,
    UpdateOptions,
    WeightUpdate,
    folder_of,
    id_of,
    label,
    require_group,
    require_known,
    seconds,
    tags_of,
    this_process,
    update_fields,
)
from .fork import Process
from .prompts import drift_request
from .status_figures import explained, figures, time_to_ask

if TYPE_CHECKING:
    from ..trainer import NamedTensors, SharedBuckets, WeightDelta, WeightUpdateGroup
    from ..trainer.buckets import Sendable
    from ..trainer.sending import Sender

ReplyT = TypeVar("ReplyT", bound=wire.Message)


_STILL_OPEN = (WeightMismatch, NotIdle, NotOwner)
"""Refusals of an ``end`` that leave its session open."""


class AsyncControlClient:
    """A connection to one engine.

    ``timeout`` (seconds) limits one call; None waits until the engine answers or dies. ``owner`` is the owner
    token of commands without another, which renew its pause's lease. The rest are :class:`ConnectionOptions`.
    """

    _wait_for = staticmethod(wait_for)
    _run = staticmethod(run)

    def __init__(
        self, endpoint: str, *, owner: str | None = None, **connection: Unpack[ConnectionOptions]
    ) -> None:
        self.endpoint = endpoint
        """The engine's address: an ipc:// path or a tcp:// host and port."""
        self.owner = owner
        """Owner token of commands that are not given another, or None."""
        self._process = Process("client")
        self._channel = self._opened(connection)
        # Known from the answer to ``begin`` until the session was ended, the engine does not know it any
        # more, or is gone. What is sent meanwhile carries it: a session that has ended in secret is an error,
        # never a commit.
        self._session_id: str | None = None
        self._shared: SharedBuckets | None = None

    @property
    def channel(self) -> Channel:
        """Channel of the messages, for callers that make their own."""
        return self._channel

    def _opened(self, connection: ConnectionOptions) -> Channel:
        return LoopChannel(self.endpoint, ChannelOptions.of(connection))

    @property
    def incarnation(self) -> str | None:
        """Incarnation of the engine that answered last, 16 hex digits; None before the first connection."""
        return self._channel.incarnation

    async def close(self) -> None:
        """Close the connection; pending calls raise :class:`EngineDied`. The engine keeps running."""
        self._channel.close()
        if self._shared is not None:
            self._shared.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def session_id(self) -> str | None:
        """Open weight session that this client began, as far as it knows, or None."""
        return self._session_id

    def start(
        self, request: wire.Request, expects: type[wire.Message], buffers: Sequence[memoryview] = ()
    ) -> Result:
        """Send a message without waiting; the future returns its reply or raises the typed error."""
        self._sign(request)
        return self._channel.start_call(request, expects, buffers)

    async def pause(
        self,
        mode: wire.PauseMode = "abort",
        *,
        owner: str | None = None,
        lease_s: float | None = None,
        on_lease_expiry: LeaseAction = "continue",
        **call: Unpack[CallOptions],
    ) -> wire.PauseGenerationReqOutput:
        """Pause generation at the next step boundary. When this returns, no step is in flight."""
        request = wire.PauseGenerationReqInput(
            mode=mode, owner=owner, lease_s=lease_s, on_lease_expiry=on_lease_expiry
        )
        return await self._ask(request, wire.PauseGenerationReqOutput, call)

    async def continue_generation(
        self,
        *,
        torch_empty_cache: bool = True,
        owner: str | None = None,
        force: bool = False,
        **call: Unpack[CallOptions],
    ) -> wire.ContinueGenerationReqOutput:
        """Continue generation, after emptying the device allocator's cache. A no-op on a running engine."""
        request = wire.ContinueGenerationReqInput(
            torch_empty_cache=torch_empty_cache, owner=owner, force=force
        )
        return await self._ask(request, wire.ContinueGenerationReqOutput, call)

    async def renew_pause_lease(
        self, owner: str | None = None, **call: Unpack[CallOptions]
    ) -> wire.RenewPauseLeaseReqOutput:
        """Renew the lease of the pause; every other command of the owner renews it as well."""
        request = wire.RenewPauseLeaseReqInput(owner=owner)
        return await self._ask(request, wire.RenewPauseLeaseReqOutput, call)

    async def flush_cache(
        self,
        *,
        torch_empty_cache: bool = True,
        timeout_s: float = 0.0,
        force: bool = False,
        **call: Unpack[CallOptions],
    ) -> wire.FlushCacheReqOutput:
        """Flush the prefix cache; the engine waits up to ``timeout_s`` seconds to become idle.

        ``force`` also commits an implicit weight session of another sender.
        """
        request = wire.FlushCacheReqInput(
            torch_empty_cache=torch_empty_cache, timeout_s=timeout_s, force=force
        )
        return await self._ask(request, wire.FlushCacheReqOutput, call)

    async def update_weights_from_disk(
        self,
        model_path: str | os.PathLike[str],
        *,
        load_format: str | None = None,
        message_id: str | None = None,
        timeout: float | None = None,
        **options: Unpack[UpdateOptions],
    ) -> wire.WeightUpdateReqOutput:
        """Load a checkpoint folder of the same architecture in place. The engine's process reads the path."""
        request = wire.UpdateWeightFromDiskReqInput(
            id=id_of(message_id),
            model_path=folder_of(model_path),
            load_format=load_format,
            **self._named(options),
        )
        return await self._call(request, wire.WeightUpdateReqOutput, timeout)

    async def update_weights_from_tensor(
        self,
        named_tensors: "Sendable",
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout: float | None = None,
        **options: Unpack[UpdateOptions],
    ) -> wire.WeightUpdateReqOutput:
        """Send weights over the socket. Needs torch.

        ``named_tensors`` (pairs, a dict or a ``WeightDelta``) have checkpoint names. More than
        ``bucket_bytes`` take several calls of one session: that of :meth:`weight_update`, else a new one.
        ``timeout`` limits each call.
        """
        from ..trainer.sending import send_tensors

        return await send_tensors(
            self._sender(timeout),
            named_tensors,
            self._named(options),
            bucket_bytes=bucket_bytes,
            shared=self._shared_buckets(),
        )

    async def update_weights_from_ipc(
        self,
        named_tensors: "Sendable",
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout: float | None = None,
        **options: Unpack[UpdateOptions],
    ) -> wire.WeightUpdateReqOutput:
        """Pass weights as :meth:`update_weights_from_tensor`, in shared memory of the same host and user."""
        from ..trainer.sending import share_tensors

        return await share_tensors(
            self._sender(timeout),
            named_tensors,
            self._named(options),
            bucket_bytes=bucket_bytes,
            shared=self._shared_buckets(),
        )

    async def update_weights_from_distributed(
        self,
        named_tensors: "Sendable",
        *,
        group: "WeightUpdateGroup",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout: float | None = None,
        **options: Unpack[UpdateOptions],
    ) -> wire.WeightUpdateReqOutput:
        """Broadcast weights over ``group``, whose only other rank is this engine. Needs torch."""
        require_group(group)
        reply: wire.WeightUpdateReqOutput = await group.carry_out(
            self._sender(timeout), named_tensors, self._named(options), bucket_bytes=bucket_bytes
        )
        return reply

    async def update_weights_sparse(
        self,
        delta: "WeightDelta",
        *,
        base_epoch: int | None = None,
        transport: Literal["tensor", "ipc", "disk", "distributed"] = "tensor",
        folder: str | os.PathLike[str] | None = None,
        group: "WeightUpdateGroup | None" = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout: float | None = None,
        **options: Unpack[UpdateOptions],
    ) -> wire.WeightUpdateReqOutput:
        """Send what has changed; generation goes on until the commit writes it. Needs torch.

        BaseMismatch, and the weights are as they were, if those of the engine are not ``base_epoch`` or those
        that ``delta`` is of. A delta of so much that all tensors take less time is sent as those.

        Args:
            transport: ``disk`` writes the delta to ``folder``, which the engine reads; ``distributed``
                broadcasts it over ``group``, whose only other rank is this engine.
        """
        from ..trainer.sending import send_delta

        return await send_delta(
            self._sender(timeout),
            delta,
            {**self._named(options), "delta": delta.base(base_epoch)},
            transport=transport,
            folder=folder,
            group=group,
            bucket_bytes=bucket_bytes,
            shared=self._shared_buckets(),
        )

    async def update_weights_from_checkpoint_engine(
        self,
        zmq_handles: dict[str, str],
        *,
        timeout_s: float = 300.0,
        message_id: str | None = None,
        timeout: float | None = None,
        **options: Unpack[UpdateOptions],
    ) -> wire.WeightUpdateReqOutput:
        """Let a checkpoint-engine parameter server run an update, of an engine with ``allow_legacy_pickle``.

        ``zmq_handles`` maps device UUID to its address. The server may be silent for ``timeout_s`` seconds.
        """
        request = wire.UpdateWeightsFromCheckpointEngineReqInput(
            id=id_of(message_id),
            zmq_handles=zmq_handles,
            timeout_s=timeout_s,
            **self._named(options),
        )
        return await self._call(request, wire.WeightUpdateReqOutput, timeout)

    async def load_adapter(
        self,
        name: str,
        path: str | os.PathLike[str] | None = None,
        *,
        tensors: "NamedTensors | None" = None,
        config: Mapping[str, Any] | None = None,
        shared: bool = False,
        group: "WeightUpdateGroup | None" = None,
        expected_checksums: Mapping[str, str] | None = None,
        replace: bool = True,
        pinned: bool = False,
        on_running: wire.OnRunning = "finish_old",
        **call: Unpack[CallOptions],
    ) -> wire.LoadAdapterReqOutput:
        """Load a PEFT folder as adapter ``name``, or replace it, while generation goes on.

        Instead of a folder, ``tensors`` (by the names that PEFT saves) and ``config`` (the content of
        adapter_config.json) can be sent, passed in memory ``shared`` on one host, or broadcast over
        ``group``, whose other ranks are the engine's; this needs torch. ``expected_checksums`` are the
        SHA-256 of every tensor's bytes, in hex. A load that fails changes nothing. ``on_running``: samples of
        the version before end with it (``finish_old``), or go on with the new one over KV that is computed
        again (``retract``) or kept (``keep``).
        """
        request = wire.LoadAdapterReqInput(
            name=name,
            path=None if path is None else folder_of(path),
            config=None if config is None else dict(config),
            expected_checksums=None if expected_checksums is None else dict(expected_checksums),
            replace=replace,
            pinned=pinned,
            on_running=on_running,
        )
        if tensors is None:
            return await self._ask(request, wire.LoadAdapterReqOutput, call)
        if group is not None:
            require_group(group)
            request.id = id_of(call.get("message_id"))
            reply: wire.LoadAdapterReqOutput = await group.load_adapter(
                self._sender(call.get("timeout")), request, tensors
            )
            return reply
        from ..trainer.sending import adapter_memory

        with adapter_memory(request, tensors, shared=shared) as frames:
            return await self._ask(request, wire.LoadAdapterReqOutput, call, frames)

    async def unload_adapter(self, name: str, **call: Unpack[CallOptions]) -> wire.UnloadAdapterReqOutput:
        """Unload an adapter at once; samples that have it end with it."""
        return await self._ask(wire.UnloadAdapterReqInput(name=name), wire.UnloadAdapterReqOutput, call)

    async def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        *,
        rank_offset: int,
        world_size: int,
        group_name: str = DEFAULT_GROUP_NAME,
        backend: Literal["gloo", "nccl", "vllm_nccl"] | None = None,
        nccl_unique_id: bytes | None = None,
        timeout_s: float = 60.0,
        broadcast_timeout_s: float = DEFAULT_BROADCAST_TIMEOUT_S,
        **call: Unpack[CallOptions],
    ) -> wire.InitWeightsUpdateGroupReqOutput:
        """Have the engine join as ``rank_offset`` (0: a trainer or sending engine); returns when all have."""
        request = wire.InitWeightsUpdateGroupReqInput(
            master_address=master_address,
            master_port=master_port,
            rank_offset=rank_offset,
            world_size=world_size,
            group_name=group_name,
            backend=backend,
            nccl_unique_id=nccl_unique_id,
            timeout_s=timeout_s,
            broadcast_timeout_s=broadcast_timeout_s,
        )
        return await self._ask(request, wire.InitWeightsUpdateGroupReqOutput, call)

    async def destroy_weights_update_group(
        self, group_name: str = DEFAULT_GROUP_NAME, **call: Unpack[CallOptions]
    ) -> wire.DestroyWeightsUpdateGroupReqOutput:
        """Have the engine leave a process group."""
        request = wire.DestroyWeightsUpdateGroupReqInput(group_name=group_name)
        return await self._ask(request, wire.DestroyWeightsUpdateGroupReqOutput, call)

    async def weights_manifest(
        self, *, component: str | None = None, **call: Unpack[CallOptions]
    ) -> wire.GetWeightsManifestReqOutput:
        """Return name, dtype and shape of every stored tensor, all of which :meth:`send_weights` can send."""
        request = wire.GetWeightsManifestReqInput(component=component)
        return await self._ask(request, wire.GetWeightsManifestReqOutput, call)

    async def send_weights(
        self,
        specs: Sequence[wire.TensorSpec],
        *,
        group_name: str = DEFAULT_GROUP_NAME,
        tensors_per_broadcast: Sequence[int] | None = None,
        component: str | None = None,
        **call: Unpack[CallOptions],
    ) -> wire.SendWeightsReqOutput:
        """Have the engine broadcast committed weights as rank 0 of a process group, while it generates.

        The receivers' calls have the same ``specs`` (``tensor.spec()`` of :meth:`weights_manifest`) and the
        same ``tensors_per_broadcast``: the number in each broadcast, or None for one each.
        """
        request = wire.SendWeightsReqInput(
            specs=list(specs),
            group_name=group_name,
            load_format=None if tensors_per_broadcast is None else "flattened_bucket",
            tensors_per_broadcast=None if tensors_per_broadcast is None else list(tensors_per_broadcast),
            component=component,
        )
        return await self._ask(request, wire.SendWeightsReqOutput, call)

    async def release_memory(
        self, tags: wire.MemoryTag | Sequence[wire.MemoryTag] | None = None, **call: Unpack[CallOptions]
    ) -> wire.ReleaseMemoryOccupationReqOutput:
        """Release device memory by tag; None means all tags. The values of released weights are lost."""
        request = wire.ReleaseMemoryOccupationReqInput(tags=tags_of(tags))
        return await self._ask(request, wire.ReleaseMemoryOccupationReqOutput, call)

    async def resume_memory(
        self, tags: wire.MemoryTag | Sequence[wire.MemoryTag] | None = None, **call: Unpack[CallOptions]
    ) -> wire.ResumeMemoryOccupationReqOutput:
        """Allocate the released memory of ``tags`` again, all of it or none. None means all tags."""
        request = wire.ResumeMemoryOccupationReqInput(tags=tags_of(tags))
        return await self._ask(request, wire.ResumeMemoryOccupationReqOutput, call)

    async def begin_weight_update(
        self,
        *,
        message_id: str | None = None,
        timeout: float | None = None,
        **session: Unpack[SessionOptions],
    ) -> wire.BeginWeightUpdateReqOutput:
        """Open an explicit session, which :meth:`end_weight_update` commits as a whole.

        Updates of this client belong to it until then; other clients pass the reply's ``session_id``.
        """
        require_known("session", session, SessionOptions)
        request = wire.BeginWeightUpdateReqInput(id=id_of(message_id), **session)
        return await self._begin(request, timeout)

    async def end_weight_update(
        self,
        *,
        commit: bool = True,
        session_id: str | None = None,
        force: bool = False,
        weight_version: str | int | None = None,
        **call: Unpack[CallOptions],
    ) -> wire.WeightUpdateReqOutput:
        """End a session: commit it, or abort it (then the weights stay valid only if nothing was written).

        ``session_id`` None means the session that this client began, else the implicit one of its calls.
        ``force`` aborts the open session, whoever opened it. A refused commit leaves it open.
        """
        request = wire.EndWeightUpdateReqInput(
            commit=commit,
            session_id=session_id if session_id is not None else self._session_id,
            force=force,
            weight_version=label(weight_version),
        )
        reply = await self._ask(request, wire.WeightUpdateReqOutput, call)
        self._ended(self._session_id if force else request.session_id)
        return reply

    @contextlib.asynccontextmanager
    async def weight_update(
        self,
        *,
        weight_version: str | int | None = None,
        timeout: float | None = None,
        **options: Unpack[SessionOptions],
    ) -> AsyncIterator[WeightUpdate]:
        """Open a session for a ``with`` block: committed at its end (``.result``), aborted if it fails."""
        require_known("session", options, SessionOptions)
        begin = wire.BeginWeightUpdateReqInput(**options)
        session = None
        try:
            session = WeightUpdate(await self._begin(begin, timeout))
            yield session
            session.result = await self.end_weight_update(
                session_id=session.opened.session_id, weight_version=weight_version, timeout=timeout
            )
        except BaseException as error:
            if session is not None or not is_answer(error):  # else nothing was opened
                await self._abort_session(begin.id, error, timeout)
            raise

    async def rollback_weights(
        self,
        *,
        to_digest: str | None = None,
        flush_cache: bool = True,
        torch_empty_cache: bool = False,
        **call: Unpack[CallOptions],
    ) -> wire.WeightUpdateReqOutput:
        """Return to the weights before the last commit, a delta's; NoRollback if they are not kept."""
        request = wire.RollbackWeightsReqInput(
            to_digest=to_digest, flush_cache=flush_cache, torch_empty_cache=torch_empty_cache
        )
        return await self._ask(request, wire.WeightUpdateReqOutput, call)

    async def rollback(
        self, delta: "WeightDelta | None" = None, **call: Unpack[CallOptions]
    ) -> wire.WeightUpdateReqOutput:
        """Return to the weights before ``delta``, or before the last delta, in the time that it took."""
        return await self.rollback_weights(to_digest=None if delta is None else delta.base_digest, **call)

    async def check_weights(
        self, action: wire.CheckerAction = "checksum", **call: Unpack[CallOptions]
    ) -> wire.WeightsCheckerReqOutput:
        """Return checksums of the weights, or compare them with an earlier snapshot."""
        return await self._ask(
            wire.WeightsCheckerReqInput(action=action),
            wire.WeightsCheckerReqOutput,
            call,
        )

    async def check_drift(
        self, samples: Sequence[Mapping[str, Any]] | None = None, **call: Unpack[CallOptions]
    ) -> wire.DriftReport:
        """Score samples with the engine's weights, and compare with a trainer's log-probabilities.

        Each sample has ``token_ids`` (prompt and output), ``prompt_len`` and ``logprobs`` (floats, of the
        output), and may have ``temperature``, ``adapter`` and ``rid``. None returns the report of the last
        self-check, which an engine makes with ``enable_drift_check``.
        """
        try:
            reply = await self._ask(drift_request(samples), wire.CheckDriftReqOutput, call)
        except TimedOut as error:  # for example because the engine is paused
            raise await self._explained(error) from None
        return reply.report

    async def drift_samples(self, count: int, **call: Unpack[CallOptions]) -> wire.CheckDriftReqOutput:
        """Return the last self-check's report, with at most ``count`` of its newest ``samples``."""
        request = wire.CheckDriftReqInput(return_samples=count)
        return await self._ask(request, wire.CheckDriftReqOutput, call)

    async def status(
        self, *, owner: str | None = None, **call: Unpack[CallOptions]
    ) -> wire.GetStatusReqOutput:
        """Return a consistent snapshot, in every state; ``owner=""`` sends no token and renews no lease."""
        request = wire.GetStatusReqInput(owner=owner)
        return await self._ask(request, wire.GetStatusReqOutput, call)

    async def metrics(self, *, timeout: float | None = None) -> dict[str, float]:
        """Return the engine's figures as ``{"caesura/…": number}``, for a trainer's log; renews no lease."""
        return figures(await self.status(owner="", timeout=timeout))

    async def memory_history(
        self, *, after: int = 0, owner: str | None = None, **call: Unpack[CallOptions]
    ) -> wire.GetMemoryHistoryReqOutput:
        """Return memory events with a ``seq`` above ``after``, oldest first; ``more`` if there are others."""
        request = wire.GetMemoryHistoryReqInput(after=after, owner=owner)
        return await self._ask(request, wire.GetMemoryHistoryReqOutput, call)

    async def shutdown(
        self, *, drain: bool | None = None, drain_s: float | None = None, **call: Unpack[CallOptions]
    ) -> wire.ShutdownReqOutput:
        """Shut the engine down: it replies, ends every request and exits.

        ``drain`` True lets accepted requests finish within ``drain_s`` seconds, False ends them at once; None
        means the engine's ``shutdown_mode`` and ``drain_timeout_s``.
        """
        request = wire.ShutdownReqInput(drain=drain, timeout_s=drain_s, requested_by=this_process())
        return await self._ask(request, wire.ShutdownReqOutput, call)

    async def _ask(
        self,
        request: wire.Request,
        expects: type[ReplyT],
        call: CallOptions,
        buffers: Sequence[memoryview] = (),
    ) -> ReplyT:
        require_known("call", call, CallOptions)
        if (message_id := call.get("message_id")) is not None:
            request.id = message_id
        return await self._call(request, expects, call.get("timeout"), buffers)

    async def _call(
        self,
        request: wire.Request,
        expects: type[ReplyT],
        timeout: float | None,
        buffers: Sequence[memoryview] = (),
    ) -> ReplyT:
        timeout = seconds("timeout", timeout)
        try:
            started = self.start(request, expects, buffers)
            reply: ReplyT = await self._wait_for(started, request.id, timeout)
        except wire.CaesuraError as error:
            self._failed(request, error)
            raise
        return reply

    def _sign(self, request: wire.Request) -> None:
        if isinstance(request, wire.ControlRequest) and request.owner is None:
            request.owner = self.owner

    def _sender(self, timeout: float | None) -> "Sender":
        from ..trainer.sending import Sender

        self._process.require()
        timeout = seconds("timeout", timeout)

        async def wait(ticket: Any, request: wire.Request) -> Any:
            try:
                return await self._wait_for(ticket, request.id, timeout)
            except BaseException as error:
                self._failed(request, error)
                raise

        return Sender(self.start, wait, self._run, timeout)

    async def _begin(
        self, request: wire.BeginWeightUpdateReqInput, timeout: float | None
    ) -> wire.BeginWeightUpdateReqOutput:
        reply = await self._call(request, wire.BeginWeightUpdateReqOutput, timeout)
        self._session_id = reply.session_id
        return reply

    async def _abort_session(self, name: str, error: BaseException, timeout: float | None) -> None:
        """Abort the session ``name``; wait for the reply only if the engine has answered before."""
        self._session_id = None
        request = wire.EndWeightUpdateReqInput(commit=False, session_id=name)
        try:
            answer = self.start(request, wire.WeightUpdateReqOutput)
            if is_answer(error):
                await self._wait_for(answer, request.id, timeout)
        except NoSession:  # it had ended before, or was never opened
            pass
        except wire.CaesuraError as second:
            error.add_note(f"the weight session could not be aborted either: {second}")

    async def _explained(self, error: TimedOut) -> TimedOut:
        patience = time_to_ask(error)
        if patience <= 0:
            return error
        try:
            return explained(error, await self.status(owner="", timeout=patience))
        except wire.CaesuraError:  # it says nothing now, or is gone
            return error

    def _shared_buckets(self) -> "SharedBuckets":
        from ..trainer import SharedBuckets

        if self._shared is None:
            self._shared = SharedBuckets()
        return self._shared

    def _named(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return update_fields({"session_id": self._session_id, **options})

    def _failed(self, request: wire.Request, error: BaseException) -> None:
        if isinstance(error, EngineDied):
            self._session_id = None
        elif isinstance(request, wire.WeightUpdateOptions | wire.EndWeightUpdateReqInput):
            over = isinstance(request, wire.EndWeightUpdateReqInput) and is_answer(error)
            if isinstance(error, NoSession | DeadlineExceeded) or (
                over and not isinstance(error, _STILL_OPEN)
            ):
                self._ended(request.session_id)

    def _ended(self, session_id: str | None) -> None:
        if session_id == self._session_id:
            self._session_id = None
