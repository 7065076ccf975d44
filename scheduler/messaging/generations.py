"""Generations as clients see them: start, retry, abort, fetching results, and clients that leave.

Invariants:
- One message id has one effect (``answers.py``). A retry under a new message id, with the same rid and body, attaches to the
  live generation, or gets its kept results.
- A generation is aborted when no client waits for it any more. Its results so far are kept and can be fetched by rid.
"""

import hashlib
import logging
from typing import Any

import msgspec

from ...io_struct import (
    AbortReq,
    CaesuraError,
    ErrorCode,
    FetchResultReqInput,
    FetchResultReqOutput,
    GenerateImagesReqInput,
    GenerateImagesReqOutput,
    GenerateReqInput,
    GenerateReqOutput,
    Message,
    encode,
)
from ..control.lifecycle import Lifecycle
from ..runtime.shutdown import Shutdown
from ..scheduling.live_requests import LiveRequests
from ..scheduling.stepping import Admission, StepOutputs, StepQueue
from .answers import Answers
from .replies import Replies

logger = logging.getLogger(__name__)


Generate = GenerateReqInput | GenerateImagesReqInput


class Generations:
    """Starts, aborts and looks up generations."""

    def __init__(
        self,
        *,
        request_type: type[Message],
        admission: Admission,
        refuse_while_paused: bool,
        lifecycle: Lifecycle,
        live: LiveRequests[Any],
        waiting: StepQueue,
        outputs: StepOutputs,
        answers: Answers,
        replies: Replies,
        shutdown: Shutdown,
    ) -> None:
        self._request_type = request_type
        self._admission = admission
        self._refuse_while_paused = refuse_while_paused
        self._lifecycle = lifecycle
        self._live = live
        self._waiting = waiting
        self._outputs = outputs
        self._answers = answers
        self._replies = replies
        self._shutdown = shutdown

    def generate(self, client: bytes, message: Generate, buffers: list[memoryview]) -> None:
        """Start a generation, or attach ``message`` to the generation that it repeats.

        Raises:
            CaesuraError: ``duplicate_rid``, ``shutting_down``, ``paused``, ``weights_poisoned``, ``weights_invalid``,
                ``epoch_behind``; what :class:`~..stepping.Admission` refuses. Nothing has changed then.
        """
        rid, body = message.rid if message.rid is not None else message.id, _body_of(message, buffers)
        if not isinstance(message, self._request_type):
            raise CaesuraError(
                ErrorCode.UNSUPPORTED,
                f"this engine takes {self._request_type.__name__}, not {type(message).__name__}: a pipeline of diffusers "
                "makes images, any other model tokens",
                field="type",
            )
        if self._join(client, message, rid, body):
            return
        self._shutdown.refuse_work()
        self._lifecycle.require_serviceable("cannot generate")
        if self._lifecycle.generation != "running" and self._refuse_while_paused:
            raise CaesuraError(ErrorCode.PAUSED, "the engine is paused and configured to refuse requests")
        self._lifecycle.require_epoch(message.min_weights_epoch)
        requests = self._admission.admit(message, buffers, client, len(self._waiting))
        self._answers.begin_generation(message.id, rid, body, samples=len(requests))
        self._live.add(requests)
        for request in requests:
            self._waiting.append(request)

    def _join(self, client: bytes, message: Generate, rid: str, body: bytes) -> bool:
        """Answer a retry, under a new message id, of a generation that is live or kept; False if it is no such retry."""
        live = self._live.samples(rid)
        exchange = self._answers.get(live[0].message_id) if live else None
        if exchange is not None:
            if exchange.generation != body:
                raise CaesuraError(ErrorCode.DUPLICATE_RID, f"generation {rid!r} is still running", rid=rid)
            for answer in self._answers.join(client, message.id, exchange):
                self._replies.send_answer(client, answer, message.id)
            return True
        kept = self._answers.kept(rid, body)
        if len(kept) < _samples(message) or any(r.finish_reason.type == "abort" for r in kept):
            return False
        self._replies.repeat(message.id, kept)
        return True

    def abort(self, message: AbortReq) -> int:
        """Abort the samples that ``message`` names; returns their number."""
        if message.abort_all:
            return self._outputs.abort_all("Aborted")
        if message.rid is None:
            raise CaesuraError(
                ErrorCode.INVALID_REQUEST, "abort needs a rid, or abort_all", field="rid", value=None
            )
        samples = self._live.samples(message.rid)
        if message.index is not None:
            samples = [sample for sample in samples if sample.index == message.index]
        return self._outputs.abort(samples, "Aborted")

    def fetch(self, message: FetchResultReqInput) -> FetchResultReqOutput:
        """The kept results of a rid, and the number of its live samples."""
        live = len(self._live.samples(message.rid))
        kept = self._answers.kept(message.rid)
        if any(isinstance(result, GenerateImagesReqOutput) for result in kept):
            raise CaesuraError(
                ErrorCode.UNSUPPORTED, "results of images are fetched by repeating the request", field="rid"
            )
        tokens = [result for result in kept if isinstance(result, GenerateReqOutput)]
        return FetchResultReqOutput(id=message.id, results=tokens, live=live)

    def client_gone(self, client: bytes) -> None:
        """Abort the requests that only ``client`` waits for, and keep their results; others get a new receiving client."""
        aborted = 0
        for request in self._live.of_client(client):
            exchange = self._answers.get(request.message_id)
            others = [] if exchange is None else [other for other in exchange.clients if other != client]
            if exchange is not None and others:
                request.client = others[-1]
                exchange.clients = others
            else:
                aborted += self._outputs.abort([request], "client is gone")
        self._answers.keep_for(client)
        if aborted:
            logger.info("client %s is gone: %d samples aborted", client.hex(), aborted)


def _body_of(message: Generate, buffers: list[memoryview]) -> bytes:
    """Digest of a request without its message id, with its tensors."""
    digest = hashlib.blake2b(encode(msgspec.structs.replace(message, id="-")), digest_size=16)
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()


def _samples(message: Generate) -> int:
    return message.sampling_params.n if isinstance(message, GenerateReqInput) else message.n
