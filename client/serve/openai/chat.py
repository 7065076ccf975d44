"""``/v1/chat/completions``: the model's template makes the prompt; the answer is text with tool calls."""

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from litestar import Response

from ...text.answer_parser import Piece
from ...text.sessions import tool_call
from ...text.tokenizer_manager import Chunk, GenerationRequest, Sample
from ..bodies import HTTPRequest
from ..context import Front, FrontEnd
from ..middleware import generating
from .answers import Choice, Job, answer, finish_fields, token_fields
from .common import EXCEPTION_HANDLERS, REFUSED, Count, decode_request, read_request
from .conversation import Conversation, Exchange, planned_exchange


class ChatRequest(Conversation, kw_only=True):
    REFUSED: ClassVar[dict[str, str]] = {
        **REFUSED,
        "functions": "superseded by tools",
        "function_call": "superseded by tools",
        "audio": "output is text only",
        "web_search_options": "there is no web search",
    }

    max_completion_tokens: Count | None = None
    """Takes precedence over ``max_tokens``. Without both: up to the context length."""

    functions: Any = None
    function_call: Any = None
    audio: Any = None
    web_search_options: Any = None


_decoder = msgspec.json.Decoder(ChatRequest, strict=False)


def decode_chat(body: bytes) -> ChatRequest:
    return decode_request(_decoder.decode, body, ChatRequest)


@generating(
    ["/v1/chat/completions", "/sessions/{session_id:str}/v1/chat/completions"],
    ChatRequest,
    body="text",
    exception_handlers=EXCEPTION_HANDLERS,
)
async def chat_completions(request: HTTPRequest, front: Front) -> Response[Any]:
    asked = await read_request(front, request, decode_chat)
    generation, exchange = await front.workers.run(lambda: planned_chat(front, asked))
    job = Job(front, asked, "chat.completion.chunk" if asked.stream else "chat.completion", [generation])
    return await answer(request, front, job, ChatForm(exchange))


def planned_chat(
    front: FrontEnd, asked: ChatRequest, *, counts: bool = True
) -> tuple[GenerationRequest, Exchange]:
    limit = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    return planned_exchange(front, asked, limit, "chatcmpl", counts=counts)


class ChatForm:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._begun: set[int] = set()
        self._called: dict[int, int] = {}

    def choice(self, index: int, position: int, sample: Sample) -> Choice:
        exchange = self._exchange
        parsed = exchange.answer(sample)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
        if exchange.reasoning_parser != "none":
            message |= _reasoning(parsed.reasoning or None)
        if parsed.calls:
            message["content"] = parsed.content or None
            message["tool_calls"] = [tool_call(call) for call in parsed.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": exchange.logprobs(sample.output),
            **_end_fields(sample, exchange),
            **token_fields(exchange.request, sample.prompt_ids, sample.output.output_ids),
        }

    def fields(self, sample: Sample) -> dict[str, Any]:
        if (count := self._exchange.request.prompt_logprobs) is None:
            return {}
        return {"prompt_logprobs": self._exchange.prompt_logprobs(sample, count)}

    def chunk(self, index: int, position: int, chunk: Chunk) -> Choice | None:
        """Return what is new of a sample, or None; the role comes with its first chunk."""
        exchange, request, delta = self._exchange, self._exchange.request, chunk.delta
        pieces = exchange.pieces(chunk)
        visible = pieces or (delta is not None and (request.logprobs or request.return_token_ids))
        if not visible and chunk.finished is None:
            return None
        first = index not in self._begun
        self._begun.add(index)
        new: dict[str, Any] = {"role": "assistant"} if first else {}
        text = "".join([piece.text for piece in pieces if piece.kind == "content"])
        if text or first:
            new["content"] = text
        if exchange.parses:
            new |= self._parsed_fields(index, pieces)
        return {
            "index": index,
            "delta": new,
            "logprobs": None if delta is None else exchange.logprobs(delta),
            "finish_reason": None,
            **(_end_fields(chunk.finished, exchange) if chunk.finished is not None else {}),
            **token_fields(
                request, exchange.prompt_ids if first else None, [] if delta is None else delta.output_ids
            ),
        }

    def _parsed_fields(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the reasoning and the calls of a chunk; calls are numbered, and come whole."""
        begun = self._called.get(index, 0)
        calls = [piece.call for piece in pieces if piece.call is not None]
        self._called[index] = begun + len(calls)
        reasoning = "".join([piece.text for piece in pieces if piece.kind == "reasoning"])
        return {
            **(_reasoning(reasoning) if reasoning else {}),
            **(
                {"tool_calls": [{"index": begun + i, **tool_call(call)} for i, call in enumerate(calls)]}
                if calls
                else {}
            ),
        }


def _reasoning(text: str | None) -> dict[str, str | None]:
    """Return reasoning by SGLang's name and by vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


def _end_fields(sample: Sample, exchange: Exchange) -> Choice:
    fields = finish_fields(sample)
    if exchange.parses:
        parsed = exchange.answer(sample)
        if parsed.calls and fields["finish_reason"] == "stop":
            fields["finish_reason"] = "tool_calls"
        fields |= exchange.malformed_calls(sample)
    return fields | exchange.session_fields(sample)
