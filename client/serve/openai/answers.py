"""Common part of the answers of completions and chats: choices, usage, and server-sent events.

Invariants: an answer's id is the ``rid`` for ``/abort_request``. A stream's first event precedes its answer,
so an immediate refusal has its HTTP status; a later one is an event with OpenAI's error. Either way the
stream ends with ``[DONE]``. A client that leaves ends its generations.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
from litestar import Response

from ....io_struct import CaesuraError
from ...text.tokenizer_manager import ENCODE_INLINE, Chunk, GenerationRequest, Sample
from ..bodies import HTTPRequest
from ..context import FrontEnd, in_slices
from ..generations import frame, label_for, streamed, unless_left, whole
from ..sglang.generate import experts_of, meta_info
from .common import CommonRequest, error_body

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode


Choice = dict[str, Any]
"""A choice of an answer or a chunk: beyond OpenAI's fields ``matched_stop`` (token id, stop string or null)
and, where asked for, ``token_ids``, ``prompt_token_ids``, ``weight_versions`` and ``meta_info``."""


class Job:
    """One HTTP request, ready to be generated: choice ``i * n + j`` is sample ``j`` of prompt ``i``."""

    def __init__(
        self,
        front: FrontEnd,
        request: CommonRequest,
        kind: str | None,
        requests: list[GenerationRequest],
        *,
        scored: bool = False,
    ) -> None:
        """``kind`` is ``object`` of OpenAI's answers, and None for vLLM's answers of tokens.

        The sampled token of ``scored`` prompts does not count.
        """
        self.kind = kind
        self.request = request
        self.requests = requests
        self.scored = scored
        name = request.rid if isinstance(request.rid, str) else requests[0].rid
        head = {
            **({"request_id": name} if kind is None else {"id": name, "object": kind}),
            "created": int(time.time()),
            "model": request.lora_path or front.options.model_name,
        }
        self._head = _encode(head)[:-1] + b","

    def body(self, choices: list[Choice], **fields: Any) -> bytes:
        """Return a response or a chunk, encoded, with the ids of the prompt if there is one."""
        body = {"choices": choices, "usage": None, **fields}
        if choices and len(self.requests) == 1 and "prompt_token_ids" in choices[0]:
            body["prompt_token_ids"] = choices[0]["prompt_token_ids"]
        return self._head + _encode(body)[1:]

    def index(self, position: int, sample: int) -> int:
        return position * (self.request.n or 1) + sample


async def planned(front: FrontEnd, text_size: int, plan: Callable[[], T]) -> T:
    """Return the result of ``plan``, in a thread if it tokenizes many bytes (about ``text_size``)."""
    return plan() if text_size <= ENCODE_INLINE else await front.workers.run(plan)


def finish_fields(sample: Sample) -> dict[str, Any]:
    reason = sample.output.finish_reason.type
    return {"finish_reason": reason, "matched_stop": sample.matched if reason == "stop" else None}


def token_fields(
    request: CommonRequest, prompt_ids: Sequence[int] | None, token_ids: Sequence[int]
) -> dict[str, Any]:
    """Return the wanted token ids of a choice or chunk; ``prompt_ids`` None: an earlier one had them."""
    fields: dict[str, Any] = {}
    if request.return_token_ids:
        fields["token_ids"] = token_ids
    if prompt_ids is not None and (request.return_token_ids or request.return_prompt_token_ids):
        fields["prompt_token_ids"] = prompt_ids
    return fields


def usage_of(samples: Iterable[Sample], *, scored: bool = False) -> dict[str, Any]:
    """Return the usage of a whole request; a prompt counts once, however many samples it has."""
    prompt = cached = completion = 0
    for sample in samples:
        completion += 0 if scored else len(sample.output.output_ids)
        if sample.index == 0:
            prompt += sample.output.prompt_tokens
            cached += sample.output.cached_tokens
    tokens = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {**tokens, "prompt_tokens_details": {"cached_tokens": cached}}


def finished_fields(job: Job, samples: Sequence[Sample], label: str) -> dict[str, Any]:
    """Return ``metadata`` and ``sglext`` of finished choices; ``label`` is for those without a token."""
    if job.kind is None:
        return {}
    spans = [sample.output.weight_versions for sample in samples]
    last = max((each[-1] for each in spans if each), key=lambda span: span.epoch, default=None)
    version = label if last is None else last.version
    metadata: dict[str, Any] = {"weight_version": version}
    if job.request.return_meta_info:
        metadata["weight_versions"] = _alone(spans)
    fields: dict[str, Any] = {"metadata": metadata}
    if any(sample.output.routed_experts is not None for sample in samples):
        encoded = [experts_of(sample.output) for sample in samples]
        fields["sglext"] = {"routed_experts": _alone(encoded)}
    return fields


def _alone(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


class Form(Protocol):
    """Turns samples into choices; ``index`` is the choice's number, ``position`` its prompt's."""

    def choice(self, index: int, position: int, sample: Sample) -> Choice:
        pass

    def fields(self, sample: Sample) -> dict[str, Any]:
        """Return fields of the whole answer beside its choices; ``sample`` is the first."""

    def chunk(self, index: int, position: int, chunk: Chunk) -> Choice | None:
        """Return what is new of a sample; None if nothing is visible, but never for its last chunk."""


async def answer(request: HTTPRequest, front: FrontEnd, job: Job, form: Form) -> Response[Any]:
    if job.request.stream:
        return await streamed(request, front, job.requests, _Events(job, form), _stream_error)
    return await unless_left(request, _whole(front, job, form))


def _stream_error(error: CaesuraError) -> bytes:
    return frame(_encode(error_body(error)))


async def _whole(front: FrontEnd, job: Job, form: Form) -> Response[bytes]:
    results = await whole(front, job.requests)
    flat = [sample for samples in results for sample in samples]
    label = await label_for(front, flat)
    choices = []
    pairs = ((position, sample) for position, samples in enumerate(results) for sample in samples)
    async for position, sample in in_slices(pairs):
        index = job.index(position, sample.index)
        choice = await _made(front, job, partial(form.choice, index, position, sample))
        choices.append(choice | _sample_fields(job, position, sample, label))
    body = job.body(
        choices,
        usage=usage_of(flat, scored=job.scored),
        **await _made(front, job, partial(form.fields, flat[0])),
        **finished_fields(job, flat, label),
    )
    return Response(body, media_type="application/json", status_code=200)


async def _made(front: FrontEnd, job: Job, make: Callable[[], T]) -> T:
    """Return the result of ``make``, in a thread if it names every token of a prompt."""
    return make() if job.request.prompt_logprobs is None else await front.workers.run(make)


class _Events:
    def __init__(self, job: Job, form: Form) -> None:
        self._job = job
        self._form = form
        self._samples: list[Sample] = []

    async def begin(self) -> None:
        pass

    def event(self, position: int, chunk: Chunk, label: str) -> bytes:
        job, sample = self._job, chunk.finished
        choice = self._form.chunk(job.index(position, chunk.index), position, chunk)
        if choice is None:
            return b""
        if sample is None:
            return frame(job.body([choice]))
        self._samples.append(sample)
        choice |= _sample_fields(job, position, sample, label)
        return frame(job.body([choice], **finished_fields(job, [sample], label)))

    def end(self) -> bytes:
        options = self._job.request.stream_options
        if not (options and options.include_usage):
            return b""
        return frame(self._job.body([], usage=usage_of(self._samples)))


def _sample_fields(job: Job, position: int, sample: Sample, label: str) -> dict[str, Any]:
    return sample_fields(job.request, job.requests[position], sample, label, scored=job.scored)


def sample_fields(
    request: CommonRequest,
    generation: GenerationRequest,
    sample: Sample,
    label: str,
    *,
    scored: bool = False,
) -> dict[str, Any]:
    """Return what a finished sample has beyond OpenAI's fields, beside its token ids."""
    output = sample.output
    fields: dict[str, Any] = {"weight_versions": output.weight_versions}
    if (mask := output.sampling_mask) is not None:
        count = 0 if scored else len(mask)
        fields["sampling_mask"] = [mask.at(position) for position in range(count)]
        fields["sampling_logprobs"] = (output.sampled_logprobs or [])[:count]
    if request.return_meta_info:
        fields["meta_info"] = meta_info(sample, generation, label, None)
    return fields
