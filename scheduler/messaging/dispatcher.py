"""Routes received messages: decoding, idempotence, typed errors.

Invariants:
- Every readable request gets exactly one answer: its reply, or an ``ErrorReply``. An unreadable frame gets an
  ``ErrorReply`` with its message id if that can be found. Neither stops the loop (I11).
- One message id has one effect (``answers.py``).
- Status, abort and lease renewal never wait for commands (``command_queue.py``).
"""

import logging
import os
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...io_struct import (
    WIRE_VERSION,
    AbortReq,
    CaesuraError,
    ControlRequest,
    EndWeightUpdateReqInput,
    ErrorCode,
    ErrorReply,
    FetchResultReqInput,
    GenerateImagesReqInput,
    GenerateReqInput,
    GetMemoryHistoryReqInput,
    GetStatusReqInput,
    GetWeightsManifestReqInput,
    HelloReqInput,
    HelloReqOutput,
    Message,
    RenewPauseLeaseReqInput,
    RenewPauseLeaseReqOutput,
    Request,
    ScoreReqInput,
    ShutdownReqInput,
    ShutdownReqOutput,
    UpdateWeightsFromTensorReqInput,
    WeightUpdateOptions,
    decode_request,
)
from ..control.pause_ownership import Sender
from ..runtime.guard import defect
from . import generations
from .status import status

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..runtime.engine import Engine

logger = logging.getLogger(__name__)


class Dispatcher:
    """Routes messages, and knows whether the loop must go on for commands and scores."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._gone: list[bytes] = []

    @property
    def has_unanswered(self) -> bool:
        """True if a command or score is unanswered; generations are live requests."""
        scoring = self._engine.scoring
        return self._engine.commands.is_busy or (scoring is not None and scoring.has_work)

    @property
    def wants_tick(self) -> bool:
        """True if a command or scoring can go on at once, so that the loop must not block."""
        scoring = self._engine.scoring
        scores = scoring is not None and scoring.has_work and not scoring.waits
        return scores or self._engine.commands.wants_tick

    @property
    def waits(self) -> bool:
        """True if a command has stepped aside, or scoring waits for the device, so the loop must poll."""
        scoring = self._engine.scoring
        return self._engine.commands.has_stepped_aside or (scoring is not None and scoring.waits)

    def handle(self, client: bytes, header: bytes, buffers: list[memoryview]) -> None:
        """Handle one message from ``client``; never raises, whatever a client sends."""
        send = self._engine.replies.send_answer
        try:
            message = _decode(header, buffers)
        except CaesuraError as error:
            logger.warning("dropped a malformed message: %s", error)
            send(client, error.to_reply(str(error.detail.pop("id", ""))))
            return
        except Exception as error:  # noqa: BLE001  an unforeseen error of the decoder must be answered, too
            send(client, defect("decoding a message", "", error))
            return
        answers = self._known(client, message, header, buffers)
        if answers is None:
            self._begin(client, message, buffers)
        for answer in answers or ():
            send(client, answer, message.id)

    def score(self) -> None:
        """Run scoring for one slice."""
        engine = self._engine
        if engine.scoring is not None:
            for answer in engine.scoring.advance():
                engine.replies.answer(answer.id, answer)

    def client_gone(self, client: bytes) -> None:
        """Record that a send to ``client`` has failed; :meth:`reap` does the rest, as steps may be processed
        now.
        """
        self._gone.append(client)

    def reap(self) -> None:
        """Abort generations whose only clients are gone, and end what else depends on these clients."""
        engine = self._engine
        gone, self._gone = self._gone, []
        for client in dict.fromkeys(gone):
            generations.client_gone(engine, client)
            engine.answers.leave(client, engine.commands.message_ids())
            engine.sessions.client_gone(client)

    def refuse_rest(self, message: str, code: ErrorCode) -> None:
        engine = self._engine
        for answer in engine.scoring.end(message, code) if engine.scoring is not None else ():
            engine.replies.answer(answer.id, answer)
        engine.commands.refuse_rest(message, code)

    def _known(
        self, client: bytes, message: Request, frame: bytes, buffers: list[memoryview]
    ) -> list[Message] | None:
        """Return what ``message`` gets without being started: the answer to a query, stored answers, an
        error; else None.
        """
        engine = self._engine
        try:
            if isinstance(message, ControlRequest):
                engine.state.renew_lease(message.owner)
            if isinstance(message, WeightUpdateOptions | EndWeightUpdateReqInput):
                engine.sessions.note_message(message, Sender(client, message.owner))
            if (query := _QUERIES.get(type(message))) is not None:
                return [query(engine, message)]
            # Tensors of a prompt are few; those of an update are the weights, and take as long as writing
            # them.
            compared = buffers if isinstance(message, GenerateImagesReqInput) else ()
            return engine.answers.attach(client, message.id, frame, compared)
        except CaesuraError as error:
            return [error.to_reply(message.id)]
        except Exception as error:  # noqa: BLE001  an unforeseen error must be answered, and the loop must go on
            answer = defect(type(message).__name__, message.id, error)
        engine.device_cache.after_failure(type(message).__name__)
        return [answer]

    def _begin(self, client: bytes, message: Request, buffers: list[memoryview]) -> None:
        """Start what ``message`` asks for, or answer with the error."""
        engine = self._engine
        try:
            if (answer_at_once := _AT_ONCE.get(type(message))) is not None:
                engine.replies.answer(message.id, answer_at_once(engine, message))
            elif isinstance(message, GenerateReqInput | GenerateImagesReqInput):
                generations.generate(engine, client, message, buffers)
            elif isinstance(message, ScoreReqInput):
                _score(engine, message)
            else:
                assert isinstance(message, ControlRequest)
                engine.commands.add(client, message, buffers)
        except CaesuraError as error:
            answer, failed = error.to_reply(message.id), error.code == ErrorCode.OUT_OF_MEMORY
        except Exception as error:  # noqa: BLE001  as above
            answer, failed = defect(type(message).__name__, message.id, error), True
        else:
            return
        if failed:
            engine.device_cache.after_failure(type(message).__name__)
        engine.replies.answer(message.id, answer)


def _decode(header: bytes, buffers: list[memoryview]) -> Request:
    message = decode_request(header)
    if buffers and not isinstance(message, UpdateWeightsFromTensorReqInput | GenerateImagesReqInput):
        raise CaesuraError(
            ErrorCode.MALFORMED_MESSAGE,
            f"{type(message).__name__} takes one frame, got {1 + len(buffers)}",
            id=message.id,
        )
    return message


def _score(engine: "Engine", message: ScoreReqInput) -> None:
    engine.shutdown.refuse_work()
    if engine.scoring is None:
        reason = "no reference is loaded: start the engine with reference_model_path"
        raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field="reference_model_path")
    engine.scoring.accept(message)


def _renew_lease(engine: "Engine", message: RenewPauseLeaseReqInput) -> RenewPauseLeaseReqOutput:
    """Return whether the sender's lease lives; receiving the message has renewed it."""
    state = engine.state
    left = state.lease_left_s if message.owner == state.ownership.owner else None
    return RenewPauseLeaseReqOutput(id=message.id, renewed=left is not None, lease_left_s=left)


def _shut_down(engine: "Engine", message: ShutdownReqInput) -> ShutdownReqOutput:
    sender = message.requested_by or "a client that does not say who it is"
    engine.shutdown.request(
        f"shutdown message from {sender}", drain=message.drain, timeout_s=message.timeout_s
    )
    return ShutdownReqOutput(id=message.id, drain_s=engine.shutdown.left_s)


def answer_hello(message: HelloReqInput, incarnation: str) -> HelloReqOutput | ErrorReply:
    """Accept every client with the same major version."""
    major, minor = WIRE_VERSION
    logger.debug("hello from %s: wire %d.%d", message.client or "?", message.wire_major, message.wire_minor)
    if message.wire_major != major:
        ours, theirs = f"{major}.{minor}", f"{message.wire_major}.{message.wire_minor}"
        error = CaesuraError(
            ErrorCode.VERSION_MISMATCH,
            f"this engine (caesura {__version__}) speaks wire {ours}, the client "
            f"({message.client or 'unknown'}) {theirs}",
            engine=ours,
            client=theirs,
        )
        return error.to_reply(message.id)
    return HelloReqOutput(
        id=message.id,
        wire_major=major,
        wire_minor=minor,
        incarnation=incarnation,
        version=__version__,
        pid=os.getpid(),
    )


_QUERIES: "dict[type, Callable[[Engine, Any], Message]]" = {
    HelloReqInput: lambda engine, message: answer_hello(message, engine.state.stamp.incarnation),
    GetStatusReqInput: lambda engine, message: status(engine, message.id),
    GetMemoryHistoryReqInput: lambda engine, message: engine.history.answer(message),
    GetWeightsManifestReqInput: lambda engine, message: engine.sending.manifest(message),
}
"""Messages that change nothing; a retry is answered anew, not from the store."""

_AT_ONCE: "dict[type, Callable[[Engine, Any], Message]]" = {
    AbortReq: generations.abort,
    FetchResultReqInput: generations.fetch,
    RenewPauseLeaseReqInput: _renew_lease,
    ShutdownReqInput: _shut_down,
}
"""Messages that are answered at once; the other control requests are commands (``control/commands.py``)."""
