"""Adapters by the routes of SGLang, vLLM, SkyRL and prime-rl, over a real socket and a real engine."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.http_serve import ServedEngine, make_text_model, served
from support.lora import ALL_LINEAR, checksums, edit_adapter, logprobs_by_peft, make_adapter
from support.pickles import flattened, payload_of, shared_by_file_name
from support.plain_trainer import PlainTrainer

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("lora") / "base")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[ServedEngine]:
    options = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--allow-pickled-tensors")
    with served(
        "--model", str(model), "--served-model-name", "base", "--dtype", "float32", *options
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def made(model: Path) -> list[Path]:
    return [make_adapter(model, model.parent / str(i), ALL_LINEAR, seed=i) for i in range(2)]


@pytest.fixture
def adapters(engine: ServedEngine, made: list[Path]) -> Iterator[list[Path]]:
    yield made
    for each in engine.get("/v1/models").json()["data"][1:]:
        engine.ok("/unload_lora_adapter", {"lora_name": each["id"]})


def logprobs(engine: ServedEngine, **fields: object) -> tuple[list[int], list[float]]:
    found = engine.generate(PROMPT, return_logprob=True, **fields)
    return found["output_ids"], [entry[0] for entry in found["meta_info"]["output_token_logprobs"]]


def test_sglangs_routes_load_replace_and_unload(engine, model, adapters):
    plain = logprobs(engine)
    for path in adapters:
        loaded = engine.ok("/load_lora_adapter", {"lora_name": "a", "lora_path": str(path)})
        assert (loaded["success"], loaded["status"], loaded["loaded_adapters"]) == (
            True,
            "ok",
            {"a": str(path)},
        )
        ids, found = logprobs(engine, lora_path="a")
        expected = logprobs_by_peft(model, path, [*PROMPT, *ids], len(PROMPT))
        assert found == pytest.approx(expected, abs=1e-4)
    mixed = engine.ok(
        "/generate",
        {"input_ids": [PROMPT, PROMPT], "lora_path": ["a", None], "sampling_params": {"max_new_tokens": 4}},
    )
    versions = [each["meta_info"]["weight_versions"][0] for each in mixed]
    assert [(each["adapter"], each["adapter_epoch"] > 0) for each in versions] == [("a", True), (None, False)]
    refused = engine.post(
        "/load_lora_adapter", {"lora_name": "a", "lora_path": str(adapters[0]), "upsert": False}
    )
    assert (refused.status_code, refused.json()["code"]) == (400, "adapter_exists")
    assert engine.ok("/unload_lora_adapter", {"lora_name": "a"})["loaded_adapters"] == {}
    assert logprobs(engine) == plain
    gone = engine.post("/generate", {"input_ids": PROMPT, "lora_path": "a"})
    assert (gone.status_code, "no adapter 'a' is loaded" in gone.text) == (404, True)


def test_tensors_as_sglang_pickles_them(engine, adapters):
    tensors = load_file(adapters[0] / "adapter_model.safetensors")
    config = json.loads((adapters[0] / "adapter_config.json").read_text())
    engine.ok("/load_lora_adapter", {"lora_name": "a", "lora_path": str(adapters[0])})
    expected = logprobs(engine, lora_path="a")
    body = {"lora_name": "b", "config_dict": config, "load_format": "flattened_bucket"}
    with shared_by_file_name():
        sent = {**body, "serialized_named_tensors": [payload_of(flattened(tensors))]}
    loaded = engine.ok("/load_lora_adapter_from_tensors", sent)
    assert loaded["loaded_adapters"] == {"a": str(adapters[0]), "b": ""}
    assert (loaded["tensors"], loaded["changed_tensors"]) == (len(tensors), len(tensors))
    assert logprobs(engine, lora_path="b") == expected
    sums = checksums(tensors)
    again = engine.ok("/load_lora_adapter_from_tensors", {**sent, "expected_checksums": sums})
    assert again["changed_tensors"] == 0
    name = next(iter(sums))
    wrong = {**sent, "expected_checksums": {**sums, name: "00"}}
    refused = engine.post("/load_lora_adapter_from_tensors", wrong)
    assert (refused.status_code, refused.json()["code"]) == (400, "weight_mismatch")
    assert f"{name} has another" in refused.text
    refused = engine.post("/load_lora_adapter_from_tensors", {**sent, "added_tokens_config": {"<a>": 1}})
    assert (refused.status_code, refused.json()["detail"]["field"]) == (400, "added_tokens_config")


def test_miles_broadcasts_adapters(engine, adapters):
    tensors = load_file(adapters[0] / "adapter_model.safetensors")
    engine.ok("/load_lora_adapter", {"lora_name": "a", "lora_path": str(adapters[0])})
    expected = logprobs(engine, lora_path="a")
    trainer = PlainTrainer(name="miles-pp_0")
    trainer.beside(trainer.join)
    init = {"master_address": "127.0.0.1", "master_port": trainer.port, "rank_offset": 1, "world_size": 2}
    engine.ok("/init_weights_update_group", {**init, "group_name": trainer.name, "backend": "gloo"})
    trainer.finish()
    body = {
        "lora_name": "b",
        "config_dict": json.loads((adapters[0] / "adapter_config.json").read_text()),
        "names": list(tensors),
        "dtypes": ["float32"] * len(tensors),
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "group_name": trainer.name,
        "pinned": False,
    }
    for wrong in ({"p": "00"}, None):
        trainer.beside(lambda: trainer.broadcast_each(tensors))
        sent = {**body, "upsert": True, "expected_checksums": wrong}
        answer = engine.post("/load_lora_adapter_from_distributed", sent)
        trainer.finish()
        assert answer.status_code == (200 if wrong is None else 400), "the group goes on after a mismatch"
    assert logprobs(engine, lora_path="b") == expected
    answer = engine.post("/load_lora_adapter_from_distributed", {**body, "names": ["x"]})
    assert (answer.status_code, "different lengths" in answer.text) == (400, True)
    engine.ok("/destroy_weights_update_group", {"group_name": trainer.name})
    trainer.close()


def test_vllms_routes_and_model_names(engine, model, adapters):
    body = {"lora_name": "policy-v1", "lora_path": str(adapters[0])}
    answer = engine.post("/v1/load_lora_adapter", body)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'policy-v1' added successfully.")
    again = engine.post("/v1/load_lora_adapter", body)
    assert (again.status_code, again.json()["error"]["code"]) == (400, "adapter_exists")
    assert engine.post("/v1/load_lora_adapter", {**body, "load_inplace": True}).status_code == 200
    cards = engine.get("/v1/models").json()["data"]
    assert [(each["id"], each["parent"]) for each in cards] == [("base", None), ("policy-v1", "base")]
    assert engine.get("/v1/models/policy-v1").json() == cards[1]
    assert engine.get("/v1/models/other").status_code == 404
    asked = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 0, "return_token_ids": True}
    for name in ("policy-v1", "base:policy-v1"):
        answer = engine.ok("/v1/completions", {**asked, "model": name})
        assert answer["model"] == "policy-v1"
        (choice,) = answer["choices"]
        expected = logprobs_by_peft(model, adapters[0], [*PROMPT, *choice["token_ids"]], len(PROMPT))
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    tokens = {
        "model": "policy-v1",
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 6, "temperature": 0},
    }
    assert engine.ok("/inference/v1/generate", tokens)["choices"][0]["token_ids"] == choice["token_ids"]
    info = engine.get("/server_info", params={"config_format": "json"}).json()
    assert info["vllm_config"]["lora_config"] == {"max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": 8}
    removed = engine.post("/v1/unload_lora_adapter", {"lora_name": "policy-v1"})
    assert removed.text == "Success: LoRA adapter 'policy-v1' removed successfully."
    unknown = engine.post("/v1/completions", {**asked, "model": "policy-v1"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert unknown.json()["error"]["param"] == "model"


def test_skyrl_replaces_by_its_own_route(engine, adapters):
    for path in adapters:
        body = {"lora_name": "skyrl", "lora_path": str(path)}
        assert engine.post("/skyrl/v1/load_lora_adapter", body).status_code == 200
    assert engine.get("/v1/models").json()["data"][1]["root"] == str(adapters[1])


def test_faults_name_the_field_and_change_nothing(engine, adapters, tmp_path):
    engine.ok("/load_lora_adapter", {"lora_name": "a", "lora_path": str(adapters[0])})
    known = logprobs(engine, lora_path="a")
    bad = adapters[1].parent / "bad"
    shutil.copytree(adapters[1], bad)
    edit_adapter(bad, use_dora=True)
    for body, status, code in (
        ({"lora_path": str(bad)}, 400, "unsupported"),
        ({"lora_path": str(tmp_path)}, 400, "invalid_request"),
        ({"lora_path": str(adapters[0] / "nowhere")}, 400, "checkpoint_error"),
        ({"lora_path": "\0"}, 400, "invalid_request"),
    ):
        answer = engine.post("/load_lora_adapter", {"lora_name": "a", **body})
        assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert engine.post("/load_lora_adapter", {"lora_name": "a"}).status_code == 400
    assert logprobs(engine, lora_path="a") == known


def test_names_that_no_request_could_choose_are_refused(engine, adapters):
    for name in ("base", "base:a", "default"):
        for path in ("/load_lora_adapter", "/v1/load_lora_adapter"):
            answer = engine.post(path, {"lora_name": name, "lora_path": str(adapters[0])})
            assert (answer.status_code, "choose another" in answer.text) == (400, True), name


def test_replicas_take_the_same_routes(model, adapters):
    options = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--replicas", "2")
    with served("--model", str(model), "--dtype", "float32", *options) as pair:
        body = {"lora_name": "a", "lora_path": str(adapters[0])}
        for number in (1, 2):
            loaded = pair.ok("/load_lora_adapter", body)
            assert (loaded["adapter_epoch"], loaded["loaded_adapters"]) == (number, {"a": str(adapters[0])})
        refused = pair.post("/load_lora_adapter", {**body, "upsert": False})
        assert (refused.status_code, refused.json()["code"]) == (400, "adapter_exists")
        assert [each["id"] for each in pair.get("/v1/models").json()["data"]][1:] == ["a"]
        found = {tuple(logprobs(pair, lora_path="a", routing_key=str(key))[1]) for key in range(8)}
        (values,) = found
        ids, _ = logprobs(pair, lora_path="a")
        expected = logprobs_by_peft(model, adapters[0], [*PROMPT, *ids], len(PROMPT))
        assert values == pytest.approx(expected, abs=1e-4)
        assert pair.ok("/unload_lora_adapter", {"lora_name": "a"})["loaded_adapters"] == {}
        for path, sent in (
            ("/generate", {"input_ids": PROMPT, "lora_path": "a"}),
            ("/unload_lora_adapter", {"lora_name": "a"}),
        ):
            gone = pair.post(path, sent)
            assert (gone.status_code, "no adapter 'a' is loaded" in gone.text) == (404, True)
