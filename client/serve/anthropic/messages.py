"""``/v1/messages``: Anthropic's Messages over the conversation that chats have.

Invariants: content blocks of the input become OpenAI's messages, and blocks of the answer content blocks, in
their order. ``message_delta`` has the token ids and versions that were asked for. Errors have Anthropic's
form. The header ``anthropic-version`` is not read.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import msgspec
from litestar import Response
from litestar.exceptions import HTTPException
from litestar.types import ExceptionHandlersMap

from ....io_struct import CaesuraError
from ...exceptions import InvalidRequest
from ...text.tokenizer_manager import Chunk, GenerationRequest, Sample
from ..bodies import HTTPRequest, present
from ..context import Front, FrontEnd
from ..error_responses import anthropic_error, json_bytes, json_response, status_of
from ..generations import ClientLeft, client_left, label_for, streamed, unless_left, whole
from ..middleware import generating
from ..openai.answers import sample_fields, token_fields
from ..openai.blocks import Block, Blocks, Step
from ..openai.common import IGNORED_KEYS, REFUSED, CommonRequest, decode_request, error_body, read_request
from ..openai.conversation import (
    Conversation,
    Exchange,
    conversation_of,
    joined_text,
    planned_exchange,
    refuse_several,
    whole_chunk,
)

IGNORED = {
    "anthropic_version": "there is one",
    "inference_geo": "there is one place",
    "cache_control": "prefixes are cached by content",
}
IGNORED_MESSAGES = IGNORED_KEYS.union(IGNORED)


class MessagesRequest(CommonRequest, kw_only=True):
    REFUSED: ClassVar[dict[str, str]] = {
        **REFUSED,
        "container": "there are no built-in tools",
        "mcp_servers": "there are no built-in tools",
        "context_management": "nothing is left out of a conversation",
    }

    messages: list[dict[str, Any]]
    """``content`` is a text or content blocks. An answer at the end is continued."""
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    """In place of ``stop``."""
    thinking: dict[str, Any] | None = None
    """``enabled``, ``adaptive`` or ``disabled``: ``enable_thinking`` and ``thinking`` of the template."""
    output_config: dict[str, Any] | None = None
    """``effort`` and ``format``."""
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None

    container: Any = None
    mcp_servers: Any = None
    context_management: Any = None


def _error(error: CaesuraError) -> dict[str, Any]:
    found = error_body(error)["error"]
    more = {name: found[name] for name in ("param", "code", "retryable") if found.get(name) is not None}
    return anthropic_error(error.message, status_of(error), **more)


def _typed(request: HTTPRequest, error: CaesuraError) -> Response[bytes]:
    front: FrontEnd = request.app.state.front
    front.metrics.error(error.code)
    return json_response(_error(error), status_of(error))


HANDLERS: ExceptionHandlersMap = {
    CaesuraError: _typed,
    HTTPException: lambda _, error: json_response(
        anthropic_error(error.detail, error.status_code), error.status_code
    ),
    ClientLeft: lambda _, __: client_left(),
}
_decoder = msgspec.json.Decoder(MessagesRequest, strict=False)


def decode_messages(body: bytes) -> MessagesRequest:
    request = decode_request(_decoder.decode, body, MessagesRequest)
    refuse_several(request, "a message")
    return request


@generating("/v1/messages", MessagesRequest, body="text", exception_handlers=HANDLERS)
async def messages(request: HTTPRequest, front: Front) -> Response[Any]:
    asked = await read_request(front, request, decode_messages, IGNORED_MESSAGES)
    generation, exchange = await front.workers.run(lambda: planned_messages(front, asked))
    made = MessageEvents(front, asked, generation, exchange)
    if asked.stream:
        return await streamed(request, front, [generation], made, made.failed, done=b"")
    return await unless_left(request, _whole(front, made))


@generating("/v1/messages/count_tokens", MessagesRequest, body="text", exception_handlers=HANDLERS)
async def count_tokens(request: HTTPRequest, front: Front) -> Response[Any]:
    """Return the length of the prompt, and generate nothing."""
    asked = await read_request(front, request, decode_messages, IGNORED_MESSAGES)
    _, exchange = await front.workers.run(lambda: planned_messages(front, asked, counts=False))
    return json_response({"input_tokens": len(exchange.prompt_ids)})


async def _whole(front: FrontEnd, made: "MessageEvents") -> Response[bytes]:
    [[sample]] = await whole(front, [made.generation])
    return json_bytes(msgspec.json.encode(made.whole(sample, await label_for(front, [sample]))))


def planned_messages(
    front: FrontEnd, asked: MessagesRequest, *, counts: bool = True
) -> tuple[GenerationRequest, Exchange]:
    return planned_exchange(front, conversation(asked), asked.max_tokens, "msg", counts=counts)


def conversation(asked: MessagesRequest) -> Conversation:
    rules = joined_text("system", asked.system or "", "\n")
    system = [{"role": "system", "content": rules}] if asked.system else []
    found = system + [
        each
        for position, message in enumerate(asked.messages)
        for each in _openai_messages(f"messages[{position}]", message)
    ]
    variables = dict(asked.chat_template_kwargs or {})
    thinks = asked.thinking is not None and asked.thinking.get("type") != "disabled"
    if asked.thinking is not None:
        variables = {"enable_thinking": thinks, "thinking": thinks} | variables
    config = asked.output_config or {}
    last = found[-1] if found else {}
    return conversation_of(
        asked,
        messages=found,
        stop=asked.stop if asked.stop_sequences is None else asked.stop_sequences,
        tools=[_tool(f"tools[{i}]", tool) for i, tool in enumerate(asked.tools or [])] or None,
        tool_choice=_tool_choice(asked.tool_choice),
        reasoning_effort=config.get("effort"),
        response_format=_response_format(config.get("format")),
        chat_template_kwargs=variables or None,
        chat_template=asked.chat_template,
        parallel_tool_calls=not (asked.tool_choice or {}).get("disable_parallel_tool_use"),
        separate_reasoning=True if thinks else None,
        continue_final_message=last.get("role") == "assistant" and "tool_calls" not in last,
    )


def _openai_messages(name: str, message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages of one: tools' results come each in its own, before the text."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidRequest(f"{name}.role is {role!r}; known are user and assistant", field="messages")
    if not isinstance(content, list):
        yield {"role": role, "content": joined_text(f"{name}.content", content, "")}
        return
    texts: list[Any] = []
    answer: dict[str, Any] = {"role": role}
    for position, block in enumerate(content):
        at, kind = f"{name}.content[{position}]", block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result" and role == "user":
            text = joined_text(f"{at}.content", block.get("content") or "", "\n")
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
        elif kind == "tool_use" and role == "assistant":
            arguments = msgspec.json.encode(block.get("input") or {}).decode()
            call = {"name": block.get("name"), "arguments": arguments}
            answer.setdefault("tool_calls", []).append(
                {"id": block.get("id"), "type": "function", "function": call}
            )
        elif kind == "thinking" and role == "assistant":
            answer["reasoning_content"] = answer.get("reasoning_content", "") + str(block.get("thinking", ""))
        else:
            texts.append(joined_text(at, [block], ""))
    if role == "assistant":
        yield {**answer, "content": "".join(texts)}
    elif texts:
        yield {"role": role, "content": "\n".join(texts)}


def _tool(name: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        reason = f"{name} is {tool['type']!r}; only tools of the client, with an input_schema, are supported"
        raise InvalidRequest(reason, field="tools")
    if not isinstance(tool.get("name"), str):
        raise InvalidRequest(f"{name}.name must be a string", field="tools")
    known = {"name": "name", "description": "description", "parameters": "input_schema", "strict": "strict"}
    return {"type": "function", "function": present({key: tool.get(given) for key, given in known.items()})}


def _tool_choice(choice: dict[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    known = {"auto": "auto", "any": "required", "none": "none"}
    if not isinstance(kind, str) or kind not in known:
        reason = f"tool_choice.type is {kind!r}; known are auto, any, tool and none"
        raise InvalidRequest(reason, field="tool_choice")
    return known[kind]


def _response_format(form: Any) -> Any:
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.get("schema")}}


class MessageEvents:
    def __init__(
        self, front: FrontEnd, asked: MessagesRequest, generation: GenerationRequest, exchange: Exchange
    ) -> None:
        self.generation = generation
        self._exchange = exchange
        self._blocks = Blocks()
        self._begun = False
        self._head = {
            "id": generation.rid,
            "type": "message",
            "role": "assistant",
            "model": asked.lora_path or front.options.model_name,
        }

    async def begin(self) -> None:
        pass

    def event(self, position: int, chunk: Chunk, label: str) -> bytes:
        events: list[bytes] = []
        if not self._begun:
            self._begun = True
            usage = _usage(len(self._exchange.prompt_ids), 0, 0)
            nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
            events += [_event("message_start", message={**self._head, **nothing, "usage": usage})]
            events += [_event("ping")]
        events += map(_step, self._blocks.add(self._exchange.pieces(chunk)))
        if (sample := chunk.finished) is not None:
            events += map(_step, self._blocks.end())
            fields = self._finished(sample, label)
            delta = {name: fields.pop(name) for name in ("stop_reason", "stop_sequence")}
            events += [_event("message_delta", delta=delta, **fields), _event("message_stop")]
        return b"".join(events)

    def end(self) -> bytes:
        return b""

    def failed(self, error: CaesuraError) -> bytes:
        return _event(**_error(error))

    def whole(self, sample: Sample, label: str) -> dict[str, Any]:
        for _ in self._blocks.add(self._exchange.pieces(whole_chunk(sample))):
            pass
        content = [_content(block) for block in self._blocks.all]
        return {**self._head, "content": content, **self._finished(sample, label)}

    def _finished(self, sample: Sample, label: str) -> dict[str, Any]:
        output, request = sample.output, self._exchange.request
        return {
            **self._stop(sample),
            "usage": _usage(output.prompt_tokens, output.cached_tokens, len(output.output_ids)),
            **self._exchange.malformed_calls(sample),
            **self._exchange.session_fields(sample),
            **token_fields(request, sample.prompt_ids, output.output_ids),
            **sample_fields(request, self.generation, sample, label),
        }

    def _stop(self, sample: Sample) -> dict[str, Any]:
        reason = sample.output.finish_reason.type
        if reason == "stop" and isinstance(sample.matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": sample.matched}
        calls = any(block.call is not None for block in self._blocks.all)
        known = {"stop": "tool_use" if calls else "end_turn", "length": "max_tokens"}
        return {"stop_reason": known.get(reason, reason), "stop_sequence": None}


def _usage(prompt: int, cached: int, output: int) -> dict[str, int]:
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


def _event(type: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (type.encode(), msgspec.json.encode({"type": type, **fields}))


def _step(step: Step) -> bytes:
    block = step.block
    if step.what == "begin":
        return _event("content_block_start", index=block.index, content_block=_content(block))
    if step.what == "end":
        return _event("content_block_stop", index=block.index)
    kind, name = _DELTAS[block.kind]
    return _event("content_block_delta", index=block.index, delta={"type": kind, name: step.text})


_DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _content(block: Block) -> dict[str, Any]:
    """Return a content block, which is empty where it begins."""
    if block.call is not None:
        given = msgspec.Raw(block.text.encode() or b"{}")
        return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": given}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}
