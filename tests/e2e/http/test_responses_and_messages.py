"""``/v1/responses`` and ``/v1/messages`` over a real engine: chats in other words, whole and streamed."""

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from support.http_serve import ServedEngine, served
from support.steered_model import ANSWER, ARGUMENTS, QUESTION, THOUGHT, make_steered_model

USER = [{"role": "user", "content": QUESTION}]
IDS = {"return_token_ids": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    path = make_steered_model(tmp_path_factory.mktemp("steered"))
    with served("--model", str(path), "--dtype", "float32", "--kv-pool-tokens", "4096") as engine:
        yield engine


def chat(engine: ServedEngine, **fields: Any) -> Any:
    return engine.ok("/v1/chat/completions", {"messages": USER, **IDS, **fields})


def respond(engine: ServedEngine, **fields: Any) -> Any:
    return engine.ok("/v1/responses", {"input": QUESTION, **IDS, **fields})


def message(engine: ServedEngine, **fields: Any) -> Any:
    return engine.ok("/v1/messages", {"messages": USER, "max_tokens": 64, **IDS, **fields})


def events(engine: ServedEngine, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = engine.post(path, {**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    found = []
    for event in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(msgspec.json.decode(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def without_names(value: Any) -> Any:
    """Return an answer without ids, times and what was cached, which differ."""
    if isinstance(value, dict):
        names = ("id", "call_id", "created_at", "completed_at", "usage")
        return {name: without_names(each) for name, each in value.items() if name not in names}
    return [without_names(each) for each in value] if isinstance(value, list) else value


def test_all_fronts_have_the_same_tokens_and_text(engine):
    [choice] = chat(engine)["choices"]
    response, answer = respond(engine), message(engine)
    assert choice["message"]["content"] == ANSWER
    assert [part["text"] for item in response["output"] for part in item["content"]] == [ANSWER]
    assert answer["content"] == [{"type": "text", "text": ANSWER}]
    for found in (response, answer):
        assert found["token_ids"] == choice["token_ids"]
        assert found["prompt_token_ids"] == choice["prompt_token_ids"]
        assert found["weight_versions"] == choice["weight_versions"]
        assert found["usage"]["output_tokens"] == len(choice["token_ids"])
    assert (response["status"], answer["stop_reason"]) == ("completed", "end_turn")


def test_a_streamed_response_is_the_whole_one(engine):
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "temperature": 0}
    whole = respond(engine, **fields)
    found = events(engine, "/v1/responses", {"input": QUESTION, **IDS, **fields})
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    kinds = [event["type"].removeprefix("response.") for event in found]
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds[:4] + kinds[-4:] == begin + end
    deltas = found[4:-4]
    assert {event["type"] for event in deltas} == {"response.output_text.delta"}
    assert "".join(event["delta"] for event in deltas) == ANSWER == found[-4]["text"]
    assert without_names(found[-1]["response"]) == without_names(whole)
    [part] = whole["output"][0]["content"]
    scores = [score for event in deltas for score in event["logprobs"]]
    assert part["logprobs"] == found[-4]["logprobs"]
    assert scores == part["logprobs"][: len(scores)]
    assert len(part["logprobs"]) == len(whole["token_ids"])
    assert {event["item_id"] for event in deltas} == {found[2]["item"]["id"]}


def test_a_streamed_message_is_the_whole_one(engine):
    whole = message(engine)
    found = events(engine, "/v1/messages", {"messages": USER, "max_tokens": 64, **IDS})
    kinds = [event["type"] for event in found]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert "".join(event["delta"]["text"] for event in found[3:-3]) == ANSWER
    start, end = found[0]["message"], found[-2]
    assert start["usage"]["input_tokens"] == len(whole["prompt_token_ids"])
    built = {**start, **end.pop("delta"), **end, "content": whole["content"], "type": "message"}
    assert without_names(built) == without_names(whole)


TOOL = {"name": "get_weather", "description": "Get the weather."}
OBJECT = {"type": "object", "properties": {"city": {"type": "string"}}}


def test_thoughts_and_calls_are_items_whole_and_streamed(engine):
    body = {
        "input": QUESTION,
        "tools": [{"type": "function", **TOOL, "parameters": OBJECT}],
        "reasoning": {"effort": "low"},
    }
    whole = engine.ok("/v1/responses", body)
    assert [item["type"] for item in whole["output"]] == ["reasoning", "function_call"]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    *found, last = events(engine, "/v1/responses", body)
    assert without_names(last["response"]) == without_names(whole)
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == last["response"]["output"]
    thought = "".join(each["delta"] for each in found if each["type"] == "response.reasoning_text.delta")
    arguments = [each["arguments"] for each in found if "arguments.done" in each["type"]]
    assert (thought, arguments) == (THOUGHT, [ARGUMENTS])


def test_a_response_goes_on_from_one_before(engine):
    first = respond(engine)
    again = respond(engine, input="And now?", previous_response_id=first["id"])
    turns = [*USER, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "And now?"}]
    assert again["prompt_token_ids"] == chat(engine, messages=turns)["choices"][0]["prompt_token_ids"]
    assert engine.get(f"/v1/responses/{first['id']}").json() == first
    deleted = engine.http.delete(f"/v1/responses/{first['id']}").json()
    assert deleted == {"id": first["id"], "object": "response", "deleted": True}
    assert engine.get(f"/v1/responses/{first['id']}").status_code == 404
    refused = engine.post("/v1/responses", {"input": "x", "previous_response_id": first["id"]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "previous_response_not_found")
    more = respond(engine, input="And then?", previous_response_id=again["id"])
    assert more["prompt_token_ids"][: len(again["prompt_token_ids"])] == again["prompt_token_ids"]
    unkept = respond(engine, store=False)
    assert engine.get(f"/v1/responses/{unkept['id']}").status_code == 404
    [*_, last] = events(engine, "/v1/responses", {"input": QUESTION})
    assert engine.get(f"/v1/responses/{last['response']['id']}").json() == last["response"]


def test_answers_say_why_they_ended(engine):
    short = respond(engine, max_output_tokens=1)
    assert (short["status"], short["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert short["output"][0]["status"] == "incomplete"
    [*_, last] = events(engine, "/v1/responses", {"input": QUESTION, "max_output_tokens": 1})
    assert last["type"] == "response.incomplete"
    assert message(engine, max_tokens=1)["stop_reason"] == "max_tokens"
    stopped = message(engine, stop_sequences=["degrees"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "degrees")
    assert ANSWER.startswith(stopped["content"][0]["text"])


def test_an_answer_at_the_end_is_gone_on_with(engine):
    turns = [*USER, {"role": "assistant", "content": "It is "}]
    assert "It is " + message(engine, messages=turns)["content"][0]["text"] == ANSWER


def test_count_tokens(engine):
    body = {"messages": USER, "system": "Be brief."}
    count = engine.ok("/v1/messages/count_tokens", body)
    assert count == {"input_tokens": len(message(engine, **body)["prompt_token_ids"])}


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"messages": []}, 400, "invalid_request_error"),
        ({"messages": USER, "mcp_servers": [{}]}, 400, "invalid_request_error"),
        ({"messages": USER, "model": "other"}, 404, "not_found_error"),
    ],
)
def test_errors_have_anthropics_form(engine, body, status, kind):
    response = engine.post("/v1/messages", body)
    assert (response.status_code, response.json()["type"]) == (status, "error")
    assert response.json()["error"]["type"] == kind
    assert engine.get("/v1/messages/other").json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("/v1/responses", {"input": [{"type": ["message"]}]}),
        ("/v1/responses", {"text": {"format": "text"}}),
        ("/v1/messages", {"tool_choice": {"type": ["auto"]}}),
        ("/v1/messages", {"output_config": {"format": "text"}}),
    ],
)
def test_nested_fields_of_wrong_types_are_refused(engine, route, fields):
    response = engine.post(route, {"messages": USER, "input": QUESTION, **fields})
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_rendered_request_generates_what_the_route_does(engine, route):
    body = {"input": QUESTION} if route == "/v1/responses" else {"messages": USER}
    rendered = engine.ok(f"{route}/render", {**body, "temperature": 0, "seed": 3})
    [choice] = chat(engine)["choices"]
    assert rendered["token_ids"] == choice["prompt_token_ids"]
    assert rendered["sampling_params"]["seed"] == 3
    [generated] = engine.ok("/inference/v1/generate", rendered)["choices"]
    assert generated["token_ids"] == choice["token_ids"]


def without_times(answer: dict[str, Any]) -> dict[str, Any]:
    names = ("id", "created", "usage", "metadata", "prompt_token_ids", "weight_versions")
    return {
        name: [without_times(each) for each in value] if name == "choices" else value
        for name, value in answer.items()
        if name not in names
    }


def test_derendered_tokens_are_the_answer(engine):
    asked = {"messages": USER, "stop": ["Paris"], "logprobs": True, "top_logprobs": 2, "temperature": 0}
    rendered = engine.ok("/v1/chat/completions/render", asked)
    generated = engine.ok("/inference/v1/generate", rendered)
    body = {"generate_response": generated, "prompt_token_ids": rendered["token_ids"], "chat_request": asked}
    found, expected = (
        engine.ok("/v1/chat/completions/derender", body),
        engine.ok("/v1/chat/completions", asked),
    )
    assert without_times(found) == without_times(expected)
    assert found["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    plain = engine.ok("/v1/chat/completions/derender", {"generate_response": generated, "prompt_tokens": 5})
    assert plain["usage"]["prompt_tokens"] == 5


def test_derendered_completions_are_those_of_the_prompts(engine):
    asked = {"prompt": ["<|tell|>", "once <|tell|>"], "logprobs": 1, "temperature": 0}
    rendered = engine.ok("/v1/completions/render", asked)
    answers = [engine.ok("/inference/v1/generate", each) for each in rendered]
    body = {
        "generate_responses": answers,
        "prompt_token_ids": [each["token_ids"] for each in rendered],
        "completion_request": asked,
    }
    found, expected = engine.ok("/v1/completions/derender", body), engine.ok("/v1/completions", asked)
    assert without_times(found) == without_times(expected)
    assert engine.post("/v1/completions/derender", {**body, "prompt_tokens": [1]}).status_code == 400


CALLS = '<think>hm</think>\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def test_sglangs_parsers_of_given_texts(engine):
    tools = [{"type": "function", "function": {"name": name}} for name in ("g", "f")]
    body = {"text": CALLS, "tools": tools}
    found = engine.ok("/parse_function_call", body)
    [call] = found["calls"]
    assert (call["tool_index"], call["name"]) == (1, "f")
    assert msgspec.json.decode(call["parameters"]) == {"a": 1}
    left = engine.ok("/parse_function_call", {**body, "tools": tools[:1], "tool_call_parser": "hermes"})
    assert (left["calls"], len(left["malformed_tool_calls"])) == ([], 1)
    assert '"name": "f"' in left["normal_text"]
    flat = engine.ok("/parse_function_call", {**body, "tools": [{"function": 1}, {"name": "f"}]})
    assert [call["tool_index"] for call in flat["calls"]] == [1]
    for text in ("<think>hm</think>yes", "hm</think>yes"):
        found = engine.ok("/separate_reasoning", {"text": text, "return_blocks": True})
        assert (found["reasoning_text"], found["text"]) == ("hm", "yes")
        assert found["blocks"] == [{"type": "reasoning", "text": "hm"}, {"type": "text", "text": "yes"}]
    found = engine.ok("/separate_reasoning", {"text": "yes", "reasoning_parser": "qwen3"})
    assert found == {"reasoning_text": "", "text": "yes"}
    assert engine.post("/separate_reasoning", {"text": "", "reasoning_parser": "x"}).status_code == 400


def test_a_reader_that_leaves_aborts(engine):
    body = {"input": QUESTION, "stream": True, "max_output_tokens": 900, "ignore_eos": True}
    with httpx.stream("POST", f"{engine.url}/v1/responses", json=body, timeout=None) as response:
        next(response.iter_lines())
    while engine.get("/get_load").json()[0]["num_reqs"]:
        pass


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
    ],
)
def test_a_rendered_request_keeps_its_grammar(engine, fields):
    body = {"messages": USER, "return_token_ids": True, "seed": 3, "max_tokens": 24, **fields}
    [choice] = engine.ok("/v1/chat/completions", body)["choices"]
    rendered = engine.ok("/v1/chat/completions/render", body)
    [generated] = engine.ok("/inference/v1/generate", rendered)["choices"]
    assert generated["token_ids"] == choice["token_ids"]


# -- sessions ------------------------------------------------------------------------------------------------


def continued(first: dict[str, Any], second: dict[str, Any], session: dict[str, Any]) -> None:
    """Check that the second prompt is the ids of the first turn and more, and that the answer says so."""
    known = first["prompt_token_ids"] + first["token_ids"]
    assert second["prompt_token_ids"][: len(known)] == known
    assert len(second["prompt_token_ids"]) > len(known)
    assert session == session | {"turn": 2, "parent": 1, "reused_tokens": len(known), "branch": None}


def test_a_tools_result_goes_on_from_the_ids_of_its_call(engine):
    fields = {"tools": BOTH[:1], "session_id": "chat", "separate_reasoning": True}
    [first] = chat(engine, **fields)["choices"]
    [call] = first["message"]["tool_calls"]
    answered = {"role": "tool", "tool_call_id": call["id"], "content": "18 degrees"}
    [second] = chat(engine, **{**fields, "messages": [*USER, first["message"], answered]})["choices"]
    continued(first, second, second["session"])
    assert second["message"]["content"] == ANSWER


def test_responses_and_messages_have_sessions(engine):
    first = respond(engine, session_id="response")
    more = [{"role": "user", "content": "And now?"}]
    items = [*USER, {"role": "assistant", "content": ANSWER}, *more]
    second = respond(engine, input=items, session_id="response")
    continued(first, second, second["session"])
    first = message(engine, session_id="message")
    said = {"role": "assistant", "content": first["content"]}
    second = message(engine, messages=[*USER, said, *more], session_id="message")
    continued(first, second, second["session"])


# -- calls that tool_choice demands --------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC", "CET"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
CLOCK = {"name": "clock", "description": "Tell the time.", "parameters": SCHEMA}
BOTH = [{"type": "function", "function": TOOL}, {"type": "function", "function": CLOCK}]
NAMED = {"type": "function", "function": {"name": "clock"}}
WILD = {"temperature": 2, "max_tokens": 400, "separate_reasoning": True}


@pytest.mark.parametrize("choice", [NAMED, "required"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_demanded_function_is_called(engine, choice, seed):
    """Without a demand this model never calls ``clock``."""
    tools = BOTH if choice is NAMED else BOTH[1:]
    [made] = chat(engine, tools=tools, tool_choice=choice, seed=seed, **WILD)["choices"]
    for call in made["message"]["tool_calls"]:
        assert call["function"]["name"] == "clock"
        assert msgspec.json.decode(call["function"]["arguments"])["zone"] in ("UTC", "CET")
    assert made["finish_reason"] == "tool_calls"
    assert not made["message"]["content"]


def test_messages_demand_calls_too(engine):
    tools = [{"name": "clock", "input_schema": SCHEMA}]
    fields = {"tools": tools, "tool_choice": {"type": "any"}, "seed": 1}
    answer = message(engine, thinking={"type": "enabled"}, **{**fields, "max_tokens": 400, "temperature": 2})
    assert answer["stop_reason"] == "tool_use"
    assert {block["type"] for block in answer["content"]} <= {"tool_use", "thinking"}


def test_thoughts_may_come_before_a_demanded_call(engine):
    fields = {"tools": BOTH[:1], "separate_reasoning": True, "temperature": 0, "max_tokens": 40}
    [free] = chat(engine, **fields)["choices"]
    [demanded] = chat(engine, tool_choice=NAMED, **{**fields, "tools": BOTH})["choices"]
    thoughts = [choice["message"]["reasoning_content"] for choice in (free, demanded)]
    assert thoughts == [THOUGHT, THOUGHT]
    assert demanded["message"]["content"].startswith('<tool_call>\n{"name": "clock", "arguments": {')


FORMATS = [
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 7}}}},
    {"structured_outputs": {"grammar": 'root ::= "7"'}},
    {"regex": "7"},
]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: next(iter(form)))
def test_a_format_begins_behind_the_thoughts(engine, form):
    fields = {"tools": BOTH[:1], "temperature": 0, "max_tokens": 40, **form}
    [choice] = chat(engine, separate_reasoning=True, **fields)["choices"]
    assert choice["finish_reason"] == "stop"
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == (THOUGHT, "7")
    body = {"messages": USER, "stream": True, "separate_reasoning": True, **fields}
    lines = [line[6:] for line in engine.post("/v1/chat/completions", body).text.splitlines() if line][:-1]
    deltas = [msgspec.json.decode(line)["choices"][0]["delta"] for line in lines]
    assert "".join(each.get("content") or "" for each in deltas) == "7"
    assert "".join(each.get("reasoning_content") or "" for each in deltas) == THOUGHT
    [choice] = chat(engine, separate_reasoning=False, **fields)["choices"]
    assert choice["message"]["content"] == "7"


def test_demands_that_cannot_be_met_are_refused(engine):
    nobody = {"type": "function", "function": {"name": "nobody"}}
    for fields in (
        {"tool_choice": "required"},
        {"tools": BOTH, "tool_choice": nobody},
        {"tools": BOTH, "tool_choice": "required", "response_format": {"type": "json_object"}},
    ):
        answer = engine.post("/v1/chat/completions", {"messages": USER, **fields})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "tool_choice"


def test_a_grammar_may_have_the_text_of_an_added_token(engine):
    """llguidance takes these for special ones by their looks, and allows what it does not take then."""
    wanted = ["a<tool_call>b</tool_call>"]
    made = chat(engine, structured_outputs={"choice": wanted}, n=8, temperature=2, seed=1)["choices"]
    assert {choice["message"]["content"] for choice in made} == set(wanted)
