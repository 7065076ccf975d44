"""``/v1/chat/completions``: the model's template makes the prompt; the answer is text with tool calls."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
from litestar import Response

from ...connection.results import GenerateOutput, TokenDelta
from ...exceptions import InvalidRequest
from ...text.tokenizer_manager import Chunk, GenerationRequest, Sample, TokenizerManager
from ..bodies import HTTPRequest, present
from ..context import Front, FrontEnd
from ..middleware import generating
from .answers import Choice, Job, answer, finish_fields, token_fields
from .common import (
    EXCEPTION_HANDLERS,
    NOTHING,
    REFUSED,
    CommonRequest,
    Count,
    TopCount,
    check_batch,
    common_fields,
    decode_request,
    kept_prompt,
    logprob_fields,
    read_request,
    rids_for,
    sampling_params,
)
from .logprobs import ChatLogprobs, TokenText, chat_logprobs, output_positions, prompt_logprobs

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


class ChatRequest(CommonRequest, kw_only=True):
    REFUSED: ClassVar[dict[str, str]] = {
        **REFUSED,
        "functions": "superseded by tools",
        "function_call": "superseded by tools",
        "audio": "output is text only",
        "web_search_options": "there is no web search",
    }

    messages: list[dict[str, Any]]
    """``content`` is a string or text parts."""
    max_completion_tokens: Count | None = None
    """Takes precedence over ``max_tokens``. Without both: up to the context length."""
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    """``auto`` or ``none``, with the same result: no calls are parsed."""
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    """True by default: the prompt ends where the assistant's answer begins."""
    continue_final_message: bool | None = None
    """End the prompt with the text of the last message."""
    chat_template: str | None = None
    """In place of the model's."""

    functions: Any = None
    function_call: Any = None
    audio: Any = None
    web_search_options: Any = None


_decoder = msgspec.json.Decoder(ChatRequest, strict=False)


def decode_chat(body: bytes) -> ChatRequest:
    return decode_request(_decoder.decode, body, ChatRequest)


@generating("/v1/chat/completions", ChatRequest, body="text", exception_handlers=EXCEPTION_HANDLERS)
async def chat_completions(request: HTTPRequest, front: Front) -> Response[Any]:
    asked = await read_request(front, request, decode_chat)
    # A template may take any time.
    job, form = await front.workers.run(lambda: _plan(front, asked))
    return await answer(request, front, job, form)


def _plan(front: FrontEnd, request: ChatRequest) -> tuple[Job, "ChatForm"]:
    check_batch(front, request, 1)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs", field="top_logprobs")
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    prompt = kept_prompt(front, request, _prompt(front.manager, request), limit or 1)
    generation = GenerationRequest(
        prompt=prompt,
        rid=rids_for(request, 1, "chatcmpl")[0],
        sampling_params=sampling_params(request, limit, front.manager.tokenizer),
        **logprob_fields(request, (request.top_logprobs or 0) if request.logprobs else None),
        **common_fields(request),
    )
    kind = "chat.completion.chunk" if request.stream else "chat.completion"
    job = Job(front, request, kind, [generation])
    return job, ChatForm(front.manager, request, prompt)


def _prompt(manager: TokenizerManager, request: ChatRequest) -> list[int]:
    choice = request.tool_choice
    if choice not in (*NOTHING, "auto", "none"):
        raise InvalidRequest("tool_choice is not supported beyond auto and none", field="tool_choice")
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    generation_prompt = variables.pop("add_generation_prompt", request.add_generation_prompt)
    continued = bool(request.continue_final_message)
    if continued and generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other",
            field="continue_final_message",
        )
    for name in ("self", "messages", "tools", "tokenize", "chat_template", "continue_final_message"):
        if name in variables:
            raise InvalidRequest(f"chat_template_kwargs may not set {name}", field="chat_template_kwargs")
    return manager.apply_chat_template(
        template_messages(request.messages),
        tools=request.tools or None,
        add_generation_prompt=generation_prompt is not False and not continued,
        continue_final_message=continued,
        chat_template=request.chat_template or None,
        **variables,
    )


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the form that templates know: text content, and tool arguments as objects."""
    if not messages:
        raise InvalidRequest("messages is empty", field="messages")
    return [_message(f"messages[{position}]", message) for position, message in enumerate(messages)]


def _message(name: str, message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(
            f"{name}.role is {role!r}; known are {', '.join(sorted(_ROLES))}", field="messages"
        )
    given = present(message)
    content = given.get("content", "")
    if isinstance(content, list):
        content = "\n".join(_part(f"{name}.content[{i}]", part) for i, part in enumerate(content))
    if not isinstance(content, str):
        raise InvalidRequest(f"{name}.content must be text or a list of text parts", field="messages")
    given["content"] = content
    if "tool_calls" in given:
        given["tool_calls"] = _tool_calls(f"{name}.tool_calls", given["tool_calls"])
    return given


def _part(name: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if kind == "text" else None
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} is {kind!r}; only text parts are supported", field="messages")
    return text


def _tool_calls(name: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    ):
        raise InvalidRequest(f"{name} must be a list of function calls", field="messages")
    return [
        {**call, "function": _with_object(f"{name}[{i}]", call["function"])} for i, call in enumerate(calls)
    ]


def _with_object(name: str, function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return function
    try:
        return {**function, "arguments": msgspec.json.decode(arguments or "{}")}
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{name}.function.arguments is not JSON: {error}", field="messages") from error


class ChatForm:
    def __init__(self, manager: TokenizerManager, request: ChatRequest, prompt_ids: Sequence[int]) -> None:
        self._request = request
        self._prompt_ids = prompt_ids
        self._tokens = TokenText(manager.tokenizer, as_ids=bool(request.return_tokens_as_token_ids))
        self._plain = TokenText(manager.tokenizer)
        self._begun: set[int] = set()

    def choice(self, index: int, position: int, sample: Sample) -> Choice:
        return {
            "index": index,
            "message": {"role": "assistant", "content": sample.text, "refusal": None},
            "logprobs": self._logprobs(sample.output),
            **finish_fields(sample),
            **token_fields(self._request, sample.prompt_ids, sample.output.output_ids),
        }

    def fields(self, sample: Sample) -> dict[str, Any]:
        if (count := self._request.prompt_logprobs) is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(sample.prompt_ids, sample.output, count, self._plain)}

    def chunk(self, index: int, position: int, chunk: Chunk) -> Choice | None:
        """Return what is new of a sample, or None; the role comes with its first chunk."""
        request, delta = self._request, chunk.delta
        visible = chunk.text or (delta is not None and (request.logprobs or request.return_token_ids))
        if not visible and chunk.finished is None:
            return None
        first = index not in self._begun
        self._begun.add(index)
        new = {"role": "assistant"} if first else {}
        if chunk.text or first:
            new["content"] = chunk.text
        return {
            "index": index,
            "delta": new,
            "logprobs": None if delta is None else self._logprobs(delta),
            "finish_reason": None,
            **(finish_fields(chunk.finished) if chunk.finished is not None else {}),
            **token_fields(
                request, self._prompt_ids if first else None, [] if delta is None else delta.output_ids
            ),
        }

    def _logprobs(self, output: GenerateOutput | TokenDelta) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs(output_positions(output, self._request.top_logprobs or 0), self._tokens)
