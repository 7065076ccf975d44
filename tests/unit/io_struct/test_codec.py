"""``decode_request`` on bytes that no honest client sends: a message, or an error in words."""

import json
import tracemalloc
from typing import get_args

import msgspec
import pytest
from support.record_frames import FOLDER

from caesura.io_struct import (
    WIRE_VERSION,
    AbortReq,
    AbortReqOutput,
    CaesuraError,
    ErrorCode,
    ErrorReply,
    GetStatusReqInput,
    SamplingParams,
    SdeParams,
    ToClient,
    ToScheduler,
    decode_reply,
    decode_request,
    encode,
    encode_reply,
)
from caesura.io_struct.field_errors import nearest, shown

RECORDED = json.loads((FOLDER / "wire-{}.{}.json".format(*WIRE_VERSION)).read_text(encoding="utf-8"))[
    "frames"
]
REQUESTS = [
    decode_request(bytes.fromhex(each["frame"])) for each in RECORDED if each["direction"] == "to_scheduler"
]


def packed(**fields: object) -> bytes:
    return msgspec.msgpack.encode(fields)


def refused(frame: bytes) -> CaesuraError:
    with pytest.raises(CaesuraError) as caught:
        decode_request(frame)
    assert caught.value.code == ErrorCode.MALFORMED_MESSAGE
    return caught.value


def test_a_reply_is_no_request_and_a_request_no_reply():
    assert not set(get_args(ToScheduler)) & set(get_args(ToClient))
    refused(encode(AbortReqOutput(id="a", aborted=1)))
    refused(encode(ErrorReply(id="a", code=ErrorCode.BUSY, message="")))
    with pytest.raises(msgspec.DecodeError):
        decode_reply(encode(AbortReq()))


@pytest.mark.parametrize(
    "frame",
    [
        b"\xc1",
        b"\x82\xa4type\xb0GenerateReqInput\xa9input_ids\xdd\xff\xff\xff\xff",
        b"\x81\xa4type" * 50_000,
        b"\x81\xa2id\xa2\xed\xa0",
        packed(type="NoSuchThing", id="x"),
        packed(type=5),
        packed(id="x"),
        encode(GetStatusReqInput()) + b"\x00",
        encode(REQUESTS[0])[:-1],
    ],
    ids=range(9),
)
def test_garbage_is_one_kind_of_error(frame):
    refused(frame)


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "GetStatusReqInput", "surprise": 1},
        {"type": "AbortReq", "abort_all": "yes"},
        {"type": "GenerateReqInput"},
        {"type": "GenerateReqInput", "input_ids": [1.5]},
        {"type": "GenerateReqInput", "input_ids": [True]},
        {"type": "GenerateReqInput", "input_ids": ["1"]},
        {"type": "GenerateReqInput", "input_ids": None},
        {"type": "GenerateReqInput", "input_ids": [1], "sampling_params": {"heat": 1.0}},
        {"type": "BeginWeightUpdateReqInput", "deadline_s": float("nan")},
        {"type": "BeginWeightUpdateReqInput", "deadline_s": 0.0},
        {"type": "FlushCacheReqInput", "timeout_s": float("nan")},
        {"type": "FlushCacheReqInput", "timeout_s": -1.0},
        {"type": "PauseGenerationReqInput", "lease_s": -1.0},
        {"type": "WeightsCheckerReqInput", "action": "eat"},
        {"type": "UpdateWeightFromDiskReqInput", "model_path": b"/bytes"},
    ],
    ids=lambda fields: "-".join(f"{k}={v}" for k, v in fields.items() if k != "type")[:40],
)
def test_a_wrong_field_is_refused_and_its_caller_found(fields):
    assert refused(packed(id="the caller", **fields)).detail["id"] == "the caller"


@pytest.mark.parametrize("value", [5, None, b"x", ["a"], {"a": 1}])
def test_an_id_that_is_no_string_is_not_echoed(value):
    assert refused(packed(type="GetStatusReqInput", id=value)).detail["id"] == ""


def test_the_refusal_of_a_long_id_echoes_it():
    long = "x" * 129
    assert refused(packed(type="GetStatusReqInput", id=long)).detail["id"] == long


@pytest.mark.parametrize("type_", ["GetStatusReqInput", "no such type"])
def test_refusing_takes_no_more_memory_than_the_frame(type_):
    """A million empty lists in an unknown field would be sixty times the frame, as objects."""
    frame = b"\x82\xa4type" + msgspec.msgpack.encode(type_) + b"\xa1x\xdd\x00\x10\x00\x00" + b"\x90" * 2**20
    tracemalloc.start()
    try:
        refused(frame)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(frame)


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "\1" * 1_000_000},
        {"type": "GetStatusReqInput", "\1" * 1_000_000: 1},
        {"type": "PauseGenerationReqInput", "mode": "\1" * 1_000_000},
    ],
)
def test_a_refusal_does_not_repeat_what_it_refuses(fields):
    assert len(refused(packed(**fields)).message) < 1000


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "PauseGenerationReqInput", "owner": "o"},
        {"type": "GenerateReqInput", "input_ids": [1], "cache_salt": "s"},
        {"type": "UpdateWeightFromDiskReqInput", "model_path": "/x", "weight_version": "v"},
        {"type": "EndWeightUpdateReqInput", "weight_version": "v"},
    ],
)
def test_stored_error_texts_are_short(fields):
    *_, name = fields
    decode_request(packed(**{**fields, name: "é" * 1024}))
    refused(packed(**{**fields, name: "é" * 1025}))


def test_an_error_about_an_absurd_number_can_be_sent():
    error = CaesuraError(
        ErrorCode.OUT_OF_MEMORY, "no room", needed_bytes=1 << 80, shapes=[[1 << 64], {"n": -1}]
    )
    reply = decode_reply(encode_reply(error.to_reply("i")))
    assert reply.detail == {"needed_bytes": str(1 << 80), "shapes": [[str(1 << 64)], {"n": -1}]}


GENERATE = {"type": "GenerateReqInput", "input_ids": [1]}
SAMPLING = (
    "max_new_tokens, temperature, top_p, top_k, min_p, frequency_penalty, presence_penalty, "
    "repetition_penalty, logit_bias, allowed_token_ids, bad_words_ids, "
    "min_new_tokens, stop_token_ids, ignore_eos, seed, grammar, n, forced_output_ids"
)


def said(message: object) -> str:
    return refused(msgspec.msgpack.encode(message)).message


@pytest.mark.parametrize(
    "message,sentence",
    [
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
        ("n_samples", " (did you mean n?)"),
        ("eos_token_id", " (did you mean stop_token_ids?)"),
        ("do_sample", GREEDY),
        ("num_beams", ": there is no beam search"),
        ("stop", f"{TEXT}, and stop_token_ids"),
        ("skip_special_tokens", TEXT),
        ("top_logprobs", " (did you mean top_logprobs_num, next to SamplingParams?)"),
        ("logprobs", " (did you mean return_logprob, next to SamplingParams?)"),
        ("return_logprob", " here: it stands next to SamplingParams"),
        ("regex", ": caesura.client.grammar makes a grammar of it"),
    ],
)
def test_misspelled_parameters_get_the_right_name(keyword, hint):
    with pytest.raises(TypeError) as caught:
        SamplingParams(temperature=0.5, **{keyword: 1})
    assert str(caught.value) == f"SamplingParams: {keyword} is not known{hint}; valid are {SAMPLING}"
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_misspelled_noise_is_answered_with_the_right_name():
    said = r"SdeParams: noise is not known \(did you mean noise_level\?\); valid are type, noise_l"
    with pytest.raises(TypeError, match=said):
        SdeParams(noise=0.5)


def test_sampling_parameters_are_made_as_ever():
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(5)
    made = SamplingParams(n=2)
    assert made == msgspec.convert({"n": 2}, SamplingParams)
    assert made == msgspec.structs.replace(SamplingParams(), n=2)


@pytest.mark.parametrize("given,found", [("ending", None), ("topp", "top_p"), ("zzz", None)])
def test_the_nearest_name(given, found):
    assert nearest(given, SAMPLING.split(", ")) == found
