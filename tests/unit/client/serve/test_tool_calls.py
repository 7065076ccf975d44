"""Tool calls and reasoning of chats, as OpenAI's own client gets them from a scripted engine."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import openai
import pytest
from click.testing import CliRunner
from support.fake_scheduler import FakeScheduler, answer, delta, finished, results, rid_of
from support.http_server import front_end, listening
from support.tokenizers import CHAT_TEMPLATE, make_byte_level

from caesura.client.serve.command import serve
from caesura.client.serve.openai.conversation import Conversation, Exchange, template_messages
from caesura.client.text.answer_parser import Piece
from caesura.client.text.tokenizer import TextTokenizer
from caesura.client.text.tokenizer_manager import Chunk
from caesura.io_struct import FinishReason, GenerateReqInput, Message, Request

TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}},
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WRONG = '<tool_call>{"name": "fly"}</tool_call>'
THOUGHT = "<think>\nRome?\n</think>\n\n"
END = FinishReason(type="stop", matched=1)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return TextTokenizer.from_folder(make_byte_level(tmp_path_factory.mktemp("tokenizer")))


class Model:
    """An engine that says ``texts``, one for each sample, and ends with the stop token ``</s>``."""

    def __init__(self, tokenizer: TextTokenizer, *texts: str, reason: FinishReason = END) -> None:
        self.reason = reason
        self.ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        if reason.type == "stop":
            self.ids = [[*each, 1] for each in self.ids]

    def __call__(self, request: Request) -> Iterable[Message]:
        if not isinstance(request, GenerateReqInput):
            return answer(request)
        rid, said = rid_of(request), list(enumerate(self.ids))
        tokens = [
            delta((rid, index, at, [token])) for index, ids in said for at, token in enumerate(ids)
        ] if request.stream else []  # fmt: skip
        return [
            *tokens,
            results(*(finished(rid, ids, index, finish_reason=self.reason) for index, ids in said)),
        ]


@contextmanager
def chatting(tmp_path, tokenizer, model: Model, **options: Any) -> Iterator[openai.OpenAI]:
    endpoint = f"ipc://{tmp_path}/engine"
    options = {"model_path": "/models/tiny", "tool_call_parser": "hermes", "max_batch": 4, **options}
    with (
        FakeScheduler(endpoint, model),
        listening(endpoint=endpoint, connect_timeout=None, tokenizer=tokenizer, **options) as door,
        openai.OpenAI(base_url=f"{door.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def ask(client: openai.OpenAI, *, stream: bool, n: int = 1, **fields: Any) -> list[dict[str, Any]]:
    """Return what a client has of each choice, put together if it came as a stream."""
    fields = {"tools": TOOLS, "extra_body": {"return_token_ids": True}, **fields}
    messages: Any = [{"role": "user", "content": "Rome?"}]
    made: Any = client.chat.completions.create(
        model="default", messages=messages, stream=stream, n=n, **fields
    )
    if not stream:
        return [
            {
                **choice.message.model_dump(exclude_none=True),
                "finish": choice.finish_reason,
                "malformed": getattr(choice, "malformed_tool_calls", []),
                "ids": choice.token_ids,
            }
            for choice in made.choices
        ]
    found: list[dict[str, Any]] = [{"content": "", "malformed": [], "ids": []} for _ in range(n)]
    for chunk in made:
        for choice in chunk.choices:
            whole, new = found[choice.index], choice.delta.model_dump(exclude_none=True)
            for call in new.pop("tool_calls", []):
                assert call.pop("index") == len(whole.setdefault("tool_calls", []))
                whole["tool_calls"].append(call)
            for key, text in new.items():
                whole[key] = text if key == "role" else whole.get(key, "") + text
            whole["ids"] += choice.token_ids
            whole["malformed"] += getattr(choice, "malformed_tool_calls", [])
            whole |= {"finish": choice.finish_reason} if choice.finish_reason else {}
    return found


def calls_of(choice: dict[str, Any]) -> list[tuple[str, str]]:
    assert len({call["id"] for call in choice["tool_calls"]}) == len(choice["tool_calls"])
    assert {call["type"] for call in choice["tool_calls"]} == {"function"}
    return [(call["function"]["name"], call["function"]["arguments"]) for call in choice["tool_calls"]]


ROME = ("weather", '{"city": "Rome"}')


@pytest.mark.parametrize("stream", [False, True])
def test_calls_reach_the_client(tmp_path, tokenizer, stream):
    model = Model(tokenizer, f"I look.\n{CALL}\n{CALL}", f"{WRONG} Rain.")
    with chatting(tmp_path, tokenizer, model) as client:
        called, wrong = ask(client, stream=stream, n=2)
        assert (called.get("content"), called["finish"], called["malformed"]) == ("I look.", "tool_calls", [])
        assert calls_of(called) == [ROME, ROME]
        assert called["ids"] == model.ids[0]
        assert (wrong["content"], wrong["finish"], "tool_calls" in wrong) == (f"{WRONG} Rain.", "stop", False)
        assert wrong["malformed"] == ["'fly' is no declared function"]
        [first, _] = ask(client, stream=stream, n=2, parallel_tool_calls=False)
        assert calls_of(first) == [ROME]


def test_without_tools_or_with_none_chosen_calls_are_text(tmp_path, tokenizer):
    with chatting(tmp_path, tokenizer, Model(tokenizer, f"{THOUGHT}{CALL}<|im_end|>")) as client:
        for stream, fields in product(
            (False, True), ({"tools": openai.omit}, {"tool_choice": "none"}, {"tools": []})
        ):
            [choice] = ask(client, stream=stream, **fields)
            assert (choice["content"], choice["finish"]) == (f"{THOUGHT}{CALL}", "stop")
            assert not choice.keys() & {"tool_calls", "reasoning", "reasoning_content"}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_content_has_none(tmp_path, tokenizer, stream):
    with chatting(tmp_path, tokenizer, Model(tokenizer, f"{CALL}<|im_end|>")) as client:
        [choice] = ask(client, stream=stream)
    assert not choice.get("content")
    assert calls_of(choice) == [ROME]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_in_an_answer_that_was_cut_keeps_the_reason(tmp_path, tokenizer, stream):
    model = Model(tokenizer, f"{CALL} and", reason=FinishReason(type="length", length=9))
    with chatting(tmp_path, tokenizer, model) as client:
        [choice] = ask(client, stream=stream)
    assert (calls_of(choice), choice["finish"]) == ([ROME], "length")


@pytest.mark.parametrize("option", ["qwen3", "auto", "none"])
def test_reasoning_is_told_apart_if_wanted(tmp_path, tokenizer, option):
    apart, whole = ("Rome?", "Rain."), (None, f"{THOUGHT}Rain.")
    cases: list[tuple[dict[str, bool], tuple[str | None, str]]] = [
        ({}, whole if option == "none" else apart),
        ({"separate_reasoning": True}, apart),
        ({"separate_reasoning": False}, whole),
        ({"separate_reasoning": True, "include_reasoning": False}, (None, "Rain.")),
        ({"separate_reasoning": True, "stream_reasoning": False}, apart),
    ]
    model = Model(tokenizer, f"{THOUGHT}Rain.")
    with chatting(tmp_path, tokenizer, model, reasoning_parser=option) as client:
        for stream, (fields, (reasoning, content)) in product((False, True), cases):
            asked = {"return_token_ids": True, **fields}
            [choice] = ask(client, stream=stream, tools=openai.omit, extra_body=asked)
            assert choice["content"] == content
            assert choice.get("reasoning_content") == choice.get("reasoning") == reasoning


@pytest.mark.parametrize(("wanted", "expected"), [(None, ["R", "ome", "?"]), (False, ["Rome?"])])
def test_a_stream_can_have_the_reasoning_at_once(tokenizer, wanted, expected):
    front = front_end(tokenizer=tokenizer, reasoning_parser="qwen3")
    request = Conversation(messages=[], stream=True, stream_reasoning=wanted)
    exchange = Exchange(front, request, [5])
    pieces = [
        piece
        for text in ("<think>", "R", "ome", "?", "</think>", "Rain.")
        for piece in exchange.pieces(
            Chunk(index=0, rid="", text=text, delta=None, finished=None, prompt_tokens=1)
        )
    ]
    assert [piece.text for piece in pieces if piece.kind == "reasoning"] == expected
    assert pieces[-1] == Piece(kind="content", text="Rain.")


def test_a_template_that_opens_the_reasoning(tmp_path, tokenizer):
    with chatting(
        tmp_path, tokenizer, Model(tokenizer, "\nRome?\n</think>\n\nRain."), reasoning_parser="auto"
    ) as client:
        [choice] = ask(
            client,
            stream=False,
            tools=openai.omit,
            extra_body={"return_token_ids": True, "chat_template": f"{CHAT_TEMPLATE}<think>"},
        )
    assert (choice["reasoning_content"], choice["content"]) == ("Rome?", "Rain.")


JOINED = "{{ '<' + m.tool_calls[0].function.arguments + '>' ~ m.tool_calls[0].function.arguments }}"
OBJECT = "{% set a = m.tool_calls[0].function.arguments %}{{ a is mapping }} {{ a | tojson }} {{ a.city }}"
EMPTY = "{{ m.content is none }} {{ m.content is string }} {{ m.content ~ '.' }}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (JOINED, '<{"city":"Rome"}>{"city":"Rome"}'),
        (OBJECT, 'True {"city": "Rome"} Rome'),
        (EMPTY, "True True ."),
        ("{{ m.tool_calls | tojson }}", '[{"function": {"name": "f", "arguments": {"city": "Rome"}}}]'),
    ],
)
def test_templates_get_earlier_calls_in_the_form_they_take(tokenizer, template, expected):
    call = {"function": {"name": "f", "arguments": '{"city":"Rome"}'}}
    messages = template_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    source = "{% set m = messages[0] %}" + template
    assert tokenizer.render_chat(messages, chat_template=source) == expected


def test_formats_without_a_name_are_refused():
    for option in ("--tool-call-parser", "--reasoning-parser"):
        run = CliRunner().invoke(serve, ["--model", "x", option, "herms"])
        assert run.exit_code == 2
        assert f"{option} herms is not known: auto, none, " in run.output
