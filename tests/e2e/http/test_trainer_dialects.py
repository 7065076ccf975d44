"""Requests of trainers before and between rollouts, as their code makes them."""

import base64
import math
import threading
from pathlib import Path

import numpy as np
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
    path = tmp_path_factory.mktemp("dialects") / "experts"
    make_checkpoint(path, "qwen3-moe", seed=2)
    with served("--model", str(path), "--enable-memory-saver", "--enable-weights-cpu-backup") as engine:
        yield engine


def attach(server: ServedEngine, expected: dict[str, object]) -> None:
    """Check an external engine as slime does: each of its own settings that it compares must be equal."""
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
        thread.join()
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


FILTERS = {"top_p": 0.7, "temperature": 2.0, "sampling_seed": 3, "max_new_tokens": 6}


def whole_distributions(server, prompt, output_ids):
    body = {"input_ids": prompt, "return_logprob": True, "top_logprobs_num": 128}
    found = []
    for at in range(len(output_ids)):
        params = {"max_new_tokens": 1, "temperature": FILTERS["temperature"]}
        meta = server.generate(**{**body, "input_ids": prompt + output_ids[:at]}, sampling_params=params)[
            "meta_info"
        ]
        found.append({token: value for value, token, _ in meta["output_top_logprobs"][0]})
    return found


def assert_kept(kept, distribution, sampled, logprob):
    """Assert that ``kept`` is the shortest prefix of the descending distribution that reaches top_p."""
    assert sampled in kept
    values = sorted((distribution[token] for token in kept), reverse=True)
    assert values == pytest.approx(sorted(distribution.values(), reverse=True)[: len(values)], abs=1e-5)
    masses = np.cumsum(np.exp(values))
    assert masses[-1] >= FILTERS["top_p"] - 1e-4
    assert len(masses) == 1 or masses[-2] < FILTERS["top_p"] + 1e-4
    assert logprob == pytest.approx(distribution[sampled] - math.log(masses[-1]), abs=1e-4)


def test_slime_reads_the_tokens_kept_by_top_p(dense):
    prompt, asked = [5, 6, 7], {**FILTERS, "custom_params": {"return_top_p_token_ids": True}}
    answer = dense.generate(prompt, sampling_params=asked, return_logprob=True)
    meta = answer["meta_info"]
    ids, offsets = (
        np.frombuffer(base64.b64decode(meta[name]), "<i4").tolist()
        for name in ("top_p_token_ids", "top_p_token_offsets")
    )
    assert len(offsets) == len(answer["output_ids"]) + 1 == 7
    assert (offsets[0], offsets[-1]) == (0, len(ids))
    distributions = whole_distributions(dense, prompt, answer["output_ids"])
    for at, (logprob, token, _) in enumerate(meta["output_token_logprobs"]):
        assert_kept(ids[offsets[at] : offsets[at + 1]], distributions[at], token, logprob)
    plain = dense.generate(prompt, sampling_params=FILTERS)
    assert plain["output_ids"] == answer["output_ids"]
    assert "top_p_token_ids" not in plain["meta_info"]


def test_without_a_filter_slime_gets_no_kept_tokens(dense):
    params = {"custom_params": {"return_top_p_token_ids": True}, "max_new_tokens": 2, "temperature": 1.0}
    meta = dense.generate([5, 6], sampling_params=params)["meta_info"]
    assert not any(name.startswith("top_p") for name in meta)


def test_sglang_s_sampling_masks(dense):
    prompts = [[5, 6, 7], [8, 9]]
    answers = dense.ok(
        "/generate",
        {
            "input_ids": prompts,
            "sampling_params": [{**FILTERS, "n": 2}, {**FILTERS, "n": 2}],
            "return_logprob": True,
            "return_sampling_mask": [True, False],
            "sampling_logprobs_mode": ["selected", None],
        },
    )
    for answer in answers[2:]:
        assert not any("sampling" in name for name in answer["meta_info"])
    for answer in answers[:2]:
        meta, tokens = answer["meta_info"], answer["output_ids"]
        masks, logprobs = meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"]
        assert meta["output_token_sampling_mask_length"] == len(masks) == len(logprobs) == len(tokens)
        distributions = whole_distributions(dense, prompts[0], tokens)
        for at, token in enumerate(tokens):
            assert_kept(masks[at], distributions[at], token, logprobs[at])
            whole = meta["output_token_logprobs"][at][0]
            assert whole == pytest.approx(distributions[at][token], abs=1e-4)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"return_sampling_mask": True, "stream": True}, "stream"),
        ({"return_sampling_mask": True, "sampling_logprobs_mode": "support"}, "sampling_logprobs_mode"),
        ({"sampling_logprobs_mode": "selected"}, "sampling_logprobs_mode"),
    ],
)
def test_sampling_masks_that_are_not_offered_are_refused_by_name(dense, body, field):
    refused = dense.post("/generate", {"input_ids": [5], **body})
    assert refused.status_code == 400
    assert field in refused.json()["error"]["message"]


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
        ("/pull_weights", "without --update-weight-local-checkpoint-dir"),
        ("/load_lora_adapter", "merge the adapter"),
        ("/unload_lora_adapter", "merge the adapter"),
        ("/v1/load_lora_adapter", "merge the adapter"),
        ("/start_draft_weight_update/", "no draft model"),
        ("/init_broadcaster", "/update_weights"),
    ],
)
def test_unserved_routes_name_the_remedy(dense, path, said):
    refused = dense.post(path, {})
    assert refused.status_code == 404
    error = refused.json()
    message = error["error"]["message"] if "error" in error else error["message"]
    assert message.startswith(f"{path.rstrip('/')} is not served: ")
    assert said in message
    assert dense.post("/nowhere", {}).status_code == 404


def test_the_server_tells_the_weights_root_that_it_enforces(dense):
    found = dense.get("/server_info").json()
    assert found["weights_root"] == str(Path(found["model_path"]).parent)
    outside = dense.post("/update_weights_from_disk", {"model_path": "/etc"})
    assert found["weights_root"] in outside.json()["message"]


def test_vllm_client_requests_are_served(dense):
    assert dense.post("/ping").status_code == dense.get("/ping").status_code == 200
    assert dense.get("/version").json() == {"version": dense.get("/server_info").json()["version"]}
    assert dense.get("/load").json() == {"server_load": 0}
