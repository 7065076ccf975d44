"""Common part of completions and chats: from a request to the tokenizer manager's, and from samples to the response.

Invariants:
- Failures have OpenAI's shape, ``{"error": {message, type, param, code}}``: 400 for the request's fault, 404 for an unknown
  model, 503 where the engine is not there or takes no more (statuses as of ``errors.py``).
- The id of an answer is the ``rid`` of its generation, so that ``/abort_request`` can end it.
- A prompt counts once in the usage, however many samples it has.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from litestar import Response
from litestar.exceptions import HTTPException
from litestar.types import ExceptionHandlersMap

from ....io_struct import CaesuraError, ErrorCode, SamplingParams, new_id
from ....io_struct.field_errors import shown
from ...exceptions import RETRYABLE, InvalidRequest
from ...text.tokenizer_manager import ENCODE_INLINE, GenerationRequest, Sample
from ..context import FrontEnd
from ..errors import json_response, openai_error, status_of
from ..exchange import ClientLeft, HTTPRequest, nobody
from ..sglang.generate_answer import experts_of
from .schema import Body, CommonRequest, TokenDetails, Usage

T = TypeVar("T")
DEFAULT_MODEL = "default"
"""What clients of SGLang call whatever is served."""
MAX_STOP_STRINGS = 32

_FIELDS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "input_ids": "prompt"}
"""The engine's names of fields → OpenAI's."""


class ModelNotFound(HTTPException):
    """No such model here."""

    status_code = 404


def check_model(front: FrontEnd, name: str | None) -> None:
    """Refuse a model that is not served. Nothing, its name, its folder and ``default`` are it.

    Raises:
        ModelNotFound: another name.
    """
    options = front.options
    if name and name not in (options.model_name, options.model_path, DEFAULT_MODEL):
        raise ModelNotFound(f"the model {shown(name)} does not exist; {options.model_name!r} is served")


def error_body(error: CaesuraError) -> dict[str, Any]:
    """OpenAI's error object."""
    param = str(error.detail.get("field") or "").removeprefix("sampling_params.")
    code = "context_length_exceeded" if error.code == ErrorCode.PROMPT_TOO_LONG else str(error.code)
    body = openai_error(error.message, status_of(error), param=_FIELDS.get(param, param) or None, code=code)
    if error.code in RETRYABLE:
        body["error"]["retryable"] = True
    return body


def _typed(request: HTTPRequest, error: CaesuraError) -> Response[bytes]:
    front: FrontEnd = request.app.state.front
    front.metrics.error(error.code)
    return json_response(error_body(error), status_of(error))


def _http(_: HTTPRequest, error: HTTPException) -> Response[bytes]:
    missing = {"param": "model", "code": "model_not_found"} if isinstance(error, ModelNotFound) else {}
    return json_response(openai_error(error.detail, error.status_code, **missing), error.status_code)


def _left(_: HTTPRequest, __: ClientLeft) -> Response[bytes]:
    return nobody()


EXCEPTION_HANDLERS: ExceptionHandlersMap = {CaesuraError: _typed, HTTPException: _http, ClientLeft: _left}
"""For the routes of this surface."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One HTTP request, ready to be generated."""

    id: str
    object: str
    """``object`` of the answer, or of a stream's chunks."""
    model: str
    requests: list[GenerationRequest]
    """One for each prompt; choice ``i * samples + j`` is sample ``j`` of prompt ``i``."""
    samples: int
    """``n``."""
    stream: bool
    include_usage: bool
    """In a stream."""
    meta_info: bool
    """In finished choices."""
    scored: bool = False
    """The prompts were to be scored only: the token that was sampled all the same does not count."""
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, choices: list[Any], **fields: Any) -> bytes:
        """A response or a chunk, encoded; ``fields`` are further ones of :class:`Body`."""
        if choices and len(self.requests) == 1:
            fields["prompt_token_ids"] = choices[0].prompt_token_ids
        return msgspec.json.encode(
            Body(
                id=self.id,
                object=self.object,
                created=self.created,
                model=self.model,
                choices=choices,
                **fields,
            )
        )

    def index(self, position: int, sample: int) -> int:
        """The choice that sample ``sample`` of prompt ``position`` is."""
        return position * self.samples + sample


def make_job(
    front: FrontEnd, request: CommonRequest, kind: str, requests: list[GenerationRequest], **fields: Any
) -> Job:
    """``kind``: ``object`` of the answer; ``fields``: further ones of :class:`Job`."""
    options = request.stream_options
    return Job(
        id=request.rid if isinstance(request.rid, str) else str(requests[0].rid),
        object=kind,
        model=front.options.model_name,
        requests=requests,
        samples=request.n or 1,
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        meta_info=bool(request.return_meta_info),
        **fields,
    )


async def planned(front: FrontEnd, text_size: int, plan: Callable[[], T]) -> T:
    """The result of ``plan``, which tokenizes about ``text_size`` bytes: many in a thread, so that others are served."""
    return plan() if text_size <= ENCODE_INLINE else await front.workers.run(plan)


def sampling_params(request: CommonRequest, max_new_tokens: int | None) -> SamplingParams:
    """The wire's form; ranges are the engine's to check."""
    given: dict[str, Any] = {
        "n": request.n,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "frequency_penalty": request.frequency_penalty,
        "presence_penalty": request.presence_penalty,
        "min_new_tokens": request.min_new_tokens if request.min_tokens is None else request.min_tokens,
        "ignore_eos": request.ignore_eos,
        "stop_token_ids": request.stop_token_ids,
        "logit_bias": request.logit_bias or None,
        "seed": None if request.seed is None else request.seed & (2**63 - 1),
    }
    values = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(max_new_tokens=max_new_tokens, **values)


def common_fields(request: CommonRequest) -> dict[str, Any]:
    """What a :class:`GenerationRequest` takes of either route, but for prompt, rid and logprobs.

    Raises:
        InvalidRequest: too many stop strings, or ``stream_options`` without a stream.
    """
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"{len(stop)} stop strings; at most {MAX_STOP_STRINGS}", field="stop")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream", field="stream_options")
    salt = request.cache_salt or ""
    return {
        "stop": tuple(text for text in stop if text),
        "no_stop_trim": bool(request.no_stop_trim or request.include_stop_str_in_output),
        "skip_special_tokens": request.skip_special_tokens is not False,
        "spaces_between_special_tokens": request.spaces_between_special_tokens is not False,
        "return_routed_experts": bool(request.return_routed_experts),
        "routed_experts_start_len": request.routed_experts_start_len or 0,
        "cache_salt": f"{salt}\n{request.extra_key}" if request.extra_key else salt,
        "min_weights_epoch": request.min_weights_epoch,
    }


def check_batch(front: FrontEnd, request: CommonRequest, prompts: int) -> None:
    """Refuse more samples than the server takes at once.

    Raises:
        InvalidRequest: prompts times ``n`` are over ``max_batch``.
    """
    samples = prompts * (request.n or 1)
    if samples > front.options.max_batch:
        raise InvalidRequest(
            f"{prompts} prompts of {request.n or 1} samples; at most {front.options.max_batch} samples at once",
            field="n",
        )


def rids_for(request: CommonRequest, prompts: int, prefix: str) -> list[str]:
    """One name for each prompt: the caller's, or new ones.

    Raises:
        InvalidRequest: a list of another length.
    """
    rid = f"{prefix}-{new_id()}" if request.rid is None else request.rid
    if isinstance(rid, str):
        return [rid] if prompts == 1 else [f"{rid}_{i}" for i in range(prompts)]
    if len(rid) != prompts:
        raise InvalidRequest(f"{len(rid)} rid for {prompts} prompts", field="rid")
    return rid


def finish_fields(sample: Sample) -> dict[str, Any]:
    """``finish_reason`` and ``matched_stop`` of a choice."""
    reason = sample.output.finish_reason.type
    return {"finish_reason": reason, "matched_stop": sample.matched if reason == "stop" else None}


def token_fields(
    request: CommonRequest, prompt_ids: Sequence[int] | None, token_ids: Sequence[int]
) -> dict[str, Any]:
    """The token ids of a choice or chunk, as far as asked for. None: those of the prompt have been told."""
    fields: dict[str, Any] = {}
    if request.return_token_ids:
        fields["token_ids"] = token_ids
    if prompt_ids is not None and (request.return_token_ids or request.return_prompt_token_ids):
        fields["prompt_token_ids"] = prompt_ids
    return fields


def usage_of(samples: Iterable[Sample], *, scored: bool = False) -> Usage:
    """The usage of a whole request; ``scored`` as of :class:`Job`."""
    prompt = cached = completion = 0
    for sample in samples:
        completion += len(sample.output.output_ids)
        if sample.index == 0:
            prompt += sample.output.prompt_tokens
            cached += sample.output.cached_tokens
    if scored:
        completion = 0
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=TokenDetails(cached_tokens=cached),
    )


def finished_fields(samples: Sequence[Sample], label: str, *, with_spans: bool) -> dict[str, Any]:
    """``metadata`` and ``sglext`` of finished choices. With one choice their values are its own, with several they are
    lists in the order of the choices.

    Args:
        label: the engine's weight version, for samples without a token; ``weight_version`` is the newest of
            all.
        with_spans: add ``weight_versions`` to the metadata, as SGLang does. OpenAI's metadata has texts only.
    """
    spans = [sample.output.weight_versions for sample in samples]
    last = max((of[-1] for of in spans if of), key=lambda span: span.epoch, default=None)
    version = label if last is None else last.version
    metadata: dict[str, Any] = {"weight_version": version}
    if with_spans:
        metadata["weight_versions"] = _alone(spans)
    fields: dict[str, Any] = {"metadata": metadata}
    if any(sample.output.routed_experts is not None for sample in samples):
        encoded = [experts_of(sample.output) for sample in samples]
        fields["sglext"] = {"routed_experts": _alone(encoded)}
    return fields


def _alone(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values
