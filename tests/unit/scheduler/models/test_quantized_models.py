"""Models with weights in FP8 and experts in MXFP4: logits of the dequantised checkpoint, updates of halves.

Halves are what a packed tensor comes in: elements and scales. It may come as one wide tensor, too.
"""

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
from support.checkpoints import (
    edit_config,
    make_checkpoint,
    make_dequantized_checkpoint,
    make_fp8_checkpoint,
    write_like,
)
from support.faults import Fault
from support.forward_batches import PagedModel, Sequence, load_model
from support.mxfp4 import SHAPE, dequantize_mxfp4, make_mxfp4_checkpoint, make_widened_checkpoint
from support.properties import examples
from support.stored_weights import mismatch, send, specs, storage
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from caesura.io_struct import CaesuraError, ErrorCode, TensorSpec
from caesura.scheduler.kernels import native
from caesura.scheduler.layers import scaled_blocks
from caesura.scheduler.layers.embedding import TIED
from caesura.scheduler.models.causal_lm import CausalLM
from caesura.scheduler.models.config import load_model_config
from caesura.scheduler.models.registry import build_model
from caesura.scheduler.weights.loader import WeightLoader
from caesura.scheduler.weights.source import WeightPiece

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
K = "model.layers.0.self_attn.k_proj.weight"
K_SCALE = f"{K}_scale_inv"
UP = "model.layers.1.mlp.experts.gate_up_proj"
BLOCKS, SCALES = f"{UP}_blocks", f"{UP}_scales"

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Folders:
    """A checkpoint in wide floats, and packed."""

    wide: Path
    packed: Path

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.packed.name == "fp8" else torch.bfloat16

    def build(self) -> CausalLM:
        return build_model(load_model_config(self.packed), self.dtype, CPU)

    def tensors(self) -> tuple[Weights, Weights]:
        return load_file(self.wide / "model.safetensors"), load_file(self.packed / "model.safetensors")


def make_folders(root: Path, family: str) -> Folders:
    if family == "gpt-oss":
        make_checkpoint(root / "source", family, seed=5, dtype=torch.bfloat16, **SHAPE)
        make_mxfp4_checkpoint(root / "source", root / "mxfp4")
        make_widened_checkpoint(root / "mxfp4", root / "wide", torch.bfloat16)
        return Folders(root / "wide", root / "mxfp4")
    make_checkpoint(root / "wide", family, seed=4, dtype=torch.bfloat16)
    make_fp8_checkpoint(root / "wide", root / "fp8", (16, 32))
    return Folders(root / "wide", root / "fp8")


@pytest.fixture(scope="session", params=["qwen3", "qwen3-moe", "deepseek-v3", "gpt-oss"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return make_folders(tmp_path_factory.mktemp("packed"), request.param)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folders]:
    return {
        kind: make_folders(tmp_path_factory.mktemp(kind), family)
        for kind, family in (("fp8", "qwen3"), ("mxfp4", "gpt-oss"))
    }


@dataclass(frozen=True)
class Subject:
    """A model without weights yet, and those that it may be sent."""

    model: CausalLM
    wide: Weights
    packed: Weights

    def read(self, name: str) -> Tensor:
        return self.model.weight_slots()[name].read()


@pytest.fixture
def fp8(made: dict[str, Folders]) -> Subject:
    return Subject(made["fp8"].build(), *made["fp8"].tensors())


@pytest.fixture
def mxfp4(made: dict[str, Folders]) -> Subject:
    return Subject(made["mxfp4"].build(), *made["mxfp4"].tensors())


# Logits and cold loads


def tokens() -> list[int]:
    return torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(0)).tolist()


def logits_in_steps(model: CausalLM, dtype: torch.dtype) -> Tensor:
    paged, sequence = PagedModel(model, dtype), Sequence(tokens())
    found = [paged.step([], [(sequence, 7)])[0], paged.step([], [(sequence, 30)])[0]]
    return torch.cat(found + [paged.step([sequence])[0] for _ in range(3)])


def case(family: str, blocks: tuple[int, int], *skipped: str, **overrides: Any) -> tuple[Any, ...]:
    return family, blocks, skipped, overrides


CASES = {
    "qwen3": case("qwen3", (128, 128)),  # every weight in one block, which its rows do not fill
    "qwen3-small-blocks": case("qwen3", (16, 32)),
    "qwen3-200x330": case("qwen3", (128, 128), hidden_size=330, intermediate_size=200, head_dim=50),
    "qwen2-bias": case("qwen2", (7, 9), head_dim=10),
    "qwen3-moe": case("qwen3-moe", (16, 32)),  # experts of 24 rows, half a block
    "qwen3-moe-plain-experts": case("qwen3-moe", (128, 128), "gate_proj", "up_proj", "down_proj"),
    "deepseek-v2": case("deepseek-v2", (16, 16)),
    "deepseek-v3": case("deepseek-v3", (128, 128)),
    "llama-skips": case("llama", (16, 16), "model.layers.0.mlp.down_proj", "self_attn.o_proj"),
}


@pytest.mark.parametrize("name", CASES)
def test_fp8_computes_the_dequantised_checkpoint(name: str, tmp_path: Path) -> None:
    family, blocks, skipped, overrides = CASES[name]
    plain, fp8, dequantized = (tmp_path / name for name in ("plain", "fp8", "dequantized"))
    make_checkpoint(plain, family, seed=3, dtype=torch.bfloat16, **overrides)
    make_fp8_checkpoint(plain, fp8, blocks, skipped)
    make_dequantized_checkpoint(fp8, dequantized, blocks)
    for dtype in (torch.float32, torch.bfloat16):
        quantized, reference = (
            logits_in_steps(load_model(str(path), dtype), dtype) for path in (fp8, dequantized)
        )
        assert quantized.shape == (40, 97)
        if dtype == torch.float32:
            assert (quantized - reference).abs().max().item() <= 1e-4
        else:
            assert (quantized - reference).float().norm() <= 0.02 * reference.float().norm()
    stored = load_file(fp8 / "model.safetensors")
    slots = load_model(str(fp8), torch.float32).weight_slots()
    assert slots.keys() == stored.keys()
    for name, slot in slots.items():
        assert slot.shape == tuple(stored[name].shape), name
        assert (slot.dtype == FP8) == (stored[name].dtype == FP8), name
        if stored[name].dtype in (FP8, torch.float32):
            assert torch.equal(slot.read().view(torch.uint8), stored[name].view(torch.uint8)), name


NUMBERS = {
    "qwen3-int8": ("qwen3", "int8", {}),
    "qwen3-int4": ("qwen3", "int4", {}),
    "qwen3-mxfp4": ("qwen3", "mxfp4", {}),
    "qwen3-not-packed": ("qwen3", "mxfp4", {"hidden_size": 38, "intermediate_size": 70}),
    "qwen3-moe-int8": ("qwen3-moe", "int8", {"moe_intermediate_size": 300}),
    "qwen3-moe-int4": ("qwen3-moe", "int4", {}),
    "mixtral-mxfp4": ("mixtral", "mxfp4", {}),
    "qwen2-moe-not-packed": ("qwen2-moe", "int8", {"hidden_size": 38, "moe_intermediate_size": 22}),
    "deepseek-v2-int4": ("deepseek-v2", "int4", {}),
    "deepseek-v3-int8": ("deepseek-v3", "int8", {}),
}


KEPT = tuple(f"{name}.weight" for name in ("kv_b_proj", "mlp.gate", "sparse_moe.gate", "shared_expert_gate"))


class RoundedInputs(TorchFunctionMode):
    """Have the products of a model of transformers take inputs in whole numbers, but those in ``KEPT``."""

    def __init__(self, model: Any, columns: int) -> None:
        super().__init__()
        kept = (each for name, each in model.named_parameters() if name.endswith(KEPT))
        self._kept = {each.data_ptr() for each in kept}
        self._head, self._columns = model.lm_head.weight.data_ptr(), columns

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.linear and args[1].data_ptr() not in self._kept:
            columns = 128 if args[1].data_ptr() == self._head else self._columns
            args = torch.cat([rounded(part) for part in args[0].split(columns, -1)], -1), *args[1:]
        return function(*args, **(kwargs or {}))


def rounded(x: Tensor) -> Tensor:
    step = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (x / step).round() * step


@pytest.mark.parametrize("name", NUMBERS)
def test_whole_numbers_compute_the_dequantised_checkpoint(name: str, tmp_path: Path) -> None:
    family, quantization, overrides = NUMBERS[name]
    make_checkpoint(tmp_path / "plain", family, seed=3, dtype=torch.bfloat16, **overrides)
    model = load_model(str(tmp_path / "plain"), torch.float32, quantization=quantization)
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    slots, columns = model.weight_slots(), 128 if quantization == "int8" else 32
    products = {key for key, value in tensors.items() if value.dim() == 2}
    kept = {key for key in products if f"{key}_scale_inv" not in slots}
    assert all(key.endswith(KEPT) or key == "model.embed_tokens.weight" for key in kept)
    for key in products - kept:
        numbers, scales = slots[key].read(), slots[f"{key}_scale_inv"].read()
        of_head = key == "lm_head.weight"
        steps = scales.repeat_interleave(128 if of_head else columns, dim=1)[:, : numbers.shape[1]]
        assert of_head or quantization == "int8" or numbers.abs().max() <= 12
        wide = numbers * steps
        assert (
            (wide - tensors[key].float()).abs() <= steps * (4 if quantization == "mxfp4" else 0.501)
        ).all()
        tensors[key] = wide
    write_like(tmp_path / "plain", tmp_path / "wide", tensors)
    edit_config(tmp_path / "wide", dtype="float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "wide", attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad(), RoundedInputs(theirs, columns):
        expected = theirs(torch.tensor([tokens()])).logits[0]
    found = logits_in_steps(model, torch.float32)
    assert (found - expected).norm() <= 1e-3 * expected.norm()


def test_logits_of_mxfp4_are_transformers_own(made: dict[str, Folders]) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        made["mxfp4"].packed,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens()])).logits[0]
    found = logits_in_steps(load_model(str(made["mxfp4"].packed), torch.float32), torch.float32)
    assert (found - expected).abs().max().item() <= 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cold_load_of_mxfp4_stores_the_wide_checkpoint(
    made: dict[str, Folders], dtype: torch.dtype
) -> None:
    packed, wide = (load_model(str(path), dtype) for path in (made["mxfp4"].packed, made["mxfp4"].wide))
    assert storage(packed) == storage(wide)


def halves_of(name: str, packed: Weights) -> Weights:
    found = {half: packed[half] for half in (f"{name}_blocks", f"{name}_scales") if half in packed}
    if f"{name}_scale_inv" in packed:
        found = {half: packed[half] for half in (name, f"{name}_scale_inv")}
    return found


@settings(max_examples=examples(25))
@given(seed=st.integers(0, 1000), rows=st.integers(1, 60), packed_share=st.sampled_from([0.0, 0.5, 1.0]))
def test_bytes_depend_neither_on_the_form_nor_on_cut_and_order(
    folders: Folders, seed: int, rows: int, packed_share: float
) -> None:
    model, choose = folders.build(), random.Random(seed)
    wide, packed = folders.tensors()
    sent: Weights = {}
    for name, value in wide.items():
        halves = halves_of(name, packed)
        sent |= halves if halves and choose.random() < packed_share else {name: value}
    names = list(sent)
    choose.shuffle(names)
    loader = WeightLoader(model)
    loader.check(specs(sent), complete=True)
    for name in names:
        send(loader, name, sent[name], rows)
    assert loader.missing(loader.written) == []
    assert loader.written == wide.keys() | packed.keys()
    loader.require_whole()
    model.finalize_weights()
    assert storage(model) == storage(load_model(str(folders.packed), folders.dtype))
    loader.take_counts()
    loader.forget_written()
    for name, value in packed.items():
        send(loader, name, value, 1 + rows // 2)
    assert (loader.counts.changed_tensors, loader.counts.written_tensors) == (0, len(packed))


# What fits


@pytest.mark.parametrize(("kind", "name", "dtype", "shape", "entry"), [
    ("fp8", K, "F8_E5M2", [24, 40], {"expected_dtype": "F8_E4M3", "got_dtype": "F8_E5M2"}),
    ("fp8", K, "U8", [24, 40], {"expected_dtype": "F8_E4M3", "got_dtype": "U8"}),
    ("fp8", K, "F8_E4M3", [40, 24], {"expected_shape": [24, 40], "got_shape": [40, 24]}),
    ("fp8", K_SCALE, "F32", [1, 1], {"expected_shape": [2, 2], "got_shape": [1, 1]}),
    ("fp8", K_SCALE, "U8", [2, 2], {"expected_dtype": "F32", "got_dtype": "U8"}),
    ("fp8", "lm_head.weight", "F8_E4M3", [97, 40], {"expected_dtype": "F32", "got_dtype": "F8_E4M3"}),
    ("mxfp4", BLOCKS, "I8", [3, 64, 2, 16], {"expected_dtype": "U8", "got_dtype": "I8"}),
    ("mxfp4", BLOCKS, "U8", [3, 64, 32], {"expected_shape": [3, 64, 2, 16], "got_shape": [3, 64, 32]}),
    ("mxfp4", SCALES, "F32", [3, 64, 2], {"expected_dtype": "U8", "got_dtype": "F32"}),
    ("mxfp4", SCALES, "U8", [3, 2, 64], {"expected_shape": [3, 64, 2], "got_shape": [3, 2, 64]}),
    ("mxfp4", UP, "U8", [3, 64, 64], {"expected_dtype": "BF16", "got_dtype": "U8"}),
])  # fmt: skip
def test_tensors_that_do_not_fit(
    made: dict[str, Folders], kind: str, name: str, dtype: str, shape: list[int], entry: dict[str, Any]
) -> None:
    sent = TensorSpec(name=name, dtype=dtype, shape=shape, nbytes=0)
    found = mismatch(WeightLoader(made[kind].build()).check, [sent], complete=False)
    assert found["mismatched"] == [{"name": name, **entry}]


def without(weights: Weights, *names: str) -> Weights:
    return {name: value for name, value in weights.items() if name not in names}


def test_a_complete_update_brings_each_weight_once_in_one_form(fp8: Subject, mxfp4: Subject) -> None:
    loader = WeightLoader(fp8.model)
    for complete in (fp8.wide, fp8.packed, {**without(fp8.packed, K_SCALE), K: fp8.wide[K]}):
        loader.check(specs(complete), complete=True)
    found = mismatch(loader.check, specs({**fp8.packed, K: fp8.wide[K]}), complete=True)
    assert found["mismatched"] == [{"name": K_SCALE, "reason": f"{K} as BF16 brings it"}]
    for lacking in (K, K_SCALE):
        rest = without(fp8.packed, lacking)
        assert mismatch(loader.check, specs(rest), complete=True)["missing"] == [lacking]
    loader = WeightLoader(mxfp4.model)
    for complete in (mxfp4.wide, mxfp4.packed):
        loader.check(specs(complete), complete=True)
    found = mismatch(loader.check, specs({**mxfp4.packed, UP: mxfp4.wide[UP]}), complete=False)
    assert found["mismatched"] == [{"name": UP, "reason": "comes in two forms"}]
    for lacking in (BLOCKS, SCALES):
        rest = without(mxfp4.packed, lacking)
        assert mismatch(loader.check, specs(rest), complete=True)["missing"] == [lacking]
        loader.check(specs(rest), complete=False)
        assert mismatch(loader.check, specs(rest), complete=False, last=True)["missing"] == [lacking]
    neither = without(mxfp4.packed, BLOCKS, SCALES)
    assert mismatch(loader.check, specs(neither), complete=True)["missing"] == [UP]


def test_counts_of_what_is_quantised(fp8: Subject) -> None:
    loader, value = WeightLoader(fp8.model), fp8.wide[K]
    send(loader, K, value, 5)
    counts = loader.take_counts()
    assert (counts.written_tensors, counts.changed_tensors, counts.cast_tensors) == (1, 1, 1)
    assert counts.written_bytes == value.nbytes
    assert loader.written == {K, K_SCALE}
    send(loader, K, value, 3)
    assert loader.counts.changed_tensors == 0


def test_scales_of_fp8_may_be_bfloat16(fp8: Subject) -> None:
    scales, loader = fp8.packed[K_SCALE].bfloat16(), WeightLoader(fp8.model)
    loader.check(specs({K_SCALE: scales}), complete=False)
    send(loader, K_SCALE, scales)
    assert torch.equal(fp8.read(K_SCALE), scales.float())


# Halves


def test_halves_of_two_forms_are_never_committed(fp8: Subject) -> None:
    parts = {"bf16": (K, fp8.wide[K]), "fp8": (K, fp8.packed[K]), "scale": (K_SCALE, fp8.packed[K_SCALE])}
    due = {
        ("bf16", "scale"): [K],
        ("bf16", "fp8"): [K_SCALE],
        ("bf16", "scale", "fp8"): [],
        ("bf16", "fp8", "scale"): [],
        ("bf16", "scale", "bf16"): [],
        ("bf16", "fp8", "bf16"): [],
        ("scale", "bf16"): [],
        ("scale", "bf16", "fp8"): [K_SCALE],
        ("fp8", "bf16"): [],
        ("fp8", "scale"): [],
        ("fp8",): [],  # without a manifest a trainer may leave out what has not changed
    }
    for steps, expected in due.items():
        loader = WeightLoader(fp8.model)
        for step in steps:
            send(loader, *parts[step], rows=7)
        assert_due(loader, expected, steps)
        whole = {name for step in steps for name in (parts[step][0], *([K_SCALE] if step == "bf16" else []))}
        assert loader.written == whole - set(expected), steps
        loader.forget_written()
        loader.require_whole()


def assert_due(loader: WeightLoader, expected: list[str], steps: object) -> None:
    if expected:
        assert mismatch(loader.require_whole)["missing"] == expected, steps
    else:
        loader.require_whole()


def test_halves_alone_are_never_committed(mxfp4: Subject) -> None:
    packed, parts = mxfp4.packed, {"blocks": BLOCKS, "scales": SCALES, "wide": UP}
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
    for steps, lacking in due.items():
        loader = WeightLoader(mxfp4.model)
        for step in steps:
            name = parts[step]
            send(loader, name, (packed | mxfp4.wide)[name], rows=2)
            if step == "blocks":  # of the other tensor, which takes the room
                for other in (BLOCKS.replace("gate_up", "down"), SCALES.replace("gate_up", "down")):
                    send(loader, other, packed[other])
        assert_due(loader, lacking, steps)
        if not lacking:
            assert torch.equal(mxfp4.read(UP), mxfp4.wide[UP])
        assert {UP, BLOCKS, SCALES} & loader.written == (set() if lacking else {UP, BLOCKS, SCALES}), steps
        loader.forget_written()
        loader.require_whole()


def test_a_half_of_another_update_is_not_taken_for_one_of_this(mxfp4: Subject) -> None:
    packed, loader = mxfp4.packed, WeightLoader(mxfp4.model)
    for renew in (loader.lose_written, loader.forget_written, lambda: loader.release_written(lost=True)):
        send(loader, SCALES, packed[SCALES] + 1)
        send(loader, BLOCKS, packed[BLOCKS][:1].expand(3, -1, -1, -1), rows=2)
        send(loader, SCALES, packed[SCALES] + 1)
        renew()
        send(loader, BLOCKS, packed[BLOCKS])
        send(loader, SCALES, packed[SCALES])
        assert torch.equal(mxfp4.read(UP), mxfp4.wide[UP])


def test_blocks_of_one_tensor_wait_at_a_time(mxfp4: Subject) -> None:
    packed, loader, before = mxfp4.packed, WeightLoader(mxfp4.model), mxfp4.read(UP)
    send(loader, BLOCKS, packed[BLOCKS], 2)
    assert torch.equal(mxfp4.read(UP), before)
    send(loader, BLOCKS.replace("gate_up", "down"), packed[BLOCKS.replace("gate_up", "down")], 2)
    plain = dequantize_mxfp4(packed[BLOCKS], torch.full_like(packed[SCALES], 127)).transpose(1, 2)
    assert torch.equal(mxfp4.read(UP), plain.bfloat16())


@pytest.mark.parametrize(("kind", "first", "second"), [
    ("fp8", K, "model.norm.weight"), ("mxfp4", BLOCKS, SCALES), ("mxfp4", SCALES, BLOCKS)
])  # fmt: skip
def test_a_tensor_that_was_cut_off_comes_again(
    made: dict[str, Folders], kind: str, first: str, second: str
) -> None:
    subject = Subject(made[kind].build(), *made[kind].tensors())
    sent = subject.wide if kind == "fp8" else subject.packed
    loader, value = WeightLoader(subject.model), sent[first]
    loader.write(WeightPiece(first, tuple(value.shape), value.dtype, 0, value[:2]))
    send(loader, second, sent[second])
    assert mismatch(loader.require_whole)["missing"] == [first]
    assert not {first, UP} & loader.written
    send(loader, first, value, 2)
    loader.require_whole()
    if kind == "mxfp4":
        assert torch.equal(subject.read(UP), subject.wide[UP])


@pytest.mark.parametrize("quantization", ["int8", "mxfp4"])
def test_a_tied_head_follows_after_a_failed_write(tmp_path: Path, quantization: str) -> None:
    for seed in (0, 1):
        make_checkpoint(tmp_path / f"{seed}", "qwen3", tied=True, seed=seed, dtype=torch.bfloat16)
    model, _ = models = [
        load_model(str(tmp_path / name), torch.bfloat16, quantization=quantization) for name in "01"
    ]
    old, new = (storage(each) for each in models)
    loader, weights = WeightLoader(model), load_file(tmp_path / "1" / "model.safetensors")
    way = "quantize" if native.why_not() else "quantize_rows"
    with Fault(scaled_blocks, way, MemoryError()), pytest.raises(MemoryError):
        send(loader, TIED, weights[TIED])
    send(loader, TIED, weights[TIED])
    head = [name for name in new if name.startswith("lm_head")]
    assert len(head) == 2
    assert all(storage(model)[name] == new[name] != old[name] for name in head)


def test_parts_of_a_product_are_quantised_together(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", "qwen3", dtype=torch.bfloat16)
    make_fp8_checkpoint(tmp_path / "plain", tmp_path / "fp8", (16, 32), (K.removesuffix(".weight"),))
    with pytest.raises(CaesuraError) as caught:
        load_model(str(tmp_path / "fp8"), torch.float32)
    assert caught.value.code == ErrorCode.UNSUPPORTED_MODEL
    assert caught.value.detail["fields"] == ["quantization_config.modules_to_not_convert"]
