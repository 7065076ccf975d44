"""Checks before the first byte, writes in place, and what is counted."""

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.checkpoints import make_checkpoint, make_fp8_checkpoint
from support.forward_batches import load_model
from support.properties import examples
from support.stored_weights import mismatch, send, specs, storage
from torch import Tensor

from caesura.io_struct import CaesuraError, ErrorCode, TensorSpec
from caesura.scheduler.layers.parameters import Parameter
from caesura.scheduler.models.causal_lm import CausalLM
from caesura.scheduler.models.config import load_model_config
from caesura.scheduler.models.registry import build_model
from caesura.scheduler.parallel.group import TensorParallel
from caesura.scheduler.weights.loader import LoadCounts, WeightLoader
from caesura.scheduler.weights.reading import Held, is_divided, require_placeable
from caesura.scheduler.weights.source import WeightPiece
from caesura.scheduler.weights.transports.disk import load_from_disk, open_checkpoint


@pytest.fixture
def model(folder: Path) -> CausalLM:
    return build_model(load_model_config(folder), torch.float32, torch.device("cpu"))


def test_all_problems_are_listed_at_once(model: CausalLM, tensors: dict[str, Tensor]) -> None:
    q, k = (f"model.layers.0.self_attn.{p}_proj.weight" for p in "qk")
    sent = {**tensors, q: tensors[q][:-1], k: tensors[k].int()}
    del sent["model.norm.weight"], sent["model.layers.0.mlp.up_proj.weight"]
    sent["model.layers.2.mlp.up_proj.weight"] = torch.zeros(72, 40)
    before = storage(model)
    detail = mismatch(WeightLoader(model).check, specs(sent), complete=True)
    assert sorted(detail["missing"]) == ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
    assert detail["unexpected"] == ["model.layers.2.mlp.up_proj.weight"]
    assert sorted(detail["mismatched"], key=lambda entry: entry["name"]) == [
        {"name": k, "expected_dtype": "F32", "got_dtype": "I32"},
        {"name": q, "expected_shape": [48, 40], "got_shape": [47, 40]},
    ]
    assert storage(model) == before


def said(model: CausalLM, sent: dict[str, Tensor], complete: bool = False) -> str:
    with pytest.raises(CaesuraError) as caught:
        WeightLoader(model).check(specs(sent), complete)
    return caught.value.message


def test_the_message_names_the_first_three_with_their_shapes(model, tensors) -> None:
    names = sorted(tensors)
    wide = dict.fromkeys(names[:5], torch.zeros(3, 5))
    listed = ", ".join(
        f"{name} has the shape [3, 5], expected {list(tensors[name].shape)}" for name in names[:3]
    )
    assert said(model, wide) == f"these tensors do not fit the model: 5 mismatched; {listed}, and 2 more"
    assert said(model, {names[0]: tensors[names[0]].long(), "new": torch.zeros(2)}) == (
        f"these tensors do not fit the model: 1 unexpected, 1 mismatched; {names[0]} has the dtype I64, "
        "expected F32, "
        "new [2] is not in the model"
    )
    most = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    assert said(model, most, complete=True) == (
        "these tensors do not fit the model: 1 missing; model.norm.weight [40] is missing"
    )


def test_a_prefix_that_all_names_have_or_lack_is_told(model: CausalLM, tensors: dict[str, Tensor]) -> None:
    def renamed(change: Callable[[str], str], names: Iterable[str] = tensors) -> str:
        return said(model, {change(name): tensors[name] for name in names}, complete=True)

    all_of = f"all {len(tensors)} names"
    for prefix in ("module.", "_orig_mod.", "base_model.model."):
        message = renamed(lambda name, prefix=prefix: prefix + name)
        assert f"; {all_of} begin with {prefix!r}, which the checkpoint's names do not; " in message
    inner = [name for name in tensors if name.startswith("model.")]
    message = renamed(lambda name: name.removeprefix("model."), inner)
    assert f"; all {len(inner)} names lack 'model.', with which the checkpoint's names begin; " in message
    for change in (str.upper, lambda name: f"{name}_x"):
        assert "names" not in renamed(change)
    one = next(iter(tensors))
    mixed = {f"module.{one}" if name == one else name: tensor for name, tensor in tensors.items()}
    assert "names" not in said(model, mixed)


def test_only_float_dtypes_fit(model: CausalLM) -> None:
    def norm(dtype: str) -> list[TensorSpec]:
        return [TensorSpec(name="model.norm.weight", dtype=dtype, shape=[40], nbytes=0)]

    for dtype in ("F64", "F16", "BF16", "F32"):
        WeightLoader(model).check(norm(dtype), complete=False)
    for dtype in ("I64", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F4", ""):
        detail = mismatch(WeightLoader(model).check, norm(dtype), complete=False)
        entry = {"name": "model.norm.weight", "expected_dtype": "F32", "got_dtype": dtype}
        assert detail["mismatched"] == [entry]


def test_a_name_given_twice_is_refused(model: CausalLM, tensors: dict[str, Tensor]) -> None:
    norm = specs({"model.norm.weight": tensors["model.norm.weight"]})
    detail = mismatch(WeightLoader(model).check, norm * 2, complete=False)
    assert detail["mismatched"] == [{"name": "model.norm.weight", "reason": "named twice"}]


def test_skipped_names(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", tied=True)
    model = load_model(str(tmp_path), torch.float32)
    loader = WeightLoader(model)
    before = storage(model)
    ignored = {
        "lm_head.weight": torch.zeros(97, 40),
        "model.rotary_emb.inv_freq": torch.zeros(6),
        "model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(6),
    }
    loader.check(specs(ignored), complete=False)
    for name, tensor in ignored.items():
        send(loader, name, tensor)
    assert loader.take_counts() == LoadCounts(skipped_tensors=3)
    assert (storage(model), loader.written) == (before, set())


def test_counts(model: CausalLM, tensors: dict[str, Tensor]) -> None:
    loader = WeightLoader(model)
    for name, tensor in tensors.items():
        send(loader, name, tensor)
    first = loader.take_counts()
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert (first.written_tensors, first.written_bytes) == (len(tensors), total)
    for name, tensor in tensors.items():
        send(loader, name, tensor)
    assert loader.take_counts().changed_tensors == 0
    norm, head = tensors["model.norm.weight"], tensors["lm_head.weight"].clone()
    head[-1, -1] += 1  # beyond the first probe
    send(loader, "model.norm.weight", norm.double())
    send(loader, "lm_head.weight", head)
    assert loader.counts == LoadCounts(
        written_tensors=2, written_bytes=2 * norm.nbytes + head.nbytes, changed_tensors=1, cast_tensors=1
    )
    total_counts = LoadCounts(written_tensors=1)
    total_counts.add(loader.take_counts())
    assert (total_counts.written_tensors, total_counts.changed_tensors) == (3, 1)
    assert loader.counts == LoadCounts()


@settings(max_examples=examples(25))
@given(bucket_bytes=st.integers(1, 1 << 15), times=st.integers(1, 2))
def test_the_bucket_does_not_change_the_result(folder, bucket_bytes, times) -> None:
    model = build_model(load_model_config(folder), torch.bfloat16, torch.device("cpu"))
    addresses = [tensor.data_ptr() for _, tensor in model.named_storage()]
    for _ in range(times):
        load_from_disk(WeightLoader(model), open_checkpoint(folder), bucket_bytes)
    assert storage(model) == storage(load_model(str(folder), torch.bfloat16))
    assert [tensor.data_ptr() for _, tensor in model.named_storage()] == addresses


def test_a_tensor_is_written_when_all_its_rows_are(model: CausalLM, tensors: dict[str, Tensor]) -> None:
    loader, head = WeightLoader(model), tensors["lm_head.weight"]
    pieces = [
        WeightPiece("lm_head.weight", (97, 40), head.dtype, a, head[a:b]) for a, b in ((0, 50), (50, 97))
    ]
    loader.write(pieces[0])
    assert (loader.written, loader.counts.written_tensors) == (set(), 0)
    loader.write(pieces[1])
    assert (loader.written, loader.counts.written_tensors) == ({"lm_head.weight"}, 1)
    loader.write(pieces[0])  # half rewritten: no longer whole
    assert loader.written == set()
    loader.write(pieces[0])  # a retry starts over
    loader.write(pieces[1])
    assert loader.written == {"lm_head.weight"}
    loader.forget_written()
    assert loader.written == set()


@pytest.mark.parametrize(
    "piece",
    [
        WeightPiece("lm_head.weight", (97, 40), torch.float32, 5, torch.zeros(4, 40)),
        WeightPiece("lm_head.weight", (97, 40), torch.float32, 0, torch.zeros(98, 40)),
        WeightPiece("lm_head.weight", (97, 40), torch.float32, 0, torch.zeros(97, 41)),
        WeightPiece("lm_head.weight", (97, 41), torch.float32, 0, torch.zeros(97, 41)),
        WeightPiece("lm_head.weight", (97, 40), torch.float32, 0, torch.zeros(97, 40, dtype=torch.int32)),
        WeightPiece("lm_tail.weight", (97, 40), torch.float32, 0, torch.zeros(97, 40)),
        WeightPiece("model.norm.weight", (40,), torch.float32, 0, torch.tensor(1.0)),
    ],
)
def test_a_piece_that_does_not_fit_is_not_written(model, piece) -> None:
    for _, tensor in model.named_storage():
        tensor.fill_(3.0)
    before = storage(model)
    loader = WeightLoader(model)
    mismatch(loader.write, piece)
    assert storage(model) == before


def test_tensors_do_not_interleave(model: CausalLM, tensors: dict[str, Tensor]) -> None:
    loader, head = WeightLoader(model), tensors["lm_head.weight"]
    loader.write(WeightPiece("lm_head.weight", (97, 40), head.dtype, 0, head[:50]))
    send(loader, "model.norm.weight", tensors["model.norm.weight"])
    with pytest.raises(CaesuraError):
        loader.write(WeightPiece("lm_head.weight", (97, 40), head.dtype, 50, head[50:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_difference_is_by_bytes(dtype: torch.dtype) -> None:
    parameter = Parameter("p", (3, 1000), dtype, torch.device("cpu"))
    parameter.data.fill_(0.0)
    parameter.data[1, 3] = torch.nan
    slot = parameter.slot("c", 1, 2)
    assert slot.shape == (2, 1000)
    same = parameter.data[1:].clone()
    assert not slot.differs(same, 0)
    assert not slot.differs(same[1:], 1)
    for row, column in ((0, 0), (1, 999)):
        negative_zero = same.clone()
        negative_zero[row, column] = -0.0
        assert slot.differs(negative_zero, 0)


@pytest.mark.parametrize("length", [1, 3, 1027, 5000])
@pytest.mark.parametrize("offset", [0, 1])
def test_difference_of_any_length_and_alignment(length: int, offset: int) -> None:
    parameter = Parameter("p", (length,), torch.bfloat16, torch.device("cpu"))
    parameter.data.copy_(torch.arange(length))
    slot = parameter.slot("c")
    base = torch.arange(-offset, length).to(torch.bfloat16)
    rows = base[offset:]
    assert not slot.differs(rows, 0)
    for index in (0, length // 2, length - 1):
        other = base.clone()[offset:]
        other[index] += 100
        assert slot.differs(other, 0)


def test_scalars_can_be_written() -> None:
    parameter = Parameter("p", (), torch.float32, torch.device("cpu"))
    slot = parameter.slot("c")
    slot.write(torch.tensor(2.5), 0)
    assert parameter.data.item() == 2.5
    assert slot.differs(torch.tensor(2.0), 0)
    assert not slot.differs(torch.tensor(2.5), 0)


CPU = torch.device("cpu")
THREE = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 36}
BLOCKS = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64,
    "intermediate_size": 64, "tied": True,
}  # fmt: skip
CASES = {
    "qwen3": ("qwen3", 2, {}),
    "vocabulary and heads of three": ("llama", 3, {**THREE, "attention_bias": True}),
    "experts": ("qwen3-moe", 2, {}),
    "latent": ("deepseek-v3", 2, {}),
    "states by key head": ("qwen3-next", 2, {}),
    "states": ("qwen3.5", 2, {}),
    "fp8": ("qwen3", 2, BLOCKS),
}


def shards(path: Path, size: int, dtype: torch.dtype = torch.float32) -> list[CausalLM]:
    models = []
    for rank in range(size):
        model = build_model(load_model_config(path), dtype, CPU, TensorParallel(rank, size))
        load_from_disk(WeightLoader(model), open_checkpoint(path), 1 << 20, None)
        models.append(model)
    return models


def assert_parts_make_the_checkpoint(path: Path, size: int) -> int:
    expected, models = load_file(path / "model.safetensors"), shards(path, size)
    by_rank = [model.weight_slots() for model in models]
    require_placeable(iter(by_rank[0].values()))
    divided = 0
    for name, slots in ((name, [each[name] for each in by_rank]) for name in by_rank[0]):
        if name not in expected:  # the head of tied embeddings
            continue
        value = expected[name].to(slots[0].dtype)
        spec = msgspec.structs.replace(*specs({name: value}), offset=3)
        buffer = torch.full((value.nbytes + 6,), 171, dtype=torch.uint8)
        for slot in slots:
            said = msgspec.msgpack.decode(msgspec.msgpack.encode(Held.of(slot)), type=Held)
            said.place(buffer, spec)
        assert bytes(buffer[3:-3].numpy()) == bytes(
            value.contiguous().reshape(-1).view(torch.uint8).numpy()
        ), name
        assert buffer[:3].tolist() == buffer[-3:].tolist() == [171] * 3
        divided += is_divided(slots[0])
    return divided


@pytest.mark.parametrize("case", CASES)
def test_parts_make_the_checkpoint(tmp_path, case):
    family, size, overrides = CASES[case]
    make_checkpoint(tmp_path / "plain", family, **{"tied": False, "seed": 4, **overrides})
    if case == "fp8":
        make_fp8_checkpoint(tmp_path / "plain", tmp_path / "fp8", (16, 16))
    assert assert_parts_make_the_checkpoint(tmp_path / ("fp8" if case == "fp8" else "plain"), size) > 4


def test_columns_by_turns_are_refused_by_name(tmp_path):
    make_checkpoint(tmp_path, "gpt-oss", tied=False, seed=4)
    (model, _) = shards(tmp_path, 2)
    with pytest.raises(CaesuraError, match="experts") as caught:
        require_placeable(iter(model.weight_slots().values()))
    assert caught.value.code == ErrorCode.UNSUPPORTED
    assert "gate_up_proj" in str(caught.value.detail["name"])
