"""Whichever road weights come by, an engine computes what one started from them does (I7), or does not serve.

Compared by the bytes of every parameter and derived tensor, and by the bits of what is generated. Families
that have forms of their own come by all roads in ``make test``; that every family does is long.
"""

import os
import random
import shutil
from collections.abc import Iterator
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.architectures import ARCHITECTURES, tiny_model
from support.checkpoints import FAMILIES, HYBRIDS, make_checkpoint, make_fp8_checkpoint
from support.client_updates import TRANSPORTS, update_by
from support.lanes import every, quick
from support.mxfp4 import SHAPE, make_mxfp4_checkpoint
from support.parameter_server import ParameterServer
from support.plain_trainer import PlainTrainer, Weights, update_message, weights_of
from support.properties import examples
from support.scripted import EngineDriver, assert_error, one_piece_per_slice, tokens_of
from support.waiting import PATIENCE_S, eventually

from caesura.client import LaunchedScheduler, SchedulerClient, launch_scheduler
from caesura.client.trainer import (
    Bucket,
    SharedBucket,
    SharedTensors,
    WeightUpdateGroup,
    as_frames,
    buckets,
    manifest,
)
from caesura.io_struct import (
    GenerateReqInput,
    SamplingParams,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromCheckpointEngineReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightUpdateReqOutput,
)

PROMPTS = [[5, 6, 7], [3 + i * 7 % 90 for i in range(60)], [9]]
BUCKETS = [64, 1000, 4096, 1 << 20]
ROADS = ["disk", "tensor", "ipc", "distributed", "shared", "parameter server", "session"]
BUCKET_BYTES = 20_000
WEIGHTS = "model.safetensors"
MXFP4, FLOAT16 = "gpt-oss, MXFP4", "qwen3-moe, float16"
QUICK = ["gemma3", MXFP4, FLOAT16, "qwen3.5"]
FOREIGN_QUICK = "Gemma2ForCausalLM"
CERTAIN = {"GemmaForCausalLM", "Gemma3ForCausalLM"}
"""Random logits of these are so large that one token has all of the probability, under any weights."""
FAMILIES_BY_ROADS = [
    *QUICK,
    FOREIGN_QUICK,
    *(pytest.param(name, marks=pytest.mark.long) for name in (*FAMILIES, *HYBRIDS) if name not in QUICK),
    *(pytest.param(name, marks=pytest.mark.long) for name in ARCHITECTURES if name != FOREIGN_QUICK),
]
State = tuple[dict[str, str], list[tuple[list[int], bytes]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    """Yield ``folder(family, seed, **options)``: a checkpoint of a family of ours, or of transformers."""
    root = tmp_path_factory.mktemp("families")

    @cache
    def make(family: str = "qwen3", seed: int = 1, **options: object) -> Path:
        path = root / "-".join(str(part).replace(".", "_") for part in (family, seed, *options.values()))
        if family == MXFP4:
            make_checkpoint(root / f"source-{seed}", "gpt-oss", seed=seed, dtype=torch.bfloat16, **SHAPE)
            make_mxfp4_checkpoint(root / f"source-{seed}", path)
        elif family == FLOAT16:
            make_checkpoint(path, "qwen3-moe", seed=seed, dtype=torch.float16)
        elif family in (*FAMILIES, *HYBRIDS):
            make_checkpoint(path, family, seed=seed, **options)
        else:
            tiny_model(family, seed).save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="module")
def cold():
    """Yield ``cold(folder, **options)``: what an engine that was started from the folder has and says."""

    @cache
    def look(path: Path, **options: object) -> State:
        with engine(path, **options) as driver:
            return state(driver)

    return look


@pytest.fixture
def trainer() -> Iterator[PlainTrainer]:
    trainer = PlainTrainer()
    yield trainer
    trainer.close()


def engine(path: Path, **options: Any) -> EngineDriver:
    settings: dict[str, Any] = {
        "chunked_prefill_size": 32,
        "kv_pool_tokens": 512,
        "allow_legacy_pickle": True,
    }
    return EngineDriver(str(path), scripted=False, **{**settings, **options})


def backend_of(family: str) -> dict[str, str]:
    return {"model_backend": "transformers"} if family in ARCHITECTURES else {}


def state(driver: EngineDriver) -> State:
    driver.flush(torch_empty_cache=False)
    rids = []
    for number, prompt in enumerate(PROMPTS):
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_new_tokens=8, temperature=temperature, seed=number, ignore_eos=True)
            message = GenerateReqInput(input_ids=prompt, sampling_params=params, return_logprob=True)
            rids.append(driver.submit(message))
    driver.run_until_idle()
    results = [driver.result(rid) for rid in rids]
    found = [(tokens_of(result), result.output_logprobs) for result in results]
    return checksums(driver), found


def checksums(driver: EngineDriver) -> dict[str, str]:
    found = driver.check_weights().checksums
    assert found
    return found


def update(driver: EngineDriver, path: Path, **options: object):
    reply = driver.update(path, **options)
    assert reply.committed, reply
    return reply


@pytest.mark.parametrize("family", FAMILIES_BY_ROADS)
def test_every_road(folder, cold, trainer: PlainTrainer, family: str) -> None:
    backend = backend_of(family)
    old, new = folder(family, 1), folder(family, 2)
    expected = [cold(old, **backend), cold(new, **backend)]
    assert expected[0][0] != expected[1][0]
    assert family in CERTAIN or expected[0][1] != expected[1][1]
    with engine(old, **backend) as driver:
        for number, road in enumerate(ROADS):
            which = (number + 1) % 2
            reply = update_by_road(driver, trainer, road, (old, new)[which], seed=number)
            assert state(driver) == expected[which], road
            assert reply.weights_epoch == number + 1


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "family", quick(["deepseek-v3", *(each for each in FAMILIES if each != "deepseek-v3")])
)
def test_every_family_from_disk(folder, cold, family, tied):
    options = {"tied": True} if tied else {}
    old, new = folder(family, 1, **options), folder(family, 2, **options)
    assert cold(old)[0].keys() == cold(new)[0].keys()
    assert cold(old)[0] != cold(new)[0]
    assert cold(old)[1] != cold(new)[1]
    with engine(old) as driver:
        names = len(load_file(new / WEIGHTS))
        reply = update(driver, new)
        assert (reply.written_tensors, reply.changed_tensors, reply.cast_tensors) == (names, names, 0)
        assert state(driver) == cold(new)


def test_an_engine_of_transformers_has_no_expert_ids(folder) -> None:
    with engine(folder("Olmo3ForCausalLM"), model_backend="transformers") as driver:
        assert "transformers" in driver.status().kernels_reason
        message = GenerateReqInput(input_ids=PROMPTS[0], return_routed_experts=True)
        assert_error(driver.call(message), "unsupported")


@pytest.mark.parametrize("family", [QUICK[0], FOREIGN_QUICK])
def test_released_weights_come_back_by_an_update(folder, cold, family: str) -> None:
    path = folder(family)
    with engine(path, **backend_of(family)) as driver:
        driver.pause("retract")
        driver.release()
        driver.resume()
        assert driver.status().weights == "invalid"
        update(driver, path)
        driver.go_on()
        assert state(driver) == cold(path, **backend_of(family))


@pytest.mark.parametrize(
    ("dtype", "stored", "sharded", "bucket"),
    every(product(["float32", "bfloat16"], [torch.float32, torch.bfloat16], [False, True], BUCKETS), 5),
)
def test_casts_shards_and_buckets(folder, cold, dtype, stored, sharded, bucket):
    old = folder("qwen3", 1)
    new = folder("qwen3", 2, dtype=stored, sharded=sharded)
    assert (new / WEIGHTS).exists() is not sharded
    expected = cold(folder("qwen3", 2, dtype=stored), dtype=dtype)
    with engine(old, dtype=dtype, load_bucket_bytes=bucket) as driver:
        reply = update(driver, new)
        same = stored is getattr(torch, dtype)
        assert reply.cast_tensors == (0 if same else reply.written_tensors)
        assert checksums(driver) == expected[0]
        again = update(driver, new)
        assert (again.changed_tensors, again.weights_epoch) == (0, 2)
        assert state(driver) == expected


@pytest.mark.parametrize("bucket", quick(BUCKETS, 2))
def test_changed_tensors_are_counted(folder, tmp_path, bucket):
    old, new = folder("qwen3", 1), tmp_path / "new"
    shutil.copytree(old, new)
    names = ["model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight", "model.norm.weight"]
    with engine(old, load_bucket_bytes=bucket) as driver:
        before = checksums(driver)
        for count, element in ((0, 0), (1, 0), (1, -1), (3, -1)):
            tensors = load_file(old / WEIGHTS)
            for name in names[:count]:
                tensors[name].view(-1)[element] += 1.0
            save_file(tensors, new / WEIGHTS, metadata={"format": "pt"})
            reply = update(driver, new)
            assert (reply.changed_tensors, reply.written_tensors) == (count, len(tensors))
            after = checksums(driver)
            assert sum(before[name] != after[name] for name in before) == count
            update(driver, old)


def test_a_torn_checkpoint_poisons_until_a_complete_update(folder, cold, tmp_path, monkeypatch):
    """A frozen request survives an update that fails, and nothing runs on half of it."""
    torn = Path(shutil.copytree(folder("qwen3", 2), tmp_path / "torn"))
    one_piece_per_slice(monkeypatch, writes=True)
    with engine(folder(), load_bucket_bytes=1000) as driver:
        rid = driver.generate(PROMPTS[1], 40)
        driver.tick(8)
        driver.pause("in_place")
        held, generated = driver.status().kv.held, driver.status().generated_tokens
        waiting = driver.send(UpdateWeightFromDiskReqInput(model_path=str(torn), flush_cache=False))

        def is_partly_written() -> bool:
            progress = driver.status().update
            return progress is not None and 0 < progress.written_bytes < progress.total_bytes

        eventually(lambda: driver.tick() or is_partly_written())
        os.truncate(torn / WEIGHTS, (torn / WEIGHTS).stat().st_size // 2)
        eventually(lambda: driver.tick() or waiting in driver.replies)
        assert_error(driver.replies.pop(waiting), "checkpoint_error")
        status = driver.status()
        assert (status.weights, status.weights_epoch, status.session) == ("poisoned", 0, None)
        assert_error(driver.call(GenerateReqInput(input_ids=[3, 4])), "weights_poisoned")
        driver.tick(5)
        assert driver.status().step == status.step
        assert_error(driver.go_on(), "weights_poisoned")
        assert_error(driver.update(torn), "checkpoint_error")
        status = driver.status()
        assert (status.running_requests, status.kv.held, status.generated_tokens) == (1, held, generated)
        update(driver, folder("qwen3", 2), flush_cache=False)
        assert driver.status().weights == "valid"
        driver.go_on()
        driver.run_until_idle()
        result = driver.result(rid)
        assert len(tokens_of(result)) == 40
        assert [(span.epoch, span.stale_kv) for span in result.weight_versions] == [(0, False), (1, True)]
        assert result.weight_versions[0].end == generated
        assert state(driver) == cold(folder("qwen3", 2))


Forms = list[tuple[Path, Path]]
"""Folders to update from, each with the one of its cold start; the engine starts from the first."""


@pytest.fixture(scope="module", params=quick(["fp8", "tied", "untied"]))
def forms(request, tmp_path_factory) -> Forms:
    root = tmp_path_factory.mktemp(request.param)
    if request.param == "fp8":
        return fp8_forms(root)
    paths = [root / str(seed) for seed in range(3)]
    for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float32)):
        make_checkpoint(paths[seed], "qwen3", tied=request.param == "tied", dtype=dtype, seed=seed)
    return [(path, path) for path in paths]


def fp8_forms(root: Path) -> Forms:
    """Write FP8 weights, and others as FP8, as bfloat16, and with half the projections as plain bfloat16."""
    for seed in range(2):
        make_checkpoint(root / f"plain{seed}", "qwen3", dtype=torch.bfloat16, seed=seed)
        make_fp8_checkpoint(root / f"plain{seed}", root / f"fp8-{seed}", (16, 32))
    shutil.copytree(root / "plain1", root / "mixed")
    plain, fp8 = weights_of(root / "plain1"), weights_of(root / "fp8-1")
    half = sorted(name for name in plain if f"{name}_scale_inv" in fp8)[::2]
    mixed = {name: value for name, value in fp8.items() if name.removesuffix("_scale_inv") not in half}
    save_file(mixed | {name: plain[name] for name in half}, root / "mixed" / "model.safetensors")
    start, other = root / "fp8-0", root / "fp8-1"
    return [(start, start), (other, other), (root / "plain1", other), (root / "mixed", other)]


def launch(path: Path) -> LaunchedScheduler:
    return launch_scheduler(str(path), dtype="float32", num_threads=1, kv_pool_tokens=256)


def greedy(client: SchedulerClient) -> list[int]:
    params = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    return list(client.generate([3, 1, 4, 1, 5], sampling_params=params).output_ids)


@pytest.fixture(scope="module")
def cold_tokens(forms: Forms) -> dict[Path, tuple[str, list[int]]]:
    """Checksum and tokens of an engine that was started from each folder."""
    found = {}
    for path in {cold for _, cold in forms}:
        with launch(path) as client:
            found[path] = client.check_weights("checksum").total, greedy(client)
    return found


@pytest.fixture(scope="module")
def client(forms: Forms) -> Iterator[SchedulerClient]:
    with launch(forms[0][0]) as client:
        yield client


@pytest.fixture(scope="module")
def group(client: SchedulerClient) -> Iterator[WeightUpdateGroup]:
    with WeightUpdateGroup.create([client]) as group:
        yield group


@settings(max_examples=examples(25), suppress_health_check=list(HealthCheck))
@given(
    data=st.data(),
    steps=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from(TRANSPORTS),
            st.sampled_from([1, 64, 1000, 4096, 20_000, 1 << 20]),
        ),
        min_size=1,
        max_size=3,
    ),
    twice=st.booleans(),
    paused=st.booleans(),
)
def test_any_order_of_updates_equals_a_cold_load(
    client, group, forms, cold_tokens, data, steps, twice, paused
):
    if paused:
        client.pause("retract")
    for number, transport, bucket_bytes in steps:
        path, cold_path = forms[number % len(forms)]
        weights = weights_of(path)
        tensors = {name: weights[name] for name in data.draw(st.permutations(sorted(weights)))}
        for _ in range(1 + twice):
            reply = update_by(client, transport, tensors, path, group, bucket_bytes=bucket_bytes)
            assert reply.committed
        assert client.check_weights("checksum").total == cold_tokens[cold_path][0]
    client.continue_generation(torch_empty_cache=False)
    assert client.status().weights == "valid"
    assert greedy(client) == cold_tokens[cold_path][1]


def update_by_road(
    driver: EngineDriver, trainer: PlainTrainer, road: str, folder: Path, seed: int
) -> WeightUpdateReqOutput:
    """Send all tensors of ``folder`` in the order of ``seed``; return the answer that committed them."""
    found = weights_of(folder)
    names = sorted(found)
    random.Random(seed).shuffle(names)
    weights = {name: found[name] for name in names}
    driver.pause("retract")
    if road == "disk":
        reply = update(driver, folder)
    elif road == "shared":
        with SharedTensors(weights.items()) as shared:
            message = UpdateWeightsFromIPCReqInput(handle=shared.memory.handle, specs=shared.specs)
            reply = driver.call(message)
    elif road == "distributed":
        reply = broadcast(driver, trainer, weights)
    elif road == "parameter server":
        reply = push(driver, trainer, weights)
    else:
        session_id = driver.begin(manifest=manifest(weights.items())) if road == "session" else None
        for number, bucket in enumerate(buckets(weights.items(), BUCKET_BYTES)):
            in_memory = road == "ipc" or (road == "session" and number % 2)
            reply = (send_in_memory if in_memory else send)(driver, bucket, session_id)
        if session_id is not None:
            reply = driver.end(session_id=session_id)
    assert reply.committed, (road, reply)
    driver.go_on(torch_empty_cache=False)
    return reply


def send(driver: EngineDriver, bucket: Bucket, session_id: str | None) -> Any:
    specs, frames = as_frames(bucket)
    return driver.call(UpdateWeightsFromTensorReqInput(specs=specs, session_id=session_id), buffers=frames)


def send_in_memory(driver: EngineDriver, bucket: Bucket, session_id: str | None) -> Any:
    with SharedBucket(bucket.nbytes) as memory:
        specs = memory.fill(bucket)
        message = UpdateWeightsFromIPCReqInput(handle=memory.handle, specs=specs, session_id=session_id)
        return driver.call(message)


def push(driver: EngineDriver, trainer: PlainTrainer, weights: Weights) -> Any:
    answers: list[str] = []
    largest = max(tensor.nbytes for tensor in weights.values())
    with ParameterServer(max(BUCKET_BYTES, largest)) as server:
        messages = chain([server.handle], server.buckets(weights), [None, None])
        trainer.beside(lambda: answers.extend(server.ask(message) for message in messages))
        message = UpdateWeightsFromCheckpointEngineReqInput(
            zmq_handles={"cpu": server.address}, timeout_s=PATIENCE_S
        )
        reply = driver.call(message)
        trainer.finish()
    assert len(answers) > 3, answers
    assert not any(answers), answers
    return reply


def broadcast(driver: EngineDriver, trainer: PlainTrainer, weights: Weights) -> Any:
    if trainer.group is None:
        trainer.beside(trainer.join)
        driver.call(trainer.init_message())
        trainer.finish()
    items = list(weights.items())
    for half in (items[: len(items) // 2], items[len(items) // 2 :]):
        trainer.beside(lambda half=half: trainer.broadcast_each(dict(half)))
        reply = driver.call(update_message(dict(half)))
        trainer.finish()
    return reply
