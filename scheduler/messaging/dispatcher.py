"""Routes received frames to handlers: decoding, idempotence, typed errors.

Invariants:
- Every readable request gets exactly one answer: its reply, or an ``ErrorReply``. An unreadable frame gets an ``ErrorReply``
  with its message id if that can be found. Neither stops the loop (I11).
- One message id has one effect (``answers.py``).
- Status, abort and lease renewal never wait for commands (``command_queue.py``).
"""

import logging
from typing import TYPE_CHECKING, Any

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
    GetMemoryHistoryReqInput,
    GetStatusReqInput,
    GetWeightsManifestReqInput,
    HelloReqInput,
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
from ..control.pause_ownership import Sender
from ..runtime.guard import defect
from . import generations
from .hello import answer_hello
from .status import status

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..runtime.engine import Engine

logger = logging.getLogger(__name__)


_QUERIES: "dict[type, Callable[[Engine, Any], Message]]" = {
    HelloReqInput: lambda engine, message: answer_hello(message, engine.state.stamp.incarnation),
    GetStatusReqInput: lambda engine, message: status(engine, message.id),
    GetMemoryHistoryReqInput: lambda engine, message: engine.history.answer(message),
    GetWeightsManifestReqInput: lambda engine, message: engine.sending.manifest(message),
}
"""Messages that change nothing; a retry is answered anew, not from the store."""

_AT_ONCE = (AbortReq, FetchResultReqInput, RenewPauseLeaseReqInput, ShutdownReqInput)


_FRAMED = (UpdateWeightsFromTensorReqInput, GenerateImagesReqInput)
"""Messages with frames after the header."""


class Dispatcher:
    """Routes messages to handlers."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._gone: list[bytes] = []

    @property
    def has_unanswered(self) -> bool:
        """Whether a command or score is unanswered. Generations are not counted here: they are in the live requests."""
        engine = self._engine
        scoring = engine.scoring
        return engine.commands.is_busy or (scoring is not None and scoring.has_work)

    @property
    def wants_tick(self) -> bool:
        """Whether a command or scoring can go on at once, so that the loop must not block."""
        engine = self._engine
        scores = engine.scoring is not None and engine.scoring.has_work and not engine.scoring.waits
        return scores or engine.commands.wants_tick

    @property
    def waits(self) -> bool:
        """Whether a command has stepped aside, or scoring waits for the device, so that the loop must poll."""
        engine = self._engine
        scoring = engine.scoring
        return engine.commands.has_stepped_aside or (scoring is not None and scoring.waits)

    def handle(self, client: bytes, header: bytes, buffers: list[memoryview]) -> None:
        """Handle one message from ``client``; never raises, whatever a client sends."""
        engine = self._engine
        try:
            message = _decode(header, buffers)
        except CaesuraError as error:
            logger.warning("dropped a malformed message: %s", error)
            engine.replies.send_answer(client, error.to_reply(str(error.detail.pop("id", ""))))
            return
        except Exception as error:  # noqa: BLE001  an unforeseen error of the decoder must be answered, too
            engine.replies.send_answer(client, defect("decoding a message", "", error))
            return
        answers = self._known(client, message, header, buffers)
        if answers is None:
            self._begin(client, message, buffers)
        for answer in answers or ():
            engine.replies.send_answer(client, answer, message.id)

    def _known(
        self, client: bytes, message: ToScheduler, frame: bytes, buffers: list[memoryview]
    ) -> list[Message] | None:
        """The answers that ``message`` gets at once, as :meth:`_attach` says, or an error; None if it must be started."""
        engine = self._engine
        try:
            if isinstance(message, ControlRequest):
                engine.state.renew_lease(message.owner)
            if isinstance(message, WeightUpdateOptions | EndWeightUpdateReqInput):
                engine.sessions.note_message(message, Sender(client, message.owner))
            return self._attach(client, message, frame, buffers)
        except CaesuraError as error:
            return [error.to_reply(message.id)]
        except Exception as error:  # noqa: BLE001  an unforeseen error must be answered, and the loop must go on
            answer = defect(type(message).__name__, message.id, error)
        engine.device_cache.after_failure(type(message).__name__)
        return [answer]

    def _begin(self, client: bytes, message: ToScheduler, buffers: list[memoryview]) -> None:
        """Start what ``message`` asks for, or answer with the error."""
        engine = self._engine
        try:
            self._start(client, message, buffers)
        except CaesuraError as error:
            answer, failed = error.to_reply(message.id), error.code == ErrorCode.OUT_OF_MEMORY
        except Exception as error:  # noqa: BLE001  as above
            answer, failed = defect(type(message).__name__, message.id, error), True
        else:
            return
        if failed:
            engine.device_cache.after_failure(type(message).__name__)
        engine.replies.answer(message.id, answer)

    def advance(self) -> None:
        """Advance the commands for at most a slice."""
        self._engine.commands.advance()

    def score(self) -> None:
        """Run scoring for one slice; scoring and commands do not wait for each other."""
        engine = self._engine
        if engine.scoring is not None:
            for answer in engine.scoring.advance():
                engine.replies.answer(answer.id, answer)

    def client_gone(self, client: bytes) -> None:
        """Record that a send to ``client`` has failed. Sends happen while steps are processed, so :meth:`reap` does the rest."""
        self._gone.append(client)

    def reap(self) -> None:
        """Abort the generations that only clients wait for that are gone, and tell the other modules about these clients."""
        engine = self._engine
        gone, self._gone = self._gone, []
        for client in dict.fromkeys(gone):
            generations.client_gone(engine, client)
            engine.answers.leave(client, engine.commands.message_ids())
            engine.sessions.client_gone(client)

    def refuse_rest(self, message: str, code: ErrorCode) -> None:
        """Answer every pending command and score with this error."""
        engine = self._engine
        for answer in engine.scoring.end(message, code) if engine.scoring is not None else ():
            engine.replies.answer(answer.id, answer)
        engine.commands.refuse_rest(message, code)

    def _attach(
        self, client: bytes, message: ToScheduler, frame: bytes, buffers: list[memoryview]
    ) -> list[Message] | None:
        """The answer to a query, or for a retry the stored answers; None if the message id is new."""
        engine = self._engine
        if (query := _QUERIES.get(type(message))) is not None:
            return [query(engine, message)]
        # The tensors of a prompt are few; those of an update are the weights, and would take as long as writing them.
        compared = buffers if isinstance(message, GenerateImagesReqInput) else ()
        return engine.answers.attach(client, message.id, frame, compared)

    def _start(self, client: bytes, message: ToScheduler, buffers: list[memoryview]) -> None:
        engine = self._engine
        if isinstance(message, GenerateReqInput | GenerateImagesReqInput):
            generations.generate(engine, client, message, buffers)
        elif isinstance(message, ScoreReqInput):
            self._score(message)
        elif isinstance(message, ControlRequest) and not isinstance(message, _AT_ONCE):
            engine.commands.add(client, message, buffers)
        else:
            engine.replies.answer(message.id, self._answer_at_once(message))

    def _answer_at_once(self, message: ToScheduler) -> Message:
        engine = self._engine
        if isinstance(message, AbortReq):
            return AbortReqOutput(id=message.id, aborted=generations.abort(engine, message))
        if isinstance(message, RenewPauseLeaseReqInput):
            state = engine.state
            left = state.lease_left_s if message.owner == state.ownership.owner else None
            return RenewPauseLeaseReqOutput(id=message.id, renewed=left is not None, lease_left_s=left)
        if isinstance(message, FetchResultReqInput):
            return generations.fetch(engine, message)
        assert isinstance(message, ShutdownReqInput)
        sender = message.requested_by or "a client that does not say who it is"
        reason = f"shutdown message from {sender}"
        engine.shutdown.request(reason, drain=message.drain, timeout_s=message.timeout_s)
        return ShutdownReqOutput(id=message.id, drain_s=engine.shutdown.left_s)

    def _score(self, message: ScoreReqInput) -> None:
        engine = self._engine
        engine.shutdown.refuse_work()
        if engine.scoring is None:
            reason = "no reference is loaded: start the engine with reference_model_path"
            raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field="reference_model_path")
        engine.scoring.accept(message)


def _decode(header: bytes, buffers: list[memoryview]) -> ToScheduler:
    message = decode_request(header)
    if buffers and not isinstance(message, _FRAMED):
        raise CaesuraError(
            ErrorCode.MALFORMED_MESSAGE,
            f"{type(message).__name__} takes one frame, got {1 + len(buffers)}",
            id=message.id,
        )
    return message
