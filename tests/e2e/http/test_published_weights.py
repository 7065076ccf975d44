"""A server follows versions that slime and SkyRL publish, takes deltas over HTTP, and returns from them."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.http_serve import ServedEngine, served
from support.plain_trainer import Weights, weights_of
from support.published_weights import publish_skyrl, publish_slime

from caesura.client.trainer import WeightDelta

OCTETS = {"content-type": "application/octet-stream"}


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("updates")
    return Path(shutil.copytree(tiny_model, root / "model"))


@pytest.fixture(scope="module", params=[1, 2], ids=["one engine", "two replicas"])
def server(request, model) -> Iterator[ServedEngine]:
    with served("--model", str(model), "--replicas", str(request.param)) as engine:
        yield engine


@pytest.fixture
def root(server, model) -> Iterator[Path]:
    yield Path(model.parent)
    for folder in ("published", "copy", "whole"):
        shutil.rmtree(model.parent / folder, ignore_errors=True)
    server.ok("/shutdown_weight_transfer_engine")
    server.ok("/continue_generation")
    server.ok("/update_weights_from_disk", {"model_path": str(model), "weight_version": "start"})


def versions(model: Path, count: int) -> list[Weights]:
    found = [dict(weights_of(model))]
    for number in range(1, count):
        new = {name: tensor.clone() for name, tensor in found[-1].items()}
        for name in list(new)[number % 2 :: 2]:
            flat = new[name].view(-1)
            flat[number::97] += 0.5
        found.append(new)
    return found


def checksum(server: ServedEngine) -> str:
    return server.ok("/weights_checker")["per_engine_checksum"]


def checksum_of(server: ServedEngine, model: Path, weights: Weights) -> str:
    """Return the checksum that a full update gives."""
    folder = Path(shutil.copytree(model, model.parent / "whole", dirs_exist_ok=True))
    for file in folder.glob("*.safetensors"):
        save_file({name: weights[name] for name in load_file(file)}, file)
    server.ok("/update_weights_from_disk", {"model_path": str(folder)})
    found = checksum(server)
    server.ok("/update_weights_from_disk", {"model_path": str(model), "weight_version": "start"})
    return found


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_slimes_versions_are_pulled_and_loaded(server, model, root, encoding):
    weights = versions(model, 3)
    expected = [checksum_of(server, model, each) for each in weights]
    copy, source = root / "copy", root / "published"
    whole = 0
    for number in (1, 2):
        publish_slime(source, number, weights[number - 1], weights[number], encoding=encoding)
        body = {"local_checkpoint_dir": str(copy), "source_dir": str(source), "target_version": number}
        assert server.ok("/pull_weights", body)["success"]
        assert checksum(server) == expected[number - 1], "a pull changes no weights"
        server.ok("/pause_generation", {"mode": "retract"})
        server.get("/flush_cache")
        reply = server.ok(
            "/update_weights_from_disk", {"model_path": str(copy), "weight_version": str(number)}
        )
        server.ok("/continue_generation")
        assert checksum(server) == expected[number]
        assert reply["weight_version"] == str(number)
        whole = whole or reply["written_bytes"]
    assert reply["written_bytes"] < whole / 10, "the second one sends what has changed"


def test_skyrls_versions_are_fetched_and_loaded(server, model, root):
    weights = versions(model, 3)
    expected = [checksum_of(server, model, each) for each in weights]
    info = {"backend": "delta", "base_model_path": str(model), "local_checkpoint_dir": str(root / "copy")}
    server.ok("/init_weight_transfer_engine", {"init_info": {**info, "max_files_to_keep": 5}})
    source = root / "published"
    for number in (1, 2):
        publish_skyrl(source, number, weights[number - 1], weights[number])
        reply = server.ok("/fetch_weights", {"target_version": number, "sync_dir": str(source)})
        assert reply["status"] == "ok"
        assert checksum(server) == expected[number - 1], "fetching changes no weights"
        server.ok("/pause?mode=keep")
        server.ok("/start_weight_update", {"is_checkpoint_format": True})
        server.ok("/update_weights", {"update_info": {"target_version": number, "sync_dir": str(source)}})
        server.ok("/finish_weight_update", {"weight_version": number})
        server.ok("/resume")
        assert checksum(server) == expected[number]
        assert server.get("/weight_info").json() == {"weight_version": str(number)}


def test_torn_versions_and_object_stores_are_refused(server, model, root):
    weights = versions(model, 2)
    before = checksum(server)
    folder = publish_slime(root / "published", 1, weights[0], weights[1])
    path = min(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    body = {"local_checkpoint_dir": str(root / "copy"), "source_dir": str(root / "published")}
    reply = server.post("/pull_weights", {**body, "target_version": 1})
    assert (reply.status_code, reply.json()["code"]) == (400, "checkpoint_error")
    assert "truncated" in reply.json()["message"]
    for name, place, words in (
        ("source_dir", "gs://bucket/run", "object store"),
        ("source_dir", "/etc", "outside"),
        ("local_checkpoint_dir", None, "is missing"),
    ):
        reply = server.post("/pull_weights", {**body, "target_version": 1, name: place})
        assert reply.status_code == 400 and words in reply.json()["message"]
    reply = server.post("/fetch_weights", {"target_version": 1, "sync_dir": "s3://bucket/run"})
    assert reply.status_code == 400
    assert checksum(server) == before


def test_a_delta_is_a_body_and_is_taken_back(server, model, root):
    old, new = versions(model, 2)
    expected = checksum_of(server, model, new)
    before, epoch = checksum(server), server.get("/server_info").json()["weights_epoch"]
    WeightDelta.between(old, new).save(root / "published")
    content = (root / "published" / "delta.safetensors").read_bytes()
    path = "/update_weights_from_tensor?weight_version=7"
    wrong = server.http.post(f"{path}&base_epoch={epoch + 1}", content=content, headers=OCTETS)
    assert (wrong.status_code, wrong.json()["code"]) == (400, "base_mismatch")
    torn = server.http.post(path, content=content[:-1], headers=OCTETS)
    assert torn.status_code == 400 and "truncated" in torn.json()["message"]
    assert checksum(server) == before
    reply = server.http.post(f"{path}&base_epoch={epoch}", content=content, headers=OCTETS)
    assert reply.status_code == 200, reply.text
    assert checksum(server) == expected and reply.json()["weight_version"] == "7"
    again = server.http.post(path, content=content, headers=OCTETS)
    assert again.json()["code"] == "base_mismatch", "its base is gone"
    assert server.ok("/rollback_weights")["weight_version"] == "start"
    assert checksum(server) == before
    assert server.post("/rollback_weights", {}).json()["code"] == "no_rollback"
