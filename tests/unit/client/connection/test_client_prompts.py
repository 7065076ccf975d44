"""Forms of prompts and sampling parameters that ``generate``, ``submit`` and ``score`` accept."""

import numpy
import pytest
import torch
from support.fake_scheduler import FakeScheduler, floats

from caesura.client import InternalError, InvalidRequest, SamplingParams, SchedulerClient
from caesura.client.connection.prompts import Scores
from caesura.io_struct import GenerateReqInput, ScoreReqInput, ScoreReqOutput


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    with FakeScheduler(f"ipc://{tmp_path_factory.mktemp('s')}/s") as scheduler:
        yield scheduler


@pytest.fixture
def generate(fake):
    with SchedulerClient(fake.endpoint) as client:
        yield client.generate


def sent(fake):
    return fake.next_request(GenerateReqInput)


@pytest.mark.parametrize(
    "make", [numpy.array, torch.tensor, lambda ids: [torch.tensor(each) for each in ids]]
)
def test_arrays_are_prompts(fake, generate, make):
    assert generate(make([1, 2, 3])).output_ids == [3, 2, 1, 0]
    assert sent(fake).input_ids == [1, 2, 3]
    assert [each.output_ids for each in generate(make([[1, 2], [3, 4]]))] == [[2, 1, 0], [4, 3, 0]]
    assert [sent(fake).input_ids, sent(fake).input_ids] == [[1, 2], [3, 4]]


def test_rows_of_different_lengths_are_prompts(fake, generate):
    outputs = generate([torch.tensor([1]), numpy.array([2, 3]), range(4, 6)])
    assert [each.output_ids[:-1] for each in outputs] == [[1], [3, 2], [5, 4]]
    for _ in outputs:
        sent(fake)


def test_a_dict_is_sampling_parameters(fake, generate):
    generate([1], {"max_new_tokens": 5, "temperature": 0, "top_p": None, "logit_bias": {3: 1.0}})
    assert sent(fake).sampling_params == SamplingParams(
        max_new_tokens=5, temperature=0.0, logit_bias={3: 1.0}
    )
    generate([[1], [2]], [{"max_new_tokens": None}, SamplingParams(n=1, seed=4)])
    assert sent(fake).sampling_params == SamplingParams(max_new_tokens=None)
    assert sent(fake).sampling_params == SamplingParams(seed=4)


TEXT = (
    "is text, and the scheduler takes token ids: tokenize it first, "
    "or give text to caesura.client.text.TextClient"
)


@pytest.mark.parametrize(
    "prompt,sentence",
    [
        ("Hello", f"input_ids = 'Hello' {TEXT}"),
        (["Hello", "you"], rf"input_ids\[0\] = 'Hello' {TEXT}"),
        ([[1, "you"]], rf"input_ids\[1\] = 'you' {TEXT}"),
        ({"input_ids": [1], "attention_mask": [1]}, r"not a dict: pass its \['input_ids'\]"),
        ([{"role": "user"}], "must be a list of token ids, not a dict"),
        (5, "input_ids = 5 must be a list of token ids"),
        (None, "input_ids = None must be a list of token ids"),
        ((i for i in range(3)), "input_ids = <generator .* must be a list of token ids"),
        ([1.5], r"input_ids\[0\] = 1.5 must be an integer"),
        ([1, None], r"input_ids\[1\] = None must be an integer"),
        (torch.tensor([1.5]), r"input_ids\[0\] = 1.5 must be an integer"),
        (numpy.array([True]), "input_ids must be integers, not bool"),
        (torch.zeros(1, 1, 1, dtype=torch.int64), r"input_ids\[0\] = \[0\] must be an integer"),
        (torch.tensor(4), "input_ids = 4 must be a list of token ids"),
        (b"bytes", "input_ids = b'bytes' must be a list of token ids|must be a list of integers"),
    ],
)
def test_invalid_prompt_error_is_one_sentence(generate, prompt, sentence):
    with pytest.raises(InvalidRequest, match=sentence):
        generate(prompt)


@pytest.mark.parametrize(
    "params,sentence",
    [
        (
            {"max_tokens": 5},
            r"sampling_params.max_tokens is not known \(did you mean max_new_tokens\?\); valid are max_new",
        ),
        ({"temp": 1}, r"did you mean temperature\?"),
        ({"temperature": "hot"}, "sampling_params.temperature = 'hot' must be a number"),
        ({"n": 0}, "sampling_params.n = 0 must be an integer from 1 to 1024"),
        ({1: 2}, "every key of sampling_params must be a string"),
        (
            "greedy",
            "sampling_params = 'greedy' must be a SamplingParams or a dict, or a list of one for each prompt",
        ),
        (
            0.5,
            "sampling_params = 0.5 must be a SamplingParams or a dict, or a list of one for each prompt",
        ),
        ([0.5], "sampling_params = 0.5 must be a SamplingParams or a dict"),
        ([{}, {}], "2 sampling_params for 1 prompts"),
    ],
)
def test_invalid_sampling_parameters_error_is_one_sentence(generate, params, sentence):
    with pytest.raises(InvalidRequest, match=sentence):
        generate([1], params)


@pytest.mark.parametrize(
    "option,sentence",
    [
        ("max_new_tokens", "unknown generation option max_new_tokens: it is a field of sampling_params"),
        ("max_tokens", r"max_tokens \(did you mean max_new_tokens, a field of sampling_params\?\)"),
        ("stream", "unknown generation option stream"),
        ("id", "unknown generation option id; options are"),
        ("return_logprobs", r"return_logprobs \(did you mean return_logprob\?\); options are cache_salt,"),
    ],
)
def test_an_unknown_option_is_told_where_it_belongs(generate, option, sentence):
    with pytest.raises(TypeError, match=sentence):
        generate([1], **{option: 1})


def test_submit_takes_one_prompt(fake):
    with SchedulerClient(fake.endpoint) as client:
        assert client.submit(torch.tensor([1, 2]), {"max_new_tokens": 1}).result().output_ids == [2, 1, 0]
        with pytest.raises(InvalidRequest, match="submit takes one prompt, not a list of 2"):
            client.submit([[1], [2]])
        with pytest.raises(InvalidRequest, match="is text"):
            client.submit("Hello")


def test_score_takes_arrays_too():
    scores = Scores(torch.tensor([[1, 2], [3, 4]]), torch.tensor([1, 1]), 1.0)
    assert (scores.request.input_ids, scores.request.start) == ([[1, 2], [3, 4]], [1, 1])
    with pytest.raises(InvalidRequest, match="is text"):
        Scores("Hello", 1, 1.0)


def by_position(request: ScoreReqInput):
    yield ScoreReqOutput(
        id=request.id,
        logprobs=[
            floats(-float(i) for i in range(start, len(ids)))
            for ids, start in zip(request.input_ids, request.start, strict=True)
        ],
    )


def score(endpoint, handler, *args, **options):
    with FakeScheduler(endpoint, handler) as fake, SchedulerClient(endpoint) as client:
        return client.score(*args, **options), fake.next_request(ScoreReqInput)


def test_one_sequence_gives_one_list(endpoint):
    found, sent = score(endpoint, by_position, (7, 8, 9), start=1, temperature=0.5)
    assert found == [-1.0, -2.0]
    assert (sent.input_ids, sent.start, sent.temperature) == ([[7, 8, 9]], [1], 0.5)


def test_many_give_many_and_one_start_serves_all(endpoint):
    found, sent = score(endpoint, by_position, [[7, 8, 9], [5, 6]], start=2, message_id="m")
    assert found == [[-2.0], []]
    assert (sent.id, sent.start, sent.temperature) == ("m", [2, 2], 1.0)
    found, _ = score(endpoint, by_position, [[7, 8, 9], [5, 6]], start=[2, 1])
    assert found == [[-2.0], [-1.0]]


@pytest.mark.parametrize("lengths", [[1, 1], [2, 1, 1], [2], []])
def test_an_answer_of_other_lengths_is_refused(endpoint, lengths):
    def wrong(request):
        yield ScoreReqOutput(id=request.id, logprobs=[floats([0.0] * length) for length in lengths])

    with pytest.raises(InternalError, match=r"for \[2, 1\] tokens"):
        score(endpoint, wrong, [[7, 8, 9], [5, 6]], start=1)


@pytest.mark.parametrize(
    ("ids", "start"), [([[1, 2]], [1, 1]), ([[1, 2], [3, 4]], [1]), (["a"], 1), ([[1.5]], 1), ([[1]], [1.5])]
)
def test_invalid_scores_are_refused_before_sending(endpoint, ids, start):
    with (
        FakeScheduler(endpoint, by_position),
        SchedulerClient(endpoint) as client,
        pytest.raises(InvalidRequest),
    ):
        client.score(ids, start=start)
