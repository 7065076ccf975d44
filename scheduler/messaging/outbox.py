"""Collects the output of a step per client, and sends it as at most one message per client and step.

If a client's message cannot be built or sent, the others get theirs. It is tried :data:`MAX_SENDS` times;
then each result is sent alone, and one that cannot be sent is replaced by an error. Results of images are
always sent alone.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from ...io_struct import (
    BatchTokenOutput,
    DeltaDetails,
    DeltaLogprobs,
    DeltaWeights,
    ErrorCode,
    FinishReason,
    GenerateImagesReqOutput,
    GenerateReqOutput,
    LogprobRows,
    StreamDelta,
)
from ..memory.device_memory import is_out_of_memory
from ..scheduling.request import Request, WeightStamp
from ..scheduling.sampling import joined_masks

logger = logging.getLogger(__name__)

MAX_SENDS = 3

Result = GenerateReqOutput | GenerateImagesReqOutput
Send = Callable[[bytes, Any], None]


@dataclass(frozen=True, slots=True)
class TokenDetails:
    weights: DeltaWeights
    raw: float
    sampled: float
    mask: np.ndarray | None

    @staticmethod
    def of(request: Request, at: int, raw: float, sampled: float) -> "TokenDetails | None":
        """Return details of the newest token, output token ``at``, or None if not asked for."""
        if not request.details:
            return None
        stamp, stale, _ = request.spans[-1]
        return TokenDetails(
            _weights_of(stamp, stale),
            raw if request.return_raw else np.nan,
            sampled if request.return_sampled else np.nan,
            None if request.masks is None else request.masks.at(at),
        )


def _details_of(tokens: Sequence[TokenDetails | None]) -> DeltaDetails | None:
    if not any(tokens):
        return None
    numbers: dict[DeltaWeights, int] = {}
    sampled_by = [-1 if each is None else numbers.setdefault(each.weights, len(numbers)) for each in tokens]

    def column(name: str) -> bytes:
        return np.asarray(
            [np.nan if each is None else getattr(each, name) for each in tokens], "<f4"
        ).tobytes()

    return DeltaDetails(
        weights=list(numbers),
        sampled_by=np.asarray(sampled_by, "<i4").tobytes(),
        raw_logprobs=column("raw"),
        sampled_logprobs=column("sampled"),
        sampling_mask=joined_masks([None if token is None else token.mask for token in tokens]),
    )


@dataclass(slots=True)
class _ClientOutput:
    rids: list[str] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[LogprobRows | None] = field(default_factory=list)
    token_ids_logprobs: list[LogprobRows | None] = field(default_factory=list)
    details: list[TokenDetails | None] = field(default_factory=list)
    finished: list[Any] = field(default_factory=list)
    attempts: int = 0

    def message(self, step: int) -> BatchTokenOutput:
        delta = None
        if self.rids:
            delta = StreamDelta(
                rids=self.rids,
                indices=np.asarray(self.indices, "<i4").tobytes(),
                starts=np.asarray(self.starts, "<i4").tobytes(),
                counts=np.asarray(self.counts, "<i4").tobytes(),
                tokens=np.asarray(self.tokens, "<i4").tobytes(),
                logprobs=np.asarray(self.logprobs, "<f4").tobytes(),
                top=_delta_logprobs(self.top),
                token_ids=_delta_logprobs(self.token_ids_logprobs),
                details=_details_of(self.details),
            )
        return BatchTokenOutput(step=step, delta=delta, finished=self.finished)


class Outbox:
    def __init__(self, send: Send, *, one_by_one: bool = False) -> None:
        """``one_by_one``: each result is a message of its own, whose frames are its tensors."""
        self._send = send
        self._one_by_one = one_by_one
        self._outputs: defaultdict[bytes, _ClientOutput] = defaultdict(_ClientOutput)

    @property
    def has_undelivered(self) -> bool:
        return bool(self._outputs)

    def add_tokens(
        self,
        requests: Iterable[Request],
        starts: Sequence[int],
        tokens: Sequence[int],
        logprobs: Sequence[float],
        raw: Sequence[float],
        sampled: Sequence[float],
    ) -> None:
        """Add one new token of each streaming request; ``starts`` are the tokens' positions in the output."""
        columns = zip(requests, starts, tokens, logprobs, raw, sampled, strict=True)
        for request, start, token, logprob, of_raw, of_sampled in columns:
            output = self._outputs[request.client]
            output.rids.append(request.rid)
            output.indices.append(request.index)
            output.starts.append(start)
            output.counts.append(1)
            output.tokens.append(token)
            output.logprobs.append(logprob if request.return_logprob else np.nan)
            record = request.record
            top, token_ids = (None, None) if record is None else record.output_rows(start, start + 1)
            output.top.append(top)
            output.token_ids_logprobs.append(token_ids)
            output.details.append(TokenDetails.of(request, start, of_raw, of_sampled))

    def add_result(self, client: bytes, result: Result) -> None:
        self._outputs[client].finished.append(result)

    def deliver(self, step: int) -> None:
        for client in list(self._outputs):
            output = self._outputs[client]
            if self._one_by_one:
                del self._outputs[client]
                self._deliver_one_by_one(client, output, step)
                continue
            try:
                self._send(client, output.message(step))
            except Exception as error:  # the other clients must get theirs
                output.attempts += 1
                logger.error("client %s: its results could not be sent", client.hex(), exc_info=error)
                if output.attempts < MAX_SENDS:
                    continue  # it goes with what comes next
                self._deliver_one_by_one(client, output, step)
            del self._outputs[client]

    def _deliver_one_by_one(self, client: bytes, output: _ClientOutput, step: int) -> None:
        for result in output.finished:
            try:
                self._send(client, self._alone(result, step))
                continue
            except Exception as error:
                logger.error("request %s: its result could not be sent", result.rid, exc_info=error)
                replacement = _error_result(result, error)
            try:
                self._send(client, self._alone(replacement, step))
            except Exception as error:
                logger.error("request %s: no result could be sent", result.rid, exc_info=error)

    def _alone(self, result: Any, step: int) -> Any:
        return result if self._one_by_one else BatchTokenOutput(step=step, finished=[result])


def _delta_logprobs(rows: list[LogprobRows | None]) -> DeltaLogprobs | None:
    if not any(rows):
        return None
    return DeltaLogprobs(
        ks=np.asarray([0 if row is None else row.k for row in rows], "<i4").tobytes(),
        ids=b"".join(row.ids for row in rows if row is not None),
        logprobs=b"".join(row.logprobs for row in rows if row is not None),
    )


def _error_result(result: Result, error: Exception) -> Result:
    code = ErrorCode.OUT_OF_MEMORY if is_out_of_memory(error) else ErrorCode.INTERNAL
    message = f"its result cannot be sent: {type(error).__name__}: {error}"
    reason = FinishReason(type="error", message=message, code=code)
    if isinstance(result, GenerateImagesReqOutput):
        return GenerateImagesReqOutput(
            rid=result.rid,
            index=result.index,
            finish_reason=reason,
            weight_versions=[],
            seed=result.seed,
            steps=result.steps,
            steps_done=0,
        )
    return GenerateReqOutput(
        rid=result.rid,
        index=result.index,
        output_ids=b"",
        finish_reason=reason,
        weight_versions=[],
        prompt_tokens=0,
        cached_tokens=0,
        seed=0,
    )


@lru_cache(maxsize=64)
def _weights_of(stamp: WeightStamp, stale: bool) -> DeltaWeights:
    return DeltaWeights(**asdict(stamp), stale_kv=stale)
