"""Updates that a parameter server drives: it sends buckets when it has them, the engine loads and answers.

Invariants:
- One exchange is one session: nothing is committed before the server has said twice that it is done, and its last answer
  comes after the commit. What it did not send keeps its values; weights that are not serviceable still need every parameter.
- Generation goes on until the first bucket is there. While the server is silent the loop sleeps or generates, and status
  and abort are answered; commands that change the engine wait for the end, as behind any update.
- The server's buffer is open from its first message to its first None, or to the failure.
"""

from collections.abc import Callable, Generator
from time import monotonic

import torch

from ...io_struct import CaesuraError, ErrorCode, UpdateWeightsFromCheckpointEngineReqInput
from ..background import Feed
from ..config import EngineConfig
from ..observability.stage_profiler import StageProfiler
from ..weights.source import BufferSource
from ..weights.transports.checkpoint_engine import (
    Bucket,
    Closing,
    Conversation,
    Ending,
    Failed,
    Opening,
    Turn,
)
from ..weights.transports.cuda_ipc import uuid_of
from ..weights.transports.ipc import SharedMemoryMaps
from .lifecycle import Operation, Wait
from .pause_ownership import Sender
from .weight_sessions import Session
from .weight_updates import WeightUpdates

_NAME = "checkpoint_engine"
_ROUTE = (_NAME, None)


class ParameterServerUpdates:
    """The handler of checkpoint-engine updates."""

    def __init__(self, *, config: EngineConfig, updates: WeightUpdates, wake: Callable[[], None]) -> None:
        """``wake`` makes the loop look again; it is called from a thread."""
        self._config = config
        self._updates = updates
        self._wake = wake
        self._conversation: Conversation | None = None

    def close(self) -> None:
        """Stop talking to the last server, which may still wait to hear that its update has failed."""
        if self._conversation is not None:
            self._conversation.close()

    def update(self, request: UpdateWeightsFromCheckpointEngineReqInput, sender: Sender) -> Operation:
        """Connect to the server of this engine's device, and load what it sends until it is done."""
        self._updates.sessions.admitted(request, sender, _ROUTE)
        stages, started = self._updates.profiler(), monotonic()
        conversation = self._connect(request)
        feed = Feed(conversation.turns(), self._wake)
        memory = SharedMemoryMaps(self._config.device)
        try:
            opening = yield from self._next(feed, None)
            session = self._updates.enter(request, sender, _ROUTE)
            work = self._load_all(opening, feed, memory, session, stages)
            return (yield from self._updates.conclude(request.id, session, stages, started, work, whole=True))
        except BaseException as error:
            conversation.refuse(str(error) or "the update was broken off")
            raise
        finally:
            feed.release()  # the turn at hand is answered: with consent after the commit, else with the refusal
            memory.close()

    def _connect(self, request: UpdateWeightsFromCheckpointEngineReqInput) -> Conversation:
        if not self._config.allow_legacy_pickle:
            raise CaesuraError(
                ErrorCode.UNSUPPORTED,
                "checkpoint-engine's messages are pickles: start the engine with allow_legacy_pickle to accept them",
            )
        device = torch.device(self._config.device)
        if device.type not in ("cpu", "cuda"):
            raise CaesuraError(
                ErrorCode.UNSUPPORTED, f"checkpoint-engine updates on {device.type} are not built"
            )
        uuid = uuid_of(device) if device.type == "cuda" else ""
        key = f"GPU-{uuid}" if uuid else "cpu"
        if key not in request.zmq_handles:
            known = sorted(request.zmq_handles)[:16]
            raise CaesuraError(
                ErrorCode.INVALID_REQUEST,
                f"zmq_handles has no address for this engine's device {key!r}, only for {known}",
                field="zmq_handles",
                value=known,
            )
        self.close()
        self._conversation = Conversation(request.zmq_handles[key], uuid, request.timeout_s)
        return self._conversation

    def _next(self, feed: Feed[Turn], session: Session | None) -> Generator[Wait, None, Turn]:
        """What the server says next; raises what ends the exchange."""
        while (turn := feed.take()) is None:
            yield Wait.OUTSIDE
            if session is not None:
                self._updates.require_open(session)
        if isinstance(turn, Failed):
            raise turn.error
        return turn

    def _load_all(
        self,
        opening: Turn,
        feed: Feed[Turn],
        memory: SharedMemoryMaps,
        session: Session,
        stages: StageProfiler,
    ) -> Generator[Wait, None, None]:
        turn, tensors = opening, 0
        assert isinstance(opening, Opening)
        memory.view(opening.handle)  # what is wrong with it is said at once
        while not isinstance(turn, Ending):
            feed.release()
            turn = yield from self._next(feed, session)
            if isinstance(turn, Bucket):
                yield from self._load(turn, opening, memory, session, stages)
                tensors += len(turn.specs)
            elif isinstance(turn, Closing):
                if not tensors:
                    raise CaesuraError(
                        ErrorCode.INVALID_REQUEST,
                        "the parameter server sent no tensors",
                        field="specs",
                        value=0,
                    )
                memory.close()

    def _load(
        self,
        bucket: Bucket,
        opening: Opening,
        memory: SharedMemoryMaps,
        session: Session,
        stages: StageProfiler,
    ) -> Generator[Wait, None, None]:
        buffer = memory.view(opening.handle)[opening.start : opening.start + opening.nbytes]
        source = self._updates.open_checked(lambda: BufferSource(_NAME, bucket.specs, [buffer]), session)
        yield from self._updates.load(source, session, stages)
