"""What trainers ask of a server before and between rollouts, as their code does it: checks at attach, odd fields, other routes."""

import base64
import threading

import pytest
from support.checkpoints import make_checkpoint
from support.http_serve import ServedEngine, make_text_model, served
from support.waiting import eventually


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    with served("--model", str(make_text_model(tmp_path_factory.mktemp("dialects") / "text"))) as engine:
        yield engine


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """Of a model with experts, with everything that a colocated reward server needs."""
    path = tmp_path_factory.mktemp("dialects") / "experts"
    make_checkpoint(path, "qwen3-moe", seed=2)
    with served("--model", str(path), "--enable-memory-saver", "--enable-weights-cpu-backup") as engine:
        yield engine


def attach(server: ServedEngine, expected: dict[str, object]) -> None:
    """slime's check of an external engine: each of its own settings that it compares must be equal."""
    for path in ("/server_info", "/get_server_info"):
        actual = server.get(path).json()
        for name, value in expected.items():
            assert actual.get(name) == value, name


def test_slime_attaches_to_a_server_with_defaults(dense):
    attach(dense, {"enable_memory_saver": False, "dtype": "float32", "enable_return_routed_experts": False})
    attach(dense, dict.fromkeys(("tp_size", "pp_size", "ep_size", "moe_dp_size", "num_gpus"), 1))


def test_slime_attaches_with_offload_and_routing_replay(experts):
    attach(experts, {"enable_memory_saver": True, "enable_return_routed_experts": True})
    attach(experts, {"enable_weights_cpu_backup": True})


def test_memory_is_released_only_where_the_server_says_so(dense):
    refused = dense.post("/release_memory_occupation", {})
    assert refused.status_code == 400
    assert "--enable-memory-saver" in refused.json()["error"]["message"]
    assert dense.ok("/resume_memory_occupation", {}) is None  # nothing is released
    assert dense.get("/ready").status_code == 200


def test_a_reward_server_serves_again_without_an_update(experts):
    before = experts.generate([5, 6, 7], return_logprob=True)
    for tags in ({}, {"tags": ["weights", "kv_cache"]}):
        assert experts.ok("/release_memory_occupation", tags) is None
        assert experts.get("/server_info").json()["internal_states"][0]["device_memory"]["weights_backup"] > 0
        assert experts.get("/ready").status_code == 503
        assert experts.ok("/resume_memory_occupation", tags) is None
        after = experts.generate([5, 6, 7], return_logprob=True)
        for name in ("output_token_logprobs", "input_token_logprobs"):
            assert after["meta_info"][name] == before["meta_info"][name]


def test_experts_are_null_where_no_token_was_sampled(experts):
    """Aborted while it waited: a decoded empty text has the wrong number of rows for its prompt."""
    body = {"input_ids": [5, 6, 7], "return_logprob": True, "return_routed_experts": True}
    experts.ok("/pause_generation", {"mode": "in_place"})
    answers: list = []
    threads = [
        threading.Thread(target=lambda: answers.append(experts.generate(**body))),
        threading.Thread(
            target=lambda: answers.append(
                experts.ok("/v1/completions", {"prompt": [5, 6, 7], "return_routed_experts": True})
            )
        ),
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: experts.get("/get_load").json()[0]["num_waiting_reqs"] == 2)
    experts.post("/abort_request", {"abort_all": True})
    for thread in threads:
        thread.join(20)
    experts.ok("/continue_generation", {})
    native, openai = sorted(answers, key=lambda answer: "choices" in answer)
    assert native["output_ids"] == []
    assert native["meta_info"]["finish_reason"]["type"] == "abort"
    assert native["meta_info"]["routed_experts"] is None
    assert openai["sglext"] == {"routed_experts": None}
    scored = experts.generate(**body, sampling_params={"max_new_tokens": 0})
    assert scored["meta_info"]["routed_experts"] is None
    sampled = experts.generate(**body)
    rows = len(base64.b64decode(sampled["meta_info"]["routed_experts"])) // 4
    config = experts.get("/server_info").json()["internal_states"][0]["kv"]
    assert rows == (3 + 8 - 1) * config["routing_bytes_per_token"]


@pytest.mark.parametrize("given", [{"best_of": 0}, {"best_of": 1}, {"best_of": 2, "n": 2}, {"best_of": None}])
def test_best_of_that_chooses_nothing_is_accepted(dense, given):
    """SGLang's serving benchmark sends 1 with every completion."""
    answer = dense.ok("/v1/completions", {"prompt": "once", "max_tokens": 2, **given})
    assert len(answer["choices"]) == given.get("n", 1)


def test_best_of_that_would_choose_is_refused(dense):
    refused = dense.post("/v1/completions", {"prompt": "once", "best_of": 3, "n": 2})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "best_of")


def test_a_top_k_of_0_is_off_on_every_route(dense):
    """One seed, and enough temperature that a filter would show."""
    native = {"temperature": 5.0, "sampling_seed": 4}
    plain = dense.generate([5, 6, 7], sampling_params=native)["output_ids"]
    for top_k in (0, -1):
        assert dense.generate([5, 6, 7], sampling_params={**native, "top_k": top_k})["output_ids"] == plain
    assert dense.generate([5, 6, 7], sampling_params={**native, "top_k": 1})["output_ids"] != plain
    asked = {"max_tokens": 8, "ignore_eos": True, "temperature": 5.0, "seed": 4, "return_token_ids": True}
    for path, prompt in (
        ("/v1/completions", {"prompt": [5, 6, 7]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "once"}]}),
    ):
        found = {
            top_k: dense.ok(path, {**prompt, **asked, "top_k": top_k})["choices"][0]["token_ids"]
            for top_k in (0, -1, 1)
        }
        assert found[0] == found[-1] != found[1], path


def test_the_kept_set_of_top_p_is_refused_in_a_sentence(dense):
    params = {"top_p": 0.9, "custom_params": {"return_top_p_token_ids": True}}
    refused = dense.post("/generate", {"input_ids": [5], "sampling_params": params})
    assert refused.status_code == 400
    assert "top_p 1.0" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/update_weights_from_disk", {"model_path": "/x", "load_format": "pkg.loader.load"}),
        (
            "/update_weights_from_tensor",
            {"serialized_named_tensors": ["eA=="], "load_format": "pkg.loader.load"},
        ),
        (
            "/update_weights_from_distributed",
            {"names": [], "dtypes": [], "shapes": [], "load_format": "pkg.x"},
        ),
    ],
)
def test_a_loader_of_the_trainers_is_refused_by_name(experts, path, body):
    refused = experts.post(path, body)
    assert (refused.status_code, refused.json()["success"]) == (400, False)
    message = refused.json()["message"]
    if path.endswith("tensor"):
        assert "--allow-pickled-tensors" in message  # said first
    else:
        assert f"load_format {body['load_format']} is not supported" in message
        assert "import path" in message


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/pull_weights", "/update_weights_from_disk"),
        ("/load_lora_adapter", "merge the adapter"),
        ("/unload_lora_adapter", "merge the adapter"),
        ("/v1/load_lora_adapter", "merge the adapter"),
        ("/pause", "/pause_generation"),
        ("/update_weights/", "/update_weights_from_disk"),
        ("/inference/v1/generate", "/generate"),
    ],
)
def test_routes_that_are_not_served_say_what_to_do(dense, path, said):
    refused = dense.post(path, {})
    assert refused.status_code == 404
    error = refused.json()
    message = error["error"]["message"] if "error" in error else error["message"]
    assert message.startswith(f"{path.rstrip('/')} is not served: ")
    assert said in message
    assert dense.post("/nowhere", {}).status_code == 404
