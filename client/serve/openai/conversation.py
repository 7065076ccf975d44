"""A conversation, as every chat-like front has it: OpenAI's form of it becomes a prompt, its samples pieces.

Invariants: the fronts differ in what they read and write, and in nothing else: each translates its body to a
:class:`Conversation`, and writes the pieces of its :class:`Exchange`. Pieces do not depend on how the tokens
were divided into chunks.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from ....io_struct import new_id
from ...connection.results import GenerateOutput, TokenDelta
from ...exceptions import InvalidRequest
from ...grammar import after_thoughts, grammar_for_tools
from ...text.answer_parser import AnswerParser, ParsedAnswer, Piece, lead_of, opens_reasoning, parser_for
from ...text.parsers.formats import find_format, name_of
from ...text.sessions import ChatPrompts, Kept, Node, Turn, assistant_message
from ...text.tokenizer import TextTokenizer
from ...text.tokenizer_manager import Chunk, GenerationRequest, Sample
from ..bodies import present
from ..context import FrontEnd
from ..grammar_fields import response_format
from ..options import ServeOptions
from .common import (
    NOTHING,
    CommonRequest,
    TopCount,
    check_batch,
    common_fields,
    kept_prompt,
    logprob_fields,
    rids_for,
    sampling_params,
)
from .logprobs import ChatLogprobs, TokenText, chat_logprobs, output_positions, prompt_logprobs

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


class Conversation(CommonRequest, kw_only=True):
    messages: list[dict[str, Any]]
    """``content`` is a string or text parts."""
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    """``none`` leaves calls in the text; ``required``, or a function, makes the answer calls. Templates see
    the tools either way."""
    parallel_tool_calls: bool | None = None
    """False keeps only the first call of an answer."""
    separate_reasoning: bool | None = None
    """False leaves reasoning in the content; True takes it out also where the server's default does not."""
    stream_reasoning: bool | None = None
    """False sends a stream's reasoning when it is complete."""
    include_reasoning: bool | None = None
    """False leaves out reasoning that is not in the content."""
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    """True by default: the prompt ends where the assistant's answer begins."""
    continue_final_message: bool | None = None
    """End the prompt with the text of the last message."""
    chat_template: str | None = None
    """In place of the model's."""


class Exchange:
    """The prompt of one conversation, and what becomes of its samples."""

    def __init__(
        self, front: FrontEnd, request: Conversation, prompt_ids: list[int], turn: Turn | None = None
    ) -> None:
        tokenizer = front.manager.tokenizer
        self.request = request
        self.prompt_ids = prompt_ids
        self.turn = turn
        """Turn of a session, or None."""
        self._nodes: dict[int, Node | None] = {}  # samples that were recorded
        self.reasoning_parser = _reasoning_parser(request, front.options)
        """Format of the reasoning that is told apart from the content, or ``none``."""
        self._new_parser = _new_parser(request, front.options, tokenizer, prompt_ids, self.reasoning_parser)
        self._parsers: dict[int, AnswerParser] = {}
        self._held: dict[int, list[str]] = {}  # reasoning that a stream shows at once
        self._tokens = TokenText(tokenizer, as_ids=bool(request.return_tokens_as_token_ids))
        self._plain = TokenText(tokenizer)

    @property
    def parses(self) -> bool:
        """True if an answer is more than its text, which then has special tokens."""
        return self._new_parser is not None

    def pieces(self, chunk: Chunk) -> list[Piece]:
        """Return the visible pieces that are new with a chunk."""
        if self._new_parser is None:
            if chunk.finished is not None:
                self._record(chunk.finished)
            return [Piece(kind="content", text=chunk.text)] if chunk.text else []
        parser = self._parsers.get(chunk.index)
        if parser is None:
            parser = self._parsers[chunk.index] = self._new_parser()
        pieces = parser.feed(chunk.text)
        if chunk.finished is not None:
            pieces += parser.end(self._stop_token(chunk.finished))
            self._record(chunk.finished)
        return self._shown(chunk, pieces)

    def _record(self, sample: Sample) -> None:
        """Keep a sample that the client gets whole, in the form in which it may send it back."""
        if self.turn is None or sample.index in self._nodes:
            return
        self._nodes[sample.index] = None
        message = assistant_message(self.answer(sample))
        self._nodes[sample.index] = self.turn.store.record(self.turn, sample, message)

    def node(self, sample: Sample) -> Node | None:
        """Return a finished sample as its session has it; None without one, or if that is gone."""
        self._record(sample)
        return self._nodes.get(sample.index)

    def session_fields(self, sample: Sample) -> dict[str, Any]:
        """Return what a finished sample says about its turn; empty without a session."""
        return {} if self.turn is None else {"session": self.turn.told(self.node(sample))}

    def answer(self, sample: Sample) -> ParsedAnswer:
        """Return the parts of a sample, also of one whose pieces have been read."""
        if self._new_parser is None:
            return ParsedAnswer(content=sample.text, reasoning="", calls=[], malformed=[])
        parser = self._parsers.get(sample.index)
        if parser is None:
            parser = self._parsers[sample.index] = self._new_parser()
            parser.feed(sample.text)
            parser.end(self._stop_token(sample))
        answer = parser.answer
        if self.request.parallel_tool_calls is False:
            del answer.calls[1:]
        if self.request.include_reasoning is False:
            answer.reasoning = ""
        return answer

    def malformed_calls(self, sample: Sample) -> dict[str, list[str]]:
        """Return why calls were left as text, as a field of the answer, if there are some."""
        malformed = self.answer(sample).malformed
        return {"malformed_tool_calls": malformed} if malformed else {}

    def _stop_token(self, sample: Sample) -> str:
        """Return the special token that ended a sample, if the sample's text lacks it."""
        kept = self.request.no_stop_trim or self.request.include_stop_str_in_output
        matched = sample.matched
        if kept or not isinstance(matched, int) or matched not in self._plain.skipped:
            return ""
        return self._plain.text(matched)

    def _shown(self, chunk: Chunk, pieces: list[Piece]) -> list[Piece]:
        """Return the pieces that the request wants, and now."""
        request = self.request
        if request.parallel_tool_calls is False:
            first = self._parsers[chunk.index].calls[:1]
            pieces = [piece for piece in pieces if piece.call is None or piece.call is first[0]]
        if request.include_reasoning is False:
            return [piece for piece in pieces if piece.kind != "reasoning"]
        if request.stream_reasoning is False:
            held = self._held.setdefault(chunk.index, [])
            held += [piece.text for piece in pieces if piece.kind == "reasoning"]
            pieces = [piece for piece in pieces if piece.kind != "reasoning"]
            if held and (pieces or chunk.finished is not None):
                pieces.insert(0, Piece(kind="reasoning", text="".join(held)))
                held.clear()
        return pieces

    def logprobs(self, output: GenerateOutput | TokenDelta) -> ChatLogprobs | None:
        if not self.request.logprobs:
            return None
        return chat_logprobs(output_positions(output, self.request.top_logprobs or 0), self._tokens)

    def prompt_logprobs(self, sample: Sample, count: int) -> list[Any] | None:
        return prompt_logprobs(sample.prompt_ids, sample.output, count, self._plain)


def conversation_of(request: CommonRequest, **fields: Any) -> Conversation:
    """Return the conversation of another front's ``request``: its common fields, and ``fields``."""
    common = {name: getattr(request, name) for name in CommonRequest.__struct_fields__}
    if (form := fields.get("response_format")) is not None:
        response_format(form)
    return Conversation(**common | fields)


def whole_chunk(sample: Sample) -> Chunk:
    return Chunk(
        index=sample.index,
        rid=sample.rid,
        text=sample.text,
        delta=sample.output.as_delta(),
        finished=sample,
        prompt_tokens=len(sample.prompt_ids),
    )


def planned_exchange(
    front: FrontEnd,
    request: Conversation,
    limit: int | None,
    prefix: str,
    *,
    after: Kept | None = None,
    keeps: bool = False,
    counts: bool = True,
) -> tuple[GenerationRequest, Exchange]:
    """Return the generation of at most ``limit`` new tokens, with ``prefix`` in its id, and its exchange.

    It is a turn of the request's session, or of that of ``after``, or of a new one if its answer ``keeps``;
    with ``counts`` False it only shows how that turn would begin. It runs in a thread: a template may take
    any time.
    """
    check_batch(front, request, 1)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs", field="top_logprobs")
    whole, turn = _prompt(front, request, after, keeps=keeps, counts=counts)
    prompt = kept_prompt(front, request, whole, limit or 1)
    exchange = Exchange(front, request, prompt, turn)
    fields = common_fields(request)
    logprobs = logprob_fields(request, (request.top_logprobs or 0) if request.logprobs else None)
    if turn is not None:
        logprobs["return_logprob"] |= request.session_id is not None or turn.store is front.sessions
        if request.session_id is not None or after is not None:  # else nobody may ever go on from it
            fields |= turn.lease()
    if exchange.parses:
        fields["skip_special_tokens"] = False
    params = sampling_params(request, limit, front.manager.tokenizer)
    if request.tool_choice not in (*NOTHING, "auto", "none"):
        if params.grammar is not None:
            raise InvalidRequest("tool_choice and a grammar both say what the output is", field="tool_choice")
        params = msgspec.structs.replace(params, grammar=_calls_alone(front, request, prompt))
    elif params.grammar is not None and exchange.parses and exchange.reasoning_parser != "none":
        tokenizer = front.manager.need_tokenizer("reasoning_parser")
        lead = lead_of(tokenizer, prompt, exchange.reasoning_parser)
        behind = after_thoughts(params.grammar, lead, tokenizer.backend.token_to_id)
        params = msgspec.structs.replace(params, grammar=behind)
    generation = GenerationRequest(
        prompt=prompt,
        rid=rids_for(request, 1, prefix)[0],
        sampling_params=params,
        **logprobs,
        **fields,
    )
    return generation, exchange


def _calls_alone(front: FrontEnd, request: Conversation, prompt_ids: list[int]) -> str:
    """Return the grammar of an answer that is the calls that ``tool_choice`` demands, and thoughts before."""
    tokenizer = front.manager.need_tokenizer("tool_choice")
    parser = front.options.tool_call_parser
    # a response template says how to read calls, not how to write them: the chat template does
    given = None if parser == "none" else find_format("call", parser, tokenizer.chat_templates, None)
    return grammar_for_tools(
        "none" if given is None else name_of(given),
        request.tools or [],
        request.tool_choice,
        parallel=request.parallel_tool_calls is not False,
        lead=lead_of(tokenizer, prompt_ids, None),
        token_of=tokenizer.backend.token_to_id,
    )


def _reasoning_parser(request: Conversation, options: ServeOptions) -> str:
    if request.separate_reasoning is False:
        return "none"
    asked = request.separate_reasoning and options.reasoning_parser == "none"
    return "auto" if asked else options.reasoning_parser


def _new_parser(
    request: Conversation,
    options: ServeOptions,
    tokenizer: TextTokenizer | None,
    prompt_ids: list[int],
    reasoning_parser: str,
) -> Callable[[], AnswerParser] | None:
    """Return what makes the parser of a sample, or None if answers are just text."""
    tools = request.tools if request.tool_choice != "none" else None
    if tokenizer is None or not (tools or reasoning_parser != "none"):
        return None
    new: Callable[[], AnswerParser | None] = partial(
        parser_for,
        tokenizer,
        tools=tools,
        tool_parser=options.tool_call_parser,
        reasoning_parser=reasoning_parser,
        in_reasoning=opens_reasoning(tokenizer, prompt_ids, reasoning_parser),
        skip_special_tokens=request.skip_special_tokens is not False,
    )
    return cast("Callable[[], AnswerParser]", new) if new() is not None else None


def _prompt(
    front: FrontEnd, request: Conversation, after: Kept | None, *, keeps: bool, counts: bool
) -> tuple[list[int], Turn | None]:
    """Return the prompt's ids; in a session they begin with those of the turns before."""
    manager = front.manager
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
    messages = template_messages(request.messages)
    settings = {"tools": request.tools or None, "chat_template": request.chat_template or None, **variables}
    begins = generation_prompt is not False and not continued
    if request.session_id is None and after is None and not keeps:
        return manager.apply_chat_template(
            messages, add_generation_prompt=begins, continue_final_message=continued, **settings
        ), None

    def render(messages: Sequence[Mapping[str, Any]], generation: bool | None) -> str:
        return manager.render_chat(
            messages,
            add_generation_prompt=begins if generation is None else generation,
            continue_final_message=continued and generation is None,
            **settings,
        )

    prompts = ChatPrompts(
        render=render,
        encode=manager.encode_chat,
        tokenizer=manager.need_tokenizer("messages"),
        form=msgspec.json.encode(settings, order="sorted"),
        continued=continued,
    )
    node = None if after is None else after.node
    if request.session_id is not None:
        store, name = front.store_of(request.session_id), request.session_id
    else:
        store, name = (front.responses, new_id()) if after is None else (after.store, after.session_id)
    turn = store.turn(name, messages, prompts, after=node, counts=counts)
    return turn.prompt_ids, turn


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
        content = joined_text(f"{name}.content", content, "\n")
    if not isinstance(content, str):
        raise InvalidRequest(f"{name}.content must be text or a list of text parts", field="messages")
    given["content"] = content
    if "tool_calls" in given:
        given["tool_calls"] = _tool_calls(f"{name}.tool_calls", given["tool_calls"])
    return given


def _text_of(part: Mapping[str, Any]) -> Any:
    return part.get("text") if part.get("type") == "text" else None


def joined_text(
    name: str,
    content: Any,
    between: str,
    *,
    field: str = "messages",
    text_of: Callable[[Mapping[str, Any]], Any] = _text_of,
) -> str:
    """Return a text, or those of a list of parts, of which each must have one."""
    if isinstance(content, str):
        return content
    texts = []
    for position, part in enumerate(content if isinstance(content, list) else [content]):
        text = text_of(part) if isinstance(part, dict) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise InvalidRequest(f"{name}[{position}] is {kind!r}; only text is supported", field=field)
        texts.append(text)
    return between.join(texts)


def refuse_several(request: CommonRequest, what: str) -> None:
    """Refuse what only answers of several choices have."""
    if (request.n or 1) > 1:
        raise InvalidRequest(f"n is not supported above 1: {what} has one answer", field="n")
    if request.prompt_logprobs is not None:
        reason = "prompt_logprobs is not supported: call /v1/chat/completions"
        raise InvalidRequest(reason, field="prompt_logprobs")


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
        found = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{name}.function.arguments is not JSON: {error}", field="messages") from error
    return {**function, "arguments": found, "written": arguments or "{}"}
