"""Answers to a person's mistakes over HTTP: one sentence that names the mistake."""

import json

import httpx
import numpy as np
import pytest
from safetensors.numpy import save
from support.fake_scheduler import FakeScheduler
from support.http_server import listening

from caesura.client.serve.bodies import MAX_KEYS, UnknownKeys
from caesura.client.serve.openai.completions import CompletionRequest
from caesura.io_struct import UpdateWeightFromDiskReqInput

LABEL = "must be a string of at most 1024 characters without control characters, an integer or null"
GROUP = {"names": ["a"], "dtypes": ["F32"], "shapes": [[1]]}
SAMPLING = "sampling_params"
MISTAKES = {
    "/generate": [
        (
            {SAMPLING: {"max_tokens": 3}},
            "sampling_params.max_tokens is not known (did you mean max_new_tokens?); v",
        ),
        ({SAMPLING: {"n": 0}}, "sampling_params.n = 0 must be an integer from 1 to 1024 or null"),
        (
            {SAMPLING: {"return_logprob": True}},
            (
                "sampling_params.return_logprob is not known here: it stands next to sampling_params; "
                "valid are max_new_tokens, "
            ),
        ),
        ({"input_ids": [-1]}, "input_ids[0] = -1 must be an integer from 0 to "),
        ({"input_ids": None}, "either text or input_ids is needed"),
        ({"prompt": "Hello"}, "prompt is not known (did you mean text?); valid are text, "),
        ({"sampling_param": {"n": 2}}, "sampling_param is not known (did you mean sampling_params?)"),
        ({"max_new_tokens": 5}, "max_new_tokens is not known here: give sampling_params.max_new_tokens"),
        ({"max_tokens": 5}, "max_tokens is not known here: give sampling_params.max_new_tokens"),
        ({"input_ids": [1] * 20_000, "top_p": 0.5}, "top_p is not known here: give sampling_params.top_p"),
        (b"mode=in_place", "the body is not valid JSON: invalid character (byte 0)"),
        (b"", "the body is empty"),
        ([1], "the body = [1] must be an object"),
    ],
    "/pause_generation": [
        (
            {"mode": "inplace"},
            "mode = 'inplace' must be 'abort', 'in_place' or 'retract' (did you mean 'in_place'?)",
        ),
        (b"{mode: 1}", "the body is not valid JSON: object keys must be strings (byte 1)"),
        (
            {"mod": "in_place"},
            "mod is not known (did you mean mode?); valid are mode, lease_s, on_lease_expiry",
        ),
    ],
    "/pause_generation?mode=in_place": [
        ({}, "the query is not read here: give mode in the body, a JSON object")
    ],
    "/continue_generation": [([1], "the body must be a JSON object")],
    "/update_weights_from_disk": [
        ({}, "model_path is missing"),
        ({"path": "/x"}, "path is not known (did you mean model_path?)"),
        ({"model_path": "/m/x", "weight_version": True}, f"weight_version = True {LABEL}"),
        (
            {"model_path": "/etc"},
            (
                "model_path = '/etc' is outside /m, the folder that this server loads weights from "
                "(--weights-root)"
            ),
        ),
        ({"model_path": "/m/x", "files": ["a"]}, "files is not known"),
    ],
    "/update_weights_from_tensor": [
        (
            save({"weight": np.zeros(4, np.float32)}),
            (
                "the body is not valid JSON: invalid character (byte 0); it looks like a safetensors file, "
                "whose Content-Type is application/octet-stream"
            ),
        )
    ],
    "/update_weights_from_distributed": [
        ({"names": ["a"]}, "dtypes is missing"),
        ({**GROUP, "shapes": [["one"]]}, "shapes[0][0] = 'one' must be an integer"),
        ({**GROUP, "flush": False}, "flush is not known (did you mean flush_cache?)"),
    ],
    "/flush_cache": [
        ({"timeout": 3}, "the options of /flush_cache stand in its query (?timeout=30), not in a body")
    ],
    "/flush_cache?timeouts=3": [({}, "timeouts is not known (did you mean timeout?)")],
    "/flush_cache?timeout=soon": [({}, "timeout = 'soon' must be a number from 0 to 3600")],
    "/v1/completions": [
        ({"prompt": [1], "max_tokens": -1}, "max_tokens = -1 must be an integer of at least 0 or null")
    ],
    "/tokenize": [
        ({"prompt": "Hello", "add_special_token": False}, "add_special_token is not known (did you")
    ],
    "/update_weight_version": [({"new_version": "2", "abort_all": False}, "abort_all is not known (did you")],
    "/release_memory_occupation": [
        (
            {"tags": ["kv"]},
            "tags[0] = 'kv' must be 'cuda_graph', 'kv_cache' or 'weights' (did you mean 'kv_cache'?)",
        )
    ],
    **{
        path: [({given: 1}, f"{given} is not known (did you mean {meant}?)")]
        for path, given, meant in [
            ("/continue_generation?", "torch_empty_cach", "torch_empty_cache"),
            ("/release_memory_occupation?", "tag", "tags"),
            ("/resume_memory_occupation", "tag", "tags"),
            ("/abort_request", "abort", "abort_all"),
            ("/weights_checker", "actions", "action"),
            ("/begin_weight_update", "deadline", "deadline_s"),
            ("/end_weight_update", "commits", "commit"),
            ("/destroy_weights_update_group", "group", "group_name"),
        ]
    },
}


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    with FakeScheduler(f"ipc://{tmp_path_factory.mktemp('s')}/s") as scheduler:
        yield scheduler


@pytest.fixture(scope="module")
def server(fake):
    with listening(endpoint=fake.endpoint, connect_timeout=None, weights_root="/m") as found:
        yield found


def post(server, path, body, method="POST"):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.request(
        method, server.url + path, content=content, headers={"content-type": "application/json"}, timeout=None
    )
    return response.status_code, response.json()


def sentence_of(body):
    return body["message"] if "message" in body else body["error"]["message"]


@pytest.mark.parametrize(
    "path,body,sentence", [(path, *mistake) for path, mistakes in MISTAKES.items() for mistake in mistakes]
)
def test_a_mistake_is_told_in_a_sentence(server, path, body, sentence):
    if path == "/generate" and isinstance(body, dict):
        body = {"input_ids": [1], **body}
    status, answer = post(server, path, body)
    assert status == 400
    said = sentence_of(answer)
    assert said.startswith(sentence)
    assert "`" not in said
    assert "$" not in said


def test_unknown_keys_of_openais_routes_are_logged_once(server, caplog):
    keys = {"max_tokenz": 5, "user": "u", "\x1b[2Jlonger": 1, "request_id": "r", "do_sample": True}
    asked = {"model": "another", "prompt": [1], **keys}
    long = {"model": "another", "prompt": [1] * 20_000, "max_new_tokens": 5}
    chat = {"model": "another", "messages": [], **keys}
    for path, bodies in {"/v1/completions": [asked, asked, long], "/v1/chat/completions": [chat]}.items():
        assert [post(server, path, body)[0] for body in bodies] == [404] * len(bodies)
    told = {
        "max_tokenz": " (did you mean max_tokens?)",
        "\\x1b[2Jlonger": "",
        "do_sample": " (temperature = 0 decodes greedily, any other samples)",
    }
    expected = [
        f"{path}: the key {key} is not known and ignored{hint}; requests with it are not mentioned again"
        for path, further in (
            ("/v1/completions", {"max_new_tokens": " (did you mean max_tokens?)"}),
            ("/v1/chat/completions", {}),
        )
        for key, hint in (told | further).items()
    ]
    assert [each.getMessage() for each in caplog.records if each.name.endswith("serve.bodies")] == expected


def test_the_log_does_not_grow_with_invented_keys(caplog):
    keys = UnknownKeys()
    for number in range(3):
        body = json.dumps({"prompt": [1], **{f"{number}_{i}": 0 for i in range(MAX_KEYS)}}).encode()
        keys.note("/v1/completions", body, CompletionRequest, frozenset())
    assert len(caplog.records) == MAX_KEYS
    assert caplog.messages[-1].endswith("nor are further unknown keys")


def test_an_unknown_route_is_answered_with_the_nearest(server):
    status, answer = post(server, "/pause_generatoin", {})
    nearest = "there is no route /pause_generatoin (did you mean /pause_generation?)"
    assert (status, sentence_of(answer)) == (404, nearest)


@pytest.mark.parametrize(
    "method,path,allowed",
    [
        ("GET", "/pause_generation", {"POST"}),
        ("DELETE", "/generate", {"POST", "PUT"}),
        ("POST", "/health", {"GET"}),
        ("PUT", "/flush_cache", {"GET", "POST"}),
        ("POST", "/v1/models", {"GET"}),
    ],
)
def test_a_wrong_method_is_told_the_right_ones(server, method, path, allowed):
    response = httpx.request(method, server.url + path)
    named = response.headers["Allow"]
    assert (response.status_code, set(named.split(", ")) - {"OPTIONS"}) == (405, allowed)
    assert sentence_of(response.json()) == f"{method} is not allowed on {path}, only {named}"


@pytest.mark.parametrize("label", [3, "3"])
def test_a_step_counter_is_a_label(server, fake, label):
    status, _ = post(server, "/update_weights_from_disk", {"model_path": "/m/x", "weight_version": label})
    assert status == 200
    assert fake.next_request(UpdateWeightFromDiskReqInput).weight_version == "3"
