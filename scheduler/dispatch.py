"""From frames to handlers: decoding, idempotence, the order of commands, typed errors.

Invariants:
- Every readable request gets exactly one answer: its reply, or an ``ErrorReply``. Unreadable frames get an
  ``ErrorReply`` with the id that could be found; they never disturb the loop (I11). An answer that cannot be sent is
  replaced by one that says so.
- One message id, one effect (``answers.py``).
- Commands that take time are :data:`Operation` generators. They run one at a time in the order of arrival; one that
  waits for the engine to change steps aside. Status and abort never wait.
"""

import hashlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Any

import msgspec

from ..io_struct import (
    AbortReq,
    AbortReqOutput,
    BatchTokenOutput,
    BeginWeightUpdateReqInput,
    CaesuraError,
    ControlRequest,
    EndWeightUpdateReqInput,
    ErrorCode,
    FetchResultReqInput,
    FetchResultReqOutput,
    GenerateReqInput,
    GenerateReqOutput,
    GetMemoryHistoryReqInput,
    GetMemoryHistoryReqOutput,
    GetStatusReqInput,
    GetStatusReqOutput,
    HelloReqInput,
    Message,
    ReleaseMemoryOccupationReqInput,
    RenewPauseLeaseReqInput,
    RenewPauseLeaseReqOutput,
    ResumeMemoryOccupationReqInput,
    ScoreReqInput,
    ShutdownReqInput,
    ShutdownReqOutput,
    ToScheduler,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightUpdateOptions,
    decode_request,
    encode,
)
from .answers import Answers, answer_bytes
from .backlog import result_bytes
from .commands import Commands
from .config import EngineConfig
from .device.cache import DeviceCache
from .guard import checked, defect
from .hello import answer_hello
from .kept import KeptResults
from .lifecycle import Lifecycle, Operation, Wait
from .observability.memory_history import MemoryHistory
from .ownership import Sender
from .request import Request
from .results import Results
from .scoring import Scoring
from .sessions import Sessions
from .stopping import Shutdown
from .waiting import AdmissionLimits, WaitingQueue, admit

logger = logging.getLogger(__name__)

SLICE_S = 0.010
"""Longest run of an operation between two looks at the inbox."""
MAX_PENDING_COMMANDS = 1024
"""Commands under way, queued or waiting for the engine to change."""

_EXCLUSIVE = (
    BeginWeightUpdateReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
)


@dataclass(slots=True)
class _Running:
    """An operation under way."""

    message: ToScheduler
    operation: Operation
    has_begun: bool = False


class Dispatcher:
    """Routes messages to handlers and advances operations."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        limits: AdmissionLimits,
        lifecycle: Lifecycle,
        sessions: Sessions,
        handlers: Commands,
        scoring: Scoring | None,
        results: Results,
        waiting: WaitingQueue,
        send: Callable[[bytes, Message], None],
        status: Callable[[str], GetStatusReqOutput],
        history: MemoryHistory,
        device_cache: DeviceCache,
        check_ledger: Callable[[], None],
        shutdown: Shutdown,
    ) -> None:
        """``scoring`` None: no reference is loaded."""
        self._config = config
        self._limits = limits
        self._lifecycle = lifecycle
        self._sessions = sessions
        self._handlers = handlers
        self._scoring = scoring
        self._results = results
        self._waiting = waiting
        self._send = send
        self._status = status
        self._history = history
        self._device_cache = device_cache
        self._check_ledger = check_ledger
        self._answers = Answers(config.result_ttl_s)
        self._shutdown = shutdown
        self._kept = KeptResults(config.result_ttl_s)
        self._commands: deque[_Running] = deque()
        self._outside = False
        self._gone: list[bytes] = []
        self._parked: list[_Running] = []
        # What changes nothing: a retry is answered afresh.
        self._queries: dict[type, Callable[[Any], Message]] = {
            HelloReqInput: self._hello,
            GetStatusReqInput: lambda request: self._status(request.id),
            GetMemoryHistoryReqInput: self._memory_history,
        }

    @property
    def is_busy(self) -> bool:
        """Some operation is under way, queued behind one, or waits."""
        return bool(self._commands or self._parked)

    @property
    def has_unanswered(self) -> bool:
        """Some command or score is under way; generations are counted by the results."""
        return self.is_busy or (self._scoring is not None and self._scoring.has_work)

    def awaiting_clients(self) -> set[bytes]:
        """Who waits for anything: a command, a score, a generation."""
        return self._answers.awaited_by()

    @property
    def defers_lease(self) -> bool:
        """The lease of the pause must not expire now: a command of its owner is a sign of life, and one that has begun, whoever
        sent it, is not interrupted."""
        if self._commands and self._commands[0].has_begun:
            return True
        owner = self._lifecycle.pause_owner
        return any(
            isinstance(running.message, ControlRequest)
            and running.message.owner == owner
            and self._answers.is_awaited(running.message.id)
            for running in (*self._commands, *self._parked)
        )

    @property
    def wants_tick(self) -> bool:
        """Something can go on at once: an operation that waits for no thread, or scoring."""
        scores = self._scoring is not None and self._scoring.has_work and not self._scoring.waits
        return scores or (bool(self._commands) and not self._outside)

    @property
    def has_parked(self) -> bool:
        """Some operation waits for the engine to change or for its deadline, or scoring for the device."""
        return bool(self._parked) or (self._scoring is not None and self._scoring.waits)

    def handle(self, client: bytes, header: bytes, buffers: list[memoryview]) -> None:
        """One message from ``client``; never raises for anything a client can send."""
        try:
            message = _decode(header, buffers)
        except CaesuraError as error:
            logger.warning("dropped a malformed message: %s", error)
            self._say(client, error.to_reply(str(error.detail.pop("id", ""))))
            return
        except Exception as error:  # noqa: BLE001  whatever a frame does to its decoder, its sender must hear
            self._say(client, defect("decoding a message", "", error))
            return
        answers = self._known(client, message, header)
        if answers is None:
            self._begin(client, message, buffers)
        for answer in answers or ():
            self._say(client, answer, message.id)

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
        self._answer(message.id, answer)

    def advance(self) -> None:
        """Run the oldest command for at most a slice, and look at the parked ones."""
        for running in self._parked[:]:
            if self._step(running) is not Wait.CHANGE:
                self._parked.remove(running)
        started, self._outside = perf_counter(), False
        while self._commands:
            wait = self._step(self._commands[0])
            if wait is None:
                self._commands.popleft()
            elif wait is Wait.CHANGE:
                self._parked.append(self._commands.popleft())
            self._outside = wait is Wait.OUTSIDE
            if wait in (Wait.STEP, Wait.OUTSIDE) or perf_counter() - started > SLICE_S:
                return

    def score(self) -> None:
        """Run what scores for a slice; it neither waits for commands nor makes them wait."""
        if self._scoring is not None:
            for answer in self._scoring.advance():
                self._answer(answer.id, answer)

    def finished(self, request: Request, result: GenerateReqOutput) -> None:
        """A sample ended (called by results): remember its answer for retries."""
        exchange = self._answers.get(request.message_id)
        if exchange is not None:
            answer = BatchTokenOutput(step=self._lifecycle.step, finished=[result])
            self._answers.add(exchange, answer, result_bytes(result))
            for client in exchange.clients:
                if client != request.client:
                    self._say(client, answer, request.message_id)

    def client_gone(self, client: bytes) -> None:
        """A send to ``client`` has failed. Sends happen while results are being made: :meth:`reap` does the rest."""
        self._gone.append(client)

    def reap(self) -> None:
        """Nobody waits for the generations of clients that are gone, unless another socket attached to them."""
        gone, self._gone = self._gone, []
        for client in dict.fromkeys(gone):
            self._end_generations_of(client)
            self._answers.leave(client, [each.message.id for each in (*self._commands, *self._parked)])
            self._sessions.client_gone(client)

    def _end_generations_of(self, client: bytes) -> None:
        orphans = [request for request in self._results.live.values() if request.client == client]
        aborted = 0
        for request in orphans:
            exchange = self._answers.get(request.message_id)
            others = [] if exchange is None else [other for other in exchange.clients if other != client]
            if exchange is not None and others:
                request.client = others[-1]
                exchange.clients = others
            else:
                aborted += self._results.abort([request], "client is gone")
        self._keep_results_of(client)
        if aborted:
            logger.info("client %s is gone: %d samples aborted", client.hex(), aborted)

    def _keep_results_of(self, client: bytes) -> None:
        """Which of its last results the client has read is not known: keep all that nobody else waited for."""
        for exchange in self._answers.done_for(client):
            for answer in exchange.answers:
                for result in answer.finished if isinstance(answer, BatchTokenOutput) else ():
                    self._kept.add(result, exchange.generation)

    def refuse_rest(self, message: str) -> None:
        """Shutdown: every command that is still under way ends with an error, scores included."""
        for answer in self._scoring.end(message) if self._scoring is not None else ():
            self._answer(answer.id, answer)
        for running in [*self._parked, *self._commands]:
            try:
                running.operation.close()
            except Exception as error:  # the others must be answered, too
                logger.error("%s has left something behind", type(running.message).__name__, exc_info=error)
            refusal = CaesuraError(ErrorCode.SHUTTING_DOWN, message)
            self._answer(running.message.id, refusal.to_reply(running.message.id))
        self._parked, self._commands = [], deque()

    def _attach(self, client: bytes, message: ToScheduler, frame: bytes) -> list[Message] | None:
        """What there is to say at once: the answer to a query, or what was answered to this id. None: the id is new."""
        query = self._queries.get(type(message))
        if query is not None:
            return [query(message)]
        return self._answers.attach(client, message.id, frame)

    def _start(self, client: bytes, message: ToScheduler, buffers: list[memoryview]) -> None:
        if isinstance(message, GenerateReqInput):
            self._generate(client, message)
        elif isinstance(message, ScoreReqInput):
            self._shutdown.refuse_work()
            if self._scoring is None:
                reason = "no reference is loaded: start the engine with reference_model_path"
                raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field="reference_model_path")
            self._scoring.accept(message)
        elif isinstance(message, AbortReq):
            self._answer(message.id, AbortReqOutput(id=message.id, aborted=self._abort(message)))
        elif isinstance(message, RenewPauseLeaseReqInput):
            left = self._lifecycle.lease_left_s if message.owner == self._lifecycle.pause_owner else None
            self._answer(
                message.id,
                RenewPauseLeaseReqOutput(id=message.id, renewed=left is not None, lease_left_s=left),
            )
        elif isinstance(message, FetchResultReqInput):
            kept, live = self._kept.get(message.rid), len(self._results.samples(message.rid))
            self._answer(message.id, FetchResultReqOutput(id=message.id, results=kept, live=live))
        elif isinstance(message, ShutdownReqInput):
            self._shutdown.request("a client asked for it", drain=message.drain, timeout_s=message.timeout_s)
            self._answer(message.id, ShutdownReqOutput(id=message.id, drain_s=self._shutdown.left_s))
        else:
            self._refuse_when_full()
            if isinstance(message, _EXCLUSIVE):
                self._refuse_when_busy()
            assert isinstance(message, ControlRequest)  # whatever is none was answered above
            operation = self._handlers.operation(client, message, buffers)
            self._commands.append(_Running(message, operation))

    def _generate(self, client: bytes, message: GenerateReqInput) -> None:
        rid = message.rid if message.rid is not None else message.id
        if self._join_generation(client, message, rid):
            return
        self._shutdown.refuse_work()
        self._lifecycle.require_serviceable("cannot generate")
        if self._lifecycle.generation != "running" and self._config.requests_while_paused == "refuse":
            raise CaesuraError(ErrorCode.PAUSED, "the engine is paused and configured to refuse requests")
        self._lifecycle.require_epoch(message.min_weights_epoch)
        requests = admit(
            message, client=client, limits=self._limits, waiting=len(self._waiting), now=monotonic()
        )
        exchange = self._answers.get(message.id)
        assert exchange is not None, "it was attached"
        exchange.remaining = len(requests)
        exchange.generation = _generation_body(message)
        self._kept.forget(rid)
        self._results.accept(requests)

    def _join_generation(self, client: bytes, message: GenerateReqInput, rid: str) -> bool:
        """Whether this is the retry, under a new message id, of a generation that is live or whose results are kept.

        Raises:
            CaesuraError: ``duplicate_rid``, the live generation of this rid is another.
        """
        live = self._results.samples(rid)
        exchange = self._answers.get(live[0].message_id) if live else None
        if exchange is not None:
            if exchange.generation != _generation_body(message):
                raise CaesuraError(ErrorCode.DUPLICATE_RID, f"generation {rid!r} is still running", rid=rid)
            for answer in self._answers.join(client, message.id, exchange):
                self._say(client, answer, message.id)
            return True
        kept = self._kept.get(rid, _generation_body(message))
        if len(kept) < message.sampling_params.n or any(r.finish_reason.type == "abort" for r in kept):
            return False
        self._answer(message.id, BatchTokenOutput(step=self._lifecycle.step, finished=kept))
        return True

    def _hello(self, request: HelloReqInput) -> Message:
        return answer_hello(request, self._lifecycle.stamp.incarnation)

    def _memory_history(self, message: GetMemoryHistoryReqInput) -> GetMemoryHistoryReqOutput:
        events, more = self._history.events(message.after, message.limit)
        older = self._history.older(message.after)
        return GetMemoryHistoryReqOutput(id=message.id, events=events, more=more, older=older)

    def _abort(self, message: AbortReq) -> int:
        if message.abort_all:
            return self._results.abort_all("Aborted")
        if message.rid is None:
            raise CaesuraError(
                ErrorCode.INVALID_REQUEST, "abort needs a rid, or abort_all", field="rid", value=None
            )
        samples = self._results.samples(message.rid)
        if message.index is not None:
            samples = [sample for sample in samples if sample.index == message.index]
        return self._results.abort(samples, "Aborted")

    def _refuse_when_full(self) -> None:
        pending = len(self._commands) + len(self._parked)
        if pending >= MAX_PENDING_COMMANDS:
            raise CaesuraError(
                ErrorCode.QUEUE_FULL,
                f"{pending} commands are pending, the limit is {MAX_PENDING_COMMANDS}",
                waiting=pending,
                limit=MAX_PENDING_COMMANDS,
            )

    def _refuse_when_busy(self) -> None:
        for running in self._commands:
            if isinstance(running.message, _EXCLUSIVE):
                name = type(running.message).__name__
                raise CaesuraError(ErrorCode.BUSY, f"{name} is running", running=name, id=running.message.id)

    def _step(self, running: _Running) -> Wait | None:
        """Advance an operation; None when it has ended and is answered."""
        message_id, name = running.message.id, type(running.message).__name__
        weights, failed = self._lifecycle.weights, False
        running.has_begun = True
        try:
            return next(running.operation)
        except StopIteration as stop:
            answer = stop.value
        except CaesuraError as error:
            answer, failed = error.to_reply(message_id), error.code == ErrorCode.OUT_OF_MEMORY
        except Exception as error:  # noqa: BLE001  as in handle
            answer, failed = defect(name, message_id, error), True
        if failed or self._lifecycle.weights == "poisoned" != weights:
            self._device_cache.after_failure(name)
        self._answer(message_id, answer)
        if isinstance(running.message, ControlRequest):
            self._lifecycle.renew_lease(
                running.message.owner
            )  # a long command was a sign of life while it ran
        if self._config.check_ledger:
            self._check_ledger()
        return None

    def _answer(self, message_id: str, answer: Message) -> None:
        """The last answer to a message, to everybody who waits for it; never raises."""
        # Token outputs that a command caused go out before its reply, to every client.
        self._results.deliver(self._lifecycle.step)
        exchange = self._answers.get(message_id)
        if exchange is None:
            return
        for client in exchange.clients:
            answer = self._say(client, answer, message_id)
        exchange.remaining = 1
        self._answers.add(exchange, answer, answer_bytes(answer))

    def _say(self, client: bytes, answer: Message, message_id: str | None = None) -> Message:
        """Send ``answer``, or in its place that it cannot be sent; returns what it was. Never raises.

        Args:
            message_id: what it answers. None: the answer's own id says so.
        """
        try:
            self._send(client, checked(answer))
        except Exception as error:  # noqa: BLE001  an answer that cannot be encoded, or no memory for it
            answered = message_id if message_id is not None else str(getattr(answer, "id", ""))
            answer = defect("answering", answered, error)
            try:
                self._send(client, answer)
            except Exception as again:
                logger.error("client %s is not answered", client.hex(), exc_info=again)
        return answer


def _generation_body(message: GenerateReqInput) -> bytes:
    """What makes two generate requests the same but for their message ids."""
    return hashlib.blake2b(encode(msgspec.structs.replace(message, id="-")), digest_size=16).digest()


def _decode(header: bytes, buffers: list[memoryview]) -> ToScheduler:
    message = decode_request(header)
    if buffers and not isinstance(message, UpdateWeightsFromTensorReqInput):
        raise CaesuraError(
            ErrorCode.MALFORMED_MESSAGE,
            f"{type(message).__name__} takes one frame, got {1 + len(buffers)}",
            id=message.id,
        )
    return message
