"""Answers to a person's mistakes over HTTP: one sentence that names the mistake."""

import json
import urllib.error
import urllib.request

import numpy as np
import pytest
from safetensors.numpy import save
from support.fake_scheduler import FakeScheduler
from support.http_server import listening

from caesura.client.serve.bodies import MAX_KEYS, UnknownKeys
from caesura.client.serve.openai.completions import CompletionRequest
from caesura.io_struct import UpdateWeightFromDiskReqInput

LABEL = "must be a string of at most 1024 characters without control characters, an integer or null"
MISTAKES = [
    (
        "/generate",
        {"input_ids": [1], "sampling_params": {"max_tokens": 3}},
        "sampling_params.max_tokens is not known (did you mean max_new_tokens?); valid are max_new_tokens, ",
    ),
    (
        "/generate",
        {"input_ids": [1], "sampling_params": {"n": 0}},
        "sampling_params.n = 0 must be an integer from 1 to 1024 or null",
    ),
    (
        "/generate",
        {"input_ids": [1], "sampling_params": {"temperature": "hot"}},
        "sampling_params.temperature = 'hot' must be a number or null",
    ),
    (
        "/generate",
        {"input_ids": [1], "sampling_params": {"return_logprob": True}},
        (
            "sampling_params.return_logprob is not known here: it stands next to sampling_params; valid are "
            "max_new_tokens, "
        ),
    ),
    ("/generate", {"input_ids": "Hello"}, "input_ids = 'Hello' must be a list of integers from 0 to "),
    ("/generate", {"input_ids": [-1]}, "input_ids[0] = -1 must be an integer from 0 to "),
    ("/generate", {}, "either text or input_ids is needed"),
    ("/generate", {"prompt": "Hello"}, "prompt is not known (did you mean text?); valid are text, "),
    (
        "/generate",
        {"input_ids": [1], "sampling_param": {"n": 2}},
        "sampling_param is not known (did you mean sampling_params?)",
    ),
    (
        "/generate",
        {"input_ids": [1], "max_new_tokens": 5},
        "max_new_tokens is not known here: give sampling_params.max_new_tokens",
    ),
    (
        "/generate",
        {"input_ids": [1], "max_tokens": 5},
        "max_tokens is not known here: give sampling_params.max_new_tokens",
    ),
    (
        "/generate",
        {"input_ids": [1] * 20_000, "top_p": 0.5},
        "top_p is not known here: give sampling_params.top_p",
    ),
    ("/generate", b"mode=in_place", "the body is not valid JSON: invalid character (byte 0)"),
    ("/generate", b"", "the body is empty"),
    (
        "/update_weights_from_tensor",
        save({"weight": np.zeros(4, np.float32)}),
        (
            "the body is not valid JSON: invalid character (byte 0); it looks like a safetensors file, whose "
            "Content-Type is application/octet-stream"
        ),
    ),
    ("/generate", [1], "the body = [1] must be an object"),
    (
        "/pause_generation",
        {"mode": "inplace"},
        "mode = 'inplace' must be 'abort', 'in_place' or 'retract' (did you mean 'in_place'?)",
    ),
    ("/pause_generation", {"lease_s": -1}, "lease_s = -1 must be a number above 0, at most 86400 or null"),
    ("/pause_generation", b"{mode: 1}", "the body is not valid JSON: object keys must be strings (byte 1)"),
    ("/continue_generation", [1], "the body must be a JSON object"),
    ("/update_weights_from_disk", {}, "model_path is missing"),
    ("/update_weights_from_disk", {"path": "/x"}, "path is not known (did you mean model_path?)"),
    (
        "/update_weights_from_disk",
        {"model_path": "/m/x", "weight_version": True},
        f"weight_version = True {LABEL}",
    ),
    (
        "/update_weights_from_disk",
        {"model_path": "/etc"},
        "model_path = '/etc' is outside /m, the folder that this server loads weights from (--weights-root)",
    ),
    (
        "/update_weights_from_tensor",
        {"serialized_named_tensors": "x"},
        "serialized_named_tensors = 'x' must be a list of strings",
    ),
    ("/update_weights_from_distributed", {"names": ["a"]}, "dtypes is missing"),
    (
        "/update_weights_from_distributed",
        {"names": ["a"], "dtypes": ["F32"], "shapes": [["one"]]},
        "shapes[0][0] = 'one' must be an integer",
    ),
    ("/update_weights_from_ipc", {"zmq_handles": "x"}, "zmq_handles = 'x' must be an object"),
    (
        "/release_memory_occupation",
        {"tags": ["kv"]},
        "tags[0] = 'kv' must be 'cuda_graph', 'kv_cache' or 'weights' (did you mean 'kv_cache'?)",
    ),
    (
        "/pause_generation",
        {"mod": "in_place"},
        "mod is not known (did you mean mode?); valid are mode, lease_s, on_lease_expiry",
    ),
    (
        "/pause_generation?mode=in_place",
        {},
        "the query is not read here: give mode in the body, a JSON object",
    ),
    (
        "/continue_generation",
        {"torch_empty_cach": False},
        "torch_empty_cach is not known (did you mean torch_empty_cache?)",
    ),
    ("/release_memory_occupation", {"tag": ["weights"]}, "tag is not known (did you mean tags?)"),
    ("/resume_memory_occupation", {"tag": ["weights"]}, "tag is not known (did you mean tags?)"),
    ("/abort_request", {"abort": True}, "abort is not known (did you mean abort_all?)"),
    ("/update_weight_version", {"new_version": "2", "abort_all": False}, "abort_all is not known (did you"),
    ("/weights_checker", {"actions": "compare"}, "actions is not known (did you mean action?)"),
    ("/begin_weight_update", {"deadline": 3}, "deadline is not known (did you mean deadline_s?)"),
    ("/end_weight_update", {"commits": False}, "commits is not known (did you mean commit?)"),
    ("/destroy_weights_update_group", {"group": "x"}, "group is not known (did you mean group_name?)"),
    (
        "/update_weights_from_distributed",
        {"names": [], "dtypes": [], "shapes": [], "flush": False},
        "flush is not known (did you mean flush_cache?)",
    ),
    ("/update_weights_from_disk", {"model_path": "/m/x", "files": ["a"]}, "files is not known"),
    ("/tokenize", {"prompt": "Hello", "add_special_token": False}, "add_special_token is not known (did you"),
    ("/flush_cache?timeouts=3", {}, "timeouts is not known (did you mean timeout?)"),
    (
        "/flush_cache",
        {"timeout": 3},
        "the options of /flush_cache stand in its query (?timeout=30), not in a body",
    ),
    ("/flush_cache?timeout=soon", {}, "timeout = 'soon' must be a number from 0 to 3600"),
    (
        "/v1/completions",
        {"prompt": [1], "max_tokens": -1},
        "max_tokens = -1 must be an integer of at least 0 or null",
    ),
    ("/v1/chat/completions", {"messages": "hi"}, "messages = 'hi' must be a list of objects"),
]


WRONG_METHODS = [
    ("GET", "/pause_generation", {"POST"}),
    ("DELETE", "/generate", {"POST", "PUT"}),
    ("POST", "/health", {"GET"}),
    ("PUT", "/flush_cache", {"GET", "POST"}),
    ("POST", "/v1/models", {"GET"}),
]


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    with FakeScheduler(f"ipc://{tmp_path_factory.mktemp('s')}/s") as scheduler:
        yield scheduler


@pytest.fixture(scope="module")
def server(fake):
    with listening(endpoint=fake.endpoint, connect_timeout=None, weights_root="/m") as found:
        yield found


def post(server, path, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def sentence_of(body):
    return body["message"] if "message" in body else body["error"]["message"]


@pytest.mark.parametrize("path,body,sentence", MISTAKES)
def test_a_mistake_is_told_in_a_sentence(server, path, body, sentence):
    status, answer = post(server, path, body)
    assert status == 400
    said = sentence_of(answer)
    assert said.startswith(sentence)
    assert "`" not in said
    assert "$" not in said


def test_unknown_keys_of_openai_routes_are_named_once_in_the_log(server, caplog):
    asked = {
        "model": "another",
        "max_tokenz": 5,
        "user": "u",
        "\x1b[2Jlonger": 1,
        "request_id": "r",
        "do_sample": True,
    }
    long = {"model": "another", "prompt": [1] * 20_000, "max_new_tokens": 5}
    bodies = {
        "/v1/completions": [{**asked, "prompt": [1]}, {**asked, "prompt": [1]}, long],
        "/v1/chat/completions": [{**asked, "messages": []}],
    }
    for path, sent in bodies.items():
        for body in sent:
            assert post(server, path, body)[0] == 404
    said = [each.getMessage() for each in caplog.records if each.name.endswith("serve.bodies")]
    of_asked = [
        (
            "the key max_tokenz is not known and ignored (did you mean max_tokens?); "
            "requests with it are not mentioned again"
        ),
        "the key \\x1b[2Jlonger is not known and ignored; requests with it are not mentioned again",
        (
            "the key do_sample is not known and ignored "
            "(temperature = 0 decodes greedily, any other samples); "
            "requests with it are not mentioned again"
        ),
    ]
    of_long = (
        "the key max_new_tokens is not known and ignored (did you mean max_tokens?); "
        "requests with it are not mentioned again"
    )
    assert said == [
        *(f"/v1/completions: {each}" for each in [*of_asked, of_long]),
        *(f"/v1/chat/completions: {each}" for each in of_asked),
    ]


def test_the_log_does_not_grow_with_invented_keys(caplog):
    keys = UnknownKeys()
    for number in range(3):
        body = json.dumps({"prompt": [1], **{f"{number}_{i}": 0 for i in range(MAX_KEYS)}}).encode()
        keys.note("/v1/completions", body, CompletionRequest, frozenset())
    assert len(caplog.records) == MAX_KEYS
    assert caplog.messages[-1].endswith("nor are further unknown keys")


def test_an_unknown_route_is_answered_with_the_nearest(server):
    status, answer = post(server, "/pause_generatoin", {})
    assert (status, sentence_of(answer)) == (
        404,
        "there is no route /pause_generatoin (did you mean /pause_generation?)",
    )


@pytest.mark.parametrize("method,path,allowed", WRONG_METHODS)
def test_a_wrong_method_is_told_the_right_ones(server, method, path, allowed):
    request = urllib.request.Request(server.url + path, method=method)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    with refused.value as response:
        named, said = response.headers["Allow"], sentence_of(json.loads(response.read()))
    assert (response.status, set(named.split(", ")) - {"OPTIONS"}) == (405, allowed)
    assert said == f"{method} is not allowed on {path}, only {named}"


@pytest.mark.parametrize("label", [3, "3"])
def test_a_step_counter_is_a_label(server, fake, label):
    status, _ = post(server, "/update_weights_from_disk", {"model_path": "/m/x", "weight_version": label})
    assert status == 200
    assert fake.next_request(UpdateWeightFromDiskReqInput).weight_version == "3"
