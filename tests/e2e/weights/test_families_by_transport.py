"""Families and roads: whichever road weights come by, an engine computes what one started from them does
(I7).

Compared by the bytes of every parameter and by tokens with their logprobs. Quick tests take the families that
have forms of their own by all roads; the table of every family is long.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from support.architectures import ARCHITECTURES, tiny_model
from support.checkpoints import FAMILIES, HYBRIDS, make_checkpoint
from support.mxfp4 import SHAPE, make_mxfp4_checkpoint
from support.plain_trainer import PlainTrainer, weights_of
from support.roads import Roads
from support.scripted import EngineDriver, tokens_of

from caesura.io_struct import FlushCacheReqInput, GenerateReqInput, SamplingParams, WeightsCheckerReqInput

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
    """``folder(family, seed)``: a checkpoint of a family that the engine has a file for, or an architecture
    of transformers.
    """
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


@pytest.mark.parametrize("family", LONG)
def test_every_family(folder, trainer: PlainTrainer, family: str) -> None:
    compare_all_roads(folder, trainer, family)
