"""Forms of prompts, parameters and results of text and images: what the client takes, and what it refuses."""

import msgspec
import numpy
import numpy as np
import pytest
import torch
from support.fake_scheduler import FakeScheduler, floats

from caesura.client import ImageTensor, InternalError, InvalidRequest, SamplingParams, SchedulerClient
from caesura.client.connection.image_generation import decode_images, plan_images
from caesura.client.connection.prompts import Scores
from caesura.io_struct import (
    FinishReason,
    GenerateImagesReqOutput,
    GenerateReqInput,
    ResultTensor,
    ScoreReqOutput,
    WeightVersionSpan,
)


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
        ({"max_tokens": 5}, r"sampling_params.max_tokens is not known \(did you mean max_new_tokens\?\)"),
        ({"temperature": "hot"}, "sampling_params.temperature = 'hot' must be a number"),
        ({"n": 0}, "sampling_params.n = 0 must be an integer from 1 to 1024"),
        ("greedy", "= 'greedy' must be a SamplingParams or a dict, or a list of one for each prompt"),
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
        ("return_logprobs", r"\(did you mean return_logprob\?\); options are adapter, cache_salt,"),
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


@pytest.mark.parametrize("lengths", [[1, 1], [2, 1, 1], [2], []])
def test_scores_of_other_lengths_are_refused(endpoint, lengths):
    def wrong(request):
        yield ScoreReqOutput(id=request.id, logprobs=[floats([0.0] * length) for length in lengths])

    refused = pytest.raises(InternalError, match=r"for \[2, 1\] tokens")
    with FakeScheduler(endpoint, wrong), SchedulerClient(endpoint) as client, refused:
        client.score([[7, 8, 9], [5, 6]], start=1)


@pytest.mark.parametrize(
    ("ids", "start"), [([[1, 2]], [1, 1]), ([[1, 2], [3, 4]], [1]), (["a"], 1), ([[1.5]], 1), ([[1]], [1.5])]
)
def test_invalid_scores_are_refused_before_sending(ids, start):
    with pytest.raises(InvalidRequest):
        Scores(ids, start, 1.0)


LATENTS = np.arange(3 * 2 * 2, dtype="<f4").reshape(3, 2, 2)
FRAMES = [each.astype("<f4").tobytes() for each in (LATENTS, np.array([-1.5, 0.0]), np.array([0.5, 0.0]))]
RESULT = GenerateImagesReqOutput(
    rid="r",
    index=0,
    finish_reason=FinishReason(type="abort"),
    weight_versions=[
        WeightVersionSpan(version="a", epoch=0, start=0, end=1),
        WeightVersionSpan(version="b", epoch=1, start=1, end=2),
    ],
    seed=1,
    steps=5,
    steps_done=2,
    step_indices=[0, 1],
    latent_indices=[0, 1, 2],
    tensors=[
        ResultTensor(name="latents", dtype="F32", shape=[3, 2, 2], buffer=0),
        ResultTensor(name="log_probs", dtype="F32", shape=[2], buffer=1),
        ResultTensor(name="noise_stds", dtype="F32", shape=[2], buffer=2),
    ],
)


def test_a_result_is_views_of_its_frames():
    output = decode_images(RESULT, FRAMES)
    assert np.array_equal(np.asarray(output.latents), LATENTS)
    assert (output.log_probs, output.noise_stds, output.timesteps) == ([-1.5, 0.0], [0.5, 0.0], [])
    assert (output.image, output.final_latents, output.embeds) == (None, None, {})
    assert not np.asarray(output.latents).flags.writeable


def changed(**fields):
    return msgspec.structs.replace(RESULT, **fields)


def tensor(name="latents", dtype="F32", shape=(3, 2, 2), buffer=0):
    return [ResultTensor(name=name, dtype=dtype, shape=list(shape), buffer=buffer), *RESULT.tensors[1:]]


@pytest.mark.parametrize(
    "result",
    [
        changed(step_indices=[0]),
        changed(latent_indices=[0, 1]),
        changed(steps_done=3),
        changed(weight_versions=[]),
        changed(tensors=tensor(buffer=3)),
        changed(tensors=tensor(buffer=-1)),
        changed(tensors=tensor(dtype="F7")),
        changed(tensors=tensor(shape=(3, 2, 3))),
        changed(tensors=tensor(shape=(-3, -2, 2))[:1] + RESULT.tensors[:1]),
    ],
)
def test_a_result_whose_parts_do_not_fit_is_refused(result):
    with pytest.raises(InternalError):
        decode_images(result, FRAMES)


def plan(prompt=None, embeds=None, **options):
    return plan_images(prompt, embeds, options, rid=None, message_id="m")


def test_arrays_tensors_and_results_become_frames():
    values = np.asarray([[1.0, 2.0]], np.float32)
    given = {
        "numpy": values,
        "torch": torch.from_numpy(values),
        "half": torch.from_numpy(values).bfloat16(),
        "result": ImageTensor("BF16", (1, 2), b"1234"),
        "column": values.T,
    }
    work = plan(embeds=given)
    specs = {spec.name: (spec.dtype, spec.shape, spec.nbytes) for spec in work.requests[0].tensors}
    assert specs["numpy"] == specs["torch"] == specs["half"] == ("F32", [1, 2], 8)
    assert (specs["result"], specs["column"]) == (("BF16", [1, 2], 4), ("F32", [2, 1], 8))
    assert work.buffers[0] == work.buffers[1] == work.buffers[2] == work.buffers[4] == values.tobytes()


@pytest.mark.parametrize("embeds", [{"a": "text"}, {"a": [1.0]}, {"a": np.asarray(["x"])}, {"a": None}])
def test_embeddings_that_are_no_arrays_are_refused(embeds):
    with pytest.raises(InvalidRequest):
        plan(embeds=embeds)


@pytest.mark.parametrize("prompt", [[1], [None, 2], 3.5])
def test_a_prompt_that_is_no_text_is_refused(prompt):
    with pytest.raises(InvalidRequest):
        plan(prompt)


def test_numpy_has_no_bfloat16_and_is_told_so():
    with pytest.raises(AttributeError, match="BF16"):
        np.asarray(ImageTensor("BF16", (1,), b"12").__array_interface__)
