"""``/generate`` of a real server over a real engine, and what trainers ask besides, as their code does."""

import asyncio
import base64
import itertools
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from support.checkpoints import make_checkpoint
from support.http_serve import ServedEngine, make_text_model, served
from support.http_server import listening
from support.waiting import eventually

from caesura.client.serve.sglang.generate import hidden_states
from caesura.client.text.tokenizer import TextTokenizer
from caesura.io_struct import HiddenStates


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ServedEngine]:
    model = make_text_model(tmp_path_factory.mktemp("http") / "text")
    with served("--model", str(model)) as engine:
        yield engine


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Iterator[ServedEngine]:
    path = tmp_path_factory.mktemp("http") / "experts"
    make_checkpoint(path, "qwen3-moe", seed=2)
    with served("--model", str(path), "--enable-memory-saver", "--enable-weights-cpu-backup") as engine:
        yield engine


def frames_of(response: httpx.Response) -> list:
    assert response.headers["content-type"].startswith("text/event-stream")
    texts = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert texts[-1] == "[DONE]"
    return [json.loads(text) for text in texts[:-1]]


def stream(server: ServedEngine, **body: object) -> list:
    sampling = {
        "temperature": 0.0,
        "max_new_tokens": 8,
        "ignore_eos": True,
        **body.pop("sampling_params", {}),
    }
    return frames_of(server.post("/generate", {**body, "stream": True, "sampling_params": sampling}))


def test_one_prompt_gives_a_dictionary_with_every_key(server):
    answer = server.generate([5, 6, 7], return_logprob=True, return_prompt_token_ids=True)
    assert set(answer) == {"text", "output_ids", "meta_info", "prompt_token_ids"}
    assert answer["prompt_token_ids"] == [5, 6, 7]
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["num_retractions"]) == (3, 8, 0)
    assert meta["weight_version"] == "default"
    assert [(s["version"], s["start"], s["end"]) for s in meta["weight_versions"]] == [("default", 0, 8)]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(logprob <= 0 and text is None for logprob, _, text in meta["output_token_logprobs"])
    assert meta["input_token_logprobs"] == []
    for name in (
        "id",
        "cached_tokens",
        "e2e_latency",
        "reasoning_tokens",
        "dp_rank",
        "response_sent_to_client_ts",
    ):
        assert name in meta


def test_text_in_and_out_with_the_finish_reason(server):
    whole = server.generate(text="Hello world", sampling_params={"max_new_tokens": 12})
    ids = server.ok("/tokenize", {"prompt": "Hello world"})["tokens"]
    assert server.generate(ids, sampling_params={"max_new_tokens": 12})["output_ids"] == whole["output_ids"]
    stop = whole["text"][3:5]
    cut = server.generate(text="Hello world", sampling_params={"max_new_tokens": 12, "stop": stop})
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    token = whole["output_ids"][4]
    by_token = server.generate(ids, sampling_params={"max_new_tokens": 12, "stop_token_ids": [token]})
    assert by_token["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    assert by_token["output_ids"][-1] == token


@pytest.mark.parametrize(
    ("name", "value", "pattern"),
    [
        (
            "json_schema",
            '{"type": "array", "items": {"const": 1}, "maxItems": 2}',
            r"\[\s*(1(\s*,\s*1)?)?\s*\]",
        ),
        ("regex", "(ab|c){2,3}", "(ab|c){2,3}"),
        ("ebnf", 'root ::= "a" | "b" root', "b*a"),
        ("structural_tag", {"format": {"type": "const_string", "value": "so"}}, "so"),
    ],
)
def test_text_fits_a_grammar(server, name, value, pattern):
    asked = {name: value, "n": 3, "sampling_seed": 5, "max_new_tokens": 200}
    for answer in server.post("/generate", {"text": "once", "sampling_params": asked}).json():
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        assert re.fullmatch(pattern, answer["text"])


def test_logprobs_of_the_prompt_and_of_other_tokens(server):
    answer = server.generate(
        [5, 6, 7, 8],
        return_logprob=True,
        logprob_start_len=1,
        top_logprobs_num=3,
        token_ids_logprob=[11, 12],
        return_text_in_logprobs=True,
    )
    meta = answer["meta_info"]
    assert [token for _, token, _ in meta["input_token_logprobs"]] == [6, 7, 8]
    assert meta["input_token_logprobs"][0][0] is None
    assert [len(row) if row else row for row in meta["input_top_logprobs"]] == [None, 3, 3]
    assert [len(row) for row in meta["output_top_logprobs"]] == [3] * 8
    assert [[token for _, token, _ in row] for row in meta["output_token_ids_logprobs"]] == [[11, 12]] * 8
    assert all(isinstance(text, str) for _, _, text in meta["output_token_logprobs"])
    # greedy: the likeliest is the one taken
    assert [row[0][1] for row in meta["output_top_logprobs"]] == answer["output_ids"]


def test_no_new_tokens_scores_the_prompt(server):
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    whole = server.generate([5, 6, 7], **asked)["meta_info"]
    answer = server.generate([5, 6, 7], sampling_params={"max_new_tokens": 0}, **asked)
    (event,) = stream(server, input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 0}, **asked)
    for told in (answer, event):
        meta = told["meta_info"]
        assert (told["text"], told["output_ids"]) == ("", [])
        assert meta["finish_reason"] == {"type": "length", "length": 0}
        assert (meta["completion_tokens"], meta["prompt_tokens"]) == (0, 3)
        assert (meta["output_token_logprobs"], meta["output_top_logprobs"]) == ([], [])
        assert meta["weight_version"] == "default"
        scores = [[each[0] for each in of["input_token_logprobs"]] for of in (meta, whole)]
        assert scores[0][0] is None
        assert scores[0][1:] == pytest.approx(scores[1][1:], abs=1e-4)


def test_a_list_in_gives_a_list_out_in_order(server):
    prompts = [[5, 6], [7], [8, 9, 10]]
    answers = server.generate(prompts, rid="batch", sampling_params={"n": 2, "max_new_tokens": 3})
    assert [each["meta_info"]["id"] for each in answers] == [f"batch_{i}" for i in (0, 0, 1, 1, 2, 2)]
    assert [each["meta_info"]["prompt_tokens"] for each in answers] == [2, 2, 1, 1, 3, 3]
    alone = [
        server.generate(prompt, sampling_params={"max_new_tokens": 3})["output_ids"] for prompt in prompts
    ]
    assert [each["output_ids"] for each in answers[::2]] == alone
    assert isinstance(server.generate([[5, 6]], sampling_params={"max_new_tokens": 1}), list)
    each = server.ok(
        "/generate",
        {
            "input_ids": [[5], [6]],
            "rid": ["a", "b"],
            "sampling_params": [
                {"max_new_tokens": 1, "ignore_eos": True},
                {"max_new_tokens": 2, "ignore_eos": True},
            ],
        },
    )
    assert [(a["meta_info"]["id"], len(a["output_ids"])) for a in each] == [("a", 1), ("b", 2)]


def test_a_cumulative_stream_ends_with_the_whole_answer(server):
    whole = server.generate(text="Hello", return_logprob=True)
    frames = stream(server, text="Hello", return_logprob=True)
    for earlier, later in itertools.pairwise(frames):
        assert later["text"].startswith(earlier["text"])
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        assert earlier["meta_info"]["finish_reason"] is None
        for name in ("prompt_tokens", "weight_version"):
            assert earlier["meta_info"][name] == whole["meta_info"][name]
        assert len(earlier["meta_info"]["output_token_logprobs"]) == len(earlier["output_ids"])
    assert frames[-1]["text"] == whole["text"]
    assert frames[-1]["output_ids"] == whole["output_ids"]
    logprobs = [
        [each[0] for each in answer["meta_info"]["output_token_logprobs"]] for answer in (frames[-1], whole)
    ]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)


def test_events_of_a_batched_stream_name_their_prompt(server):
    frames = stream(server, input_ids=[[5, 6], [7]], sampling_params={"n": 2})
    last = {frame["index"]: frame for frame in frames}
    assert sorted(last) == [0, 1, 2, 3]
    assert all(frame["meta_info"]["finish_reason"]["type"] == "length" for frame in last.values())
    assert last[0]["meta_info"]["prompt_tokens"] == 2
    assert last[2]["meta_info"]["prompt_tokens"] == 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input_ids": [1], "sampling_params": {"top_k": 1.0}}, "top_k"),
        ({"input_ids": [1], "sampling_params": {"top_p": 3}}, "top_p"),
        ({"input_ids": [1.0]}, "input_ids"),
        ({"input_ids": [1], "routed_experts_start_len": None}, "routed_experts_start_len"),
        ({"input_ids": [[1], [2]], "rid": ["a"]}, "rid"),
        ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "Duplicate request ID detected"),
        ({"text": "a" * 200_000}, "200000 characters"),
        ({}, "input_ids"),
        ({"input_ids": [1] * 600}, "600"),
        ({"input_ids": [1], "min_weights_epoch": 99}, "epoch"),
        (
            {"input_ids": [1], "return_sampling_mask": True, "sampling_logprobs_mode": "support"},
            "sampling_logprobs_mode",
        ),
        ({"input_ids": [1], "sampling_logprobs_mode": "selected"}, "sampling_logprobs_mode"),
    ],
)
def test_wrong_fields_are_400_and_named(server, body, field):
    for streamed in (False, True):
        response = server.post("/generate", {"stream": streamed, **body})
        assert response.status_code == 400, response.text
        assert field in response.json()["error"]["message"]


def in_background(call) -> tuple[threading.Thread, list]:
    found: list = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    return thread, found


def wait_for_load(server: ServedEngine, count: int) -> None:
    def load() -> int:
        (found,) = server.get("/v1/loads?include=core").json()["loads"]
        return found["num_running_reqs"] + found["num_waiting_reqs"]

    eventually(lambda: load() == count)


def test_an_abort_returns_the_output_so_far(server):
    server.ok("/pause_generation", {"mode": "in_place"})
    try:
        calls = [
            in_background(lambda rid=rid: server.generate([5, 6], rid=rid, return_logprob=True))
            for rid in ("a1", "a10", "b")
        ]
        wait_for_load(server, 3)
        for rid in ("", "a", "nobody"):
            response = server.post("/abort_request", {"rid": rid})
            assert (response.status_code, response.content) == (200, b"")
        assert server.post("/abort_request", {"rid": None}).status_code == 200
        wait_for_load(server, 3)
        server.post("/abort_request", {"rid": "a1"})
        calls[0][0].join()
        wait_for_load(server, 2)
        server.post("/abort_request", {"abort_all": True})
        for thread, _ in calls:
            thread.join()
        wait_for_load(server, 0)
        for _, (answer,) in calls:
            reason = answer["meta_info"]["finish_reason"]
            assert (reason["type"], reason["status_code"]) == ("abort", None)
            assert isinstance(reason["message"], str)
            assert answer["meta_info"]["output_token_logprobs"] == []
            assert answer["meta_info"]["weight_version"] == "default"
    finally:
        server.ok("/continue_generation")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_aborts_its_generation(server, streamed):
    async def leave() -> None:
        body = {
            "input_ids": [5, 6],
            "stream": streamed,
            "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
        }
        async with httpx.AsyncClient(base_url=server.url) as client:
            task = asyncio.create_task(client.post("/generate", json=body))
            while (await client.get("/v1/loads")).json()["loads"][0]["num_reqs"] == 0:
                assert not task.done()
            task.cancel()

    server.ok("/pause_generation", {"mode": "in_place"})
    try:
        asyncio.run(leave())
        wait_for_load(server, 0)
    finally:
        server.ok("/continue_generation")


def test_a_stream_that_is_left_midway_aborts(server):
    body = {"input_ids": [5], "stream": True, "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
    with (
        httpx.Client(base_url=server.url) as client,
        client.stream("POST", "/generate", json=body) as response,
    ):
        assert next(response.iter_lines()).startswith("data: {")
    wait_for_load(server, 0)


def test_tokenize_and_detokenize(server):
    both = server.ok("/tokenize", {"prompt": ["Hello", "a b"], "model": "ignored"})
    assert both["count"] == [len(tokens) for tokens in both["tokens"]]
    assert both["max_model_len"] == 512
    assert server.ok("/v1/detokenize", {"tokens": both["tokens"]})["text"] == ["Hello", "a b"]
    found = server.ok("/detokenize", {"tokens": both["tokens"][0]})
    assert found["text"] == found["prompt"] == "Hello"  # the latter is vLLM's name
    chat = server.ok("/v1/tokenize", {"messages": [{"role": "user", "content": "Hello"}]})
    assert chat["count"] > len(both["tokens"][0])
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [1, [2]]}),
        ("/tokenize", {"prompt": "a" * 200_000}),
    ):
        assert server.post(path, body).status_code == 400


@pytest.mark.parametrize("start", [0, 2])
def test_routed_experts_are_int32_of_all_but_the_last(experts, start):
    asked = {"return_routed_experts": True, "routed_experts_start_len": start}
    answer = experts.generate([5, 6, 7], **asked, return_logprob=True)
    assert "text" not in answer  # no tokenizer there
    flat = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), dtype="<i4").tolist()
    assert len(flat) == (3 + len(answer["output_ids"]) - 1 - start) * 2 * 3
    assert set(flat) <= set(range(5))
    for name, dtype in ((None, "<i4"), ("uint8", np.uint8)):
        meta = experts.generate([5, 6, 7], **asked, routed_experts_dtype=name)["meta_info"]
        assert np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype=dtype).tolist() == flat
    assert experts.post("/generate", {"text": "a"}).status_code == 400


def test_incremental_streams_add_up(server):
    folder = server.get("/server_info").json()["model_path"]
    options = {"tokenizer": TextTokenizer.from_folder(folder), "incremental_streaming": True}
    endpoint = server.announced.split("(engine ")[1].split(")")[0]
    with (
        listening(endpoint=endpoint, connect_timeout=None, **options) as door,
        httpx.Client(base_url=door.url, timeout=None) as http,
    ):
        asked = {"text": "Hello", "return_logprob": True, "top_logprobs_num": 2}
        whole = server.generate(**asked)
        sampling = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
        frames = frames_of(
            http.post("/generate", json={**asked, "stream": True, "sampling_params": sampling})
        )
        assert "".join(frame["text"] for frame in frames) == whole["text"]
        assert [token for frame in frames for token in frame["output_ids"]] == whole["output_ids"]
        for name in ("output_token_logprobs", "output_top_logprobs"):
            found = [row for frame in frames for row in frame["meta_info"].get(name, [])]
            assert len(found) == len(whole["output_ids"])
        assert frames[-1]["meta_info"]["finish_reason"]["type"] == "length"


def test_probes_and_scrapes_renew_no_lease(server):
    server.ok("/pause_generation", {"mode": "in_place", "lease_s": 1.0, "on_lease_expiry": "continue"})
    while server.get("/server_info").json()["internal_states"][0]["generation"] == "paused":
        for path in ("/health", "/metrics", "/dashboard/data"):
            server.get(path)


# -- trainers, before and between rollouts -------------------------------------------------------------------


def attach(server: ServedEngine, expected: dict[str, object]) -> None:
    """Check an external engine as slime does: each of its own settings that it compares must be equal."""
    for path in ("/server_info", "/get_server_info"):
        actual = server.get(path).json()
        for name, value in expected.items():
            assert actual.get(name) == value, name


def test_slime_attaches_to_a_server_with_defaults(server):
    attach(server, {"enable_memory_saver": False, "dtype": "float32", "enable_return_routed_experts": False})
    attach(server, dict.fromkeys(("tp_size", "pp_size", "ep_size", "moe_dp_size", "num_gpus"), 1))


def test_slime_attaches_with_offload_and_routing_replay(experts):
    attach(experts, {"enable_memory_saver": True, "enable_return_routed_experts": True})
    attach(experts, {"enable_weights_cpu_backup": True})


def test_memory_is_released_only_where_the_server_says_so(server):
    refused = server.post("/release_memory_occupation", {})
    assert refused.status_code == 400
    assert "--enable-memory-saver" in refused.json()["error"]["message"]
    assert server.ok("/resume_memory_occupation", {}) is None  # nothing is released
    assert server.get("/ready").status_code == 200


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


FILTERS = {"top_p": 0.7, "temperature": 2.0, "sampling_seed": 3, "max_new_tokens": 6}


def test_kept_tokens_as_slime_and_as_sglangs_masks(server):
    """Their numbers are those of the sampler (tests/unit/scheduler/execution/test_kept_tokens.py)."""
    prompt, asked = [5, 6, 7], {**FILTERS, "custom_params": {"return_top_p_token_ids": True}}
    answer = server.generate(prompt, sampling_params=asked, return_logprob=True)
    ids, offsets = (
        np.frombuffer(base64.b64decode(answer["meta_info"][name]), "<i4").tolist()
        for name in ("top_p_token_ids", "top_p_token_offsets")
    )
    assert len(offsets) == len(answer["output_ids"]) + 1 == 7
    assert (offsets[0], offsets[-1]) == (0, len(ids))
    kept = [ids[start:end] for start, end in itertools.pairwise(offsets)]
    plain = server.generate(prompt, sampling_params=FILTERS)
    assert plain["output_ids"] == answer["output_ids"]
    assert "top_p_token_ids" not in plain["meta_info"]

    body = {
        "input_ids": [prompt, [8, 9]],
        "sampling_params": [{**FILTERS, "n": 2}] * 2,
        "return_logprob": True,
    }
    body |= {"return_sampling_mask": [True, False], "sampling_logprobs_mode": ["selected", None]}
    answers = server.ok("/generate", body)
    for other in answers[2:]:
        assert not any("sampling" in name for name in other["meta_info"])
    first, second = (each["meta_info"] for each in answers[:2])
    assert first["output_token_sampling_mask"] == kept != second["output_token_sampling_mask"]
    for meta, tokens in ((each["meta_info"], each["output_ids"]) for each in answers[:2]):
        masks, logprobs = meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"]
        assert meta["output_token_sampling_mask_length"] == len(masks) == len(logprobs) == len(tokens)
        assert all(token in mask for token, mask in zip(tokens, masks))
        of_all = [logprob for logprob, _, _ in meta["output_token_logprobs"]]
        assert all(1e-5 >= of_kept >= whole - 1e-5 for of_kept, whole in zip(logprobs, of_all))
        alone = [logprob for logprob, mask in zip(logprobs, masks) if len(mask) == 1]
        assert alone == pytest.approx([0.0] * len(alone), abs=1e-5)


def test_hidden_states_come_as_lists_or_as_bytes(server):
    params = {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0}
    asked = {"input_ids": [5, 6, 7], "return_hidden_states": True, "sampling_params": params}
    one = server.ok("/generate", asked)["meta_info"]["hidden_states"]
    two = server.ok("/generate", {**asked, "hidden_states_layers": [1, -1]})["meta_info"]["hidden_states"]
    assert (two["dtype"], two["start"], two["shape"][:2]) == ("F32", 0, [6, 2])
    values = np.frombuffer(base64.b64decode(two["data"]), "<f4").reshape(two["shape"])
    prompt, *output = one
    np.testing.assert_allclose(np.asarray([*prompt, *output]), values[:, 1], atol=1e-5)
    assert (len(prompt), len(output)) == (3, 3)
    later = server.ok("/generate", {**asked, "hidden_states_start_len": 2})["meta_info"]["hidden_states"]
    assert [len(later[0]), *map(len, later[1:])] == [1, *[two["shape"][2]] * 3]


@pytest.mark.parametrize(("dtype", "code"), [("BF16", None), ("F16", "e"), ("F32", "f")])
def test_values_of_each_dtype_are_read(dtype, code):
    values = np.arange(-6, 6, dtype="<f4") / 4
    data = values.view("<u2")[1::2].tobytes() if code is None else values.astype(f"<{code}").tobytes()
    states = HiddenStates(data=data, shape=[4, 1, 3], dtype=dtype, start=1)
    prompt, *output = hidden_states(states, 3)
    assert [list(row) for row in (*prompt, *output)] == values.reshape(4, 3).tolist()
    assert len(prompt) == 2


def test_the_last_event_of_a_stream_has_the_masks(server):
    body = {"input_ids": [5, 6, 7], "sampling_params": FILTERS, "return_sampling_mask": True}
    whole = server.generate(body["input_ids"], **{name: body[name] for name in body if name != "input_ids"})
    *others, last = stream(server, **body)
    names = ("output_token_sampling_mask", "output_token_sampling_logprobs")
    assert [last["meta_info"][name] for name in names] == [whole["meta_info"][name] for name in names]
    assert not any(names[0] in each["meta_info"] for each in others)


def test_without_a_filter_slime_gets_no_kept_tokens(server):
    params = {"custom_params": {"return_top_p_token_ids": True}, "max_new_tokens": 2, "temperature": 1.0}
    meta = server.generate([5, 6], sampling_params=params)["meta_info"]
    assert not any(name.startswith("top_p") for name in meta)


def test_a_loader_of_the_trainers_is_refused_by_name(experts):
    loader = {"load_format": "pkg.loader.load"}
    for path, body in (
        ("disk", {"model_path": "/x"}),
        ("distributed", {"names": [], "dtypes": [], "shapes": []}),
        ("tensor", {"serialized_named_tensors": ["eA=="]}),
    ):
        refused = experts.post(f"/update_weights_from_{path}", {**body, **loader})
        assert (refused.status_code, refused.json()["success"]) == (400, False)
        said = "load_format pkg.loader.load is not supported"
        assert (said if path != "tensor" else "--allow-pickled-tensors") in refused.json()["message"]


@pytest.mark.parametrize(
    ("path", "said"),
    [("/start_draft_weight_update/", "no draft model"), ("/init_broadcaster", "/update_weights")],
)
def test_unserved_routes_name_the_remedy(server, path, said):
    refused = server.post(path, {})
    assert refused.status_code == 404
    error = refused.json()
    message = error["error"]["message"] if "error" in error else error["message"]
    assert message.startswith(f"{path.rstrip('/')} is not served: ")
    assert said in message
    assert server.post("/nowhere", {}).status_code == 404


def test_an_image_route_of_a_language_model_says_so(server):
    for path in ("/v1/images/generations", "/rollout/generate"):
        refused = server.post(path, {"prompt": "a"})
        assert (refused.status_code, "diffusion pipeline" in refused.text) == (400, True)
    assert server.get("/v1/models").json()["data"][0]["max_model_len"] > 0


def test_the_server_tells_the_weights_root_that_it_enforces(server):
    found = server.get("/server_info").json()
    assert found["weights_root"] == str(Path(found["model_path"]).parent)
    outside = server.post("/update_weights_from_disk", {"model_path": "/etc"})
    assert found["weights_root"] in outside.json()["message"]


def test_vllm_client_requests_are_served(server):
    assert server.post("/ping").status_code == server.get("/ping").status_code == 200
    assert server.get("/version").json() == {"version": server.get("/server_info").json()["version"]}
    assert server.get("/load").json() == {"server_load": 0}
