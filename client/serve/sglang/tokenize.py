"""SGLang's ``/tokenize`` and ``/detokenize``."""

from typing import Any

from litestar import Response
from litestar.exceptions import ClientException

from ..bodies import HTTPRequest, Strict, read_control
from ..context import Front, FrontEnd
from ..error_responses import json_response
from ..middleware import generating


class TokenizeBody(Strict, kw_only=True):
    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    # accepted and ignored
    model: str = ""


@generating(["/tokenize", "/v1/tokenize"], TokenizeBody, body="text")
async def tokenize(request: HTTPRequest, front: Front) -> Response[bytes]:
    body = await read_control(request, TokenizeBody, text=True)
    if (body.prompt is None) == (body.messages is None):
        raise ClientException("exactly one of prompt and messages is needed")
    _check_rows(front, body.prompt)
    tokens = await front.workers.run(lambda: _tokens_of(front, body))
    counts = [len(each) for each in tokens]
    one = not isinstance(body.prompt, list)
    return json_response(
        {
            "tokens": tokens[0] if one else tokens,
            "count": counts[0] if one else counts,
            "max_model_len": front.options.context_length,
        }
    )


def _check_rows(front: FrontEnd, rows: object) -> None:
    if isinstance(rows, list) and len(rows) > front.options.max_batch:
        raise ClientException(f"{len(rows)} texts are over the limit of {front.options.max_batch}")


def _tokens_of(front: FrontEnd, body: TokenizeBody) -> list[list[int]]:
    if body.messages is not None:
        generates = body.add_generation_prompt
        return [front.manager.apply_chat_template(body.messages, add_generation_prompt=generates)]
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
    return [front.manager.tokenize(text, add_special_tokens=body.add_special_tokens) for text in texts]


class DetokenizeBody(Strict, kw_only=True):
    tokens: list[int | list[int]]
    skip_special_tokens: bool = True
    # accepted and ignored
    model: str = ""


@generating(["/detokenize", "/v1/detokenize"], DetokenizeBody, body="text")
async def detokenize(request: HTTPRequest, front: Front) -> Response[bytes]:
    body = await read_control(request, DetokenizeBody)
    kinds = {type(each) for each in body.tokens}
    if len(kinds) > 1:
        raise ClientException("tokens must be one list of integers, or a list of such lists")
    nested = kinds == {list}
    _check_rows(front, body.tokens if nested else None)
    rows: list[Any] = list(body.tokens) if nested else [body.tokens]
    skip = body.skip_special_tokens
    texts = await front.workers.run(
        lambda: [front.manager.detokenize(row, skip_special_tokens=skip) for row in rows]
    )
    text = texts if nested else texts[0]
    return json_response({"text": text, "prompt": text})  # the latter is vLLM's name
