"""``quantization``: weights that are quantised as they are written, on start and by every update."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.checkpoints import make_checkpoint, make_fp8_checkpoint

from caesura.client import (
    EngineDied,
    InvalidRequest,
    SamplingParams,
    SchedulerClient,
    UnsupportedModel,
    launch_scheduler,
)

OPTIONS = {"num_threads": 1, "kv_pool_tokens": 4096, "log_level": "WARNING"}
PROMPTS = [[5, 6, 7], [3 + i * 7 % 90 for i in range(60)]]
KEPT = "model.layers.0.self_attn.o_proj"


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


@pytest.mark.parametrize(
    ("family", "options", "error", "said"),
    [
        ("qwen3", {"quantization": "int3"}, EngineDied, "'int3' is not one of"),
        ("qwen3", {"quantization_skipped": "o_proj"}, InvalidRequest, "needs quantization"),
        (
            "qwen3",
            {"quantization": "fp8", "quantization_skipped": "o_proj, oproj"},
            InvalidRequest,
            "'oproj' is no",
        ),
        ("gpt-oss", {"quantization": "fp8"}, UnsupportedModel, "start it without quantization"),
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
