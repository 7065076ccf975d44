"""Weights that do not fit are refused in the same words, whatever brings them."""

import asyncio

import pytest
from safetensors.torch import load_file, save_file
from support import client_updates
from support.waiting import PATIENCE_S as PATIENCE

from caesura.client import (
    AsyncControlClient,
    ControlClient,
    EngineError,
    InvalidRequest,
    WeightMismatch,
    launch_scheduler,
)
from caesura.client.trainer import WeightUpdateGroup

TRANSPORTS = (*client_updates.TRANSPORTS, "tensor, asyncio", "ipc, asyncio")


@pytest.fixture(scope="module")
def engine(tiny_model, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "engine.log"
    with launch_scheduler(tiny_model, num_threads=1, kv_pool_tokens=128, log_path=log) as client:
        yield client


def updated(engine: ControlClient, transport: str, tensors, folder, **options):
    if transport == "disk":
        save_file(tensors, folder / "model.safetensors")
    kind, _, how = transport.partition(", ")
    if how != "asyncio":
        return client_updates.update_by(engine, transport, tensors, folder, **options)

    async def update():
        async with AsyncControlClient(engine.endpoint) as client:
            method = getattr(client, f"update_weights_from_{kind}")
            return await method(tensors, timeout=PATIENCE, **options)

    return asyncio.run(update())


@pytest.fixture
def folder(tmp_path, tiny_model):
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    return tmp_path


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_state_dict_updates_and_wrong_names_are_told(engine, tiny_model, folder, transport):
    weights = load_file(tiny_model / "model.safetensors")
    wrapped = {f"module.{name}": tensor for name, tensor in weights.items()}
    said = rf"all {len(weights)} names begin with 'module\.', which the checkpoint's names do not; "
    said += r"module\..* \[\d+.*is not in"
    with pytest.raises(WeightMismatch, match=said):
        updated(engine, transport, wrapped, folder)
    assert updated(engine, transport, weights, folder, weight_version=7).weight_version == "7"
    assert engine.status().weights == "valid"


@pytest.mark.parametrize(
    "call,sentence",
    [
        (lambda c: c.update_weights_from_disk(None), "model_path = None must be a path"),
        (
            lambda c: c.update_weights_from_tensor({}, bucket_bytes="1GB"),
            "bucket_bytes = '1GB' must be an integer",
        ),
        (
            lambda c: c.update_weights_from_ipc({}, bucket_bytes=0),
            "bucket_bytes = 0 must be an integer of at",
        ),
        (
            lambda c: c.update_weights_from_distributed({}, group="g"),
            "group = 'g' must be a WeightUpdateGroup",
        ),
        (WeightUpdateGroup.create, "clients must be a list of clients, not a SchedulerClient"),
        (lambda c: WeightUpdateGroup.create([c], backend="mpi"), "backend = 'mpi' must be gloo or nccl"),
        (lambda c: c.pause("inplace"), r"mode = 'inplace' must be .* \(did you mean 'in_place'\?\)"),
        (lambda c: c.release_memory("kv"), r"tags\[0\] = 'kv' must be .* \(did you mean 'kv_cache'\?\)"),
    ],
)
def test_a_mistake_of_a_trainer_is_told_in_a_sentence(engine, call, sentence):
    with pytest.raises(EngineError, match=sentence):
        call(engine)


def test_one_tag_is_as_good_as_a_list_of_it(engine):
    engine.pause("abort")
    assert engine.release_memory("kv_cache").released_tags == ["kv_cache"]
    assert engine.resume_memory("kv_cache").released_tags == []
    engine.continue_generation()


@pytest.mark.parametrize("label", [7.0, True, ["7"]])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_label_that_is_none_is_refused_in_a_sentence(engine, tiny_model, folder, transport, label):
    weights = load_file(tiny_model / "model.safetensors")
    with pytest.raises(InvalidRequest, match=r"weight_version = .* must be a string or an integer"):
        updated(engine, transport, weights, folder, weight_version=label)
