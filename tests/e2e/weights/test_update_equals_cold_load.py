"""An update from disk leaves what a cold start from that folder would have (I7), or refuses to serve.

Compared by the bytes of every parameter and derived tensor, and by the bits of what is generated.
"""

import os
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import FAMILIES, make_checkpoint
from support.scripted import EngineDriver, assert_error, one_piece_per_slice, tokens_of
from support.waiting import eventually

from caesura.io_struct import (
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    GenerateReqInput,
    PauseGenerationReqInput,
    SamplingParams,
    UpdateWeightFromDiskReqInput,
    WeightsCheckerReqInput,
)

PROMPTS = [[5, 6, 7], [3 + i * 7 % 90 for i in range(60)], [9]]
BUCKETS = [64, 1000, 4096, 1 << 20]
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")

    @cache
    def make(family: str = "qwen3", seed: int = 1, **options: object) -> Path:
        path = root / "-".join(str(part).replace(".", "_") for part in (family, seed, *options.values()))
        make_checkpoint(path, family, seed=seed, **options)
        return path

    return make


@pytest.fixture(scope="module")
def cold(tmp_path_factory):
    @cache
    def look(path: Path, dtype: str = "float32") -> tuple[dict[str, str], list]:
        with engine(path, dtype=dtype) as driver:
            return checksums(driver), outputs(driver)

    return look


def engine(path: Path, **options: object) -> EngineDriver:
    return EngineDriver(str(path), scripted=False, chunked_prefill_size=32, **options)


def checksums(driver: EngineDriver) -> dict[str, str]:
    found = driver.call(WeightsCheckerReqInput()).checksums
    assert found
    return found


def outputs(driver: EngineDriver) -> list[tuple[list[int], bytes]]:
    driver.call(FlushCacheReqInput(torch_empty_cache=False))
    rids = []
    for number, prompt in enumerate(PROMPTS):
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_new_tokens=8, temperature=temperature, seed=number, ignore_eos=True)
            message = GenerateReqInput(input_ids=prompt, sampling_params=params, return_logprob=True)
            rids.append(driver.submit(message))
    driver.run_until_idle()
    results = [driver.result(rid) for rid in rids]
    return [(tokens_of(result), result.output_logprobs) for result in results]


def update(driver: EngineDriver, path: Path, **options: object):
    reply = driver.call(UpdateWeightFromDiskReqInput(model_path=str(path), **options), max_ticks=100_000)
    assert reply.committed, reply
    return reply


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(checkpoint, cold, family, tied):
    old, new = checkpoint(family, 1, tied=tied), checkpoint(family, 2, tied=tied)
    expected = cold(new)
    assert cold(old)[0].keys() == expected[0].keys()
    assert cold(old)[0] != expected[0]
    assert cold(old)[1] != expected[1]
    with engine(old) as driver:
        assert checksums(driver) == cold(old)[0]
        names = len(load_file(new / WEIGHTS))
        reply = update(driver, new)
        assert (reply.written_tensors, reply.changed_tensors, reply.cast_tensors) == (names, names, 0)
        assert checksums(driver) == expected[0]
        assert outputs(driver) == expected[1]


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "sharded"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["F32", "BF16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_casts_shards_and_buckets(checkpoint, cold, dtype, stored, sharded, bucket):
    old = checkpoint("qwen3", 1)
    new = checkpoint("qwen3", 2, dtype=stored, sharded=sharded)
    assert (new / WEIGHTS).exists() is not sharded
    expected = cold(checkpoint("qwen3", 2, dtype=stored, sharded=False), dtype)
    with engine(old, dtype=dtype, load_bucket_bytes=bucket) as driver:
        reply = update(driver, new)
        same = stored is getattr(torch, dtype)
        assert reply.cast_tensors == (0 if same else reply.written_tensors)
        assert checksums(driver) == expected[0]
        again = update(driver, new)
        assert (again.changed_tensors, again.weights_epoch) == (0, 2)
        assert checksums(driver) == expected[0]
        assert outputs(driver) == expected[1]


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("element", [0, -1])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_changed_tensors_are_counted(checkpoint, tmp_path, count, element, bucket):
    old = checkpoint("qwen3", 1)
    shutil.copytree(old, tmp_path / "new")
    tensors = load_file(old / WEIGHTS)
    names = ["model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight", "model.norm.weight"]
    for name in names[:count]:
        tensors[name].view(-1)[element] += 1.0
    save_file(tensors, tmp_path / "new" / WEIGHTS, metadata={"format": "pt"})
    with engine(old, load_bucket_bytes=bucket) as driver:
        before = checksums(driver)
        reply = update(driver, tmp_path / "new")
        assert (reply.changed_tensors, reply.written_tensors) == (count, len(tensors))
        after = checksums(driver)
        assert sum(before[name] != after[name] for name in before) == count


class TestPoisoned:
    """A checkpoint that breaks under the reader leaves weights that nothing may run on."""

    @pytest.fixture
    def driver(self, checkpoint, monkeypatch):
        one_piece_per_slice(monkeypatch, writes=True)
        with engine(checkpoint("qwen3", 1), load_bucket_bytes=1000) as driver:
            yield driver

    @pytest.fixture
    def torn(self, checkpoint, tmp_path) -> Path:
        return Path(shutil.copytree(checkpoint("qwen3", 2), tmp_path / "torn"))

    def is_written(self, driver: EngineDriver) -> bool:
        """Return True if an update has written some of its bytes."""
        progress = driver.status().update
        if progress is None or progress.written_bytes == 0:
            return False
        assert progress.written_bytes < progress.total_bytes
        return True

    def tear(self, driver: EngineDriver, torn: Path) -> None:
        waiting = driver.send(UpdateWeightFromDiskReqInput(model_path=str(torn), flush_cache=False))
        eventually(lambda: driver.tick() or self.is_written(driver))
        os.truncate(torn / WEIGHTS, (torn / WEIGHTS).stat().st_size // 2)
        for _ in range(500):
            driver.tick()
            if waiting in driver.replies:
                break
        assert_error(driver.replies.pop(waiting), "checkpoint_error")

    def assert_nothing_runs(self, driver: EngineDriver) -> None:
        status = driver.status()
        assert (status.weights, status.weights_epoch, status.session) == ("poisoned", 0, None)
        assert_error(driver.call(GenerateReqInput(input_ids=[3, 4])), "weights_poisoned")
        driver.tick(5)
        assert driver.status().step == status.step

    def test_a_frozen_request_survives_and_a_complete_update_recovers(self, driver, torn, checkpoint, cold):
        rid = driver.generate(PROMPTS[1], 40)
        driver.tick(8)
        driver.call(PauseGenerationReqInput(mode="in_place"))
        held, generated = driver.status().kv.held, driver.status().generated_tokens
        self.tear(driver, torn)
        self.assert_nothing_runs(driver)
        assert_error(driver.call(ContinueGenerationReqInput()), "weights_poisoned")
        assert_error(driver.call(UpdateWeightFromDiskReqInput(model_path=str(torn))), "checkpoint_error")
        status = driver.status()
        assert (status.running_requests, status.kv.held, status.generated_tokens) == (1, held, generated)
        update(driver, checkpoint("qwen3", 2), flush_cache=False)
        assert driver.status().weights == "valid"
        driver.call(ContinueGenerationReqInput())
        driver.run_until_idle()
        result = driver.result(rid)
        assert len(tokens_of(result)) == 40
        assert [(span.epoch, span.stale_kv) for span in result.weight_versions] == [(0, False), (1, True)]
        assert result.weight_versions[0].end == generated
        assert (checksums(driver), outputs(driver)) == cold(checkpoint("qwen3", 2))

    def test_a_running_engine_stops(self, driver, torn, checkpoint, cold):
        rid = driver.generate(PROMPTS[0], 20)
        driver.tick(4)
        self.tear(driver, torn)
        self.assert_nothing_runs(driver)
        update(driver, checkpoint("qwen3", 2))
        driver.run_until_idle()
        assert len(tokens_of(driver.result(rid))) == 20
        assert (checksums(driver), outputs(driver)) == cold(checkpoint("qwen3", 2))

    def test_deadline_in_the_midst_of_a_call(self, driver, checkpoint):
        session_id = driver.begin(deadline_s=600)
        update = UpdateWeightFromDiskReqInput(model_path=str(checkpoint("qwen3", 2)), session_id=session_id)
        waiting = driver.send(update)
        eventually(lambda: driver.tick() or self.is_written(driver))
        driver.engine.sessions.current.deadline = 0.0
        driver.tick(3)
        assert_error(driver.replies.pop(waiting), "deadline_exceeded")
        self.assert_nothing_runs(driver)
