"""``quantization``: weights that are quantised as they are written, on start and by every update."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import make_checkpoint, make_fp8_checkpoint
from support.waiting import PATIENCE_S

from caesura.client import (
    EngineDied,
    InvalidRequest,
    SamplingParams,
    SchedulerClient,
    UnsupportedModel,
    launch_scheduler,
)
from caesura.client.trainer import DeltaTracker, clone_weights

OPTIONS = {"num_threads": 1, "kv_pool_tokens": 4096, "log_level": "WARNING"}
PROMPTS = [[5, 6, 7], [3 + i * 7 % 90 for i in range(60)]]
KEPT = "model.layers.0.self_attn.o_proj"
DIVIDED = {
    "intermediate_size": 383,  # three blocks, the last not whole: two ranks have two and one
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two versions in bfloat16, and each in FP8 but for one module."""
    root = tmp_path_factory.mktemp("versions")
    for seed in (0, 1):
        make_checkpoint(root / f"{seed}", "qwen3-moe", seed=seed)
        make_fp8_checkpoint(root / f"{seed}", root / f"{seed}-fp8", skipped=(KEPT,))
    return root


@pytest.fixture
def engine(folders: Path) -> Iterator[SchedulerClient]:
    with launch_scheduler(folders / "0", quantization="fp8", quantization_skipped=KEPT, **OPTIONS) as client:
        yield client


def sampled(client: SchedulerClient) -> list[tuple[list[int], bytes | None]]:
    params = SamplingParams(max_new_tokens=12, seed=3, ignore_eos=True)
    outputs = client.generate(PROMPTS, params, return_logprob=True)
    return [(output.output_ids, output.output_logprobs) for output in outputs]


def test_it_computes_what_a_quantised_checkpoint_does(engine, folders):
    with launch_scheduler(folders / "0-fp8", **OPTIONS) as other:
        assert engine.weights_manifest().tensors == other.weights_manifest().tensors
        assert sampled(engine) == sampled(other)
        engine.update_weights_from_disk(folders / "1")
        other.update_weights_from_disk(folders / "1-fp8")
        of_disk = sampled(engine)
        assert of_disk == sampled(other)
    engine.update_weights_from_disk(folders / "0")
    engine.update_weights_from_tensor(load_file(folders / "1" / "model.safetensors"))
    assert sampled(engine) == of_disk


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def versions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two versions of a dense model in bfloat16."""
    root = tmp_path_factory.mktemp("dense")
    for seed in (0, 1):
        make_checkpoint(
            root / f"{seed}", "qwen3", tied=request.param, seed=seed, dtype=torch.bfloat16, **DIVIDED
        )
    return root


@pytest.mark.parametrize(("quantization", "tp"), [("int8", 1), ("int8", 2), ("int4", 2), ("mxfp4", 2)])
def test_any_update_gives_what_a_start_does(versions: Path, quantization: str, tp: int) -> None:
    assert_updates_give_what_a_start_does(versions, quantization=quantization, tp=tp)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3-moe", {"quantization": "int8", "tp": 2}),
        ("qwen3-moe", {"quantization": "mxfp4", "tp": 2, "ep": 2}),
        ("deepseek-v3", {"quantization": "int4"}),
    ],
)
def test_updates_of_experts_and_latents(tmp_path: Path, family: str, options: dict[str, str | int]) -> None:
    for seed in (0, 1):
        sizes = (
            {"moe_intermediate_size": 256, "head_dim": 64, "num_experts": 4} if family == "qwen3-moe" else {}
        )
        make_checkpoint(tmp_path / f"{seed}", family, seed=seed, dtype=torch.bfloat16, **sizes)
    assert_updates_give_what_a_start_does(tmp_path, **options)


def assert_updates_give_what_a_start_does(versions: Path, **options: str | int) -> None:
    new = load_file(versions / "1" / "model.safetensors")
    with (
        launch_scheduler(versions / "0", **options, **OPTIONS) as engine,
        launch_scheduler(versions / "1", **options, **OPTIONS) as cold,
    ):
        before, of_cold = sampled(engine), sampled(cold)
        assert before != of_cold
        for update in (
            lambda: engine.update_weights_from_disk(versions / "1"),
            lambda: engine.update_weights_from_tensor(new, bucket_bytes=1000),
            lambda: engine.update_weights_from_ipc(new),
            lambda: clone_weights(cold, [engine], timeout=PATIENCE_S),
        ):
            update()
            assert sampled(engine) == of_cold
            assert engine.check_weights("checksum").total == cold.check_weights("checksum").total
            engine.update_weights_from_disk(versions / "0")
            assert sampled(engine) == before


def test_int8_ranks_sample_what_one_does(versions: Path) -> None:
    options = {"quantization": "int8", "dtype": "float32", **OPTIONS}
    with (
        launch_scheduler(versions / "0", tp=2, **options) as ranks,
        launch_scheduler(versions / "0", **options) as one,
    ):
        of_ranks, of_one = sampled(ranks), sampled(one)
    assert [tokens for tokens, _ in of_ranks] == [tokens for tokens, _ in of_one]
    for (_, logprobs), (_, expected) in zip(of_ranks, of_one, strict=True):
        assert logprobs == pytest.approx(expected, abs=1e-3)


def test_a_tracker_sends_deltas_of_quantised_weights(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16)
    options = {"quantization": "int8", "quantization_originals": True, **OPTIONS}
    old = load_file(tmp_path / "model.safetensors")
    new = {name: value.clone() for name, value in old.items()}
    for value in new.values():
        value.view(-1)[::70] *= 1.5
    with launch_scheduler(tmp_path, **options) as engine, launch_scheduler(tmp_path, **options) as other:
        tracker = DeltaTracker(old, like=engine.weights_manifest().tensors)
        delta = tracker.delta(new)
        assert delta.is_small("tensor")
        assert engine.update_weights_sparse(delta).digest == delta.digest
        other.update_weights_from_tensor(new)
        totals = [each.check_weights("checksum").total for each in (engine, other)]
        assert totals[0] == totals[1]


def test_a_tied_table_that_begins_with_zeros_has_one_head(tmp_path: Path) -> None:
    for name in ("before", "zeros"):
        make_checkpoint(tmp_path / name, "qwen3", tied=True, dtype=torch.bfloat16)
    file = tmp_path / "zeros" / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"].zero_()
    save_file(weights, file)
    with (
        launch_scheduler(tmp_path / "before", quantization="int8", **OPTIONS) as engine,
        launch_scheduler(tmp_path / "zeros", quantization="int8", **OPTIONS) as cold,
    ):
        engine.update_weights_from_disk(tmp_path / "zeros")
        assert engine.check_weights("checksum").total == cold.check_weights("checksum").total


def test_a_module_that_is_not_int8_keeps_its_precision(versions: Path) -> None:
    kept = "lm_head, q_proj, k_proj, v_proj, o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj"
    options = {"quantization": "int8", "quantization_skipped": kept}
    with (
        launch_scheduler(versions / "0", **options, **OPTIONS) as none,
        launch_scheduler(versions / "0", **OPTIONS) as plain,
    ):
        assert sampled(none) == sampled(plain)


@pytest.mark.parametrize(
    ("family", "options", "error", "said"),
    [
        ("qwen3", {"quantization": "int3"}, EngineDied, "'int3' is not one of"),
        ("qwen3", {"quantization_skipped": "o_proj"}, InvalidRequest, "needs quantization"),
        ("qwen3", {"quantization_originals": True}, InvalidRequest, "needs quantization"),
        (
            "qwen3",
            {"quantization": "fp8", "quantization_skipped": "o_proj, proj"},
            InvalidRequest,
            "'proj' is no",
        ),
        ("gpt-oss", {"quantization": "fp8"}, UnsupportedModel, "start it without quantization"),
        ("gpt-oss", {"quantization": "mxfp4"}, UnsupportedModel, "without experts that are one tensor"),
        ("qwen3", {"quantization": "int8", "tp": 2}, UnsupportedModel, "cut its blocks of 128"),
    ],
)
def test_other_quantizations_are_refused(tmp_path, family, options, error, said):
    make_checkpoint(tmp_path, family)
    with pytest.raises(error, match=said), launch_scheduler(tmp_path, **options, **OPTIONS):
        pass


def test_a_quantised_checkpoint_says_itself_what_is_skipped(folders):
    with (
        pytest.raises(InvalidRequest, match="the checkpoint itself is in FP8"),
        launch_scheduler(folders / "0-fp8", quantization="fp8", quantization_skipped=KEPT, **OPTIONS),
    ):
        pass
