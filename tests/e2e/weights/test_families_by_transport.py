"""Families and roads: whichever road weights come by, an engine computes what one started from them does
(I7).

Compared by the bytes of every parameter and by tokens with their logprobs. Quick tests take the families that
have forms of their own by all roads; the table of every family is long.
"""

import random
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.architectures import ARCHITECTURES, tiny_model
from support.checkpoints import FAMILIES, HYBRIDS, make_checkpoint, make_fp8_checkpoint
from support.client_updates import TRANSPORTS, update_by
from support.lanes import quick
from support.mxfp4 import SHAPE, make_mxfp4_checkpoint
from support.parameter_server import ParameterServer
from support.plain_trainer import PlainTrainer, Weights, update_message, weights_of
from support.properties import examples
from support.scripted import EngineDriver, assert_error, tokens_of
from support.waiting import PATIENCE_S as _PATIENCE_S

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
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    FlushCacheReqInput,
    GenerateReqInput,
    Message,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    SamplingParams,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromCheckpointEngineReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightsCheckerReqInput,
)

PROMPTS = [[5, 6, 7], [3 + i * 7 % 90 for i in range(40)]]
MXFP4, FLOAT16 = "gpt-oss, MXFP4", "qwen3-moe, float16"
QUICK = ["gemma3", "gpt-oss", MXFP4, FLOAT16, "mixtral", "qwen2-moe", "glm4-moe", "qwen3.5"]
FOREIGN_QUICK = "Gemma2ForCausalLM"
CERTAIN = {"GemmaForCausalLM", "Gemma3ForCausalLM"}
"""Random logits of these are so large that one token has all of the probability, under any weights."""
LONG = [
    *(pytest.param(name, marks=pytest.mark.long) for name in (*FAMILIES, *HYBRIDS) if name not in QUICK),
    *(pytest.param(name, marks=pytest.mark.long) for name in ARCHITECTURES if name != FOREIGN_QUICK),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    """Yield ``folder(family, seed)``: a checkpoint of a family with a file here, or of transformers."""
    root = tmp_path_factory.mktemp("families")

    @cache
    def make(family: str, seed: int) -> Path:
        path = root / f"{family}-{seed}"
        if family == MXFP4:
            make_checkpoint(root / f"source-{seed}", "gpt-oss", seed=seed, dtype=torch.bfloat16, **SHAPE)
            make_mxfp4_checkpoint(root / f"source-{seed}", path)
        elif family == FLOAT16:
            make_checkpoint(path, "qwen3-moe", seed=seed, dtype=torch.float16)
        elif family in (*FAMILIES, *HYBRIDS):
            make_checkpoint(path, family, seed=seed)
        else:
            tiny_model(family, seed).save_pretrained(path)
        return path

    return make


@pytest.fixture
def trainer() -> Iterator[PlainTrainer]:
    trainer = PlainTrainer()
    yield trainer
    trainer.close()


def engine(path: Path, family: str) -> EngineDriver:
    backend = "transformers" if family in ARCHITECTURES else "native"
    return EngineDriver(
        str(path),
        scripted=False,
        model_backend=backend,
        chunked_prefill_size=32,
        kv_pool_tokens=256,
        allow_legacy_pickle=True,
    )


def state(driver: EngineDriver) -> tuple[dict[str, str], list[tuple[list[int], bytes]]]:
    driver.call(FlushCacheReqInput(torch_empty_cache=False))
    rids = []
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_new_tokens=6, temperature=float(number), seed=number, ignore_eos=True)
        message = GenerateReqInput(input_ids=prompt, sampling_params=params, return_logprob=True)
        rids.append(driver.send(message))
    driver.run_until_idle()
    results = [driver.result(rid) for rid in rids]
    found = [(tokens_of(result), result.output_logprobs) for result in results]
    return driver.call(WeightsCheckerReqInput()).checksums, found


def compare_all_roads(folder, trainer: PlainTrainer, family: str) -> None:
    old, new = folder(family, 1), folder(family, 2)
    with engine(new, family) as driver:
        cold = [None, state(driver)]
    with engine(old, family) as driver:
        cold[0] = state(driver)
        assert cold[0][0] != cold[1][0]
        assert family in CERTAIN or cold[0][1] != cold[1][1]
        roads = Roads(driver, trainer)
        for number, road in enumerate(roads.names):
            which = (number + 1) % 2
            reply = roads.send(road, (old, new)[which], seed=number)
            assert state(driver) == cold[which], road
            assert reply.weights_epoch == number + 1
            if road == "disk":
                assert reply.written_tensors == len(weights_of(new))


@pytest.mark.parametrize("family", QUICK)
def test_native_families(folder, trainer: PlainTrainer, family: str) -> None:
    compare_all_roads(folder, trainer, family)


def test_modules_of_transformers(folder, trainer: PlainTrainer) -> None:
    compare_all_roads(folder, trainer, FOREIGN_QUICK)


def test_an_engine_of_transformers_says_so_and_has_no_expert_ids(folder) -> None:
    with engine(folder("Olmo3ForCausalLM", 1), "Olmo3ForCausalLM") as driver:
        assert "transformers" in driver.status().kernels_reason
        message = GenerateReqInput(input_ids=PROMPTS[0], return_routed_experts=True)
        assert_error(driver.call(message), "unsupported")


@pytest.mark.parametrize("family", LONG)
def test_every_family(folder, trainer: PlainTrainer, family: str) -> None:
    compare_all_roads(folder, trainer, family)


@pytest.mark.parametrize("family", [QUICK[0], FOREIGN_QUICK])
def test_released_weights_come_back_by_an_update(folder, family: str) -> None:
    path = folder(family, 1)
    with engine(path, family) as driver:
        cold = state(driver)
        driver.call(PauseGenerationReqInput(mode="retract"))
        driver.call(ReleaseMemoryOccupationReqInput())
        driver.call(ResumeMemoryOccupationReqInput())
        assert driver.status().weights == "invalid"
        driver.call(UpdateWeightFromDiskReqInput(model_path=str(path)), max_ticks=100_000)
        driver.call(ContinueGenerationReqInput())
        assert state(driver) == cold


Forms = list[tuple[Path, Path]]
"""Folders to update from, each with the one of its cold start; the engine starts from the first."""


@pytest.fixture(scope="module", params=[*quick(["tied", "untied"]), "fp8"])
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
def cold(forms: Forms) -> dict[Path, tuple[str, list[int]]]:
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
def test_update_equals_cold_load(client, group, forms, cold, data, steps, twice, paused):
    if paused:
        client.pause("retract")
    for number, transport, bucket_bytes in steps:
        path, cold_path = forms[number % len(forms)]
        weights = weights_of(path)
        tensors = {name: weights[name] for name in data.draw(st.permutations(sorted(weights)))}
        for _ in range(1 + twice):
            reply = update_by(client, transport, tensors, path, group, bucket_bytes=bucket_bytes)
            assert reply.committed
        assert client.check_weights("checksum").total == cold[cold_path][0]
    client.continue_generation(torch_empty_cache=False)
    assert client.status().weights == "valid"
    assert greedy(client) == cold[cold_path][1]


class Roads:
    """Sends checkpoints to one driven engine."""

    def __init__(self, driver: EngineDriver, trainer: PlainTrainer, bucket_bytes: int = 20_000) -> None:
        self._driver, self._trainer, self._bucket_bytes = driver, trainer, bucket_bytes
        self.names: dict[str, Callable[[Path, Weights], Message]] = {
            "disk": lambda folder, weights: self._disk(folder),
            "tensor": lambda folder, weights: self._in_buckets(weights, self._tensor),
            "ipc": lambda folder, weights: self._in_buckets(weights, self._ipc),
            "distributed": lambda folder, weights: self._distributed(weights),
            "shared": lambda folder, weights: self._shared(weights),
            "parameter server": lambda folder, weights: self._parameter_server(weights),
            "session": lambda folder, weights: self._session(weights),
        }

    def send(self, road: str, folder: Path, seed: int = 0) -> Message:
        """Send all tensors of ``folder`` in the order of ``seed``; return the answer that committed them."""
        weights = weights_of(folder)
        names = sorted(weights)
        random.Random(seed).shuffle(names)
        self._driver.call(PauseGenerationReqInput(mode="retract"))
        reply = self.names[road](folder, {name: weights[name] for name in names})
        assert getattr(reply, "committed", False), (road, reply)
        self._driver.call(ContinueGenerationReqInput(torch_empty_cache=False))
        return reply

    def _disk(self, folder: Path) -> Message:
        return self._driver.call(UpdateWeightFromDiskReqInput(model_path=str(folder)), max_ticks=100_000)

    def _in_buckets(self, weights: Weights, send: Callable[[Bucket, str | None], Message]) -> Message:
        replies = [send(bucket, None) for bucket in buckets(weights.items(), self._bucket_bytes)]
        assert not any(getattr(reply, "committed", True) for reply in replies[:-1]), replies
        return replies[-1]

    def _tensor(self, bucket: Bucket, session_id: str | None) -> Message:
        specs, frames = as_frames(bucket)
        message = UpdateWeightsFromTensorReqInput(specs=specs, session_id=session_id)
        return self._driver.call(message, buffers=frames)

    def _ipc(self, bucket: Bucket, session_id: str | None) -> Message:
        with SharedBucket(bucket.nbytes) as memory:
            specs = memory.fill(bucket)
            message = UpdateWeightsFromIPCReqInput(handle=memory.handle, specs=specs, session_id=session_id)
            return self._driver.call(message)

    def _shared(self, weights: Weights) -> Message:
        with SharedTensors(weights.items()) as shared:
            memory = shared.memory
            return self._driver.call(UpdateWeightsFromIPCReqInput(handle=memory.handle, specs=shared.specs))

    def _parameter_server(self, weights: Weights) -> Message:
        answers: list[str] = []
        largest = max(tensor.nbytes for tensor in weights.values())
        with ParameterServer(max(self._bucket_bytes, largest)) as server:

            def push() -> None:
                messages = chain([server.handle], server.buckets(weights), [None, None])
                answers.extend(server.ask(message) for message in messages)

            self._trainer.beside(push)
            reply = self._driver.call(
                UpdateWeightsFromCheckpointEngineReqInput(
                    zmq_handles={"cpu": server.address}, timeout_s=_PATIENCE_S
                )
            )
            self._trainer.finish()
        assert len(answers) > 3, answers
        assert not any(answers), answers
        return reply

    def _distributed(self, weights: Weights) -> Message:
        trainer, driver = self._trainer, self._driver
        if trainer.group is None:
            trainer.beside(trainer.join)
            driver.call(trainer.init_message())
            trainer.finish()
        names = list(weights)
        for half in (names[: len(names) // 2], names[len(names) // 2 :]):
            part = {name: weights[name] for name in half}
            trainer.beside(lambda part=part: trainer.broadcast_each(part))
            reply = driver.call(update_message(part))
            trainer.finish()
        return reply

    def _session(self, weights: Weights) -> Message:
        session_id = self._driver.begin(manifest=manifest(weights.items()))
        for number, bucket in enumerate(buckets(weights.items(), self._bucket_bytes)):
            (self._ipc if number % 2 else self._tensor)(bucket, session_id)
        return self._driver.call(EndWeightUpdateReqInput(session_id=session_id))
