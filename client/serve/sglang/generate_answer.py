"""Responses of ``/generate``: SGLang's dictionaries and server-sent events.

Invariants: lists over tokens have one entry per output id, aborted samples included; a cumulative event is appended to,
not encoded again, so a stream's JSON costs what its tokens cost.
"""

import base64
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ....io_struct import RoutedExperts, SamplingMask
from ...connection.results import GenerateOutput, TokenDelta, TokenLogprobs
from ...exceptions import InvalidRequest
from ...text.tokenizer_manager import Chunk, GenerationRequest, Sample, TokenizerManager
from .generate_schema import ExpertsDtype, NativeRequest

Texts = Callable[[int], str | None]
"""The text of one token, where asked for."""
_encode = msgspec.json.encode


def token_texts(manager: TokenizerManager, wanted: bool) -> Texts | None:
    """How to fill the third entry of a logprob; None: with null."""
    if not wanted or manager.tokenizer is None:
        return None
    known: dict[int, str] = {}

    def text_of(token: int) -> str:
        if token not in known:
            known[token] = manager.detokenize([token], skip_special_tokens=False)
        return known[token]

    return text_of


def triples(logprobs: list[float] | list[float | None], ids: list[int], texts: Texts | None) -> list[Any]:
    """``[logprob, token id, text]`` for each token."""
    words = itertools.repeat(None) if texts is None else map(texts, ids)
    return list(zip(logprobs, ids, words, strict=False))


def rows(values: TokenLogprobs, texts: Texts | None) -> Iterator[list[Any]]:
    """The triples of each position."""
    for position in range(len(values)):
        pairs = values.at(position)
        yield triples([value for value, _ in pairs], [token for _, token in pairs], texts)


def experts_of(output: GenerateOutput, dtype: ExpertsDtype = "int32") -> str | None:
    """:func:`routed_experts` of a sample. None: they were not asked for, or no token was sampled. Then those of the prompt are
    not known either, and clients take any text for theirs.
    """
    if output.routed_experts is None or not output.output_ids:
        return None
    return routed_experts(output.routed_experts, dtype)


def routed_experts(routed: RoutedExperts, dtype: ExpertsDtype = "int32") -> str:
    """Little-endian [rows, layers, experts per token] in base64.

    Raises:
        InvalidRequest: ``uint8`` for a model of more than 256 experts.
    """
    if dtype == "uint8":
        if routed.dtype != "U8":
            raise InvalidRequest(
                "routed_experts_dtype uint8: the model has more than 256 experts",
                field="routed_experts_dtype",
            )
        return base64.b64encode(routed.data).decode()
    size = routed.itemsize
    wide = bytearray(len(routed.data) // size * 4)
    for place in range(size):  # the lowest bytes; the others are zero
        wide[place::4] = routed.data[place::size]
    return base64.b64encode(wide).decode()


def finish_reason(sample: Sample) -> dict[str, Any]:
    """Why it ended, in SGLang's words."""
    reason = sample.output.finish_reason
    if reason.type == "stop":
        return {"type": "stop", "matched": sample.matched}
    if reason.type == "length":
        return {"type": "length", "length": reason.length}
    return {"type": "abort", "message": reason.message or "Aborted", "status_code": None, "err_type": None}


def meta_info(
    sample: Sample,
    request: GenerationRequest,
    label: str,
    texts: Texts | None,
    experts_dtype: ExpertsDtype = "int32",
) -> dict[str, Any]:
    """Everything about a finished sample but its tokens. ``label`` is for one that has none."""
    output = sample.output
    spans = output.weight_versions
    meta: dict[str, Any] = {
        "id": sample.rid,
        "finish_reason": finish_reason(sample),
        "prompt_tokens": output.prompt_tokens,
        "weight_version": spans[-1].version if spans else label,
        "weight_versions": spans,
        "num_retractions": output.num_retractions,
        "reasoning_tokens": 0,
        "completion_tokens": len(output.output_ids),
        "cached_tokens": output.cached_tokens,
        "cached_tokens_details": None,
        "dp_rank": 0,
        "seed": output.seed,
        "queue_time": output.queue_time,
        "e2e_latency": output.e2e_latency,
        "response_sent_to_client_ts": time.time(),
    }
    if request.return_logprob:
        delta = output.as_delta()
        if _as_slime(request):
            delta = replace(delta, output_logprobs=output.sampled_logprobs)
        _add_output_logprobs(meta, delta, texts)
        _add_input_logprobs(meta, sample, request, texts)
    if output.sampling_mask is not None:
        _add_sampling_mask(meta, output, output.sampling_mask, request)
    if output.routed_experts is not None:
        meta["routed_experts"] = experts_of(output, experts_dtype)
        meta["routed_experts_start_len"] = request.routed_experts_start_len
    return meta


def _as_slime(request: GenerationRequest) -> bool:
    return isinstance(request, NativeRequest) and request.top_p_token_ids


def _add_sampling_mask(
    meta: dict[str, Any], output: GenerateOutput, mask: SamplingMask, request: GenerationRequest
) -> None:
    """In slime's words or SGLang's; slime reads no key at all as "no tokens"."""
    if not _as_slime(request):
        meta["output_token_sampling_mask"] = [mask.at(position) for position in range(len(mask))]
        meta["output_token_sampling_logprobs"] = output.sampled_logprobs
        meta["output_token_sampling_mask_length"] = len(mask)
    elif len(mask):
        meta["top_p_token_ids"] = base64.b64encode(mask.ids).decode()
        meta["top_p_token_offsets"] = base64.b64encode(mask.offsets).decode()


def _add_output_logprobs(meta: dict[str, Any], delta: TokenDelta, texts: Texts | None) -> None:
    logprobs = delta.output_logprobs or []
    meta["output_token_logprobs"] = triples(logprobs, delta.output_ids, texts)
    meta["output_token_logprobs_length"] = len(logprobs)
    if delta.output_top_logprobs is not None:
        meta["output_top_logprobs"] = list(rows(delta.output_top_logprobs, texts))
    if delta.output_token_ids_logprobs is not None:
        meta["output_token_ids_logprobs"] = list(rows(delta.output_token_ids_logprobs, texts))


def _add_input_logprobs(
    meta: dict[str, Any], sample: Sample, request: GenerationRequest, texts: Texts | None
) -> None:
    output: GenerateOutput = sample.output
    values = output.input_logprobs or []
    ids = sample.prompt_ids[request.logprob_start_len :] if values else []
    meta["input_token_logprobs"] = triples(values, ids, texts)
    for name, further in (
        ("input_top_logprobs", output.input_top_logprobs),
        ("input_token_ids_logprobs", output.input_token_ids_logprobs),
    ):
        if further is not None:
            meta[name] = [None, *rows(further, texts)]


@dataclass(slots=True)
class Answer:
    """How the samples of one call are told."""

    texts: Texts | None
    with_text: bool
    prompt_token_ids: bool
    label: str = ""
    """The engine's weight version; filled in where a sample without tokens needs it."""
    label_at_begin: str | None = None
    """The same when a stream began, for its events before the last; None: unknown."""
    experts_dtype: ExpertsDtype = "int32"

    def of(self, sample: Sample, request: GenerationRequest) -> dict[str, Any]:
        """One finished sample."""
        answer: dict[str, Any] = {"text": sample.text} if self.with_text else {}
        answer["output_ids"] = sample.output.output_ids
        answer["meta_info"] = self.meta_of(sample, request)
        if self.prompt_token_ids:
            answer["prompt_token_ids"] = sample.prompt_ids
        return answer

    def meta_of(self, sample: Sample, request: GenerationRequest) -> dict[str, Any]:
        """``meta_info`` of one finished sample."""
        return meta_info(sample, request, self.label, self.texts, self.experts_dtype)


@dataclass(slots=True)
class EventWriter:
    """The events of one sample's stream."""

    answer: Answer
    request: GenerationRequest
    index: int | None
    """Position of the sample in the call; None: it is the only one."""
    incremental: bool
    text: bytearray = field(default_factory=bytearray)
    ids: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    further: dict[str, bytearray] = field(default_factory=dict)
    count: int = 0

    def event(self, chunk: Chunk) -> bytes:
        """What to send for ``chunk``."""
        if chunk.finished is not None and not self.incremental:
            body = self.answer.of(chunk.finished, self.request)
            return _frame(body if self.index is None else {**body, "index": self.index})
        if self.incremental:
            for buffer in (self.text, self.ids, self.logprobs, *self.further.values()):
                buffer.clear()
        self._take(chunk)
        return self._written(chunk)

    def _take(self, chunk: Chunk) -> None:
        self.text += _encode(chunk.text)[1:-1]
        delta = chunk.delta
        if delta is None:
            return
        self.count += len(delta.output_ids)
        _append(self.ids, delta.output_ids)
        if self.request.return_logprob:
            texts = self.answer.texts
            _append(self.logprobs, triples(delta.output_logprobs or [], delta.output_ids, texts))
            for name, further in (
                ("output_top_logprobs", delta.output_top_logprobs),
                ("output_token_ids_logprobs", delta.output_token_ids_logprobs),
            ):
                if further is not None:
                    _append(self.further.setdefault(name, bytearray()), list(rows(further, texts)))

    def _written(self, chunk: Chunk) -> bytes:
        meta = self._meta(chunk)
        parts: list[bytes | bytearray] = [b"data: {"]
        if self.answer.with_text:
            parts += [b'"text":"', self.text, b'",']
        parts += [b'"output_ids":[', self.ids, b'],"meta_info":', _encode(meta)[:-1]]
        if self.request.return_logprob:
            parts += [b',"output_token_logprobs":[', self.logprobs, b"]"]
            for name, buffer in self.further.items():
                parts += [f',"{name}":['.encode(), buffer, b"]"]
        parts.append(b"}}\n\n" if self.index is None else b'},"index":%d}\n\n' % self.index)
        return b"".join(parts)

    def _meta(self, chunk: Chunk) -> dict[str, Any]:
        if chunk.finished is not None:
            meta = self.answer.meta_of(chunk.finished, self.request)
            for name in ("output_token_logprobs", *self.further):
                meta.pop(name, None)
            return meta
        meta = {
            "id": chunk.rid,
            "finish_reason": None,
            "prompt_tokens": chunk.prompt_tokens,
            "completion_tokens": self.count,
            "weight_version": self.answer.label_at_begin,
            "cached_tokens": None,
        }
        return {**meta, "output_token_logprobs_length": self.count} if self.request.return_logprob else meta


def _append(buffer: bytearray, items: list[Any]) -> None:
    if items:
        if buffer:
            buffer += b","
        buffer += _encode(items)[1:-1]


def _frame(value: Any) -> bytes:
    return b"data: %b\n\n" % _encode(value)


def error_frame(message: str, status: int, *, retryable: bool) -> bytes:
    """What a stream says when it cannot go on."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return _frame({"error": {"message": message, "type": kind, "code": status, "retryable": retryable}})


DONE = b"data: [DONE]\n\n"
