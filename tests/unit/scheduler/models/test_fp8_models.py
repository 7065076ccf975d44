"""Models with FP8 weights: logits of the dequantised checkpoint."""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.checkpoints import make_checkpoint, make_dequantized_checkpoint, make_fp8_checkpoint
from support.forward_batches import PagedModel, Sequence, load_model
from support.properties import examples
from torch import Tensor

from caesura.io_struct import CaesuraError, ErrorCode, TensorSpec
from caesura.scheduler.models.base import CausalLM
from caesura.scheduler.models.config import config_difference, load_model_config, parse_model_config
from caesura.scheduler.models.registry import build_model
from caesura.scheduler.runtime.dtypes import NAMES
from caesura.scheduler.weights.loader import WeightLoader
from caesura.scheduler.weights.source import WeightPiece

CPU = torch.device("cpu")
K = "model.layers.0.self_attn.k_proj.weight"

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    family: str
    blocks: tuple[int, int]
    skipped: tuple[str, ...] = ()
    overrides: tuple[tuple[str, Any], ...] = ()


CASES = {
    "qwen3": Case("qwen3", (128, 128)),  # every weight in one block, which its rows do not fill
    "qwen3-small-blocks": Case("qwen3", (16, 32)),
    "qwen3-200x330": Case(
        "qwen3", (128, 128), overrides=(("hidden_size", 330), ("intermediate_size", 200), ("head_dim", 50))
    ),
    "qwen2-bias": Case("qwen2", (7, 9), overrides=(("head_dim", 10),)),
    "qwen3-moe": Case("qwen3-moe", (16, 32)),  # experts of 24 rows, half a block
    "qwen3-moe-plain-experts": Case("qwen3-moe", (128, 128), ("gate_proj", "up_proj", "down_proj")),
    "deepseek-v2": Case("deepseek-v2", (16, 16)),
    "deepseek-v3": Case("deepseek-v3", (128, 128)),
    "llama-skips": Case("llama", (16, 16), ("model.layers.0.mlp.down_proj", "self_attn.o_proj")),
}


@dataclass(frozen=True)
class Folders:
    plain: Path
    fp8: Path
    dequantized: Path


@pytest.fixture(scope="session", params=CASES)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    case, root = CASES[request.param], tmp_path_factory.mktemp(request.param)
    found = Folders(root / "plain", root / "fp8", root / "dequantized")
    make_checkpoint(found.plain, case.family, seed=3, dtype=torch.bfloat16, **dict(case.overrides))
    make_fp8_checkpoint(found.plain, found.fp8, case.blocks, case.skipped)
    make_dequantized_checkpoint(found.fp8, found.dequantized, case.blocks)
    return found


def make_folders(root: Path, family: str) -> Folders:
    make_checkpoint(root / "plain", family, seed=4, dtype=torch.bfloat16)
    make_fp8_checkpoint(root / "plain", root / "fp8", (16, 32))
    return Folders(root / "plain", root / "fp8", root / "none")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return make_folders(tmp_path_factory.mktemp("fp8"), "qwen3")


@pytest.fixture(scope="session", params=["qwen3", "qwen3-moe", "deepseek-v3"])
def any_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return make_folders(tmp_path_factory.mktemp("fp8"), request.param)


@pytest.fixture
def model(folder: Folders) -> CausalLM:
    return build_model(load_model_config(folder.fp8), torch.float32, CPU)


def tensors_of(path: Path) -> Weights:
    return load_file(path / "model.safetensors")


def specs(tensors: Weights) -> list[TensorSpec]:
    return [
        TensorSpec(name=name, dtype=NAMES[value.dtype], shape=list(value.shape), nbytes=value.nbytes)
        for name, value in tensors.items()
    ]


def storage(model: CausalLM) -> dict[str, bytes]:
    return {name: bytes(tensor.view(torch.uint8).numpy()) for name, tensor in model.named_storage()}


def send(loader: WeightLoader, name: str, value: Tensor, rows: int = 1 << 20) -> None:
    for start in range(0, value.shape[0], rows):
        piece = WeightPiece(name, tuple(value.shape), value.dtype, start, value[start : start + rows])
        loader.write(piece)


def mismatch(call: Any, *arguments: Any, **keywords: Any) -> dict[str, Any]:
    with pytest.raises(CaesuraError) as caught:
        call(*arguments, **keywords)
    assert caught.value.code == ErrorCode.WEIGHT_MISMATCH
    return caught.value.detail


def logits_in_steps(model: CausalLM, dtype: torch.dtype, tokens: list[int]) -> Tensor:
    paged, sequence = PagedModel(model, dtype), Sequence(tokens)
    found = [paged.step([], [(sequence, 7)])[0], paged.step([], [(sequence, len(tokens) - 10)])[0]]
    return torch.cat(found + [paged.step([sequence])[0] for _ in range(3)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_the_dequantised_checkpoint(folders: Folders, dtype: torch.dtype) -> None:
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    quantized, reference = (
        logits_in_steps(load_model(str(path), dtype), dtype, tokens)
        for path in (folders.fp8, folders.dequantized)
    )
    assert quantized.shape == (40, 97)
    if dtype == torch.float32:
        assert (quantized - reference).abs().max().item() <= 1e-4
    else:
        assert (quantized - reference).float().norm() <= 0.02 * reference.float().norm()


def test_projections_are_stored_as_fp8_and_nothing_else_is(folders: Folders) -> None:
    stored = tensors_of(folders.fp8)
    slots = build_model(load_model_config(folders.fp8), torch.float32, CPU).weight_slots()
    assert slots.keys() == stored.keys()
    for name, slot in slots.items():
        assert slot.shape == tuple(stored[name].shape), name
        assert (slot.dtype == torch.float8_e4m3fn) == (stored[name].dtype == torch.float8_e4m3fn), name


def test_a_cold_load_reads_back_byte_by_byte(folders: Folders) -> None:
    model = load_model(str(folders.fp8), torch.float32)
    for name, value in tensors_of(folders.fp8).items():
        read = model.weight_slots()[name].read()
        if value.dtype in (torch.float8_e4m3fn, torch.float32):
            assert torch.equal(read.view(torch.uint8), value.view(torch.uint8)), name


@settings(max_examples=examples(25))
@given(seed=st.integers(0, 1000), rows=st.integers(1, 60), fp8_share=st.sampled_from([0.0, 0.5, 1.0]))
def test_bytes_depend_neither_on_the_form_nor_on_cut_and_order(
    any_folder: Folders, seed: int, rows: int, fp8_share: float
) -> None:
    folder = any_folder
    model = build_model(load_model_config(folder.fp8), torch.float32, CPU)
    choose = random.Random(seed)
    plain, fp8 = tensors_of(folder.plain), tensors_of(folder.fp8)
    sent: Weights = {}
    for name in plain:
        scales = f"{name}_scale_inv"
        if scales in fp8 and choose.random() < fp8_share:
            sent |= {name: fp8[name], scales: fp8[scales]}
        else:
            sent[name] = plain[name]
    names = list(sent)
    choose.shuffle(names)
    loader = WeightLoader(model)
    loader.check(specs(sent), complete=True)
    for name in names:
        send(loader, name, sent[name], rows)
    assert loader.missing(loader.written) == []
    loader.require_whole()
    model.finalize_weights()
    assert storage(model) == storage(load_model(str(folder.fp8), torch.float32))
    loader.take_counts()
    loader.forget_written()
    for name, value in fp8.items():
        send(loader, name, value, 1 + rows // 2)
    assert loader.counts.changed_tensors == 0


def test_a_folder_that_is_not_quantised_loads_into_an_fp8_model(folder: Folders) -> None:
    quantized, plain = load_model_config(folder.fp8), load_model_config(folder.plain)
    assert config_difference(quantized, plain) == []
    assert config_difference(plain, quantized) == ["fp8"]
    other = replace(quantized, fp8=replace(quantized.fp8, rows=8))
    assert config_difference(quantized, other) == ["fp8"]


def test_counts_of_what_is_quantised(model: CausalLM, folder: Folders) -> None:
    loader, value = WeightLoader(model), tensors_of(folder.plain)[K]
    send(loader, K, value, 5)
    counts = loader.take_counts()
    assert (counts.written_tensors, counts.changed_tensors, counts.cast_tensors) == (1, 1, 1)
    assert counts.written_bytes == value.nbytes
    assert loader.written == {K, f"{K}_scale_inv"}
    send(loader, K, value, 3)
    assert loader.counts.changed_tensors == 0


def test_requirements_of_a_complete_update(model: CausalLM, folder: Folders) -> None:
    loader, plain, fp8 = WeightLoader(model), tensors_of(folder.plain), tensors_of(folder.fp8)
    loader.check(specs(plain), complete=True)
    loader.check(specs(fp8), complete=True)
    mixed = {**fp8, K: plain[K]}
    found = mismatch(loader.check, specs(mixed), complete=True)
    assert found["mismatched"] == [{"name": f"{K}_scale_inv", "reason": f"{K} as BF16 brings it"}]
    del mixed[f"{K}_scale_inv"]
    loader.check(specs(mixed), complete=True)
    for lacking in (K, f"{K}_scale_inv"):
        rest = {name: value for name, value in fp8.items() if name != lacking}
        assert mismatch(loader.check, specs(rest), complete=True)["missing"] == [lacking]


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "entry"),
    [
        (K, "F8_E5M2", [24, 40], {"expected_dtype": "F8_E4M3", "got_dtype": "F8_E5M2"}),
        (K, "U8", [24, 40], {"expected_dtype": "F8_E4M3", "got_dtype": "U8"}),
        (K, "F8_E4M3", [40, 24], {"expected_shape": [24, 40], "got_shape": [40, 24]}),
        (f"{K}_scale_inv", "F32", [1, 1], {"expected_shape": [2, 2], "got_shape": [1, 1]}),
        (f"{K}_scale_inv", "U8", [2, 2], {"expected_dtype": "F32", "got_dtype": "U8"}),
        ("lm_head.weight", "F8_E4M3", [97, 40], {"expected_dtype": "F32", "got_dtype": "F8_E4M3"}),
    ],
)
def test_tensors_that_do_not_fit(
    model: CausalLM, name: str, dtype: str, shape: list[int], entry: dict[str, Any]
) -> None:
    sent = TensorSpec(name=name, dtype=dtype, shape=shape, nbytes=0)
    found = mismatch(WeightLoader(model).check, [sent], complete=False)
    assert found["mismatched"] == [{"name": name, **entry}]


def test_scales_may_be_bfloat16(model: CausalLM, folder: Folders) -> None:
    fp8 = tensors_of(folder.fp8)
    scales = fp8[f"{K}_scale_inv"].bfloat16()
    loader = WeightLoader(model)
    loader.check(specs({f"{K}_scale_inv": scales}), complete=False)
    send(loader, f"{K}_scale_inv", scales)
    assert torch.equal(model.weight_slots()[f"{K}_scale_inv"].read(), scales.float())


def test_halves_of_two_forms_are_never_committed(model: CausalLM, folder: Folders) -> None:
    scale = f"{K}_scale_inv"
    plain, fp8 = tensors_of(folder.plain)[K], tensors_of(folder.fp8)
    parts = {"bf16": (K, plain), "fp8": (K, fp8[K]), "scale": (scale, fp8[scale])}
    due = {
        ("bf16", "scale"): [K],
        ("bf16", "fp8"): [scale],
        ("bf16", "scale", "fp8"): [],
        ("bf16", "fp8", "scale"): [],
        ("bf16", "scale", "bf16"): [],
        ("bf16", "fp8", "bf16"): [],
        ("scale", "bf16"): [],
        ("scale", "bf16", "fp8"): [scale],
        ("fp8", "bf16"): [],
        ("fp8", "scale"): [],
        ("fp8",): [],  # without a manifest a trainer may leave out what has not changed
    }
    for steps, expected in due.items():
        loader = WeightLoader(model)
        for step in steps:
            send(loader, *parts[step], rows=7)
        if expected:
            assert mismatch(loader.require_whole)["missing"] == expected, steps
        else:
            loader.require_whole()
        whole = {name for step in steps for name in (parts[step][0], *([scale] if step == "bf16" else []))}
        assert loader.written == whole - set(expected), steps
        loader.forget_written()
        loader.require_whole()


def test_a_tensor_that_is_not_whole_is_not_committed(model: CausalLM, folder: Folders) -> None:
    loader, value = WeightLoader(model), tensors_of(folder.plain)[K]
    loader.write(WeightPiece(K, tuple(value.shape), value.dtype, 0, value[:20]))
    norm = "model.norm.weight"
    send(loader, norm, tensors_of(folder.plain)[norm])
    assert mismatch(loader.require_whole)["missing"] == [K]
    send(loader, K, value)
    loader.require_whole()


MINIMAL = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8,
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"quant_method": "gptq"}, ["quant_method"]),
        ({"quant_method": None}, ["quant_method"]),
        ({"weight_block_size": None}, ["weight_block_size"]),
        ({"weight_block_size": [128]}, ["weight_block_size"]),
        ({"weight_block_size": [128, 0]}, ["weight_block_size"]),
        ({"weight_block_size": [128, 1.5]}, ["weight_block_size"]),
        ({"activation_scheme": "static"}, ["activation_scheme"]),
        ({"fmt": "e5m2"}, ["fmt"]),
        ({"scale_fmt": "ue8m0"}, ["scale_fmt"]),
        ({"expert_dtype": "fp4"}, ["expert_dtype"]),
        ({"modules_to_convert": ["model.embed_tokens"]}, ["modules_to_convert"]),
        ({"modules_to_not_convert": [r"layers\.\d+"]}, ["modules_to_not_convert"]),
        ({"modules_to_not_convert": [3]}, ["modules_to_not_convert"]),
        ({"kv_cache_scheme": {"type": "float"}}, ["kv_cache_scheme"]),
        ({"fmt": "e5m2", "activation_scheme": "static"}, ["fmt", "activation_scheme"]),
    ],
)
def test_other_formats_are_refused_by_name(changes: dict[str, Any], fields: list[str]) -> None:
    with pytest.raises(CaesuraError) as caught:
        parse_model_config({**MINIMAL, "quantization_config": {**FP8, **changes}})
    assert caught.value.code == ErrorCode.UNSUPPORTED_MODEL
    assert sorted(caught.value.detail["fields"]) == sorted(f"quantization_config.{name}" for name in fields)


@pytest.mark.parametrize("spelling", ["modules_to_not_convert", "ignored_layers"])
def test_converted_modules(spelling: str) -> None:
    names = ["model.layers.1", "layers.0.self_attn.o_proj", "mlp.up_proj"]
    stated = {
        **FP8,
        "weight_block_size": [64, 32],
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        spelling: names,
    }
    fp8 = parse_model_config({**MINIMAL, "quantization_config": stated}).fp8
    assert fp8 is not None
    assert (fp8.rows, fp8.columns) == (64, 32)
    assert fp8.converts("model.layers.0.self_attn.q_proj")
    assert fp8.converts("model.layers.10.self_attn.q_proj")  # not below model.layers.1
    assert fp8.converts("model.layers.0.mlp.gate_proj")
    for plain in (
        "model.layers.1.self_attn.q_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.up_proj",
        "model.layers.0.mlp.gate",
        "lm_head",
    ):
        assert not fp8.converts(plain), plain


def test_parts_of_one_product_are_quantised_together_or_not_at_all() -> None:
    stated = {**FP8, "modules_to_not_convert": ["model.layers.0.self_attn.k_proj"]}
    config = parse_model_config({**MINIMAL, "quantization_config": stated})
    with pytest.raises(CaesuraError) as caught:
        build_model(config, torch.float32, CPU)
    assert caught.value.code == ErrorCode.UNSUPPORTED_MODEL
    assert caught.value.detail["fields"] == ["quantization_config.modules_to_not_convert"]
