"""One trainer's weight transfer (init, start, updates, finish) as a session of the engine.

Invariants:
- Nothing of an update serves before ``finish``, which commits all of it or nothing. After a failed call the
  session is over and ``finish`` is refused until the next ``start``: weights that were written in part are
  poisoned, and a whole update makes them valid again.
- A call with the body of one that succeeded in the same update, or still runs, returns what that one returns:
  clients repeat a POST whose answer was lost.
- One trainer at a time: while an update has calls, another ``start`` or ``init`` is refused. One that nobody
  continues is aborted after :data:`IDLE_S`.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from ....io_struct import (
    BeginWeightUpdateReqInput,
    BeginWeightUpdateReqOutput,
    CaesuraError,
    EndWeightUpdateReqInput,
    WeightUpdateReqOutput,
)
from ....io_struct.weights import DEFAULT_GROUP_NAME
from ...connection.async_client import AsyncSchedulerClient
from ...exceptions import (
    EngineError,
    InvalidRequest,
    NoSession,
    SessionOpen,
    TimedOut,
    Unsupported,
    error_for,
)
from ..bodies import Strict
from ..options import Backend

Positive = Annotated[int, msgspec.Meta(ge=1)]

IDLE_S = 300.0
"""Seconds between two calls of one update after which its trainer counts as gone."""
_REPEATED_S = 10.0
"""Seconds in which an equal ``init`` is a repeated one, not that of a restarted trainer."""
_GROUPS: dict[str, Literal["gloo", "vllm_nccl"]] = {"gloo": "gloo", "nccl": "vllm_nccl"}
"""Backends with a process group, by the engine's name of it."""
T = TypeVar("T")


class InitInfo(Strict, kw_only=True):
    """vLLM's ``NCCLWeightTransferInitInfo``, and the backend."""

    backend: Backend | None = None
    """Caesura's own; null: ``--weight-transfer-backend``."""
    master_address: str | None = None
    master_port: int | None = None
    rank_offset: Positive = 1
    world_size: Positive | None = None
    packed: bool = False
    packed_buffer_size_bytes: Positive = 1 << 30
    # refused unless null
    nccl_unique_id_b64: Any = None
    # accepted and ignored
    packed_num_buffers: int = 2


class WeightTransfer:
    def __init__(self, client: AsyncSchedulerClient, backend: str) -> None:
        """``backend`` is that of an ``init`` without one."""
        self._client = client
        self._lock = asyncio.Lock()
        self._backend = backend
        self._info: InitInfo | None = None
        self._joined_at = 0.0
        self._session: str | None = None
        self._failure: CaesuraError | None = None
        # Of the last update: those that run or have succeeded, by their body.
        self._calls: dict[bytes, asyncio.Task[Any]] = {}
        self._idle: asyncio.TimerHandle | None = None

    @property
    def info(self) -> InitInfo:
        """The last init, whose backend is known; InvalidRequest without one."""
        if self._info is None:
            raise InvalidRequest("no weight transfer: call POST /init_weight_transfer_engine first")
        return self._info

    async def init(self, info: InitInfo) -> None:
        """Leave the transfer of the last trainer, and join the group of this one if it has one."""
        info = msgspec.structs.replace(info, backend=info.backend or self._backend)
        await self._require_possible(info)
        async with self._lock:
            self._require_no_update()
            same = info == self._info and self._failure is None and not self._calls
            if not same or monotonic() - self._joined_at > _REPEATED_S:
                await self._leave()
            if info.backend in _GROUPS:
                await self._join(info)  # at once where the engine is in this group already
            self._info, self._joined_at = info, monotonic()

    async def _require_possible(self, info: InitInfo) -> None:
        instead = "start the server with --weight-transfer-backend, or send by caesura.integrations.vllm"
        device = (await self._client.status(owner="")).device
        if info.backend in ("nccl", "ipc") and not device.startswith("cuda"):
            raise Unsupported(
                f"the backend {info.backend} needs an engine on a GPU, this one is on {device}: {instead}",
                field="backend",
            )
        if info.nccl_unique_id_b64 is not None:
            raise Unsupported(
                "nccl_unique_id_b64 is not supported: give master_address and master_port",
                field="nccl_unique_id_b64",
            )

    async def _join(self, info: InitInfo) -> None:
        if info.master_address is None or info.master_port is None or info.world_size is None:
            raise InvalidRequest(
                f"{info.backend} needs master_address, master_port and world_size", field="init_info"
            )
        await asyncio.shield(
            self._client.init_weights_update_group(
                info.master_address,
                info.master_port,
                rank_offset=info.rank_offset,
                world_size=info.world_size,
                group_name=DEFAULT_GROUP_NAME,
                backend=_GROUPS[info.backend or ""],
            )
        )

    async def shutdown(self) -> None:
        """Leave the group, which ends a broadcast that never comes, and abort the open update."""
        async with self._lock:
            await self._leave()

    async def start(self) -> str:
        """Open a session; return its id, which later calls may name."""
        async with self._lock:
            if self._session is not None and not self._calls:
                return self._session
            self._require_no_update()
            await self._abort()
            request = BeginWeightUpdateReqInput()
            opened: BeginWeightUpdateReqOutput = await asyncio.shield(
                self._client.start(request, BeginWeightUpdateReqOutput)
            )
            self._session, self._failure = opened.session_id, None
            self._calls.clear()
            self._wait()
            return opened.session_id

    async def update(self, body: bytes, receive: Callable[[str], Awaitable[T]], named: str | None) -> T:
        """Return the result of ``receive``, given the session; a failure aborts the session.

        NoSession if the call's session, ``named`` unless None, is another one.
        """

        async def received() -> T:
            session = self._require_session(named)
            async with self._ending_at_failure(session):
                return await receive(session)

        return await self._once(b"update%s %s" % ((named or "").encode(), body), received)

    async def finish(self, weight_version: str | None, named: str | None) -> WeightUpdateReqOutput:
        """Commit the update. Raises as :meth:`update`, and WeightMismatch if tensors are missing."""

        async def committed() -> WeightUpdateReqOutput:
            session = self._require_session(named)
            end = EndWeightUpdateReqInput(session_id=session, weight_version=weight_version)
            async with self._ending_at_failure(session):
                reply: WeightUpdateReqOutput = await self._client.start(end, WeightUpdateReqOutput)
            self._session = None
            return reply

        return await self._once(f"finish{named or ''} {weight_version or ''}".encode(), committed)

    @asynccontextmanager
    async def _ending_at_failure(self, session: str) -> AsyncGenerator[None, None]:
        """Abort ``session`` if the block fails, but none that has been started since."""
        try:
            yield
        except CaesuraError as error:
            if session == self._session:
                self._failure = error
                await self._abort()
            raise

    async def _once(self, key: bytes, work: Callable[[], Awaitable[T]]) -> T:
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = asyncio.ensure_future(work())
            call.add_done_callback(lambda done: self._ended(key, done))
        self._wait()
        return await asyncio.shield(call)

    def _ended(self, key: bytes, call: "asyncio.Task[Any]") -> None:
        failed = call.cancelled() or call.exception() is not None
        if failed and self._calls.get(key) is call:
            del self._calls[key]
        self._wait()

    def _require_session(self, named: str | None) -> str:
        if self._failure is not None:
            raise _over(self._failure)
        if named is not None and named != self._session:
            raise NoSession(f"the weight session {named} is not open")
        if self._session is None:
            raise NoSession("no weight update has been started: call POST /start_weight_update first")
        return self._session

    def _require_no_update(self) -> None:
        if self._session is not None and self._calls:
            raise SessionOpen(
                "a weight update is under way: POST /finish_weight_update or /shutdown_weight_transfer_engine"
            )

    async def _leave(self) -> None:
        if self._info is not None and self._info.backend in _GROUPS:
            with suppress(EngineError):  # an engine that has been restarted has no group
                await self._client.destroy_weights_update_group(DEFAULT_GROUP_NAME)
        await self._abort()
        self._info, self._failure = None, None
        self._calls.clear()

    async def _abort(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            end = EndWeightUpdateReqInput(session_id=session, commit=False)
            with suppress(EngineError):  # the engine has ended it already
                await asyncio.shield(self._client.start(end, WeightUpdateReqOutput))

    def _wait(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if self._session is not None and all(call.done() for call in self._calls.values()):
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(IDLE_S, lambda: asyncio.ensure_future(self._expire()))

    async def _expire(self) -> None:
        async with self._lock:
            if self._session is not None and all(call.done() for call in self._calls.values()):
                self._failure = TimedOut(f"nothing came for {IDLE_S:.0f} s", id="", timeout=IDLE_S)
                await self._abort()


def _over(failure: CaesuraError) -> EngineError:
    return error_for(
        failure.code,
        f"the weight update is over and nothing of it serves ({failure.message}): call POST "
        "/start_weight_update and send every tensor again",
        failure.detail,
    )
