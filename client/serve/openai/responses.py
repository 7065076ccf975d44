"""``/v1/responses``: OpenAI's Responses over the conversation that chats have.

Invariants: items of the input become messages, and blocks of the answer items, in their order. An answer is
kept once it is complete, so nothing goes on from a part of one. The last event has the whole response, with
the token ids and versions that were asked for.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal

import msgspec
from litestar import Response, delete, get
from litestar.exceptions import HTTPException
from litestar.params import FromPath

from ....io_struct import CaesuraError
from ....io_struct.field_errors import shown
from ...exceptions import InvalidRequest
from ...group.router import route_by
from ...text.sessions import Kept
from ...text.tokenizer_manager import Chunk, GenerationRequest, Sample
from ..bodies import HTTPRequest, present
from ..context import Front, FrontEnd
from ..error_responses import json_bytes, json_response
from ..generations import label_for, streamed, unless_left, whole
from ..middleware import generating, owner_of
from .answers import sample_fields, token_fields
from .blocks import Block, Blocks, Step
from .common import (
    EXCEPTION_HANDLERS,
    IGNORED_KEYS,
    REFUSED,
    CommonRequest,
    Count,
    TopCount,
    decode_request,
    error_body,
    read_request,
    rids_for,
)
from .conversation import (
    Conversation,
    Exchange,
    conversation_of,
    joined_text,
    planned_exchange,
    refuse_several,
    whole_chunk,
)

LOGPROBS = "message.output_text.logprobs"
IGNORED = {
    "prompt_cache_retention": "prefixes are cached by content",
    "prompt_cache_options": "prefixes are cached by content",
    "max_tool_calls": "of built-in tools, of which there are none",
}
IGNORED_RESPONSES = IGNORED_KEYS.union(IGNORED)
_INCLUDED = (LOGPROBS, "reasoning.encrypted_content")


class ResponsesRequest(CommonRequest, kw_only=True):
    REFUSED: ClassVar[dict[str, str]] = {
        **REFUSED,
        "background": "wait for the answer, or stream it",
        "conversation": "go on with previous_response_id",
        "prompt": "prompts are not stored",
        "context_management": "nothing is left out of a conversation",
        "moderation": "there is none",
    }

    input: str | list[dict[str, Any]]
    """Text of a user, or items."""
    instructions: str | None = None
    """First message, by the system; that of an answer before does not count."""
    max_output_tokens: Count | None = None
    """Without it, or ``max_tokens``: up to the context length."""
    previous_response_id: str | None = None
    store: bool | None = None
    """True by default: keep the answer."""
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    """``effort``. If it is given, reasoning is an item of its own."""
    text: dict[str, Any] | None = None
    """``format`` of the output."""
    include: list[str] | None = None
    top_logprobs: TopCount | None = None
    truncation: Literal["disabled"] | None = None
    metadata: dict[str, str] | None = None
    """Labels, which the answer repeats."""
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None

    background: Any = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None


_decoder = msgspec.json.Decoder(ResponsesRequest, strict=False)
_encode = msgspec.json.Encoder().encode


def decode_responses(body: bytes) -> ResponsesRequest:
    request = decode_request(_decoder.decode, body, ResponsesRequest)
    refuse_several(request, "a response")
    return request


@generating("/v1/responses", ResponsesRequest, body="text", exception_handlers=EXCEPTION_HANDLERS)
async def responses(request: HTTPRequest, front: Front) -> Response[Any]:
    asked = await read_request(front, request, decode_responses, IGNORED_RESPONSES)
    owner = owner_of(request)
    if asked.previous_response_id is not None:
        route_by(_kept(front, (owner, asked.previous_response_id), 400).session_id)
    made = await front.workers.run(lambda: planned_response(front, asked, owner))
    if asked.stream:
        return await streamed(request, front, [made.generation], made, made.failed, done=b"")
    return await unless_left(request, _whole(front, made))


@get("/v1/responses/{response_id:str}", opt={"access": "user"}, exception_handlers=EXCEPTION_HANDLERS)
async def kept_response(request: HTTPRequest, response_id: FromPath[str], front: Front) -> Response[bytes]:
    """Return an answer that was kept."""
    return json_bytes(_kept(front, (owner_of(request), response_id), 404).body)


@delete(
    "/v1/responses/{response_id:str}",
    status_code=200,
    opt={"access": "user"},
    exception_handlers=EXCEPTION_HANDLERS,
)
async def forget_response(request: HTTPRequest, response_id: FromPath[str], front: Front) -> Response[bytes]:
    """Forget an answer; with the last one of a conversation without a session, all of it."""
    name = owner_of(request), response_id
    kept = _kept(front, name, 404)
    if kept.store.forget(name) and kept.store is front.responses:
        kept.store.finish(kept.session_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


def _kept(front: FrontEnd, name: tuple[bytes, str], status: int) -> Kept:
    if (kept := _known(front, name)) is None:
        raise HTTPException(
            f"there is no response {name[1]!r}: it was not stored, or deleted, or gave way to newer ones",
            status_code=status,
            extra={"param": "previous_response_id", "code": "previous_response_not_found"},
        )
    return kept


def _known(front: FrontEnd, name: tuple[bytes, str]) -> Kept | None:
    return front.responses.kept(name) or front.sessions.kept(name)


async def _whole(front: FrontEnd, made: "ResponseEvents") -> Response[bytes]:
    [[sample]] = await whole(front, [made.generation])
    return json_bytes(made.whole(sample, await label_for(front, [sample])))


def planned_response(
    front: FrontEnd, asked: ResponsesRequest, owner: bytes, *, counts: bool = True
) -> "ResponseEvents":
    after, keeps = None, counts and asked.store is not False
    if asked.previous_response_id is not None:
        after = _kept(front, (owner, asked.previous_response_id), 400)
    [rid] = rids_for(asked, 1, "resp")
    if keeps and _known(front, (owner, rid)) is not None:
        reason = f"rid: a response {shown(rid)} is kept: delete it, or give another rid"
        raise InvalidRequest(reason, field="rid")
    before = [] if after is None else after.node.conversation()[after.beside :]
    generation, exchange = planned_exchange(
        front,
        response_conversation(asked, [*before, *input_messages(asked.input)]),
        asked.max_tokens if asked.max_output_tokens is None else asked.max_output_tokens,
        "resp",
        after=after,
        keeps=keeps,
        counts=counts,
    )
    return ResponseEvents(front, asked, owner, generation, exchange)


def response_conversation(asked: ResponsesRequest, messages: list[dict[str, Any]]) -> Conversation:
    include = asked.include or []
    for name in include:
        if name not in _INCLUDED:
            raise InvalidRequest(f"include: {name!r} is not known; known are {_INCLUDED}", field="include")
    system = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    return conversation_of(
        asked,
        messages=system + messages,
        tools=[_tool(f"tools[{i}]", tool) for i, tool in enumerate(asked.tools or [])] or None,
        tool_choice=_tool_choice(asked.tool_choice),
        reasoning_effort=(asked.reasoning or {}).get("effort"),
        response_format=_response_format((asked.text or {}).get("format")),
        logprobs=LOGPROBS in include or bool(asked.top_logprobs),
        top_logprobs=asked.top_logprobs,
        chat_template_kwargs=asked.chat_template_kwargs,
        chat_template=asked.chat_template,
        parallel_tool_calls=asked.parallel_tool_calls,
        separate_reasoning=None if asked.reasoning is None else True,
    )


def _tool(name: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidRequest(f"{name} is {tool.get('type')!r}; only functions are supported", field="tools")
    if not isinstance(tool.get("name"), str):
        raise InvalidRequest(f"{name}.name must be a string", field="tools")
    known = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": present({key: tool.get(key) for key in known})}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(form: Any) -> Any:
    """Return ``text.format`` as a chat's ``response_format``."""
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {key: form[key] for key in form if key != "type"}}


def input_messages(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return items as messages: reasoning, text and calls that follow each other are one answer."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for position, item in enumerate(given):
        name, kind = f"input[{position}]", item.get("type") or "message"
        if (add := _ITEMS.get(str(kind))) is None:
            raise InvalidRequest(f"{name} is {kind!r}; known are {', '.join(sorted(_ITEMS))}", field="input")
        add(name, item, messages)
    return messages


def _add_message(name: str, item: Mapping[str, Any], messages: list[dict[str, Any]]) -> None:
    role = item.get("role")
    if role == "assistant":
        text = _text(f"{name}.content", item.get("content"), "")
        _answer(messages, "content", "tool_calls")["content"] = text
    else:
        messages.append({"role": role, "content": _text(f"{name}.content", item.get("content"), "\n")})


def _add_reasoning(name: str, item: Mapping[str, Any], messages: list[dict[str, Any]]) -> None:
    text = _text(f"{name}.content", item.get("content") or item.get("summary") or "", "")
    answer = _answer(messages, "content", "tool_calls")
    answer["reasoning_content"] = answer.get("reasoning_content", "") + text


def _add_call(name: str, item: Mapping[str, Any], messages: list[dict[str, Any]]) -> None:
    function = {"name": item.get("name"), "arguments": item.get("arguments", "")}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    _answer(messages).setdefault("tool_calls", []).append(call)


def _add_output(name: str, item: Mapping[str, Any], messages: list[dict[str, Any]]) -> None:
    text = _text(f"{name}.output", item.get("output"), "\n")
    messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})


_ITEMS: dict[str, Callable[[str, Mapping[str, Any], list[dict[str, Any]]], None]] = {
    "message": _add_message,
    "reasoning": _add_reasoning,
    "function_call": _add_call,
    "function_call_output": _add_output,
}


def _answer(messages: list[dict[str, Any]], *without: str) -> dict[str, Any]:
    """Return the answer that the messages end with if it has none of these keys yet, else a new one."""
    if not messages or messages[-1]["role"] != "assistant" or any(key in messages[-1] for key in without):
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(name: str, content: Any, between: str) -> str:
    def text_of(part: Mapping[str, Any]) -> Any:
        return part.get("refusal" if part.get("type") == "refusal" else "text")

    return joined_text(name, content, between, field="input", text_of=text_of)


class ResponseEvents:
    def __init__(
        self,
        front: FrontEnd,
        asked: ResponsesRequest,
        owner: bytes,
        generation: GenerationRequest,
        exchange: Exchange,
    ) -> None:
        self.generation = generation
        self._front = front
        self._asked = asked
        self._owner = owner
        self.exchange = exchange
        self._blocks = Blocks()
        self._logprobs: dict[int, list[dict[str, Any]]] = {}
        """Logprobs of the tokens of each block of text."""
        self._waiting: list[dict[str, Any]] = []
        self._heads: dict[int, bytes] = {}
        self._number = 0
        params, reasoning = generation.sampling_params, asked.reasoning or {}
        self._head = {
            "id": generation.rid,
            "object": "response",
            "created_at": int(time.time()),
            "model": asked.lora_path or front.options.model_name,
            "background": False,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "store": asked.store is not False,
            "temperature": params.temperature,
            "text": asked.text or {"format": {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
        }

    async def begin(self) -> None:
        pass

    def event(self, position: int, chunk: Chunk, label: str) -> bytes:
        events: list[bytes] = []
        if not self._number:
            begun = self._response("in_progress")
            kinds = ("response.created", "response.in_progress")
            events += [self._event(kind, response=begun) for kind in kinds]
        for step in self._taken(chunk):
            if step.what == "add":
                events.append(self._delta(step))
            else:
                events += self._step(step, "completed")
        if (sample := chunk.finished) is not None:
            response = self._finished(sample, label)
            for step in self._blocks.end():
                events += self._step(step, response["status"])
            self._keep(response, sample)
            kind = "completed" if response["status"] == "completed" else "incomplete"
            events.append(self._event(f"response.{kind}", response=response))
        return b"".join(events)

    def end(self) -> bytes:
        return b""

    def failed(self, error: CaesuraError) -> bytes:
        found = error_body(error)["error"]
        code = "server_error" if found["type"] == "server_error" else "invalid_prompt"
        reason = {"code": code, "message": found["message"]}
        output = self._items("incomplete")
        return self._event("response.failed", response=self._response("failed", error=reason, output=output))

    def whole(self, sample: Sample, label: str) -> bytes:
        for _ in self._taken(whole_chunk(sample)):
            pass
        return self._keep(self._finished(sample, label), sample)

    def _taken(self, chunk: Chunk) -> Iterator[Step]:
        """Take a chunk; text has the logprobs of its tokens and of those without text around it."""
        if chunk.delta is not None and (found := self.exchange.logprobs(chunk.delta)) is not None:
            self._waiting += found["content"]
        for step in self._blocks.add(self.exchange.pieces(chunk)):
            if step.what == "add" and step.block.kind == "content":
                self._logprobs.setdefault(step.block.index, []).extend(self._waiting)
            yield step
            if step.what == "add" and step.block.kind == "content":
                self._waiting = []
        if (
            chunk.finished is not None
            and self._blocks.all
            and (last := self._blocks.all[-1]).kind == "content"
        ):
            self._logprobs[last.index] += self._waiting  # the end of the sequence may come by itself

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = _encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), event)

    def _delta(self, step: Step) -> bytes:
        """Return the event of new text, of which all but the text is written once for a block."""
        block = step.block
        if (head := self._heads.get(block.index)) is None:
            name = f"response.{_EVENTS[block.kind]}.delta"
            head = b"event: %b\ndata: %b" % (name.encode(), _encode({"type": name, **_place(block)})[:-1])
            self._heads[block.index] = head
        number, self._number = self._number, self._number + 1
        text = _encode(step.text)
        if block.kind != "content":
            return b'%b,"sequence_number":%d,"delta":%b}\n\n' % (head, number, text)
        scores = _encode(self._waiting)
        return b'%b,"sequence_number":%d,"delta":%b,"logprobs":%b}\n\n' % (head, number, text, scores)

    def _step(self, step: Step, status: str) -> Iterator[bytes]:
        """Yield the events of a block that begins, or ends as completely as a response of this ``status``."""
        block, place, kind = step.block, _place(step.block), _EVENTS[step.block.kind]
        if step.what == "begin":
            item = self._item(block, "in_progress") | ({"content": []} if block.call is None else {})
            yield self._event("response.output_item.added", output_index=block.index, item=item)
            if block.call is None:
                yield self._event("response.content_part.added", **place, part=self._part(block))
            return
        if block.call is not None:
            done = {"name": block.call.name, "arguments": block.text}
            yield self._event(f"response.{kind}.done", **place, **done)
        else:
            part = self._part(block)
            every = {"logprobs": part["logprobs"]} if block.kind == "content" else {}
            yield self._event(f"response.{kind}.done", **place, text=part["text"], **every)
            yield self._event("response.content_part.done", **place, part=part)
        item = self._item(block, status)
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _items(self, status: str) -> list[dict[str, Any]]:
        """Return all items, of which the last is as complete as the response with this ``status``."""
        blocks = self._blocks.all
        return [self._item(block, status if block is blocks[-1] else "completed") for block in blocks]

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        status = "incomplete" if status == "cancelled" else status
        name = _item_id(block)
        if block.call is not None:
            call = {"call_id": block.call.id, "name": block.call.name, "arguments": block.text}
            return {"id": name, "type": "function_call", "status": status, **call}
        content = [self._part(block)]
        if block.kind == "reasoning":
            return {"id": name, "type": "reasoning", "summary": [], "content": content}
        return {"id": name, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        scores = self._logprobs.get(block.index, [])
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": scores}

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        nothing: dict[str, Any] = {"error": None, "incomplete_details": None, "output": [], "usage": None}
        return {**self._head, "status": status, **nothing, **fields}

    def _finished(self, sample: Sample, label: str) -> dict[str, Any]:
        output, request = sample.output, self.exchange.request
        reason = output.finish_reason.type
        status = {"length": "incomplete", "abort": "cancelled"}.get(reason, "completed")
        return self._response(
            status,
            completed_at=int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if reason == "length" else None,
            output=self._items(status),
            usage=self._usage(sample),
            **self.exchange.malformed_calls(sample),
            **self.exchange.session_fields(sample),
            **token_fields(request, sample.prompt_ids, output.output_ids),
            **sample_fields(request, self.generation, sample, label),
        )

    def _usage(self, sample: Sample) -> dict[str, Any]:
        prompt, count = sample.output.prompt_tokens, len(sample.output.output_ids)
        reasoning = "".join(block.text for block in self._blocks.all if block.kind == "reasoning")
        tokenizer = self._front.manager.tokenizer
        thought = tokenizer.encode(reasoning, add_special_tokens=False) if tokenizer and reasoning else ()
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": sample.output.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": count,
            "output_tokens_details": {"reasoning_tokens": len(thought)},
            "total_tokens": prompt + count,
        }

    def _keep(self, response: dict[str, Any], sample: Sample) -> bytes:
        """Return the response, encoded, and keep it if that is wanted and it was not aborted."""
        body, turn, node = _encode(response), self.exchange.turn, self.exchange.node(sample)
        if self._asked.store is not False and response["status"] != "cancelled" and turn and node:
            beside = 1 if self._asked.instructions else 0
            kept = Kept(turn.store, turn.session.id, node, body, beside)
            turn.store.keep((self._owner, response["id"]), kept)
        return body


_EVENTS = {"content": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
_PREFIXES = {"content": "msg_", "reasoning": "rs_", "call": "fc_"}


def _item_id(block: Block) -> str:
    return _PREFIXES[block.kind] + block.id


def _place(block: Block) -> dict[str, Any]:
    place = {"output_index": block.index, "item_id": _item_id(block)}
    return place if block.call is not None else {**place, "content_index": 0}
