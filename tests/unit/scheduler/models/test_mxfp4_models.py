"""gpt-oss with experts in MXFP4: transformers' logits."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.checkpoints import make_checkpoint
from support.forward_batches import PagedModel, Sequence, load_model
from support.mxfp4 import (
    CONFIG,
    SHAPE,
    dequantize_mxfp4,
    make_mxfp4_checkpoint,
    make_widened_checkpoint,
)
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
UP = "model.layers.1.mlp.experts.gate_up_proj"
BLOCKS, SCALES = f"{UP}_blocks", f"{UP}_scales"

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Folders:
    packed: Path
    wide: Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("mxfp4")
    make_checkpoint(root / "source", "gpt-oss", seed=5, dtype=torch.bfloat16, **SHAPE)
    make_mxfp4_checkpoint(root / "source", root / "packed")
    make_widened_checkpoint(root / "packed", root / "wide", torch.bfloat16)
    return Folders(root / "packed", root / "wide")


@pytest.fixture
def model(folder: Folders) -> CausalLM:
    return build_model(load_model_config(folder.packed), torch.bfloat16, CPU)


@pytest.fixture(scope="module")
def tensors(folder: Folders) -> tuple[Weights, Weights]:
    return load_file(folder.packed / "model.safetensors"), load_file(folder.wide / "model.safetensors")


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


def test_logits_are_transformers_own(folder: Folders) -> None:
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder.packed,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    paged, sequence = (
        PagedModel(load_model(str(folder.packed), torch.float32), torch.float32),
        Sequence(tokens),
    )
    found = [paged.step([], [(sequence, 7)])[0], paged.step([], [(sequence, len(tokens) - 10)])[0]]
    found += [paged.step([sequence])[0] for _ in range(3)]
    assert (torch.cat(found) - expected).abs().max().item() <= 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cold_load_stores_what_the_wide_checkpoint_s_does(folder: Folders, dtype: torch.dtype) -> None:
    packed, wide = (load_model(str(path), dtype) for path in (folder.packed, folder.wide))
    assert storage(packed) == storage(wide)


@settings(max_examples=examples(12))
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 4),
    wide_share=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_bytes_depend_neither_on_the_form_nor_on_cut_and_order(
    folder: Folders, tensors: tuple[Weights, Weights], seed: int, rows: int, wide_share: float
) -> None:
    model = build_model(load_model_config(folder.packed), torch.bfloat16, CPU)
    choose = random.Random(seed)
    packed, wide = tensors
    sent = dict(packed)
    for name in wide.keys() - packed.keys():
        if choose.random() < wide_share:
            del sent[f"{name}_blocks"], sent[f"{name}_scales"]
            sent[name] = wide[name]
    names = list(sent)
    choose.shuffle(names)
    loader = WeightLoader(model)
    loader.check(specs(sent), complete=True)
    for name in names:
        send(loader, name, sent[name], rows)
    assert loader.missing(loader.written) == []
    assert loader.written == wide.keys() | packed.keys()
    loader.require_whole()
    assert storage(model) == storage(load_model(str(folder.wide), torch.bfloat16))
    loader.take_counts()
    loader.forget_written()
    for name, value in packed.items():
        send(loader, name, value, rows)
    assert (loader.counts.changed_tensors, loader.counts.cast_tensors) == (0, 0)
    assert loader.counts.written_tensors == len(packed)


def test_halves_alone_are_never_committed(model: CausalLM, tensors: tuple[Weights, Weights]) -> None:
    packed, wide = tensors
    parts = {"blocks": (BLOCKS, packed[BLOCKS]), "scales": (SCALES, packed[SCALES]), "wide": (UP, wide[UP])}
    due = {
        ("blocks",): [SCALES],
        ("scales",): [BLOCKS],
        ("blocks", "scales"): [],
        ("scales", "blocks"): [],
        ("blocks", "blocks", "scales"): [],
        ("blocks", "scales", "scales"): [BLOCKS],
        ("blocks", "scales", "blocks"): [SCALES],
        ("wide", "scales"): [BLOCKS],
        ("wide", "blocks", "scales"): [],
        ("scales", "wide"): [],
        ("scales", "wide", "blocks"): [SCALES],
        ("blocks", "wide", "scales", "blocks"): [],
    }
    expected = storage(load_model_of(model, tensors))
    for steps, lacking in due.items():
        loader = WeightLoader(model)
        for step in steps:
            send(loader, *parts[step], rows=2)
            if step == "blocks":  # of the other tensor, which takes the room
                send(loader, BLOCKS.replace("gate_up", "down"), packed[BLOCKS.replace("gate_up", "down")])
                send(loader, SCALES.replace("gate_up", "down"), packed[SCALES.replace("gate_up", "down")])
        if lacking:
            assert mismatch(loader.require_whole)["missing"] == lacking, steps
        else:
            loader.require_whole()
            assert storage(model)["layers.1.mlp.experts.gate_up"] == expected["layers.1.mlp.experts.gate_up"]
        assert {UP, BLOCKS, SCALES} & loader.written == (set() if lacking else {UP, BLOCKS, SCALES}), steps
        loader.forget_written()
        loader.require_whole()


def load_model_of(like: CausalLM, tensors: tuple[Weights, Weights]) -> CausalLM:
    model = build_model(like.config, torch.bfloat16, CPU)
    loader = WeightLoader(model)
    for name, value in tensors[1].items():
        send(loader, name, value)
    return model


def test_a_half_of_another_update_is_not_taken_for_one_of_this(
    model: CausalLM, tensors: tuple[Weights, Weights]
) -> None:
    packed, wide = tensors
    loader = WeightLoader(model)
    for renew in (loader.lose_written, loader.forget_written, lambda: loader.release_written(lost=True)):
        send(loader, SCALES, packed[SCALES] + 1)
        send(loader, BLOCKS, packed[BLOCKS][:1].expand(3, -1, -1, -1), rows=2)
        send(loader, SCALES, packed[SCALES] + 1)
        renew()
        send(loader, BLOCKS, packed[BLOCKS])
        send(loader, SCALES, packed[SCALES])
        assert torch.equal(model.weight_slots()[UP].read(), wide[UP])


def test_blocks_of_one_tensor_wait_at_a_time(model: CausalLM, tensors: tuple[Weights, Weights]) -> None:
    packed, _ = tensors
    loader, before = WeightLoader(model), model.weight_slots()[UP].read()
    send(loader, BLOCKS, packed[BLOCKS], 2)
    assert torch.equal(model.weight_slots()[UP].read(), before)
    send(loader, BLOCKS.replace("gate_up", "down"), packed[BLOCKS.replace("gate_up", "down")], 2)
    plain = dequantize_mxfp4(packed[BLOCKS], torch.full_like(packed[SCALES], 127)).transpose(1, 2)
    assert torch.equal(model.weight_slots()[UP].read(), plain.bfloat16())


def test_a_half_that_was_cut_off_comes_again(model: CausalLM, tensors: tuple[Weights, Weights]) -> None:
    packed, wide = tensors
    for first, second in ((BLOCKS, SCALES), (SCALES, BLOCKS)):
        loader, value = WeightLoader(model), packed[first]
        loader.write(WeightPiece(first, tuple(value.shape), value.dtype, 0, value[:2]))
        send(loader, second, packed[second])
        assert mismatch(loader.require_whole)["missing"] == [first]
        assert UP not in loader.written
        send(loader, first, value, 2)
        loader.require_whole()
        assert torch.equal(model.weight_slots()[UP].read(), wide[UP])


def test_requirements_of_a_complete_update(model: CausalLM, tensors: tuple[Weights, Weights]) -> None:
    packed, wide = tensors
    loader = WeightLoader(model)
    loader.check(specs(packed), complete=True)
    loader.check(specs(wide), complete=True)
    both = {**packed, UP: wide[UP]}
    assert mismatch(loader.check, specs(both), complete=False)["mismatched"] == [
        {"name": UP, "reason": "comes in two forms"}
    ]
    for lacking in (BLOCKS, SCALES):
        rest = {name: value for name, value in packed.items() if name != lacking}
        assert mismatch(loader.check, specs(rest), complete=True)["missing"] == [lacking]
        loader.check(specs(rest), complete=False)
        assert mismatch(loader.check, specs(rest), complete=False, last=True)["missing"] == [lacking]
    neither = {name: value for name, value in packed.items() if name not in (BLOCKS, SCALES)}
    assert mismatch(loader.check, specs(neither), complete=True)["missing"] == [UP]


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "entry"),
    [
        (BLOCKS, "I8", [3, 64, 2, 16], {"expected_dtype": "U8", "got_dtype": "I8"}),
        (BLOCKS, "U8", [3, 64, 32], {"expected_shape": [3, 64, 2, 16], "got_shape": [3, 64, 32]}),
        (SCALES, "F32", [3, 64, 2], {"expected_dtype": "U8", "got_dtype": "F32"}),
        (SCALES, "U8", [3, 2, 64], {"expected_shape": [3, 64, 2], "got_shape": [3, 2, 64]}),
        (UP, "U8", [3, 64, 64], {"expected_dtype": "BF16", "got_dtype": "U8"}),
    ],
)
def test_tensors_that_do_not_fit(
    model: CausalLM, name: str, dtype: str, shape: list[int], entry: dict[str, Any]
) -> None:
    sent = TensorSpec(name=name, dtype=dtype, shape=shape, nbytes=0)
    found = mismatch(WeightLoader(model).check, [sent], complete=False)
    assert found["mismatched"] == [{"name": name, **entry}]


PUBLISHED = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": CONFIG,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def test_a_published_config() -> None:
    config = parse_model_config(PUBLISHED)
    assert (config.dtype, config.fp8) == (torch.bfloat16, None)
    wide = parse_model_config({**PUBLISHED, "quantization_config": None, "torch_dtype": "bfloat16"})
    assert config_difference(config, wide) == config_difference(wide, config) == []
    assert parse_model_config({**PUBLISHED, "torch_dtype": "float32"}).dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"quantization_config": {**CONFIG, "group_size": 16}}, ["quantization_config.group_size"]),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": None},
            ["quantization_config.quant_method", "quantization_config.weight_block_size"],
        ),
    ],
)
def test_unsupported_fields_are_refused_by_name(changes: dict[str, Any], fields: list[str]) -> None:
    with pytest.raises(CaesuraError) as caught:
        parse_model_config({**PUBLISHED, **changes})
    assert caught.value.code == ErrorCode.UNSUPPORTED_MODEL
    assert set(fields) <= set(caught.value.detail["fields"])
