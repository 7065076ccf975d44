"""Fields of vLLM's on OpenAI's routes, with which trainers score prompts and render chats of their own."""

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from support.openai_server import CONTEXT, NAME, Served

from caesura.client import SamplingParams

PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=f"{served.url}/v1", headers={"authorization": "Bearer secret"}, timeout=None
    ) as client:
        yield client


def complete(http: httpx.Client, **fields: Any) -> Any:
    answer = http.post("/completions", json={"model": NAME, "max_tokens": 1, "temperature": 0.0, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(http: httpx.Client, content: str = "once", **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "return_token_ids": True}
    answer = http.post("/chat/completions", json={**body, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(http: httpx.Client, path: str, **fields: Any) -> tuple[str, str]:
    answer = http.post(path, json=fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["message"]


def check_scores(served: Served, prompt: list[int], found: list[dict[str, Any] | None], count: int) -> None:
    scored = served.engine.generate(
        prompt,
        sampling_params=SamplingParams(max_new_tokens=1),
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=max(count, 1),
    )
    assert len(found) == len(prompt)
    assert found[0] is None
    for position, token in enumerate(prompt[1:]):
        top = scored.input_top_logprobs.at(position)[:count]
        ranked = {str(id): (rank, logprob) for rank, (logprob, id) in enumerate(top, 1)}
        own = ranked.pop(str(token), (count + 1, scored.input_logprobs[position + 1]))
        entry = found[position + 1]
        assert list(entry) == [str(token), *ranked]
        for name, (rank, logprob) in ({str(token): own} | ranked).items():
            assert entry[name] == {
                "logprob": pytest.approx(logprob, abs=1e-5),
                "rank": rank,
                "decoded_token": served.tokenizer.decode([int(name)], skip_special_tokens=False),
            }


@pytest.mark.parametrize("count", [0, 2])
def test_prompt_logprobs_of_each_choice(served, http, count):
    choices = complete(http, prompt=PROMPTS, n=2, prompt_logprobs=count)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    for choice, prompt in zip(choices, [PROMPTS[0]] * 2 + [PROMPTS[1]] * 2, strict=True):
        check_scores(served, prompt, choice["prompt_logprobs"], count)
        assert choice["logprobs"] is None
    asked = {"token_ids": PROMPTS[0], "sampling_params": {"max_tokens": 1, "prompt_logprobs": count}}
    answer = http.post(f"{served.url}/inference/v1/generate", json=asked).json()
    check_scores(served, PROMPTS[0], answer["prompt_logprobs"], count)
    assert answer["choices"][0]["logprobs"] is None


def test_prompt_logprobs_of_a_chat_stand_at_the_top(served, http):
    found = chat(http, prompt_logprobs=1, logprobs=True)
    check_scores(served, found["prompt_token_ids"], found["prompt_logprobs"], 1)
    assert "prompt_logprobs" not in found["choices"][0]
    assert [entry["top_logprobs"] for entry in found["choices"][0]["logprobs"]["content"]] == [[]]
    assert "prompt_logprobs" not in chat(http)


def test_more_tokens_at_the_prompt_than_at_the_output(http):
    [choice] = complete(
        http, prompt=PROMPTS[0], prompt_logprobs=5, logprobs=1, return_tokens_as_token_ids=True
    )["choices"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [1]
    assert all(len(entry) >= 5 for entry in choice["prompt_logprobs"][1:])


def test_echo_asks_for_prompt_logprobs(served, http):
    asked = {"echo": True, "max_tokens": 0, "logprobs": 0}
    [choice] = complete(http, prompt=PROMPTS[0], **asked)["choices"]
    check_scores(served, PROMPTS[0], choice["prompt_logprobs"], 0)


def test_logprobs_of_given_tokens(http):
    asked = {"logprobs": 0, "logprob_token_ids": [9, 4], "return_tokens_as_token_ids": True, "max_tokens": 3}
    [choice] = complete(http, prompt=PROMPTS[0], **asked)["choices"]
    for token, top in zip(choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True):
        assert set(top) == {token, "token_id:9", "token_id:4"}
    assert refused(http, "/completions", prompt="a", logprob_token_ids=[9])[0] == "logprob_token_ids"


@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
def test_prompt_logprobs_are_not_streamed(http, path):
    body = {"prompt": "a", "messages": [{"role": "user", "content": "x"}], "stream": True}
    assert refused(http, path, **body, prompt_logprobs=1)[0] == "prompt_logprobs"
    assert refused(http, path, **{**body, "stream": False}, prompt_logprobs=-1)[0] == "prompt_logprobs"


# -- tokens that are sampled ---------------------------------------------------------------------------------


HOT = {"prompt": PROMPTS[0], "max_tokens": 40, "temperature": 4.0, "ignore_eos": True, "seed": 2}


def test_only_allowed_tokens_are_sampled(http):
    asked = {**HOT, "return_token_ids": True, "logprobs": 2, "return_tokens_as_token_ids": True}
    [free] = complete(http, **asked)["choices"]
    [choice] = complete(http, **asked, allowed_token_ids=[40, 41])["choices"]
    assert set(choice["token_ids"]) == {40, 41} != set(free["token_ids"])
    for top in choice["logprobs"]["top_logprobs"]:
        assert set(top) == {"token_id:40", "token_id:41"}
        assert sum(math.exp(value) for value in top.values()) == pytest.approx(1.0, abs=1e-4)
    assert refused(http, "/completions", prompt="a", allowed_token_ids=[])[0] == "allowed_token_ids"
    assert refused(http, "/completions", prompt="a", allowed_token_ids=[10**6])[0] == "allowed_token_ids"


def test_bad_words_are_not_sampled(served, http):
    asked = {**HOT, "return_token_ids": True}
    [free] = complete(http, **asked)["choices"]
    texts = (served.tokenizer.decode([token]).strip() for token in free["token_ids"])
    word = next(t for t in texts if t.isalnum() and len(served.tokenizer.encode(t)) == 1)
    forms = [served.tokenizer.encode(text) for text in (word, f" {word}")]
    forbidden = {ids[0] for ids in forms if len(ids) == 1}
    [choice] = complete(http, **asked, bad_words=[word])["choices"]
    assert forbidden & set(free["token_ids"])
    assert not forbidden & set(choice["token_ids"])
    assert refused(http, "/completions", prompt="a", bad_words=[""])[0] == "bad_words"


@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate"])
def test_words_of_several_tokens_are_not_sampled(served, http, path):
    first, last = (served.tokenizer.encode(letter)[0] for letter in "qz")
    assert served.tokenizer.encode("qz") == [first, last]

    def sampled(**fields: object) -> list[int]:
        asked = {**HOT, "allowed_token_ids": [first, last], **fields}
        prompt = asked.pop("prompt")
        body = {"token_ids": prompt, "sampling_params": asked}
        if path == "/v1/completions":
            body = {**asked, "prompt": prompt, "return_token_ids": True}
        answer = http.post(f"{served.url}{path}", json=body)
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        return choice["token_ids"]

    assert (first, last) in pairwise(sampled())
    for fields in ({"bad_words": ["qz"]}, {"bad_words_ids": [[first, last]]}):
        found = sampled(**fields)
        assert {first, last} == set(found)
        assert (first, last) not in pairwise(found)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
def test_kept_tokens_come_with_each_choice(served, http, path, stream):
    params = {"temperature": 1.5, "top_p": 0.7, "seed": 5, "n": 2}
    body: dict[str, Any] = {**params, "max_tokens": 6, "return_sampling_mask": True, "return_token_ids": True}
    if path == "/inference/v1/generate":
        body = {"token_ids": PROMPTS[0], "sampling_params": body, "return_token_ids": True}
    elif path == "/v1/completions":
        body["prompt"] = PROMPTS[0]
    else:
        body["messages"] = [{"role": "user", "content": "once"}]
    answer = http.post(f"{served.url}{path}", json={**body, "stream": stream})
    assert answer.status_code == 200, answer.text
    if stream:
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        chunks = [json.loads(line) for line in lines[:-1]]
        prompt = chunks[0]["prompt_token_ids"]
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    else:
        whole = answer.json()
        prompt, choices = whole["prompt_token_ids"], whole["choices"]
    outputs = served.engine.generate(
        prompt,
        sampling_params=SamplingParams(**params, max_new_tokens=6),
        return_sampled_logprob=True,
        return_sampling_mask=True,
    )
    choices.sort(key=lambda choice: choice["index"])
    for choice, output in zip(choices, outputs, strict=True):
        kept = [output.sampling_mask.at(position) for position in range(len(output.output_ids))]
        assert choice["sampling_mask"] == kept
        assert max(map(len, kept)) > 1
        assert choice["sampling_logprobs"] == pytest.approx(output.sampled_logprobs, abs=1e-5)


# -- prompts that are cut ------------------------------------------------------------------------------------


def test_a_prompt_is_cut(served, http):
    asked = {"return_token_ids": True, "max_tokens": 2, "ignore_eos": True}
    ids = served.tokenizer.encode("once upon a time")
    for side, kept in (({}, ids[-3:]), ({"truncation_side": "right"}, ids[:3])):
        cut = {"truncate_prompt_tokens": 3, **side}
        expected = complete(http, prompt=kept, **asked)["choices"][0]["token_ids"]
        for prompt in (["once upon a time"], [ids]):
            found = complete(http, prompt=prompt * 2, **asked, **cut)["choices"]
            assert [choice["prompt_token_ids"] for choice in found] == [kept, kept]
            assert [choice["token_ids"] for choice in found] == [expected, expected]
    long = [5] * CONTEXT + [6]
    [choice] = complete(http, prompt=long, **asked, truncate_prompt_tokens=-1)["choices"]
    assert choice["prompt_token_ids"] == long[3:]
    assert chat(http, truncate_prompt_tokens=2)["prompt_token_ids"] == chat(http)["prompt_token_ids"][-2:]
    cut = {"sampling_params": {"max_tokens": 1, "truncate_prompt_tokens": 2}, "return_token_ids": True}
    tokens = http.post(f"{served.url}/inference/v1/generate", json={"token_ids": [5, 6, 7], **cut}).json()
    assert tokens["prompt_token_ids"] == [6, 7]


@pytest.mark.parametrize("count", [0, -2, CONTEXT])
def test_a_length_without_room_is_refused(http, count):
    fields = {"prompt": "a", "truncate_prompt_tokens": count}
    assert refused(http, "/completions", **fields)[0] == "truncate_prompt_tokens"


# -- chats ---------------------------------------------------------------------------------------------------


def prompt_of(served: Served, found: Any) -> str:
    return served.tokenizer.decode(found["prompt_token_ids"], skip_special_tokens=False)


def test_a_template_of_the_request(served, http):
    found = chat(
        http, chat_template="[{{ messages[0].content }}|{{ mood }}]", chat_template_kwargs={"mood": 1}
    )
    assert prompt_of(served, found) == "[once|1]"
    assert prompt_of(served, chat(http, chat_template="")) == "<s><user>once</><assistant>"


@pytest.mark.parametrize(
    ("template", "field"),
    [
        ("{% if %}", "chat_template"),
        ("x" * (1 << 20) + "x", "chat_template"),
        ("{{ ''.__class__.__mro__ }}", "messages"),
        ("{{ 'x' * 10**9 }}", "messages"),
        ("{{ messages[0].nothing.at.all }}", "messages"),
    ],
)
def test_templates_are_kept_within_limits(served, http, template, field):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "chat_template": template}
    assert refused(http, "/chat/completions", **body)[0] == field
    assert prompt_of(served, chat(http)) == "<s><user>once</><assistant>"


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        (None, "so ", "<s><user>once</><assistant>so "),
        ("{% for m in messages %}{{ m.content | trim }};{% endfor %}", "so ", "once;so"),
        ("{% for m in messages %}{{ m.content }};{% endfor %}", "", "once;"),
    ],
)
def test_the_final_message_is_continued(served, http, template, content, expected):
    given = [{"role": "user", "content": "once"}, {"role": "assistant", "content": content}]
    found = chat(http, messages=given, continue_final_message=True, chat_template=template)
    assert prompt_of(served, found) == expected


def test_what_cannot_be_continued(http):
    body = {"messages": [{"role": "user", "content": "x"}], "continue_final_message": True}
    both = refused(http, "/chat/completions", **body, add_generation_prompt=True)
    hidden = refused(http, "/chat/completions", **body, chat_template="nothing of it")
    assert [both[0], hidden[0]] == ["continue_final_message"] * 2
    kwargs = {"chat_template": "x"}
    assert (
        refused(http, "/chat/completions", **body, chat_template_kwargs=kwargs)[0] == "chat_template_kwargs"
    )
