"""SDKs of OpenAI and Anthropic, and the agents SDK, unmodified: a model calls a tool and tells its result."""

import asyncio
from typing import Any, Generic, Literal, TypeVar

import pydantic
import pytest
from support.http_serve import ServedEngine
from support.steered_model import ANSWER, ARGUMENTS, QUESTION, THOUGHT

WEATHER = "Get the weather of a city."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": WEATHER, "parameters": SCHEMA}
USER: list[Any] = [{"role": "user", "content": QUESTION}]


KindT = TypeVar("KindT")


class Zone(pydantic.BaseModel):
    name: Literal["UTC", "CET"]
    summer: bool | None


class Said(pydantic.BaseModel, Generic[KindT]):
    """``Said[Zone]``: a name with brackets, fields with odd names, and a definition of its own."""

    model_config = pydantic.ConfigDict(populate_by_name=True)
    zones: list[KindT] = pydantic.Field(alias='Zonen \u2013 "UTC"', min_length=1, max_length=2)
    kind: Literal["$ref", "a b"] = pydantic.Field(alias="$kind")


def check_said(found: Any) -> None:
    assert isinstance(found, Said)
    assert isinstance(found.zones[0], Zone)


@pytest.fixture(scope="module")
def compact(steered: ServedEngine) -> dict[str, Any]:
    """Return fields against the spaces between JSON's parts, with which this model never ends."""
    ids = [token for text in " \n\t\r" for token in steered.ok("/tokenize", {"prompt": text})["tokens"]]
    return {"extra_body": {"seed": 1, "temperature": 2.0, "logit_bias": dict.fromkeys(map(str, ids), -100)}}


@pytest.fixture(scope="module")
def openai_options(steered: ServedEngine) -> dict[str, Any]:
    return {"base_url": f"{steered.url}/v1", "api_key": "none", "max_retries": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_chats_of_the_openai_sdk(openai_options, stream):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(**openai_options)
    tools = [{"type": "function", "function": FUNCTION}]
    messages = [*USER]
    if stream:
        with client.chat.completions.stream(model="default", messages=messages, tools=tools) as events:
            answer = events.get_final_completion()
    else:
        answer = client.chat.completions.create(model="default", messages=messages, tools=tools)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}]
    answer = client.chat.completions.create(model="default", messages=messages, tools=tools)
    assert answer.choices[0].message.content == ANSWER


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_responses_of_the_openai_sdk(openai_options, stream, kept):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(**openai_options)
    fields: Any = {"model": "default", "tools": [{"type": "function", **FUNCTION, "strict": True}]}
    if stream:
        with client.responses.stream(input=USER, **fields) as events:
            answer = events.get_final_response()
    else:
        answer = client.responses.create(input=USER, **fields)
    thought, call = answer.output
    assert thought.content[0].text == THOUGHT
    assert (call.name, call.arguments, call.status) == ("get_weather", ARGUMENTS, "completed")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    if kept:
        fields |= {"input": [output], "previous_response_id": answer.id}
    else:
        fields |= {"input": [*USER, *answer.output, output]}
    answer = client.responses.create(**fields, extra_body={"return_token_ids": True})
    assert answer.output_text == ANSWER
    assert client.responses.retrieve(answer.id).token_ids == answer.token_ids


@pytest.mark.parametrize("stream", [False, True])
def test_messages_of_the_anthropic_sdk(steered, stream):
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=steered.url, api_key="none", max_retries=0)
    fields: Any = {
        "model": "default",
        "max_tokens": 64,
        "tools": [{"name": "get_weather", "description": WEATHER, "input_schema": SCHEMA}],
    }
    if stream:
        with client.messages.stream(messages=USER, **fields) as events:
            answer = events.get_final_message()
    else:
        answer = client.messages.create(messages=USER, **fields)
    assert answer.stop_reason == "tool_use"
    thought, call = answer.content
    assert (thought.thinking, call.name, call.input) == (THOUGHT, "get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees"}
    turns = [*USER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(messages=turns, **fields)
    assert [(block.type, block.text) for block in answer.content] == [("text", ANSWER)]
    count = client.messages.count_tokens(model="default", messages=turns, tools=fields["tools"])
    assert count.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


def test_the_anthropic_sdk_runs_tools(steered):
    anthropic = pytest.importorskip("anthropic")

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        return f"18 degrees in {city}"

    client = anthropic.Anthropic(base_url=steered.url, api_key="none", max_retries=0)
    runner = client.beta.messages.tool_runner(
        model="default", max_tokens=64, messages=USER, tools=[get_weather]
    )
    assert runner.until_done().content[0].text == ANSWER


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("front", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
def test_an_agent_of_the_agents_sdk(openai_options, front, stream):
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    cities = []

    @agents.function_tool
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        cities.append(city)
        return "18 degrees"

    async def run() -> Any:
        async with openai.AsyncOpenAI(**openai_options) as client:
            model = getattr(agents, front)(model="default", openai_client=client)
            agent = agents.Agent(name="weather", tools=[get_weather], model=model)
            if not stream:
                return await agents.Runner.run(agent, QUESTION)
            result = agents.Runner.run_streamed(agent, QUESTION)
            async for _ in result.stream_events():
                pass
            return result

    assert asyncio.run(run()).final_output == ANSWER
    assert cities == ["Paris"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_openai_sdk_parses_models(compact, openai_options, stream):
    openai = pytest.importorskip("openai")
    fields: Any = {"model": "default", **compact}
    chat: Any = {"messages": USER, "response_format": Said[Zone], **fields}
    fields |= {"input": QUESTION, "text_format": Said[Zone]}
    with openai.OpenAI(**openai_options) as client:
        if stream:
            with client.responses.stream(**fields) as events:
                check_said(events.get_final_response().output_parsed)
            with client.chat.completions.stream(**chat) as events:
                check_said(events.get_final_completion().choices[0].message.parsed)
        else:
            check_said(client.responses.parse(**fields).output_parsed)
            check_said(client.chat.completions.parse(**chat).choices[0].message.parsed)


@pytest.mark.parametrize("stream", [False, True])
def test_the_anthropic_sdk_parses_models(compact, steered, stream):
    anthropic = pytest.importorskip("anthropic")
    fields: Any = {"model": "default", "max_tokens": 400, "messages": USER, "output_format": Said[Zone]}
    with anthropic.Anthropic(base_url=steered.url, api_key="none", max_retries=0) as client:
        if stream:
            with client.messages.stream(**fields, **compact) as events:
                check_said(events.get_final_message().parsed_output)
        else:
            check_said(client.messages.parse(**fields, **compact).parsed_output)


@pytest.mark.parametrize("name", ["x" * 64, "Überschrift", "a.b/c", ""])
def test_formats_may_have_any_name(compact, openai_options, name):
    openai = pytest.importorskip("openai")
    schema = Zone.model_json_schema()
    form: Any = {"format": {"type": "json_schema", "name": name, "schema": schema, "strict": True}}
    with openai.OpenAI(**openai_options) as client:
        answer = client.responses.create(model="default", input=QUESTION, text=form, **compact)
    Zone.model_validate_json(answer.output_text)
