"""Generations as clients see them: start, retry, abort, fetching results, and clients that leave.

Invariants:
- A retry under a new message id, with the same rid and body, attaches to the live generation, or gets its
  kept results.
- A generation is aborted when no client waits for it any more; its results so far are kept.
"""

import hashlib
import logging
from typing import TYPE_CHECKING

import msgspec

from ...io_struct import (
    AbortReq,
    AbortReqOutput,
    CaesuraError,
    ErrorCode,
    FetchResultReqInput,
    FetchResultReqOutput,
    GenerateImagesReqInput,
    GenerateImagesReqOutput,
    GenerateReqInput,
    GenerateReqOutput,
    encode,
)

if TYPE_CHECKING:
    from ..runtime.engine import Engine

logger = logging.getLogger(__name__)


Generate = GenerateReqInput | GenerateImagesReqInput


def generate(engine: "Engine", client: bytes, message: Generate, buffers: list[memoryview]) -> None:
    """Start a generation, or attach ``message`` to the generation that it repeats; nothing has changed if
    this raises.
    """
    rid, body = message.rid if message.rid is not None else message.id, _body_of(message, buffers)
    if not isinstance(message, engine.request_type):
        raise CaesuraError(
            ErrorCode.UNSUPPORTED,
            f"this engine takes {engine.request_type.__name__}, not {type(message).__name__}: a pipeline of "
            "diffusers "
            "makes images, any other model tokens",
            field="type",
        )
    if _join(engine, client, message, rid, body):
        return
    engine.shutdown.refuse_work()
    engine.state.require_serviceable("cannot generate")
    if engine.state.generation != "running" and engine.config.requests_while_paused == "refuse":
        raise CaesuraError(ErrorCode.PAUSED, "the engine is paused and configured to refuse requests")
    engine.state.require_epoch(message.min_weights_epoch)
    requests = engine.admit(message, buffers, client, len(engine.waiting))
    engine.answers.begin_generation(message.id, rid, body, samples=len(requests))
    engine.live.add(requests)
    for request in requests:
        engine.waiting.append(request)


def _join(engine: "Engine", client: bytes, message: Generate, rid: str, body: bytes) -> bool:
    """Answer a retry of a live or kept generation under a new message id; return False if it is no retry."""
    live = engine.live.samples(rid)
    exchange = engine.answers.get(live[0].message_id) if live else None
    if exchange is not None:
        if exchange.generation != body:
            raise CaesuraError(ErrorCode.DUPLICATE_RID, f"generation {rid!r} is still running", rid=rid)
        for answer in engine.answers.join(client, message.id, exchange):
            engine.replies.send_answer(client, answer, message.id)
        return True
    kept = engine.answers.kept(rid, body)
    if len(kept) < _samples(message) or any(r.finish_reason.type == "abort" for r in kept):
        return False
    engine.replies.repeat(message.id, kept)
    return True


def abort(engine: "Engine", message: AbortReq) -> AbortReqOutput:
    if message.abort_all:
        return AbortReqOutput(id=message.id, aborted=engine.outputs.abort_all("Aborted"))
    if message.rid is None:
        raise CaesuraError(
            ErrorCode.INVALID_REQUEST, "abort needs a rid, or abort_all", field="rid", value=None
        )
    samples = engine.live.samples(message.rid)
    if message.index is not None:
        samples = [sample for sample in samples if sample.index == message.index]
    return AbortReqOutput(id=message.id, aborted=engine.outputs.abort(samples, "Aborted"))


def fetch(engine: "Engine", message: FetchResultReqInput) -> FetchResultReqOutput:
    live = len(engine.live.samples(message.rid))
    kept = engine.answers.kept(message.rid)
    if any(isinstance(result, GenerateImagesReqOutput) for result in kept):
        raise CaesuraError(
            ErrorCode.UNSUPPORTED, "results of images are fetched by repeating the request", field="rid"
        )
    tokens = [result for result in kept if isinstance(result, GenerateReqOutput)]
    return FetchResultReqOutput(id=message.id, results=tokens, live=live)


def client_gone(engine: "Engine", client: bytes) -> None:
    """Abort the requests that only ``client`` waits for, keep their results, give others a new receiver."""
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
    """Return the digest of a request with its tensors, without its message id."""
    digest = hashlib.blake2b(encode(msgspec.structs.replace(message, id="-")), digest_size=16)
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()


def _samples(message: Generate) -> int:
    return message.sampling_params.n if isinstance(message, GenerateReqInput) else message.n
