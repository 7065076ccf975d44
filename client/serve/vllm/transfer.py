"""One trainer's weight transfer (init, start, updates, finish) as a session of the engine.

Invariants:
- Nothing of an update serves before ``finish``, which commits all of it or nothing. After a failed call the
  session is over and ``finish`` is refused until the next ``start``: weights that were written in part are
  poisoned, and a whole update makes them valid again.
- A call with the body of one that succeeded in the same update, or still runs, returns what that one returns:
  clients repeat a POST whose answer was lost.
- One trainer at a time: while an update has calls, another ``start`` is refused, and another ``init`` unless
  no call runs and the update's trainer is gone. One that nobody continues is aborted after :data:`IDLE_S`.
- The connection to a trainer's store ends with the trainer, and with it what is known of its group.
"""

import asyncio
import base64
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
    Busy,
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
JOIN_S = 60.0
"""Longest time for all ranks of a trainer's group to join, in seconds."""
_REPEATED_S = 10.0
"""Seconds in which an equal ``init`` is a repeated one, and after which a trainer without a store that says
nothing of its update may be replaced."""
_CONNECT_S = 2.0
_NCCL_ID_BYTES = 128
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
    nccl_unique_id_b64: str | None = None
    """Instead of the address: the communicator's id, 128 bytes in base64."""
    base_model_path: str | None = None
    """SkyRL's, of the backend ``delta``: the checkpoint that is version 0; null: the server's model."""
    local_checkpoint_dir: str | None = None
    """Folder of the copy that ``/fetch_weights`` brings up to date."""
    # accepted and ignored
    packed_num_buffers: int = 2
    max_files_to_keep: int = 5
    prefetch_depth: int = 0
    version_wait_timeout_s: float = 0.0

    def has_store_of(self, other: "InitInfo | None") -> bool:
        """Return True if both name one address, at which only one trainer can listen."""
        mine = (self.master_address, self.master_port)
        return other is not None and None not in mine and mine == (other.master_address, other.master_port)


class WeightTransfer:
    def __init__(self, client: AsyncSchedulerClient, backend: str) -> None:
        """``backend`` is that of an ``init`` without one."""
        self._client = client
        self._lock = asyncio.Lock()
        self._backend = backend
        self._info: InitInfo | None = None
        self._joined_at = self._heard_at = 0.0
        self._joining: tuple[InitInfo, asyncio.Task[None]] | None = None
        self._store: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._session: str | None = None
        self._failure: CaesuraError | None = None
        # Calls of the last update that run or have succeeded, by their body.
        self._calls: dict[bytes, asyncio.Task[Any]] = {}
        self._idle: asyncio.TimerHandle | None = None

    @property
    def info(self) -> InitInfo:
        """The last init, whose backend is known; InvalidRequest without one."""
        if self._info is None:
            raise InvalidRequest("no weight transfer: call POST /init_weight_transfer_engine first")
        return self._info

    async def init(self, info: InitInfo) -> None:
        """Leave the transfer of the last trainer, and join the group of this one if it has one.

        SessionOpen while an update of another trainer goes on, Busy while another init waits for its ranks.
        """
        info = msgspec.structs.replace(info, backend=info.backend or self._backend)
        await self._require_possible(info)
        if self._joining is None or self._joining[1].done() or self._joining[0] != info:
            self._require_not_joining()
            self._joining = info, asyncio.ensure_future(self._init(info))
        await asyncio.shield(self._joining[1])

    async def _init(self, info: InitInfo) -> None:
        async with self._lock:
            self._require_replaceable(info)
            same = info == self._info and self._failure is None and not self._calls
            if not same or self._is_gone() or monotonic() - self._joined_at > _REPEATED_S:
                await self._leave()
            if info.backend in _GROUPS:
                await self._join(info)  # at once where the engine is in this group already
            self._info, self._joined_at = info, monotonic()

    def _require_not_joining(self) -> None:
        if self._joining is not None and not self._joining[1].done():
            info = self._joining[0]
            raise Busy(
                f"an init waits up to {JOIN_S:.0f} s for the ranks at {info.master_address}:"
                f"{info.master_port}: POST /shutdown_weight_transfer_engine ends it",
                running="InitWeightsUpdateGroupReqInput",
            )

    def _require_replaceable(self, info: InitInfo) -> None:
        if self._session is None or not self._calls:
            return
        silent, limit = monotonic() - self._heard_at, _REPEATED_S if self._store is None else IDLE_S
        if self._has_running():
            left, silent = "when its call that runs has ended, or", 0.0
        elif silent >= limit or self._is_gone() or info.has_store_of(self._info):
            return
        else:
            left = "when its trainer is gone, or" if self._store is not None else "after"
        raise SessionOpen(
            f"a weight update of another trainer is under way: init again {left} {limit - silent:.0f} s "
            "without a call of it; POST /shutdown_weight_transfer_engine ends it at once"
        )

    def _has_running(self, kind: bytes = b"") -> bool:
        return any(key.startswith(kind) and not call.done() for key, call in self._calls.items())

    def _is_gone(self) -> bool:
        """Return True if the trainer's store has closed its connection."""
        reader = None if self._store is None else self._store[0]
        return reader is not None and (reader.at_eof() or reader.exception() is not None)

    async def _require_possible(self, info: InitInfo) -> None:
        instead = "start the server with --weight-transfer-backend, or send by caesura.integrations.vllm"
        device = (await self._client.status(owner="")).device
        _nccl_id(info)
        if info.backend == "sparse_nccl" and device.startswith("cuda"):
            raise Unsupported(
                f"the backend sparse_nccl, two broadcasts for each tensor, is not received: {instead}",
                field="backend",
            )
        if info.backend in ("nccl", "sparse_nccl", "ipc") and not device.startswith("cuda"):
            raise Unsupported(
                f"the backend {info.backend} needs an engine on a GPU, this one is on {device}: {instead}",
                field="backend",
            )

    async def _join(self, info: InitInfo) -> None:
        identity = _nccl_id(info)
        host, port = (info.master_address, info.master_port) if identity is None else ("unused", 1)
        if host is None or port is None or info.world_size is None:
            raise InvalidRequest(
                f"{info.backend} needs master_address, master_port and world_size", field="init_info"
            )
        await asyncio.shield(
            self._client.init_weights_update_group(
                host,
                port,
                rank_offset=info.rank_offset,
                world_size=info.world_size,
                group_name=DEFAULT_GROUP_NAME,
                backend=_GROUPS[info.backend or ""],
                nccl_unique_id=identity,
                timeout_s=JOIN_S,
            )
        )
        if self._store is None and identity is None:
            with suppress(OSError, TimeoutError):  # then nothing tells that the trainer is gone
                connecting = asyncio.open_connection(host, port)
                self._store = await asyncio.wait_for(connecting, _CONNECT_S)

    async def shutdown(self) -> None:
        """Leave the group, which ends a broadcast or a rank that never comes, and abort the open update."""
        if self._joining is not None and not self._joining[1].done():
            with suppress(EngineError):  # it has not begun to join
                await self._client.destroy_weights_update_group(DEFAULT_GROUP_NAME)
        async with self._lock:
            await self._leave()

    async def start(self) -> str:
        """Open a session; return its id, which later calls may name."""
        self._require_not_joining()
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
        """Commit the update. Raises as :meth:`update`, and WeightMismatch if tensors are missing.

        SessionOpen, and the update goes on, while one of its tensors is on the way.
        """

        async def committed() -> WeightUpdateReqOutput:
            session = self._require_session(named)
            if self._has_running(b"update"):
                raise SessionOpen("an /update_weights of this update still runs: finish after its answer")
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
        if self._store is not None:
            self._store[1].close()
        self._info = self._failure = self._store = None
        self._calls.clear()

    async def _abort(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            end = EndWeightUpdateReqInput(session_id=session, commit=False)
            with suppress(EngineError):  # the engine has ended it already
                await asyncio.shield(self._client.start(end, WeightUpdateReqOutput))

    def _wait(self) -> None:
        self._heard_at = monotonic()
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if self._session is not None and not self._has_running():
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(IDLE_S, lambda: asyncio.ensure_future(self._expire()))

    async def _expire(self) -> None:
        async with self._lock:
            if self._session is not None and not self._has_running():
                self._failure = TimedOut(f"nothing came for {IDLE_S:.0f} s", id="", timeout=IDLE_S)
                await self._abort()


def _nccl_id(info: InitInfo) -> bytes | None:
    """Return the id of the trainer's communicator if it came with the init. Raises InvalidRequest."""
    given, field = info.nccl_unique_id_b64, "nccl_unique_id_b64"
    if given is None:
        return None
    if info.backend != "nccl" or info.master_address is not None or info.master_port is not None:
        raise InvalidRequest(f"{field} is for the backend nccl, without an address and a port", field=field)
    with suppress(ValueError):
        if len(data := base64.b64decode(given, validate=True)) == _NCCL_ID_BYTES:
            return data
    raise InvalidRequest(f"{field} must be {_NCCL_ID_BYTES} bytes in standard base64", field=field)


def _over(failure: CaesuraError) -> EngineError:
    return error_for(
        failure.code,
        f"the weight update is over and nothing of it serves ({failure.message}): call POST "
        "/start_weight_update and send every tensor again",
        failure.detail,
    )
