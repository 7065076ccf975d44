"""Routes received messages: decoding, idempotence, typed errors; and generations as clients see them.

Invariants:
- Every readable request gets exactly one answer: its reply, or an ``ErrorReply``. An unreadable frame gets an
  ``ErrorReply`` with its message id if that can be found. Neither stops the loop (I11).
- One message id has one effect (``stored_answers.py``). A generation's retry under a new message id, with the
  same rid and body, attaches to the live generation, or gets its kept results.
- A generation is aborted when no client waits for it any more; its results so far are kept.
- Status, abort and lease renewal never wait for commands (``command_queue.py``).
"""

import hashlib
import logging
import os
from typing import TYPE_CHECKING, Any

import msgspec

from ... import __version__
from ... import io_struct as wire
from ...io_struct import CaesuraError, ErrorCode, decode_request
from ..control.engine_state import Sender
from ..runtime.guard import defect
from .status import status

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..runtime.engine import Engine
    from ..scheduling.corpora import Corpora

logger = logging.getLogger(__name__)


class Dispatcher:
    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._gone: list[bytes] = []

    @property
    def has_unanswered(self) -> bool:
        scoring = self._engine.scoring
        scores = scoring is not None and scoring.has_work
        return scores or self._engine.drift.has_answers or self._engine.commands.is_busy

    @property
    def wants_tick(self) -> bool:
        scoring = self._engine.scoring
        scores = scoring is not None and scoring.has_work and not scoring.waits
        wants = self._engine.drift.has_answers or self._engine.commands.wants_tick
        return scores or wants or self._engine.adapters.wants_tick

    @property
    def waits(self) -> bool:
        scoring = self._engine.scoring
        scores_wait = scoring is not None and scoring.waits
        grammars = self._engine.grammars
        if grammars is not None and grammars.has_work:
            return True
        return scores_wait or self._engine.commands.has_stepped_aside or self._engine.adapters.waits

    def handle(self, client: bytes, header: bytes, buffers: list[memoryview]) -> None:
        engine, send = self._engine, self._engine.replies.send_answer
        try:
            message = _decode(header, buffers)
        except CaesuraError as error:
            logger.warning("dropped a malformed message: %s", error)
            send(client, error.to_reply(str(error.detail.pop("id", ""))))
            return
        except Exception as error:  # noqa: BLE001  an unforeseen error of the decoder must be answered, too
            send(client, defect("decoding a message", "", error))
            return
        answers: list[wire.Message] | None = None
        name, is_attached, failed = type(message).__name__, False, False
        try:
            answers = self._known(client, message, header, buffers)
            if is_attached := answers is None:
                answers = self._begin(client, message, buffers)
        except CaesuraError as error:
            answers, failed = [error.to_reply(message.id)], error.code == ErrorCode.OUT_OF_MEMORY
        # An unforeseen error must be answered, and the loop must go on.
        except Exception as error:  # noqa: BLE001
            answers, failed = [defect(name, message.id, error)], True
        if failed:
            engine.device_cache.after_failure(name)
        for answer in answers or ():
            if is_attached:
                engine.replies.answer(message.id, answer)
            else:
                send(client, answer, message.id)

    def score(self) -> None:
        engine = self._engine
        if engine.scoring is not None:
            for answer in engine.scoring.advance():
                engine.replies.answer(answer.id, answer)
        engine.drift.answer()

    def client_gone(self, client: bytes) -> None:
        """Record that a send has failed; :meth:`reap` does the rest, as steps may be processed now."""
        self._gone.append(client)

    def reap(self) -> None:
        engine = self._engine
        gone, self._gone = self._gone, []
        for client in dict.fromkeys(gone):
            _client_gone(engine, client)
            engine.answers.leave(client, engine.commands.message_ids())
            engine.sessions.client_gone(client)

    def refuse_rest(self, message: str, code: ErrorCode) -> None:
        engine = self._engine
        for answer in engine.scoring.end(message, code) if engine.scoring is not None else ():
            engine.replies.answer(answer.id, answer)
        engine.drift.answer()
        engine.commands.refuse_rest(message, code)

    def _known(
        self, client: bytes, message: wire.Request, frame: bytes, buffers: list[memoryview]
    ) -> list[wire.Message] | None:
        engine = self._engine
        if isinstance(message, wire.ControlRequest):
            engine.state.renew_lease(message.owner)
        if isinstance(message, _OF_SESSIONS):
            engine.sessions.note_message(message, Sender(client, message.owner))
        if (query := _QUERIES.get(type(message))) is not None:
            return [query(engine, message)]
        # Tensors of a prompt are few; those of an update are the weights, and take as long as writing them.
        compared = buffers if isinstance(message, wire.GenerateImagesReqInput) else ()
        return engine.answers.attach(client, message.id, frame, compared)

    def _begin(self, client: bytes, message: wire.Request, buffers: list[memoryview]) -> list[wire.Message]:
        engine = self._engine
        if (answer_at_once := _AT_ONCE.get(type(message))) is not None:
            return [answer_at_once(engine, message)]
        if isinstance(message, wire.GenerateReqInput | wire.GenerateImagesReqInput):
            _generate(engine, client, message, buffers)
        elif isinstance(message, wire.ScoreReqInput):
            engine.shutdown.refuse_work()
            if engine.scoring is None:
                reason = "no reference is loaded: start the engine with reference_model_path"
                raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field="reference_model_path")
            engine.scoring.accept(message)
        elif isinstance(message, wire.CheckDriftReqInput):
            return engine.drift.accept(message)
        else:
            assert isinstance(message, wire.ControlRequest)
            engine.commands.add(client, message, buffers)
        return []


_OF_SESSIONS = wire.WeightUpdateOptions | wire.EndWeightUpdateReqInput | wire.LoadAdapterReqInput
_WITH_FRAMES = wire.UpdateWeightsFromTensorReqInput | wire.GenerateImagesReqInput | wire.LoadAdapterReqInput


def _decode(header: bytes, buffers: list[memoryview]) -> wire.Request:
    message = decode_request(header)
    if buffers and not isinstance(message, _WITH_FRAMES):
        reason = f"{type(message).__name__} takes one frame, got {1 + len(buffers)}"
        raise CaesuraError(ErrorCode.MALFORMED_MESSAGE, reason, id=message.id)
    return message


def _renew_lease(engine: "Engine", message: wire.RenewPauseLeaseReqInput) -> wire.RenewPauseLeaseReqOutput:
    state = engine.state
    left = state.lease_left_s if message.owner == state.ownership.owner else None
    return wire.RenewPauseLeaseReqOutput(id=message.id, renewed=left is not None, lease_left_s=left)


def _shut_down(engine: "Engine", message: wire.ShutdownReqInput) -> wire.ShutdownReqOutput:
    sender = message.requested_by or "a client that does not say who it is"
    engine.shutdown.request(
        f"shutdown message from {sender}", drain=message.drain, timeout_s=message.timeout_s
    )
    return wire.ShutdownReqOutput(id=message.id, drain_s=engine.shutdown.left_s)


Generate = wire.GenerateReqInput | wire.GenerateImagesReqInput


def _generate(engine: "Engine", client: bytes, message: Generate, buffers: list[memoryview]) -> None:
    """Start a generation, or attach ``message`` to the one that it repeats; all or nothing."""
    rid, body = message.rid if message.rid is not None else message.id, _body_of(message, buffers)
    if not isinstance(message, engine.request_type):
        reason = f"this engine takes {engine.request_type.__name__}, not {type(message).__name__}: "
        reason += "a pipeline of diffusers makes images, any other model tokens"
        raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field="type")
    if _join(engine, client, message, rid, body):
        return
    engine.shutdown.refuse_work()
    engine.state.require_serviceable("cannot generate")
    if engine.state.generation != "running" and engine.config.requests_while_paused == "refuse":
        raise CaesuraError(ErrorCode.PAUSED, "the engine is paused and configured to refuse requests")
    engine.state.require_epoch(message.min_weights_epoch)
    adapter = engine.adapters.named(message.adapter) if isinstance(message, wire.GenerateReqInput) else None
    waiting = len(engine.waiting) - engine.drift.counts()[1]
    requests = engine.admit(message, buffers, client, waiting)
    grammar = message.sampling_params.grammar if isinstance(message, wire.GenerateReqInput) else None
    if grammar is not None and engine.grammars is not None:
        engine.grammars.check(grammar)
    engine.answers.begin_generation(message.id, rid, body, samples=len(requests))
    if adapter is not None:
        engine.adapters.give(adapter, requests)
    if engine.grammars is not None:
        engine.grammars.give(requests)
    engine.live.add(requests)
    for request in requests:
        engine.waiting.append(request)


def _join(engine: "Engine", client: bytes, message: Generate, rid: str, body: bytes) -> bool:
    live = engine.live.samples(rid)
    exchange = engine.answers.get(live[0].message_id) if live else None
    if exchange is not None:
        if exchange.generation != body:
            raise CaesuraError(ErrorCode.DUPLICATE_RID, f"generation {rid!r} is still running", rid=rid)
        for answer in engine.answers.join(client, message.id, exchange):
            engine.replies.send_answer(client, answer, message.id)
        return True
    kept = engine.answers.kept(rid, body)
    samples = message.sampling_params.n if isinstance(message, wire.GenerateReqInput) else message.n
    if len(kept) < samples or any(r.finish_reason.type == "abort" for r in kept):
        return False
    engine.replies.answer(message.id, *map(engine.replies.result, kept))
    return True


def _abort(engine: "Engine", message: wire.AbortReq) -> wire.AbortReqOutput:
    if message.abort_all:
        return wire.AbortReqOutput(id=message.id, aborted=engine.outputs.abort_all("Aborted"))
    if message.rid is None:
        reason = "abort needs a rid, or abort_all"
        raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="rid", value=None)
    rids = [message.rid] if isinstance(message.rid, str) else dict.fromkeys(message.rid)
    samples = [sample for rid in rids if rid for sample in engine.live.samples(rid)]  # "" is that of checks
    if message.index is not None:
        samples = [sample for sample in samples if sample.index == message.index]
    return wire.AbortReqOutput(id=message.id, aborted=engine.outputs.abort(samples, "Aborted"))


def _end_leases(engine: "Engine", message: wire.EndPrefixLeasesReqInput) -> wire.EndPrefixLeasesReqOutput:
    ended = sum(engine.cache.end_lease(name) for name in message.names)
    return wire.EndPrefixLeasesReqOutput(id=message.id, ended=ended)


def _corpora(engine: "Engine") -> "Corpora":
    if (speculation := engine.batcher.speculation) is None:
        reason = "this engine drafts nothing: start it with speculation = 'suffix'"
        raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field="speculation", value="none")
    return speculation.corpora


def _add_corpus(engine: "Engine", message: wire.AddCorpusReqInput) -> wire.AddCorpusReqOutput:
    count = _corpora(engine).add(message.name, message.token_ids)
    return wire.AddCorpusReqOutput(id=message.id, num_tokens=count)


def _remove_corpus(engine: "Engine", message: wire.RemoveCorpusReqInput) -> wire.RemoveCorpusReqOutput:
    return wire.RemoveCorpusReqOutput(id=message.id, num_tokens=_corpora(engine).remove(message.name))


def _list_corpora(engine: "Engine", message: wire.ListCorporaReqInput) -> wire.ListCorporaReqOutput:
    return wire.ListCorporaReqOutput(id=message.id, corpora=_corpora(engine).sizes)


def _fetch(engine: "Engine", message: wire.FetchResultReqInput) -> wire.FetchResultReqOutput:
    live = len(engine.live.samples(message.rid))
    kept = engine.answers.kept(message.rid)
    if any(isinstance(result, wire.GenerateImagesReqOutput) for result in kept):
        reason = "results of images are fetched by repeating the request"
        raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field="rid")
    tokens = [result for result in kept if isinstance(result, wire.GenerateReqOutput)]
    return wire.FetchResultReqOutput(id=message.id, results=tokens, live=live)


def _client_gone(engine: "Engine", client: bytes) -> None:
    """Abort what only ``client`` waits for, keep the results, and give others a new receiver."""
    aborted = 0
    for request in engine.live.of_client(client):
        exchange = engine.answers.get(request.message_id)
        others = [] if exchange is None else [other for other in exchange.clients if other != client]
        if exchange is not None and others:
            request.client = others[-1]
            exchange.clients = others
        else:
            aborted += engine.outputs.abort([request], "client is gone")
    engine.answers.keep_for(client)
    if aborted:
        logger.info("client %s is gone: %d samples aborted", client.hex(), aborted)


def _body_of(message: Generate, buffers: list[memoryview]) -> bytes:
    digest = hashlib.blake2b(wire.encode(msgspec.structs.replace(message, id="-")), digest_size=16)
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()


def answer_hello(message: wire.HelloReqInput, incarnation: str) -> wire.HelloReqOutput | wire.ErrorReply:
    major, minor = wire.WIRE_VERSION
    logger.debug("hello from %s: wire %d.%d", message.client or "?", message.wire_major, message.wire_minor)
    if message.wire_major != major:
        ours, theirs = f"{major}.{minor}", f"{message.wire_major}.{message.wire_minor}"
        reason = f"this engine (caesura {__version__}) speaks wire {ours}, the client "
        reason += f"({message.client or 'unknown'}) {theirs}"
        return CaesuraError(ErrorCode.VERSION_MISMATCH, reason, engine=ours, client=theirs).to_reply(
            message.id
        )
    return wire.HelloReqOutput(
        id=message.id,
        wire_major=major,
        wire_minor=minor,
        incarnation=incarnation,
        version=__version__,
        pid=os.getpid(),
    )


_QUERIES: "dict[type, Callable[[Engine, Any], wire.Message]]" = {
    wire.HelloReqInput: lambda engine, message: answer_hello(message, engine.state.stamp.incarnation),
    wire.GetStatusReqInput: lambda engine, message: status(engine, message.id),
    wire.GetMemoryHistoryReqInput: lambda engine, message: engine.history.answer(message),
    wire.GetWeightsManifestReqInput: lambda engine, message: engine.sending.manifest(message),
    wire.ListCorporaReqInput: _list_corpora,
}
"""Messages that change nothing; a retry is answered anew, not from the store."""

_AT_ONCE: "dict[type, Callable[[Engine, Any], wire.Message]]" = {
    wire.AbortReq: _abort,
    wire.AddCorpusReqInput: _add_corpus,
    wire.EndPrefixLeasesReqInput: _end_leases,
    wire.FetchResultReqInput: _fetch,
    wire.RemoveCorpusReqInput: _remove_corpus,
    wire.RenewPauseLeaseReqInput: _renew_lease,
    wire.ShutdownReqInput: _shut_down,
}
"""Messages answered at once; other control requests are commands (``control/command_table.py``)."""
