"""Weight updates driven by a parameter server: the server sends buckets, the engine loads each one and
replies.

- One exchange is one weight session. It commits after the server's second None, and the server gets its last
  reply after the commit. Tensors that were not sent keep their values, unless weights are poisoned or
  invalid.
- Generation goes on until the first bucket has arrived; other commands wait, as with any update.
- The server's buffer is mapped from its first message until its first None, or until a failure.
"""

from collections.abc import Generator
from time import monotonic
from typing import TYPE_CHECKING

import torch

from ...io_struct import CaesuraError, ErrorCode, TensorSpec, UpdateWeightsFromCheckpointEngineReqInput
from ...transfer.cuda_ipc import uuid_of
from ..observability.stage_profiler import StageProfiler
from ..runtime.background import Feed
from ..weights.source import BufferSource, SharedMemory, chosen
from ..weights.transports.checkpoint_engine import Conversation, Marker, Turn
from ..weights.transports.ipc import SharedMemoryMaps
from .engine_state import Sender
from .operations import Operation, Wait
from .weight_sessions import Session

if TYPE_CHECKING:
    from ..runtime.engine import Engine

_NAME = "checkpoint_engine"
_ROUTE = (_NAME, None)


class ParameterServerUpdates:
    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._conversation: Conversation | None = None

    def close(self) -> None:
        """End the conversation with the last server, which may wait for the error of its failed update."""
        if self._conversation is not None:
            self._conversation.close()

    def update(self, request: UpdateWeightsFromCheckpointEngineReqInput, sender: Sender) -> Operation:
        """Connect to the server of this engine's device, and load its buckets until it is done."""
        engine = self._engine
        if request.delta is not None:
            raise CaesuraError(ErrorCode.UNSUPPORTED, "a parameter server sends no deltas")
        engine.sessions.find(request, sender, _ROUTE)
        stages, started = engine.updates.profiler(), monotonic()
        conversation = self._connect(request)
        feed = Feed(conversation.turns(), engine.wakeup.set)
        memory = SharedMemoryMaps(engine.config.device)
        try:
            opening = yield from self._next(feed, None)
            found = engine.sessions.find(request, sender, _ROUTE)  # again, because time has passed
            session = engine.updates.join(found, request, sender, _ROUTE)
            with engine.updates.call(session):
                yield from self._load_all(opening, feed, memory, session, stages)
                return (yield from engine.updates.finish(request.id, session, stages, started, last=True))
        except BaseException as error:
            conversation.refuse(str(error) or "the update was cancelled")
            raise
        finally:
            # Lets the thread reply to the current message: success after a commit, else the refusal
            feed.release()
            memory.close()

    def _connect(self, request: UpdateWeightsFromCheckpointEngineReqInput) -> Conversation:
        engine = self._engine
        if not engine.config.allow_legacy_pickle:
            raise CaesuraError(
                ErrorCode.UNSUPPORTED,
                "checkpoint-engine's messages are pickles: start the engine with allow_legacy_pickle to "
                "accept them",
            )
        device = torch.device(engine.config.device)
        if device.type not in ("cpu", "cuda"):
            reason = f"checkpoint-engine updates on {device.type} are not built"
            raise CaesuraError(ErrorCode.UNSUPPORTED, reason)
        uuid = uuid_of(device) if device.type == "cuda" else ""
        key = f"GPU-{uuid}" if uuid else "cpu"
        if key not in request.zmq_handles:
            known = sorted(request.zmq_handles)[:16]
            reason = f"zmq_handles has no address for this engine's device {key!r}, only for {known}"
            raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="zmq_handles", value=known)
        self.close()
        self._conversation = Conversation(request.zmq_handles[key], uuid, request.timeout_s)
        return self._conversation

    def _next(self, feed: Feed[Turn], session: Session | None) -> Generator[Wait, None, Turn]:
        """Wait for the server's next message; raises the error that ended the exchange, if one did."""
        while (turn := feed.take()) is None:
            yield Wait.THREAD
            if session is not None:
                self._engine.sessions.require_open(session)
        if isinstance(turn, CaesuraError):
            raise turn
        return turn

    def _load_all(
        self,
        opening: Turn,
        feed: Feed[Turn],
        memory: SharedMemoryMaps,
        session: Session,
        stages: StageProfiler,
    ) -> Generator[Wait, None, None]:
        tensors = 0
        assert isinstance(opening, SharedMemory)
        memory.view(opening.handle)  # a bad handle must fail now, before the first bucket
        turn: Turn = opening
        while turn is not Marker.ENDING:
            feed.release()
            turn = yield from self._next(feed, session)
            if isinstance(turn, list):
                yield from self._load(turn, opening, memory, session, stages)
                tensors += len(turn)
            elif turn is Marker.CLOSING:
                if not tensors:
                    reason = "the parameter server sent no tensors"
                    raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="specs", value=0)
                memory.close()

    def _load(
        self,
        specs: list[TensorSpec],
        place: SharedMemory,
        memory: SharedMemoryMaps,
        session: Session,
        stages: StageProfiler,
    ) -> Generator[Wait, None, None]:
        """Write a bucket; nothing refers to the buffer when it has ended."""
        engine = self._engine
        buffer = memory.view(place.handle)[place.start : place.start + place.nbytes]
        source, _ = engine.updates.check(
            lambda: BufferSource(_NAME, specs, [buffer], place),
            session,
            chosen(engine.model.components, session.component),
        )
        yield from engine.updates.write(source, session, stages)
