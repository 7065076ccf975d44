"""From frames to handlers: decoding, idempotence, typed errors.

Invariants:
- Every readable request gets exactly one answer: its reply, or an ``ErrorReply``. Unreadable frames get an
  ``ErrorReply`` with the id that could be found; they never disturb the loop (I11).
- One message id, one effect (``answers.py``).
- Status, abort and lease renewal never wait for commands (``command_queue.py``).
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ...io_struct import (
    AbortReq,
    AbortReqOutput,
    CaesuraError,
    ControlRequest,
    EndWeightUpdateReqInput,
    ErrorCode,
    FetchResultReqInput,
    GenerateReqInput,
    Message,
    RenewPauseLeaseReqInput,
    RenewPauseLeaseReqOutput,
    ScoreReqInput,
    ShutdownReqInput,
    ShutdownReqOutput,
    ToScheduler,
    UpdateWeightsFromTensorReqInput,
    WeightUpdateOptions,
    decode_request,
)
from ..commands.lifecycle import Lifecycle
from ..commands.pause_ownership import Sender
from ..commands.scoring import Scoring
from ..commands.weight_sessions import Sessions
from ..guard import defect
from ..memory.device_cache import DeviceCache
from ..shutdown import Shutdown
from .answers import Answers
from .command_queue import CommandQueue
from .generations import Generations
from .replies import Replies

logger = logging.getLogger(__name__)

Queries = Mapping[type, Callable[[Any], Message]]
"""What answers messages that change nothing: a retry is answered afresh."""

_AT_ONCE = (AbortReq, FetchResultReqInput, RenewPauseLeaseReqInput, ShutdownReqInput)


class Dispatcher:
    """Routes messages to handlers."""

    def __init__(
        self,
        *,
        queries: Queries,
        generations: Generations,
        commands: CommandQueue,
        scoring: Scoring | None,
        lifecycle: Lifecycle,
        sessions: Sessions,
        answers: Answers,
        replies: Replies,
        device_cache: DeviceCache,
        shutdown: Shutdown,
    ) -> None:
        """``scoring`` None: no reference is loaded."""
        self._queries = queries
        self._generations = generations
        self._commands = commands
        self._scoring = scoring
        self._lifecycle = lifecycle
        self._sessions = sessions
        self._answers = answers
        self._replies = replies
        self._device_cache = device_cache
        self._shutdown = shutdown
        self._gone: list[bytes] = []

    @property
    def has_unanswered(self) -> bool:
        """Some command or score is under way; generations are counted by the live requests."""
        return self._commands.is_busy or (self._scoring is not None and self._scoring.has_work)

    @property
    def wants_tick(self) -> bool:
        """Something can go on at once: a command that waits for no thread, or scoring."""
        scores = self._scoring is not None and self._scoring.has_work and not self._scoring.waits
        return scores or self._commands.wants_tick

    @property
    def waits(self) -> bool:
        """Some command waits for the engine to change or for its deadline, or scoring for the device."""
        return self._commands.has_stepped_aside or (self._scoring is not None and self._scoring.waits)

    def handle(self, client: bytes, header: bytes, buffers: list[memoryview]) -> None:
        """One message from ``client``; never raises for anything a client can send."""
        try:
            message = _decode(header, buffers)
        except CaesuraError as error:
            logger.warning("dropped a malformed message: %s", error)
            self._replies.say(client, error.to_reply(str(error.detail.pop("id", ""))))
            return
        except Exception as error:  # noqa: BLE001  whatever a frame does to its decoder, its sender must hear
            self._replies.say(client, defect("decoding a message", "", error))
            return
        answers = self._known(client, message, header)
        if answers is None:
            self._begin(client, message, buffers)
        for answer in answers or ():
            self._replies.say(client, answer, message.id)

    def _known(self, client: bytes, message: ToScheduler, frame: bytes) -> list[Message] | None:
        """What can be said at once to ``message``: see :meth:`_attach`; an error where that fails."""
        try:
            if isinstance(message, ControlRequest):
                self._lifecycle.renew_lease(message.owner)
            if isinstance(message, WeightUpdateOptions | EndWeightUpdateReqInput):
                self._sessions.heard(message, Sender(client, message.owner))
            return self._attach(client, message, frame)
        except CaesuraError as error:
            return [error.to_reply(message.id)]
        except Exception as error:  # noqa: BLE001  a defect, whatever it is: its caller must hear, the loop must go on
            answer = defect(type(message).__name__, message.id, error)
        self._device_cache.after_failure(type(message).__name__)
        return [answer]

    def _begin(self, client: bytes, message: ToScheduler, buffers: list[memoryview]) -> None:
        """Start what ``message`` asks for, or answer why not."""
        try:
            self._start(client, message, buffers)
        except CaesuraError as error:
            answer, failed = error.to_reply(message.id), error.code == ErrorCode.OUT_OF_MEMORY
        except Exception as error:  # noqa: BLE001  as above
            answer, failed = defect(type(message).__name__, message.id, error), True
        else:
            return
        if failed:
            self._device_cache.after_failure(type(message).__name__)
        self._replies.answer(message.id, answer)

    def score(self) -> None:
        """Run what scores for a slice; it neither waits for commands nor makes them wait."""
        if self._scoring is not None:
            for answer in self._scoring.advance():
                self._replies.answer(answer.id, answer)

    def client_gone(self, client: bytes) -> None:
        """A send to ``client`` has failed. Sends happen while results are being made: :meth:`reap` does the rest."""
        self._gone.append(client)

    def reap(self) -> None:
        """Nobody waits for the generations of clients that are gone, unless another socket attached to them."""
        gone, self._gone = self._gone, []
        for client in dict.fromkeys(gone):
            self._generations.client_gone(client)
            self._answers.leave(client, self._commands.message_ids())
            self._sessions.client_gone(client)

    def refuse_rest(self, message: str) -> None:
        """Shutdown: every command and score that is still under way ends with an error."""
        for answer in self._scoring.end(message) if self._scoring is not None else ():
            self._replies.answer(answer.id, answer)
        self._commands.refuse_rest(message)

    def _attach(self, client: bytes, message: ToScheduler, frame: bytes) -> list[Message] | None:
        """What there is to say at once: the answer to a query, or what was answered to this id. None: the id is new."""
        query = self._queries.get(type(message))
        if query is not None:
            return [query(message)]
        return self._answers.attach(client, message.id, frame)

    def _start(self, client: bytes, message: ToScheduler, buffers: list[memoryview]) -> None:
        if isinstance(message, GenerateReqInput):
            self._generations.generate(client, message)
        elif isinstance(message, ScoreReqInput):
            self._score(message)
        elif isinstance(message, ControlRequest) and not isinstance(message, _AT_ONCE):
            self._commands.add(client, message, buffers)
        else:
            self._replies.answer(message.id, self._answer_at_once(message))

    def _answer_at_once(self, message: ToScheduler) -> Message:
        if isinstance(message, AbortReq):
            return AbortReqOutput(id=message.id, aborted=self._generations.abort(message))
        if isinstance(message, RenewPauseLeaseReqInput):
            left = self._lifecycle.lease_left_s if message.owner == self._lifecycle.pause_owner else None
            return RenewPauseLeaseReqOutput(id=message.id, renewed=left is not None, lease_left_s=left)
        if isinstance(message, FetchResultReqInput):
            return self._generations.fetch(message)
        assert isinstance(message, ShutdownReqInput)
        self._shutdown.request("a client asked for it", drain=message.drain, timeout_s=message.timeout_s)
        return ShutdownReqOutput(id=message.id, drain_s=self._shutdown.left_s)

    def _score(self, message: ScoreReqInput) -> None:
        self._shutdown.refuse_work()
        if self._scoring is None:
            reason = "no reference is loaded: start the engine with reference_model_path"
            raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field="reference_model_path")
        self._scoring.accept(message)


def _decode(header: bytes, buffers: list[memoryview]) -> ToScheduler:
    message = decode_request(header)
    if buffers and not isinstance(message, UpdateWeightsFromTensorReqInput):
        raise CaesuraError(
            ErrorCode.MALFORMED_MESSAGE,
            f"{type(message).__name__} takes one frame, got {1 + len(buffers)}",
            id=message.id,
        )
    return message
