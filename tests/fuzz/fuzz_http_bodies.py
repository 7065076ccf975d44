"""Bodies of HTTP requests: the fields that a handler works with, or a refusal that becomes a 4xx.

The first byte chooses the route.
"""

import base64
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

import msgspec
from litestar.exceptions import ClientException

from caesura.client.exceptions import InvalidRequest, Unsupported
from caesura.client.serve.bodies import read_control
from caesura.client.serve.openai.chat import ChatRequest, decode_chat
from caesura.client.serve.openai.common import common_fields, rids_for, sampling_params
from caesura.client.serve.openai.completions import CompletionRequest, decode_completion, prompts_of
from caesura.client.serve.sglang import control as control_routes
from caesura.client.serve.sglang import generate as generate_routes
from caesura.client.serve.sglang import tokenize, weights
from caesura.client.serve.sglang.generate import decode_body, plan_job
from caesura.client.serve.sglang.tensor_payload import DeviceTensors, Part, read_pickled, read_safetensors
from caesura.io_struct import CaesuraError, encode

MAX_BATCH = 64
CONTROL = [
    getattr(module, name)
    for module in (control_routes, tokenize, weights)
    for name in sorted(dir(module))
    if name.endswith("Body")
]


class Request:
    """The part of a request that ``read_control`` looks at."""

    query_params: ClassVar[dict[str, str]] = {}

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def body(self) -> bytes:
        return self._body


def run(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits")


def generate(data: bytes) -> None:
    for request in plan_job(decode_body(data), max_batch=MAX_BATCH, detokenize=True).requests:
        encode(request.sampling_params)


def completion(data: bytes) -> None:
    request = decode_completion(data)
    prompts = prompts_of(request)
    assert prompts
    encode(sampling_params(request, request.max_tokens))
    common_fields(request)
    if len(prompts) <= MAX_BATCH:
        assert len(rids_for(request, len(prompts), "cmpl")) == len(prompts)


def chat(data: bytes) -> None:
    request = decode_chat(data)
    encode(sampling_params(request, 1))
    common_fields(request)


def control(data: bytes) -> None:
    for kind in CONTROL:
        try:
            run(read_control(Request(data), kind))  # type: ignore[arg-type]
        except ClientException as error:
            assert error.status_code == 400, error


def safetensors(data: bytes) -> None:
    _check(read_safetensors(data))


def pickled(data: bytes) -> None:
    for flattened in (False, True):
        try:
            parts = read_pickled([base64.b64encode(data).decode()], flattened=flattened)
        except CaesuraError as error:
            assert error.code in ("malformed_message", "invalid_request", "unsupported"), error
        else:
            for part in parts:
                _check(part)


def _check(part: Part) -> None:
    if isinstance(part, DeviceTensors):
        assert all(0 <= spec.offset <= spec.offset + spec.nbytes <= part.handle.nbytes for spec in part.specs)
        return
    for spec in part.specs:
        assert spec.nbytes == len(part.buffers[spec.buffer])
    msgspec.msgpack.encode(part.specs)


ROUTES: list[Callable[[bytes], None]] = [generate, completion, chat, control, safetensors, pickled]


def target(data: bytes) -> None:
    if not data:
        return
    try:
        ROUTES[data[0] % len(ROUTES)](data[1:])
    except (InvalidRequest, Unsupported) as error:
        error.message.encode("utf-8", "backslashreplace")


WORDS = sorted(
    {
        name
        for struct in (
            generate_routes.GenerateBody,
            generate_routes.SamplingBody,
            CompletionRequest,
            ChatRequest,
            *CONTROL,
        )
        for name in struct.__struct_fields__
    }
)
