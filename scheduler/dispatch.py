"""From frames to handlers: decoding, idempotence, the order of commands, typed errors.

Invariants:
- Every readable request gets exactly one answer: its reply, or an ``ErrorReply``. Unreadable frames get an
  ``ErrorReply`` with the id that could be found; they never disturb the loop (I11).
- One message id, one effect: the same id and body attaches to what is running or gets the stored answer; the same id
  with another body is refused.
- Commands that take time are :data:`Operation` generators. They run one at a time in the order of arrival; one that
  waits for the engine to change steps aside. Status and abort never wait.
"""

import hashlib
import logging
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import Any

import msgspec

from ..io_struct import (
    AbortReq,
    AbortReqOutput,
    BatchTokenOutput,
    BeginWeightUpdateReqInput,
    CaesuraError,
    ContinueGenerationReqInput,
    ControlRequest,
    DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput,
    ErrorCode,
    FetchResultReqInput,
    FetchResultReqOutput,
    FlushCacheReqInput,
    GenerateReqInput,
    GenerateReqOutput,
    GetMemoryHistoryReqInput,
    GetMemoryHistoryReqOutput,
    GetStatusReqInput,
    GetStatusReqOutput,
    HelloReqInput,
    InitWeightsUpdateGroupReqInput,
    Message,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    RenewPauseLeaseReqInput,
    RenewPauseLeaseReqOutput,
    ResumeMemoryOccupationReqInput,
    ScoreReqInput,
    ScoreReqOutput,
    ShutdownReqInput,
    ShutdownReqOutput,
    ToScheduler,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromCheckpointEngineReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightsCheckerReqInput,
    decode_request,
    encode,
)
from .checker import WeightsChecker
from .config import EngineConfig
from .device.memory import is_out_of_memory
from .groups import GroupCommands
from .hello import answer_hello
from .kept import KeptResults, result_bytes
from .lifecycle import Lifecycle, Operation, Wait
from .observability.memory_history import MemoryHistory
from .occupation import MemoryOccupation
from .parameter_server import ParameterServerUpdates
from .request import Request
from .results import Results
from .scoring import Scoring
from .updates import WeightUpdates
from .waiting import AdmissionLimits, WaitingQueue, admit

logger = logging.getLogger(__name__)

STORED_ANSWERS = 1024
STORED_ANSWER_BYTES = 64 << 20
SLICE_S = 0.010
"""Longest run of an operation between two looks at the inbox."""

_EXCLUSIVE = (
    BeginWeightUpdateReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
)


@dataclass(slots=True)
class _Exchange:
    """One message id: who asked, and what was answered."""

    body: bytes
    clients: list[bytes]
    remaining: int = 1
    """Answers still to come; a generation has one per sample."""
    answers: list[Message] = field(default_factory=list)
    nbytes: int = 0
    generation: bytes = b""
    """Digest of a generate request without its message id."""


@dataclass(slots=True)
class _Running:
    """An operation under way."""

    message: ToScheduler
    operation: Operation


class Dispatcher:
    """Routes messages to handlers and advances operations."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        limits: AdmissionLimits,
        lifecycle: Lifecycle,
        updates: WeightUpdates,
        parameter_server: ParameterServerUpdates,
        groups: GroupCommands,
        occupation: MemoryOccupation,
        checker: WeightsChecker,
        scoring: Scoring | None,
        results: Results,
        waiting: WaitingQueue,
        send: Callable[[bytes, Message], None],
        status: Callable[[str], GetStatusReqOutput],
        history: MemoryHistory,
        check_ledger: Callable[[], None],
    ) -> None:
        """``scoring`` None: no reference is loaded."""
        self.stop_requested = False
        """A shutdown message was accepted; the loop ends after this tick."""
        self._config = config
        self._limits = limits
        self._lifecycle = lifecycle
        self._updates = updates
        self._scoring = scoring
        self._results = results
        self._waiting = waiting
        self._send = send
        self._status = status
        self._history = history
        self._check_ledger = check_ledger
        self._exchanges: OrderedDict[str, _Exchange] = OrderedDict()
        self._done: OrderedDict[str, None] = OrderedDict()
        self._stored_bytes = 0
        self._kept = KeptResults(config.result_ttl_s)
        self._commands: deque[_Running] = deque()
        self._outside = False
        self._gone: list[bytes] = []
        self._parked: list[_Running] = []
        self._operations: dict[type, Callable[[Any], Operation]] = {
            PauseGenerationReqInput: lifecycle.pause,
            ContinueGenerationReqInput: lifecycle.continue_generation,
            FlushCacheReqInput: lifecycle.flush,
            BeginWeightUpdateReqInput: updates.begin,
            EndWeightUpdateReqInput: updates.end,
            UpdateWeightFromDiskReqInput: updates.from_disk,
            UpdateWeightsFromIPCReqInput: updates.from_ipc,
            UpdateWeightsFromDistributedReqInput: updates.from_distributed,
            UpdateWeightsFromCheckpointEngineReqInput: parameter_server.update,
            InitWeightsUpdateGroupReqInput: groups.init,
            DestroyWeightsUpdateGroupReqInput: groups.destroy,
            ReleaseMemoryOccupationReqInput: occupation.release,
            ResumeMemoryOccupationReqInput: occupation.resume,
            WeightsCheckerReqInput: checker.check,
        }

    @property
    def is_busy(self) -> bool:
        """Some operation is under way, queued behind one, or waits: its sender is not silent."""
        return bool(self._commands or self._parked)

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
            self._send(client, error.to_reply(str(error.detail.pop("id", ""))))
            return
        if isinstance(message, ControlRequest):
            self._lifecycle.renew_lease(message.owner)
        if isinstance(message, HelloReqInput):
            self._send(client, answer_hello(message, self._lifecycle.stamp.incarnation))
            return
        if isinstance(message, GetStatusReqInput):  # changes nothing, so a retry needs no stored answer
            self._send(client, self._status(message.id))
            return
        if isinstance(message, GetMemoryHistoryReqInput):
            self._send(client, self._memory_history(message))
            return
        if self._attach(client, message, header):
            return
        try:
            self._start(client, message, buffers)
        except CaesuraError as error:
            self._answer(message.id, error.to_reply(message.id))
        except Exception as error:  # noqa: BLE001  a defect in one handler: its caller must hear, the loop must go on
            self._answer(message.id, _defect(message, error))

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
        exchange = self._exchanges.get(request.message_id)
        if exchange is not None:
            answer = BatchTokenOutput(step=self._lifecycle.step, finished=[result])
            self._record(request.message_id, exchange, answer, result_bytes(result))
            for client in exchange.clients:
                if client != request.client:
                    self._send(client, answer)

    def client_gone(self, client: bytes) -> None:
        """A send to ``client`` has failed. Sends happen while results are being made: :meth:`reap` does the rest."""
        self._gone.append(client)

    def reap(self) -> None:
        """Nobody waits for the generations of clients that are gone, unless another socket attached to them."""
        gone, self._gone = self._gone, []
        for client in dict.fromkeys(gone):
            self._end_generations_of(client)

    def _end_generations_of(self, client: bytes) -> None:
        orphans = [request for request in self._results.live.values() if request.client == client]
        aborted = 0
        for request in orphans:
            exchange = self._exchanges[request.message_id]
            others = [other for other in exchange.clients if other != client]
            if others:
                request.client = others[-1]
                exchange.clients = others
            else:
                aborted += self._results.abort([request], "client is gone")
        self._keep_results_of(client)
        if aborted:
            logger.info("client %s is gone: %d samples aborted", client.hex(), aborted)

    def _keep_results_of(self, client: bytes) -> None:
        """Which of its last results the client has read is not known: keep all that nobody else waited for."""
        for message_id in self._done:
            exchange = self._exchanges[message_id]
            if exchange.clients == [client]:
                for answer in exchange.answers:
                    for result in answer.finished if isinstance(answer, BatchTokenOutput) else ():
                        self._kept.add(result, exchange.generation)

    def refuse_rest(self, message: str) -> None:
        """Shutdown: every command that is still under way ends with an error, scores included."""
        for answer in self._scoring.end(message) if self._scoring is not None else ():
            self._answer(answer.id, answer)
        for running in [*self._parked, *self._commands]:
            running.operation.close()
            error = CaesuraError(ErrorCode.SHUTTING_DOWN, message)
            self._answer(running.message.id, error.to_reply(running.message.id))
        self._parked, self._commands = [], deque()

    def _attach(self, client: bytes, message: ToScheduler, frame: bytes) -> bool:
        """Whether this id is known: then the retry attaches, or gets what was answered."""
        body = hashlib.blake2b(frame, digest_size=16).digest()
        exchange = self._exchanges.get(message.id)
        if exchange is None:
            self._exchanges[message.id] = _Exchange(body, [client])
            return False
        if exchange.body != body:
            error = CaesuraError(ErrorCode.ID_CONFLICT, f"message id {message.id} was used with another body")
            self._send(client, error.to_reply(message.id))
            return True
        if exchange.remaining and client not in exchange.clients:
            exchange.clients.append(client)
        for answer in exchange.answers:
            self._send(client, answer)
        return True

    def _start(self, client: bytes, message: ToScheduler, buffers: list[memoryview]) -> None:
        if isinstance(message, GenerateReqInput):
            self._generate(client, message)
        elif isinstance(message, ScoreReqInput):
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
            self.stop_requested = True
            self._answer(message.id, ShutdownReqOutput(id=message.id))
        else:
            if isinstance(message, _EXCLUSIVE):
                self._refuse_when_busy()
            if isinstance(message, UpdateWeightsFromTensorReqInput):
                operation = self._updates.from_tensor(message, buffers)
            else:
                operation = self._operations[type(message)](message)
            self._commands.append(_Running(message, operation))

    def _generate(self, client: bytes, message: GenerateReqInput) -> None:
        rid = message.rid if message.rid is not None else message.id
        if self._join_generation(client, message, rid):
            return
        self._lifecycle.require_serviceable("cannot generate")
        if self._lifecycle.generation != "running" and self._config.requests_while_paused == "refuse":
            raise CaesuraError(ErrorCode.PAUSED, "the engine is paused and configured to refuse requests")
        self._lifecycle.require_epoch(message.min_weights_epoch)
        requests = admit(
            message, client=client, limits=self._limits, waiting=len(self._waiting), now=monotonic()
        )
        exchange = self._exchanges[message.id]
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
        if live:
            exchange = self._exchanges[live[0].message_id]
            if exchange.generation != _generation_body(message):
                raise CaesuraError(ErrorCode.DUPLICATE_RID, f"generation {rid!r} is still running", rid=rid)
            if client not in exchange.clients:
                exchange.clients.append(client)
            answers = exchange.answers
        else:
            kept = self._kept.get(rid, _generation_body(message))
            if len(kept) < message.sampling_params.n or any(r.finish_reason.type == "abort" for r in kept):
                return False
            answers = [BatchTokenOutput(step=self._lifecycle.step, finished=kept)]
        del self._exchanges[message.id]  # answered as the generation's own message is
        for answer in answers:
            self._send(client, answer)
        return True

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

    def _refuse_when_busy(self) -> None:
        for running in self._commands:
            if isinstance(running.message, _EXCLUSIVE):
                name = type(running.message).__name__
                raise CaesuraError(ErrorCode.BUSY, f"{name} is running", running=name, id=running.message.id)

    def _step(self, running: _Running) -> Wait | None:
        """Advance an operation; None when it has ended and is answered."""
        message_id = running.message.id
        try:
            return next(running.operation)
        except StopIteration as stop:
            self._answer(message_id, stop.value)
        except CaesuraError as error:
            self._answer(message_id, error.to_reply(message_id))
        except Exception as error:  # noqa: BLE001  as in handle
            self._answer(message_id, _defect(running.message, error))
        if isinstance(running.message, ControlRequest):
            self._lifecycle.renew_lease(
                running.message.owner
            )  # a long command was a sign of life while it ran
        if self._config.check_ledger:
            self._check_ledger()
        return None

    def _answer(self, message_id: str, answer: Message) -> None:
        # Token outputs that a command caused go out before its reply, to every client.
        self._results.deliver(self._lifecycle.step)
        exchange = self._exchanges[message_id]
        for client in exchange.clients:
            self._send(client, answer)
        exchange.remaining = 1
        nbytes = sum(map(len, answer.logprobs)) if isinstance(answer, ScoreReqOutput) else 0
        self._record(message_id, exchange, answer, 512 + nbytes)

    def _record(self, message_id: str, exchange: _Exchange, answer: Message, nbytes: int) -> None:
        """Store an answer; forget the oldest exchanges that are complete beyond the bounds."""
        exchange.answers.append(answer)
        exchange.nbytes += nbytes
        self._stored_bytes += nbytes
        exchange.remaining -= 1
        if exchange.remaining == 0:
            self._done[message_id] = None
        while len(self._done) > STORED_ANSWERS or (self._stored_bytes > STORED_ANSWER_BYTES and self._done):
            oldest, _ = self._done.popitem(last=False)
            self._stored_bytes -= self._exchanges.pop(oldest).nbytes


def _generation_body(message: GenerateReqInput) -> bytes:
    """What makes two generate requests the same but for their message ids."""
    return hashlib.blake2b(encode(msgspec.structs.replace(message, id="-")), digest_size=16).digest()


def _defect(message: ToScheduler, error: Exception) -> Message:
    """The answer to a command that failed in a way nobody foresaw."""
    name = type(message).__name__
    logger.error("%s failed", name, exc_info=error)
    reply = CaesuraError(
        ErrorCode.OUT_OF_MEMORY if is_out_of_memory(error) else ErrorCode.INTERNAL,
        f"{name} failed: {type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
    )
    return reply.to_reply(message.id)


def _decode(header: bytes, buffers: list[memoryview]) -> ToScheduler:
    message = decode_request(header)
    if buffers and not isinstance(message, UpdateWeightsFromTensorReqInput):
        raise CaesuraError(
            ErrorCode.MALFORMED_MESSAGE,
            f"{type(message).__name__} takes one frame, got {1 + len(buffers)}",
            id=message.id,
        )
    return message
