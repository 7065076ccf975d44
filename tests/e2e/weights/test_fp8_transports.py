"""FP8 weights in parts, as FP8 or as bfloat16, and what must not meet."""

from pathlib import Path

import pytest
import torch
from support.checkpoints import make_checkpoint, make_fp8_checkpoint
from support.plain_trainer import weights_of

from caesura.client import SamplingParams, SchedulerClient, launch_scheduler
from caesura.client.exceptions import EngineError
from caesura.client.trainer import manifest

Q = "model.layers.1.self_attn.q_proj.weight"
BLOCKS = (16, 32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[dict[str, Path]]:
    found = []
    for seed in range(2):
        root = tmp_path_factory.mktemp("fp8")
        make_checkpoint(root / "bf16", "qwen3", dtype=torch.bfloat16, seed=seed)
        make_fp8_checkpoint(root / "bf16", root / "fp8", BLOCKS)
        found.append({"bf16": root / "bf16", "fp8": root / "fp8"})
    return found


def launch(path: Path):
    return launch_scheduler(str(path), dtype="float32", num_threads=1, kv_pool_tokens=256)


def tokens_of(client: SchedulerClient) -> list[int]:
    params = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    return list(client.generate([3, 1, 4, 1, 5], sampling_params=params).output_ids)


@pytest.fixture(scope="module")
def cold(folders) -> list[tuple[str, list[int]]]:
    found = []
    for folder in folders:
        with launch(folder["fp8"]) as client:
            found.append((client.check_weights("checksum").total, tokens_of(client)))
    assert found[0] != found[1]
    return found


@pytest.fixture(scope="module")
def engine(folders):
    with launch(folders[0]["fp8"]) as client:
        yield client


def test_a_manifest_of_bfloat16_is_complete_without_scales(engine, folders, cold):
    plain = weights_of(folders[1]["bf16"])
    with engine.weight_update(manifest=manifest(plain.items())):
        engine.update_weights_from_tensor(plain.items(), bucket_bytes=1000)
    assert engine.check_weights("checksum").total == cold[1][0]


def test_a_manifest_lacks_the_scales_of_fp8_or_has_too_many(engine, folders):
    plain, fp8 = weights_of(folders[1]["bf16"]), weights_of(folders[1]["fp8"])
    epoch = engine.status().weights_epoch
    lacking = {name: value for name, value in fp8.items() if name != f"{Q}_scale_inv"}
    too_many = {**plain, f"{Q}_scale_inv": fp8[f"{Q}_scale_inv"]}
    for tensors, problem in ((lacking, "missing"), (too_many, "mismatched")):
        with pytest.raises(EngineError) as caught, engine.weight_update(manifest=manifest(tensors.items())):
            raise AssertionError("accepted")
        assert caught.value.code == "weight_mismatch"
        assert f"{Q}_scale_inv" in str(caught.value.detail[problem])
    assert (engine.status().weights, engine.status().weights_epoch) == ("valid", epoch)


def test_scales_of_another_form_are_never_served(engine, folders, cold):
    plain, fp8 = weights_of(folders[1]["bf16"]), weights_of(folders[1]["fp8"])
    engine.pause("retract")
    engine.update_weights_from_tensor([(Q, plain[Q])])
    engine.update_weights_from_tensor([(f"{Q}_scale_inv", 2 * fp8[f"{Q}_scale_inv"])])
    with pytest.raises(EngineError) as caught:
        engine.continue_generation()
    assert (caught.value.code, caught.value.detail["missing"]) == ("weight_mismatch", [Q])
    assert engine.status().weights == "updating", "the rest may still come"
    with pytest.raises(EngineError):
        engine.continue_generation()
    engine.end_weight_update(commit=False)
    assert engine.status().weights == "poisoned"
    with pytest.raises(EngineError):
        engine.continue_generation()
    engine.update_weights_from_tensor(plain.items())
    engine.continue_generation()
    assert (engine.check_weights("checksum").total, tokens_of(engine)) == cold[1]


def test_checker_verbs_see_fp8(engine, folders, cold):
    engine.update_weights_from_disk(folders[0]["fp8"])
    engine.check_weights("snapshot")
    assert engine.check_weights("compare").changed == []
    value = weights_of(folders[0]["bf16"])[Q]
    reply = engine.update_weights_from_tensor([(Q, 2 * value)])  # twice the scales, the same FP8
    assert (reply.committed, reply.changed_tensors, reply.cast_tensors) == (True, 1, 1)
    assert engine.check_weights("compare").changed == ["layers.1.attention.qkv.weight_scale_inv"]
    engine.check_weights("reset_tensors")
    assert engine.status().weights == "poisoned"
    engine.update_weights_from_disk(folders[0]["bf16"])
    assert engine.check_weights("compare").changed == []
    assert tokens_of(engine) == cold[0][1]


def test_deterministic_needs_blocks_that_can_be_packed(folders, tmp_path):
    make_fp8_checkpoint(folders[0]["bf16"], tmp_path, (16, 18))
    with pytest.raises(EngineError, match="blocks that cannot be packed") as caught:
        launch_scheduler(str(tmp_path), dtype="bfloat16", deterministic=True, log_level="ERROR")
    assert caught.value.code == "unsupported"


def test_deterministic_engines_repeat_a_request(folders):
    prompt, params = (
        [3, 1, 4, 1, 5],
        SamplingParams(max_new_tokens=24, temperature=1.0, seed=3, ignore_eos=True),
    )
    others = [[number, 7, 9, 2 * number] for number in range(11)]
    with launch_scheduler(
        str(folders[0]["fp8"]), dtype="bfloat16", deterministic=True, num_threads=2, kv_pool_tokens=1024
    ) as client:
        alone = client.generate(prompt, sampling_params=params, return_logprob=True)
        *_, among = client.generate([*others, prompt], sampling_params=params, return_logprob=True)
    assert list(among.output_ids) == list(alone.output_ids)
    assert list(among.output_logprobs) == list(alone.output_logprobs)
