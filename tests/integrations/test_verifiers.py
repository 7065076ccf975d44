"""verifiers' interception server and its client, unmodified: an agent's SDK, the trace, and the session."""

import asyncio
from typing import Any

import pytest
from support.steered_model import ANSWER, ARGUMENTS, QUESTION

interception = pytest.importorskip("verifiers.v1.interception", exc_type=ImportError)
anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")
v1 = pytest.importorskip("verifiers.v1")
clients = pytest.importorskip("verifiers.v1.clients")
session_of = pytest.importorskip("verifiers.v1.session").RolloutSession
traces = pytest.importorskip("verifiers.v1.trace")

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Get the weather of a city.", "parameters": SCHEMA}
USER: list[Any] = [{"role": "user", "content": QUESTION}]


async def chats(url: str, key: str, *, stream: bool) -> str:
    tools: Any = [{"type": "function", "function": FUNCTION}]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        fields: Any = {"model": "any", "tools": tools}
        if stream:
            usage: Any = {"include_usage": True}
            async with client.chat.completions.stream(
                messages=USER, stream_options=usage, **fields
            ) as events:
                answer = await events.get_final_completion()
        else:
            answer = await client.chat.completions.create(messages=USER, **fields)
        [choice] = answer.choices
        [call] = choice.message.tool_calls
        assert call.function.arguments == ARGUMENTS
        said = [*USER, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}]
        answer = await client.chat.completions.create(messages=said, **fields)
        return answer.choices[0].message.content


async def responses(url: str, key: str, *, stream: bool) -> str:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        fields: Any = {"model": "any", "tools": [{"type": "function", **FUNCTION, "strict": True}]}
        if stream:
            async with client.responses.stream(input=USER, **fields) as events:
                answer = await events.get_final_response()
        else:
            answer = await client.responses.create(input=USER, **fields)
        [call] = [item for item in answer.output if item.type == "function_call"]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
        answer = await client.responses.create(input=[*USER, *answer.output, result], **fields)
        return answer.output_text


async def messages(url: str, key: str, *, stream: bool) -> str:
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
        tools = [{"name": "get_weather", "description": FUNCTION["description"], "input_schema": SCHEMA}]
        fields: Any = {"model": "any", "max_tokens": 64, "tools": tools}
        if stream:
            async with client.messages.stream(messages=USER, **fields) as events:
                answer = await events.get_final_message()
        else:
            answer = await client.messages.create(messages=USER, **fields)
        [call] = [block for block in answer.content if block.type == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees"}
        said = [
            *USER,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
        await client.messages.count_tokens(model="any", messages=said, tools=tools)
        answer = await client.messages.create(messages=said, **fields)
        return "".join(block.text for block in answer.content if block.type == "text")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("agent", [chats, responses, messages])
def test_an_intercepted_agent_has_a_session(steered, recorded, agent, stream):
    url = recorded("verifiers, interception", "verifiers", steered.url)
    config = clients.EvalClientConfig(base_url=f"{url}/v1", api_key_var="NO_SUCH_KEY")
    task = traces.TraceTask(type="Task", data=v1.TaskData(idx=0, prompt=QUESTION))
    trace = traces.Trace(task=task, agent=traces.AgentInfo(config=v1.AgentConfig()))
    session = session_of(ctx=clients.ModelContext(model="default", client=config), trace=trace)

    async def run() -> str:
        async with interception.InterceptionServer() as server, server.acquire(session) as (address, key, _):
            return await agent(address, key, stream=stream)

    assert asyncio.run(run()) == ANSWER
    assert session.error is None
    assert trace.num_turns == 2
    found = steered.get(f"/sessions/{trace.id}").json()
    [sample] = found["samples"]
    assert [turn["branch"] for turn in sample["turns"]] == [None, None]
    assert sum(sample["mask"]) == trace.num_output_tokens
