"""SGLang's ``/parse_function_call`` and ``/separate_reasoning``: the parsers of chats over a given text."""

from collections.abc import Mapping, Sequence
from typing import Any

from litestar import Response

from ...exceptions import InvalidRequest
from ...text.answer_parser import AnswerParser, Piece, parser_for
from ...text.parsers.calls import declared
from ..bodies import HTTPRequest, Strict, read_control
from ..context import Front, FrontEnd
from ..error_responses import json_response
from ..middleware import generating
from ..openai.blocks import Blocks


class ParseCallBody(Strict, kw_only=True):
    text: str
    tools: list[dict[str, Any]] | None = None
    tool_call_parser: str | None = None


@generating("/parse_function_call", ParseCallBody, body="text")
async def parse_function_call(request: HTTPRequest, front: Front) -> Response[bytes]:
    body = await read_control(request, ParseCallBody, text=True)
    return json_response(await front.workers.run(lambda: _calls(front, body)))


class SeparateReasoningBody(Strict, kw_only=True):
    text: str
    reasoning_parser: str = "auto"
    return_blocks: bool = False


@generating("/separate_reasoning", SeparateReasoningBody, body="text")
async def separate_reasoning(request: HTTPRequest, front: Front) -> Response[bytes]:
    body = await read_control(request, SeparateReasoningBody, text=True)
    return json_response(await front.workers.run(lambda: _separated(front, body)))


def _calls(front: FrontEnd, body: ParseCallBody) -> dict[str, Any]:
    name, tools = body.tool_call_parser or front.options.tool_call_parser, body.tools or []
    parser = _parser(front, tools, tool_parser=name)
    if parser is not None:
        _pieces(parser, body.text)
    answer = None if parser is None else parser.answer
    names = [next(iter(declared([tool])), None) for tool in tools]
    calls = [] if answer is None else answer.calls
    return {
        "normal_text": body.text if answer is None else answer.content,
        "calls": [
            {"tool_index": names.index(call.name), "name": call.name, "parameters": call.arguments}
            for call in calls
        ],
        "malformed_tool_calls": [] if answer is None else answer.malformed,
    }


def _separated(front: FrontEnd, body: SeparateReasoningBody) -> dict[str, Any]:
    """Return the parts of a text, which begins in reasoning if it only has the mark of its end."""
    found: list[Piece] = []
    for begins in (False, True):
        parser = _parser(front, [], reasoning_parser=body.reasoning_parser, in_reasoning=begins)
        pieces = [Piece(kind="content", text=body.text)] if parser is None else _pieces(parser, body.text)
        shown = sum(len(piece.text) for piece in pieces)
        if not begins or (parser is not None and shown < len(body.text.strip())):
            found = pieces
        if any(piece.kind == "reasoning" for piece in found):
            break
    blocks = Blocks()
    for _ in blocks.add(found):
        pass
    of_kind = {
        kind: [block.text for block in blocks.all if block.kind == kind] for kind in ("reasoning", "content")
    }
    answer = {"reasoning_text": "".join(of_kind["reasoning"]), "text": "".join(of_kind["content"])}
    if not body.return_blocks:
        return answer
    kinds = {"reasoning": "reasoning", "content": "text"}
    return {
        **answer,
        "reasoning_blocks": of_kind["reasoning"],
        "text_blocks": of_kind["content"],
        "blocks": [{"type": kinds[block.kind], "text": block.text} for block in blocks.all],
    }


def _parser(front: FrontEnd, tools: Sequence[Mapping[str, Any]], **options: Any) -> AnswerParser | None:
    if front.manager.tokenizer is None:
        raise InvalidRequest("this engine is served without a tokenizer", field="text")
    return parser_for(front.manager.tokenizer, tools=tools, **options)


def _pieces(parser: AnswerParser, text: str) -> list[Piece]:
    return parser.feed(text) + parser.end()
