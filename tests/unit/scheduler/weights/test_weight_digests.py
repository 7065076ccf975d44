"""The digests that a loader keeps are those of the checkpoint, as it is stored."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import make_checkpoint, make_fp8_checkpoint
from support.mxfp4 import SHAPE, make_mxfp4_checkpoint
from support.stored_weights import send
from torch import Tensor

from caesura.scheduler.layers.matrix import Matrix
from caesura.scheduler.layers.parameters import Placement
from caesura.scheduler.models.causal_lm import CausalLM
from caesura.scheduler.models.config import load_model_config
from caesura.scheduler.models.registry import build_model
from caesura.scheduler.parallel.group import TensorParallel
from caesura.scheduler.weights.digests import WeightDigests
from caesura.scheduler.weights.loader import WeightLoader
from caesura.scheduler.weights.transports.disk import load_from_disk, open_checkpoint
from caesura.transfer import words
from caesura.transfer.weight_digest import TensorDigest, digest_of

CPU = torch.device("cpu")


def models_of(folder: Path, ranks: int, dtype: torch.dtype) -> list[CausalLM]:
    config = load_model_config(folder)
    return [build_model(config, dtype, CPU, TensorParallel(rank, ranks)) for rank in range(ranks)]


def loaders_of(folder: Path, ranks: int, dtype: torch.dtype) -> list[WeightLoader]:
    models = models_of(folder, ranks, dtype)
    return [WeightLoader(model, WeightDigests(rank)) for rank, model in enumerate(models)]


def total(loaders: list[WeightLoader]) -> str:
    first, *others = (loader.digests for loader in loaders)
    return first.total(other.rows() for other in others)


def stored(folder: Path, dtype: torch.dtype, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    slots = models_of(folder, 1, dtype)[0].weight_slots()
    return {name: value.to(slots[name].dtype) for name, value in tensors.items() if name in slots}


@pytest.mark.parametrize("bucket_bytes", [300, 1 << 20])
@pytest.mark.parametrize(
    ("family", "ranks"), [("llama", 1), ("llama", 4), ("qwen3-moe", 4), ("deepseek-v3", 2), ("qwen3.5", 2)]
)
def test_ranks_together_have_the_digest_of_the_checkpoint(
    tmp_path: Path, family: str, ranks: int, bucket_bytes: int
) -> None:
    make_checkpoint(tmp_path, family)
    loaders = loaders_of(tmp_path, ranks, torch.bfloat16)
    for loader in loaders:
        load_from_disk(loader, open_checkpoint(tmp_path), bucket_bytes)
    expected = stored(tmp_path, torch.bfloat16, load_file(tmp_path / "model.safetensors"))
    assert total(loaders) == digest_of(expected)


def test_fp8_is_digested_as_it_comes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", "qwen3", dtype=torch.bfloat16)
    make_fp8_checkpoint(tmp_path / "plain", tmp_path / "fp8", (12, 12), ())
    wide, narrow = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "fp8"))
    [loader] = loaders_of(tmp_path / "fp8", 1, torch.bfloat16)
    load_from_disk(loader, open_checkpoint(tmp_path / "fp8"), 1 << 20)
    assert total([loader]) == digest_of(narrow)
    for name, value in wide.items():
        send(loader, name, value, rows=5)
    assert total([loader]) == digest_of(wide)


def test_mxfp4_is_digested_as_it_comes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "wide", "gpt-oss", dtype=torch.bfloat16, **SHAPE)
    make_mxfp4_checkpoint(tmp_path / "wide", tmp_path / "packed")
    wide, packed = (load_file(tmp_path / name / "model.safetensors") for name in ("wide", "packed"))
    [loader] = loaders_of(tmp_path / "packed", 1, torch.bfloat16)
    for tensors in (packed, wide, packed):
        for name, value in tensors.items():
            send(loader, name, value, rows=2)
        assert total([loader]) == digest_of(tensors)


@pytest.mark.skipif(words.library() is None, reason="words.cpp was not compiled")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("packed", [True, False])
def test_rows_are_copied_while_they_are_digested(dtype: torch.dtype, packed: bool) -> None:
    place, threads = Placement(dtype, CPU), torch.get_num_threads()
    for width, cuts in ((1024, (0, 7, 1700, 2000)), (4098, (0, 130)), (66, (0, 3, 9000)), (30000, (0, 33))):
        apart, together = (Matrix("w", cuts[-1] + 5, width, place, packed=packed) for _ in range(2))
        separate, joined = TensorDigest("BF16", ()), TensorDigest("BF16", ())
        slots = [matrix.slot("w", 5) for matrix in (apart, together)]
        for first, last in pairwise(cuts):
            rows = torch.randn(last - first, width).to(dtype)
            slots[0].write(rows, first)
            separate.add(first * width, rows)
            copy = slots[1].copy_of(rows, first)
            assert copy is not None
            try:
                torch.set_num_threads(1 + first % 2)
                joined.add_copied(first * width, rows, copy)
            finally:
                torch.set_num_threads(threads)
        assert torch.equal(apart.parameter.data, together.parameter.data)
        assert joined == separate


@pytest.mark.parametrize("ranks", [1, 2])
def test_changed_elements_change_the_digest(tmp_path: Path, ranks: int) -> None:
    make_checkpoint(tmp_path, "qwen3")
    tensors = load_file(tmp_path / "model.safetensors")
    loaders, before = loaders_of(tmp_path, ranks, torch.float32), []
    for loader in loaders:
        load_from_disk(loader, open_checkpoint(tmp_path), 1 << 20)
        before.append(loader.digests)
        loader.digests = loader.digests.copy()
    slots_by_rank = [model.weight_slots() for model in models_of(tmp_path, ranks, torch.float32)]
    old = digest_of(tensors)
    for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"):
        flat = tensors[name].view(-1)
        positions = torch.arange(0, len(flat), 7)
        values = flat[positions] + 1
        for loader, slots in zip(loaders, slots_by_rank):
            loader.digests.change(slots[name], positions, flat[positions], values)
        flat[positions] = values
    assert total(loaders) == digest_of(tensors) != old
    for loader, digests in zip(loaders, before):
        loader.digests = digests
    assert total(loaders) == old
