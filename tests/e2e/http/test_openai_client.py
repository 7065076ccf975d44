"""Models, errors and completions as OpenAI's official client sees them, over a real engine."""

import base64
import codecs
import json
import struct
from collections.abc import Iterator

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from support.openai_server import CONTEXT, GREEDY, NAME, Served, messages, serve_openai, with_ids

from caesura.client import SamplingParams
from caesura.client.serve.openai.logprobs import TokenText
from caesura.client.text.tokenizer import TextTokenizer
from caesura.client.text.tokenizer_manager import ENCODE_INLINE


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_openai(tmp_path_factory.mktemp("models") / "tiny") as served:
        yield served


# -- models, keys and errors ---------------------------------------------------------------------------------


def test_models(served):
    listed = served.client.models.list().data
    assert [model.id for model in listed] == [NAME]
    one = served.client.models.retrieve(NAME)
    assert one == listed[0]
    assert one.max_model_len == CONTEXT
    assert one.root == str(served.path)
    assert one.created == int((served.path / "config.json").stat().st_mtime)
    with pytest.raises(openai.NotFoundError) as caught:
        served.client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("name", [NAME, "", "default", "path"])
def test_names_of_the_model(served, name):
    model = str(served.path) if name == "path" else name
    answer = served.client.completions.create(prompt="once", max_tokens=2, **{**GREEDY, "model": model})
    assert answer.model == NAME


def test_unknown_model(served):
    with pytest.raises(openai.NotFoundError) as caught:
        served.client.completions.create(model="gpt-5", prompt="once")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 1000}, "logprobs"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"stop": ["x"] * 40}, "stop"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1, "a"]]}, "prompt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"n": 17}, "n"),
        ({"extra_body": {"regex": "a+"}}, "regex"),
        ({"extra_body": {"response_format": {"type": "json_object"}}}, "response_format"),
        ({"extra_body": {"rid": ["a", "b"]}}, "rid"),
        ({"stream": True, "echo": True, "logprobs": 1}, "echo"),
    ],
)
def test_refused_by_name(served, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        served.client.completions.create(**{"model": NAME, "prompt": "once", **fields})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
    ],
)
def test_chats_refused_by_name(served, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        served.client.chat.completions.create(**{"model": NAME, "messages": messages("once"), **fields})
    assert caught.value.param == param


def test_too_long_a_prompt(served):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            served.client.completions.create(model=NAME, prompt=[5] * CONTEXT, max_tokens=9, stream=stream)
        assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="token"):
        served.client.chat.completions.create(model=NAME, messages=messages("a猫" * ENCODE_INLINE))


EVERYTHING = {"return_token_ids": True, "ignore_eos": True, "return_routed_experts": True}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_answers_have_the_types_of_the_official_client(served, stream, n):
    common = {"n": n, "max_tokens": 4, "stream": stream, "model": NAME, "extra_body": EVERYTHING}
    chats = served.client.chat.completions.with_raw_response.create(
        messages=messages("once"), logprobs=True, top_logprobs=2, **common
    )
    completions = served.client.completions.with_raw_response.create(prompt="once", logprobs=2, **common)
    if stream:
        kinds = (ChatCompletionChunk, Completion)
        texts = [
            [
                line.removeprefix("data: ")
                for line in raw.http_response.iter_lines()
                if line.startswith("data: {")
            ]
            for raw in (chats, completions)
        ]
    else:
        kinds = (ChatCompletion, Completion)
        texts = [[chats.text], [completions.text]]
    for kind, found in zip(kinds, texts, strict=True):
        assert found
        for text in found:
            given = json.loads(text)
            # its chunks have no type of their own, and no reason until the last
            if stream and kind is Completion:
                given["choices"] = [
                    {**each, "finish_reason": each["finish_reason"] or "stop"} for each in given["choices"]
                ]
            kind.model_validate(given, strict=True)


def test_prompt_ids_are_told_at_the_top_too(served):
    for stream in (False, True):
        answers = served.client.chat.completions.create(
            messages=messages("once"), max_tokens=3, n=2, stream=stream, **with_ids()
        )
        first = next(iter(answers)) if stream else answers
        assert first.prompt_token_ids == first.choices[0].prompt_token_ids != []
    answer = served.client.completions.create(prompt=["once", "upon"], max_tokens=1, **with_ids())
    assert not hasattr(answer, "prompt_token_ids")
    answer = served.client.completions.create(prompt=["once"], max_tokens=1, **with_ids())
    assert answer.prompt_token_ids == served.tokenizer.encode("once")


# -- completions ---------------------------------------------------------------------------------------------


def test_completion_is_the_engines(served):
    answer = served.client.completions.create(prompt="once upon", max_tokens=9, **with_ids())
    [choice] = answer.choices
    ids = served.tokenizer.encode("once upon")
    expected = served.engine.generate(
        ids, SamplingParams(max_new_tokens=9, temperature=0.0, ignore_eos=True), return_logprob=False
    )
    assert choice.token_ids == expected.output_ids
    assert choice.prompt_token_ids == ids
    assert choice.text == served.tokenizer.decode(expected.output_ids)
    assert (choice.finish_reason, choice.matched_stop) == ("length", None)
    assert answer.object == "text_completion"
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.completion_tokens == 9
    assert answer.usage.total_tokens == len(ids) + 9
    status = served.engine.status()
    assert answer.metadata["weight_version"] == status.weight_version
    [span] = choice.weight_versions
    assert (span["start"], span["end"], span["epoch"]) == (0, 9, status.weights_epoch)


def test_prompts_of_every_kind(served):
    ids = served.tokenizer.encode("once")
    create = served.client.completions.create
    for prompt, count in (("once", 1), (ids, 1), (["once", "upon"], 2), ([ids, ids, [7]], 3)):
        answer = create(prompt=prompt, max_tokens=3, n=2, **with_ids())
        assert [choice.index for choice in answer.choices] == list(range(2 * count))
        assert answer.choices[0].prompt_token_ids == ids
        assert answer.choices[0].token_ids == answer.choices[1].token_ids
        assert answer.usage.prompt_tokens == sum(
            len(choice.prompt_token_ids) for choice in answer.choices[::2]
        )
        assert answer.usage.completion_tokens == 6 * count


def test_seeds(served):
    create = served.client.completions.create
    texts = [
        [choice.text for choice in create(model=NAME, prompt="once", max_tokens=8, n=3, seed=seed).choices]
        for seed in (7, 7, -7)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) == 3


def test_logprobs_of_completions(served):
    answer = served.client.completions.create(
        prompt="once", max_tokens=40, logprobs=3, **{**with_ids(), "seed": 3, "temperature": 1.0}
    )
    [choice] = answer.choices
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(choice.token_ids) == 40
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs):
        assert top[token] >= value  # of tokens with the same text the likeliest stays
        assert len(top) <= 4
    check_offsets(served.tokenizer, choice.text, choice.token_ids, logprobs.text_offset)


def check_offsets(tokenizer: TextTokenizer, text: str, ids: list[int], offsets: list[int]) -> None:
    """Check that every offset counts the whole characters of the bytes before its token."""
    tokens = TokenText(tokenizer)
    data = [b"" if token in tokenizer.skipped else tokens.data(token) for token in ids]
    assert b"".join(data).decode("utf-8", "replace") == text
    known = [codecs.utf_8_decode(b"".join(data[:count]), "replace", False)[0] for count in range(len(ids))]
    assert offsets == [len(before) for before in known]


def test_tokens_as_ids(served):
    answer = served.client.completions.create(
        prompt="once", max_tokens=3, logprobs=0, **with_ids(return_tokens_as_token_ids=True)
    )
    [choice] = answer.choices
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
    assert [list(top) for top in choice.logprobs.top_logprobs] == [[name] for name in choice.logprobs.tokens]


def test_echo(served):
    prompt = "once upon a naïve 猫 🙂"
    create = served.client.completions.create
    plain = create(prompt=prompt, max_tokens=4, **GREEDY).choices[0]
    echoed = create(prompt=prompt, max_tokens=4, echo=True, logprobs=2, **with_ids()).choices[0]
    assert echoed.text == prompt + plain.text
    ids = echoed.prompt_token_ids + echoed.token_ids
    assert len(echoed.logprobs.tokens) == len(ids)
    assert echoed.logprobs.token_logprobs[0] is None
    assert echoed.logprobs.top_logprobs[0] is None
    assert all(value <= 0.0 for value in echoed.logprobs.token_logprobs[1:])
    check_offsets(served.tokenizer, echoed.text, ids, echoed.logprobs.text_offset)
    scored = create(prompt=prompt, max_tokens=0, echo=True, logprobs=2, **with_ids())
    assert scored.choices[0].text == prompt
    assert scored.choices[0].token_ids == []
    assert scored.choices[0].finish_reason == "length"
    assert scored.usage.completion_tokens == 0
    count = len(echoed.prompt_token_ids)
    assert scored.choices[0].logprobs.token_logprobs == pytest.approx(
        echoed.logprobs.token_logprobs[:count], abs=1e-4
    )
    again = create(prompt=ids, max_tokens=0, echo=True, logprobs=0, **with_ids()).choices[0]
    assert again.logprobs.token_logprobs[1:] == pytest.approx(echoed.logprobs.token_logprobs[1:], abs=1e-4)
    from_ids = create(prompt=echoed.prompt_token_ids, max_tokens=4, echo=True, **GREEDY).choices[0]
    assert from_ids.text == echoed.text


def test_stop_strings_and_tokens(served):
    create = served.client.completions.create
    whole = create(prompt="once", max_tokens=30, **with_ids()).choices[0]
    stop = whole.text[4:6]
    cut = create(prompt="once", max_tokens=30, stop=["\0never", stop], **with_ids()).choices[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.matched_stop) == ("stop", stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    kept = create(prompt="once", max_tokens=30, stop=stop, **with_ids(include_stop_str_in_output=True))
    assert kept.choices[0].text == cut.text + stop
    token = whole.token_ids[3]
    ended = create(prompt="once", max_tokens=30, **with_ids(stop_token_ids=[token])).choices[0]
    assert (ended.finish_reason, ended.matched_stop) == ("stop", token)
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]


def test_logit_bias_and_penalties_reach_the_engine(served):
    def ids(bias: int, **fields: float) -> list[int]:
        extra = {name: fields.pop(name) for name in ("repetition_penalty",) if name in fields}
        answer = served.client.completions.create(
            prompt="once", max_tokens=5, logit_bias={"77": bias}, **fields, **with_ids(**extra)
        )
        return answer.choices[0].token_ids

    assert ids(100) == [77] * 5
    for name, value in (("frequency_penalty", 2.0), ("presence_penalty", 2.0), ("repetition_penalty", 2.0)):
        assert ids(6, **{name: value}) != ids(6)


def test_minimum_of_tokens(served):
    create = served.client.completions.create
    first = create(prompt="once", max_tokens=1, **with_ids()).choices[0].token_ids[0]
    for name in ("min_tokens", "min_new_tokens"):
        answer = create(prompt="once", max_tokens=4, **with_ids(stop_token_ids=[first], **{name: 3}))
        assert len(answer.choices[0].token_ids) >= 3
        assert first not in answer.choices[0].token_ids[:3]


def test_routed_experts(served):
    answer = served.client.completions.create(
        prompt=[5, 6, 7], max_tokens=4, **with_ids(return_routed_experts=True, routed_experts_start_len=1)
    )
    data = base64.b64decode(answer.sglext["routed_experts"])
    experts = struct.unpack(f"<{len(data) // 4}i", data)
    assert len(experts) == (3 + 4 - 1 - 1) * 2 * 3
    assert set(experts) <= set(range(5))


def test_meta_info(served):
    answer = served.client.completions.create(
        prompt="once", max_tokens=4, n=2, **with_ids(return_meta_info=True, rid="named")
    )
    assert answer.id == "named"
    for choice in answer.choices:
        assert choice.meta_info["completion_tokens"] == 4
        assert choice.meta_info["finish_reason"] == {"type": "length", "length": 4}


def test_cached_tokens_and_salt(served):
    prompt = [9 + i % 50 for i in range(100)]
    create = served.client.completions.create

    def cached(**extra: object) -> int:
        answer = create(prompt=prompt, max_tokens=1, **with_ids(**extra))
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="a") >= 80
    assert cached(cache_salt="b") == 0
    assert cached(cache_salt="a", extra_key="k") == 0
    assert cached(cache_salt="a", extra_key="k") >= 80
