"""Refused values in words: the field, what was given, what is valid."""

import msgspec
import pytest

from caesura.io_struct import CaesuraError, SamplingParams, SdeParams, decode_request
from caesura.io_struct.field_errors import nearest, shown

GENERATE = {"type": "GenerateReqInput", "input_ids": [1]}
SAMPLING = (
    "max_new_tokens, temperature, top_p, top_k, min_p, frequency_penalty, presence_penalty, "
    "repetition_penalty, logit_bias, allowed_token_ids, "
    "min_new_tokens, stop_token_ids, ignore_eos, seed, n"
)


def said(message: object) -> str:
    with pytest.raises(CaesuraError) as caught:
        decode_request(msgspec.msgpack.encode(message))
    assert caught.value.code == "malformed_message"
    return caught.value.message


@pytest.mark.parametrize(
    "message,sentence",
    [
        (
            {"type": "PauseGenerationReqInput", "mode": "inplace"},
            "mode = 'inplace' must be 'abort', 'in_place' or 'retract' (did you mean 'in_place'?)",
        ),
        (
            {"type": "PauseGenerationReqInput", "lease_s": -1},
            "lease_s = -1 must be a number above 0, at most 86400 or null",
        ),
        (
            {"type": "ReleaseMemoryOccupationReqInput", "tags": ["kv"]},
            "tags[0] = 'kv' must be 'cuda_graph', 'kv_cache' or 'weights' (did you mean 'kv_cache'?)",
        ),
        ({"type": "GenerateReqInput"}, "input_ids is missing"),
        (
            {**GENERATE, "input_ids": "abc"},
            "input_ids = 'abc' must be a list of integers from 0 to 2147483647",
        ),
        (
            {"type": "GenerateImagesReqInput", "sigmas": []},
            "sigmas = [] must be a list of 1 to 1000 numbers or null",
        ),
        (
            {"type": "GenerateImagesReqInput", "prompt_ids": [[1]] * 9},
            (
                f"prompt_ids = {[[1]] * 9} must be a list of at most 8 lists of integers "
                "from 0 to 2147483647 or null"
            ),
        ),
        ({**GENERATE, "input_ids": [5, -1]}, "input_ids[1] = -1 must be an integer from 0 to 2147483647"),
        ({**GENERATE, "stream": "yes"}, "stream = 'yes' must be true or false"),
        (
            {**GENERATE, "rid": "x" * 200},
            f"rid = '{'x' * 60}'… (200 characters) must be a string of 1 to 128 characters or null",
        ),
        (
            {**GENERATE, "sampling_params": {"max_tokens": 5}},
            f"sampling_params.max_tokens is not known (did you mean max_new_tokens?); valid are {SAMPLING}",
        ),
        (
            {**GENERATE, "sampling_params": {"logprobs": 5}},
            (
                "sampling_params.logprobs is not known (did you mean return_logprob, next to "
                f"sampling_params?); valid are {SAMPLING}"
            ),
        ),
        (
            {**GENERATE, "sampling_params": {"max_new_tokens": "ten"}},
            "sampling_params.max_new_tokens = 'ten' must be an integer or null",
        ),
        (
            {**GENERATE, "sampling_params": {"logit_bias": {"the": 1.0}}},
            "every key of sampling_params.logit_bias must be an integer from 0 to 2147483647",
        ),
        (
            {**GENERATE, "sampling_params": {"logit_bias": {5: "much"}}},
            "every value of sampling_params.logit_bias must be a number",
        ),
        ({**GENERATE, "sampling_params": {1: 2}}, "every key of sampling_params must be a string"),
        ({**GENERATE, "sampling_params": [1]}, "sampling_params = [1] must be an object"),
    ],
)
def test_an_invalid_field_is_refused_in_a_sentence(message, sentence):
    assert said(message) == sentence


def test_the_error_for_an_unknown_type_names_the_nearest():
    assert "did you mean GenerateReqInput?" in said({"type": "GenerateRequestInput"})
    assert "not a Caesura message" in said([])


def test_the_id_stays_with_the_error_whatever_the_field():
    with pytest.raises(CaesuraError) as caught:
        decode_request(msgspec.msgpack.encode({**GENERATE, "id": "a", "stream": 3}))
    assert caught.value.detail == {"id": "a", "field": "stream"}


def test_a_large_message_is_not_decoded_twice_to_be_refused():
    message = {**GENERATE, "input_ids": [1] * 100_000, "sampling_params": {"n": 0}}
    assert said(message) == "sampling_params.n must be an integer from 1 to 1024"


@pytest.mark.parametrize("name", ["x" * 100_000, "a - at `$.b`", "`", "\x1b[2J", ""])
def test_names_that_a_sender_chose_stay_short(name):
    assert len(said({**GENERATE, name: 1})) < 1000


def test_values_are_shown_short():
    assert shown("x" * 5000).endswith("(5000 characters)")
    assert shown([0] * 5000) == "list of 5000"
    assert len(shown({"a": "x" * 500})) < 80


GREEDY = ": temperature = 0 decodes greedily, any other samples"
TEXT = (
    ": it is about text, which caesura.client.text.TextClient and `caesura serve` make; the engine has tokens"
)


@pytest.mark.parametrize(
    "keyword,hint",
    [
        ("max_tokens", " (did you mean max_new_tokens?)"),
        ("max_length", " (did you mean max_new_tokens?)"),
        ("max_completion_tokens", " (did you mean max_new_tokens?)"),
        ("min_length", " (did you mean min_new_tokens?)"),
        ("n_samples", " (did you mean n?)"),
        ("num_return_sequences", " (did you mean n?)"),
        ("stop_tokens", " (did you mean stop_token_ids?)"),
        ("eos_token_id", " (did you mean stop_token_ids?)"),
        ("sampling_seed", " (did you mean seed?)"),
        ("temp", " (did you mean temperature?)"),
        ("do_sample", GREEDY),
        ("num_beams", ": there is no beam search"),
        ("stop", f"{TEXT}, and stop_token_ids"),
        ("skip_special_tokens", TEXT),
        ("top_logprobs", " (did you mean top_logprobs_num, next to SamplingParams?)"),
        ("logprobs", " (did you mean return_logprob, next to SamplingParams?)"),
        ("return_logprob", " here: it stands next to SamplingParams"),
        ("regex", ""),
    ],
)
def test_misspelled_sampling_parameters_are_answered_with_the_right_name(keyword, hint):
    with pytest.raises(TypeError) as caught:
        SamplingParams(temperature=0.5, **{keyword: 1})
    assert str(caught.value) == f"SamplingParams: {keyword} is not known{hint}; valid are {SAMPLING}"
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_misspelled_noise_is_answered_with_the_right_name():
    with pytest.raises(
        TypeError,
        match=r"SdeParams: noise is not known \(did you mean noise_level\?\); valid are type, noise_l",
    ):
        SdeParams(noise=0.5)


def test_sampling_parameters_are_made_as_ever():
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(5)
    assert (
        SamplingParams(n=2)
        == msgspec.convert({"n": 2}, SamplingParams)
        == msgspec.structs.replace(SamplingParams(), n=2)
    )


@pytest.mark.parametrize(
    "given,found",
    [
        ("max_tokens", "max_new_tokens"),
        ("temp", "temperature"),
        ("sampling_seed", "seed"),
        ("stop", "stop_token_ids"),
        ("min_length", "min_new_tokens"),
        ("ending", None),
        ("topp", "top_p"),
        ("zzz", None),
    ],
)
def test_the_nearest_name(given, found):
    assert nearest(given, SAMPLING.split(", ")) == found
