"""Routes received frames to handlers: decoding, idempotence, typed errors.

Invariants:
- Every readable request gets exactly one answer: its reply, or an ``ErrorReply``. An unreadable frame gets an ``ErrorReply``
  with its message id if that can be found. Neither stops the loop (I11).
- One message id has one effect (``answers.py``).
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
    GenerateImagesReqInput,
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
from ..control.lifecycle import Lifecycle
from ..control.pause_ownership import Sender
from ..control.weight_sessions import Sessions
from ..memory.device_cache import DeviceCache
from ..runtime.guard import defect
from ..runtime.shutdown import Shutdown
from ..scoring.scoring import Scoring
from .answers import Answers
from .command_queue import CommandQueue
from .generations import Generations
from .replies import Replies

logger = logging.getLogger(__name__)

Queries = Mapping[type, Callable[[Any], Message]]
"""Handlers of messages that change nothing; a retry is answered anew, not from the store."""

_AT_ONCE = (AbortReq, FetchResultReqInput, RenewPauseLeaseReqInput, ShutdownReqInput)


_FRAMED = (UpdateWeightsFromTensorReqInput, GenerateImagesReqInput)
"""Messages with frames after the header."""


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
        """``scoring`` is None if no reference model is loaded."""
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
        """Whether a command or score is unanswered. Generations are not counted here: they are in the live requests."""
        return self._commands.is_busy or (self._scoring is not None and self._scoring.has_work)

    @property
    def wants_tick(self) -> bool:
        """Whether a command or scoring can go on at once, so that the loop must not block."""
        scores = self._scoring is not None and self._scoring.has_work and not self._scoring.waits
        return scores or self._commands.wants_tick

    @property
    def waits(self) -> bool:
        """Whether a command has stepped aside, or scoring waits for the device, so that the loop must poll."""
        return self._commands.has_stepped_aside or (self._scoring is not None and self._scoring.waits)

    def handle(self, client: bytes, header: bytes, buffers: list[memoryview]) -> None:
        """Handle one message from ``client``; never raises, whatever a client sends."""
        try:
            message = _decode(header, buffers)
        except CaesuraError as error:
            logger.warning("dropped a malformed message: %s", error)
            self._replies.send_answer(client, error.to_reply(str(error.detail.pop("id", ""))))
            return
        except Exception as error:  # noqa: BLE001  an unforeseen error of the decoder must be answered, too
            self._replies.send_answer(client, defect("decoding a message", "", error))
            return
        answers = self._known(client, message, header, buffers)
        if answers is None:
            self._begin(client, message, buffers)
        for answer in answers or ():
            self._replies.send_answer(client, answer, message.id)

    def _known(
        self, client: bytes, message: ToScheduler, frame: bytes, buffers: list[memoryview]
    ) -> list[Message] | None:
        """The answers that ``message`` gets at once, as :meth:`_attach` says, or an error; None if it must be started."""
        try:
            if isinstance(message, ControlRequest):
                self._lifecycle.renew_lease(message.owner)
            if isinstance(message, WeightUpdateOptions | EndWeightUpdateReqInput):
                self._sessions.note_message(message, Sender(client, message.owner))
            return self._attach(client, message, frame, buffers)
        except CaesuraError as error:
            return [error.to_reply(message.id)]
        except Exception as error:  # noqa: BLE001  an unforeseen error must be answered, and the loop must go on
            answer = defect(type(message).__name__, message.id, error)
        self._device_cache.after_failure(type(message).__name__)
        return [answer]

    def _begin(self, client: bytes, message: ToScheduler, buffers: list[memoryview]) -> None:
        """Start what ``message`` asks for, or answer with the error."""
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

    def advance(self) -> None:
        """Advance the commands for at most a slice."""
        self._commands.advance()

    def score(self) -> None:
        """Run scoring for one slice; scoring and commands do not wait for each other."""
        if self._scoring is not None:
            for answer in self._scoring.advance():
                self._replies.answer(answer.id, answer)

    def client_gone(self, client: bytes) -> None:
        """Record that a send to ``client`` has failed. Sends happen while steps are processed, so :meth:`reap` does the rest."""
        self._gone.append(client)

    def reap(self) -> None:
        """Abort the generations that only clients wait for that are gone, and tell the other modules about these clients."""
        gone, self._gone = self._gone, []
        for client in dict.fromkeys(gone):
            self._generations.client_gone(client)
            self._answers.leave(client, self._commands.message_ids())
            self._sessions.client_gone(client)

    def refuse_rest(self, message: str, code: ErrorCode) -> None:
        """Answer every pending command and score with this error."""
        for answer in self._scoring.end(message, code) if self._scoring is not None else ():
            self._replies.answer(answer.id, answer)
        self._commands.refuse_rest(message, code)

    def _attach(
        self, client: bytes, message: ToScheduler, frame: bytes, buffers: list[memoryview]
    ) -> list[Message] | None:
        """The answer to a query, or for a retry the stored answers; None if the message id is new."""
        query = self._queries.get(type(message))
        if query is not None:
            return [query(message)]
        # The tensors of a prompt are few; those of an update are the weights, and would take as long as writing them.
        compared = buffers if isinstance(message, GenerateImagesReqInput) else ()
        return self._answers.attach(client, message.id, frame, compared)

    def _start(self, client: bytes, message: ToScheduler, buffers: list[memoryview]) -> None:
        if isinstance(message, GenerateReqInput | GenerateImagesReqInput):
            self._generations.generate(client, message, buffers)
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
        sender = message.requested_by or "a client that does not say who it is"
        reason = f"shutdown message from {sender}"
        self._shutdown.request(reason, drain=message.drain, timeout_s=message.timeout_s)
        return ShutdownReqOutput(id=message.id, drain_s=self._shutdown.left_s)

    def _score(self, message: ScoreReqInput) -> None:
        self._shutdown.refuse_work()
        if self._scoring is None:
            reason = "no reference is loaded: start the engine with reference_model_path"
            raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field="reference_model_path")
        self._scoring.accept(message)


def _decode(header: bytes, buffers: list[memoryview]) -> ToScheduler:
    message = decode_request(header)
    if buffers and not isinstance(message, _FRAMED):
        raise CaesuraError(
            ErrorCode.MALFORMED_MESSAGE,
            f"{type(message).__name__} takes one frame, got {1 + len(buffers)}",
            id=message.id,
        )
    return message
