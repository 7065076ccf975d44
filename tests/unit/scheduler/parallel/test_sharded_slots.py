"""Slots of divided tensors: whole tensors go in, in any pieces."""

from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.checkpoints import make_checkpoint, make_fp8_checkpoint
from support.properties import examples
from torch import Tensor

from caesura.scheduler.layers.attention import Attention, AttentionShape
from caesura.scheduler.layers.embedding import Embedding
from caesura.scheduler.layers.experts import ExpertNames, Experts
from caesura.scheduler.layers.linear import Linear
from caesura.scheduler.layers.mlp import GatedMLP
from caesura.scheduler.layers.parameters import Layer, Placement, ScaleBlocks, WeightSlot
from caesura.scheduler.layers.sharding import Window, even
from caesura.scheduler.memory.workspace import Workspace
from caesura.scheduler.models.causal_lm import CausalLM
from caesura.scheduler.models.config import load_model_config
from caesura.scheduler.models.registry import build_model
from caesura.scheduler.parallel.group import TensorParallel
from caesura.scheduler.weights.loader import WeightLoader
from caesura.scheduler.weights.source import WeightPiece
from caesura.scheduler.weights.transports.disk import open_checkpoint

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn


def place(
    rank: int, size: int, dtype: torch.dtype = torch.float32, blocks: ScaleBlocks | None = None, ep: int = 1
) -> Placement:
    return Placement(dtype, CPU, blocks, parallel=TensorParallel(rank, size), ep=ep)


def slots_of(layer: Layer) -> dict[str, WeightSlot]:
    return {slot.name: slot for slot in layer.slots()}


def bits(value: Tensor) -> bytes:
    return bytes(value.contiguous().view(torch.uint8).numpy()) if value.numel() else b""


def assembled(slots: list[WeightSlot]) -> Tensor:
    shape = slots[0].shape
    whole = torch.zeros(shape, dtype=slots[0].dtype)
    held = torch.zeros(shape, dtype=torch.bool)
    for slot in slots:
        assert slot.shape == shape
        rows = rows_of(slot)
        columns = slot.owned_columns
        where: Any = rows if columns is None else (rows[:, None], torch.arange(columns.start, columns.stop))
        part = slot.read()
        assert bits(whole[where][held[where]]) == bits(part[held[where]])
        whole[where] = part
        held[where] = True
    assert held.all()
    return whole


def rows_of(slot: WeightSlot, first: int = 0, last: int | None = None) -> Tensor:
    last = slot.shape[0] if last is None else last
    held = [row for rows in slot.owned for row in rows if first <= row < last]
    assert held == sorted(set(held))
    return torch.tensor(held, dtype=torch.int64)


def cuts(data: st.DataObject, rows: int) -> list[tuple[int, int]]:
    borders = sorted(data.draw(st.sets(st.integers(1, max(rows - 1, 1)), max_size=4)) - {rows})
    return list(zip([0, *borders], [*borders, rows]))


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def write_alike(
    data: st.DataObject, alone: dict[str, WeightSlot], by_rank: list[dict[str, WeightSlot]]
) -> None:
    """Write the same weights to one rank's slots and, in pieces, to those of several, which must be equal."""
    for name in [name for name in alone if name.endswith(".weight")]:
        value = random(alone[name].shape, 1)
        alone[name].write(value, 0)
        for slots in by_rank:
            for start, stop in cuts(data, len(value)):
                slots[name].update(value[start:stop], start)
    for name, slot in alone.items():
        assert bits(assembled([slots[name] for slots in by_rank])) == bits(slot.read())


@dataclass(frozen=True)
class Layers:
    on: list[Layer]

    def check(self, data: st.DataObject, dtype: torch.dtype) -> None:
        by_rank = [slots_of(layer) for layer in self.on]
        for number, name in enumerate(by_rank[0]):
            slots = [slots[name] for slots in by_rank]
            value = random(slots[0].shape, number).to(dtype)
            for slot in slots:
                pieces = cuts(data, value.shape[0])
                for start, stop in pieces:
                    slot.update(value[start:stop], start, compare=data.draw(st.booleans()))
                assert not any(slot.differs(value[start:stop], start) for start, stop in pieces)
                first, last = sorted(
                    (data.draw(st.integers(0, len(value))), data.draw(st.integers(0, len(value))))
                )
                assert bits(slot.read(first, last)) == bits(held_of(slot, value, first, last).to(slot.dtype))
                self.check_changes(slot, value)
            assert bits(assembled(slots)) == bits(value.to(slots[0].dtype))

    @staticmethod
    def check_changes(slot: WeightSlot, value: Tensor) -> None:
        """A changed element is seen by who holds it, and by nobody else."""
        for row in {0, len(value) // 2, len(value) - 1}:
            changed = value.clone()
            changed[row].flatten()[-1:] += 1
            columns = slot.owned_columns
            mine = row in rows_of(slot) and (columns is None or columns.stop == value.shape[1])
            assert slot.differs(changed, 0) == mine
            assert slot.update(changed, 0) == mine
            slot.write(value, 0)


def held_of(slot: WeightSlot, value: Tensor, first: int, last: int) -> Tensor:
    rows = value[rows_of(slot, first, last)]
    columns = slot.owned_columns
    return rows if columns is None else rows[:, columns.start : columns.stop]


DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@settings(max_examples=examples(40))
@given(st.data(), st.integers(1, 4), DTYPES, DTYPES)
def test_products(data: st.DataObject, size: int, stored: torch.dtype, sent: torch.dtype) -> None:
    rows, inputs, others = (data.draw(st.integers(1, 40)) for _ in range(3))
    by_inputs = data.draw(st.booleans())

    def layer(rank: int) -> Linear:
        where = place(rank, size, stored)
        if by_inputs:
            columns = even(inputs * size, where.parallel, "inputs")
            return Linear("l", columns, {"a": rows, "b": others}, bias=True, place=where)
        window = even(rows * size, where.parallel, "rows")
        both = window, even(others * size, where.parallel, "others"), window
        return Linear("l", inputs, {"a": window, "b": others, "c": both, "d": window}, bias=True, place=where)

    Layers([layer(rank) for rank in range(size)]).check(data, sent)


@settings(max_examples=examples(20))
@given(st.data(), st.sampled_from([(6, 6, 3), (6, 3, 3), (6, 1, 3), (8, 2, 4), (4, 2, 2)]), DTYPES)
def test_attention_with_shared_key_heads(
    data: st.DataObject, heads: tuple[int, int, int], sent: torch.dtype
) -> None:
    queries, keys, size = heads
    head_dim = data.draw(st.integers(1, 9))
    shape = AttentionShape(
        hidden_size=20, num_heads=queries, num_kv_heads=keys, head_dim=head_dim, qkv_bias=True
    )
    Layers([Attention("a", "m", 0, shape, place=place(rank, size)) for rank in range(size)]).check(data, sent)


@settings(max_examples=examples(20))
@given(st.data(), st.integers(1, 4), st.integers(13, 50), st.booleans())
def test_a_vocabulary_that_does_not_divide(data: st.DataObject, size: int, vocab: int, tied: bool) -> None:
    layers = [
        Embedding("e", "embed", vocab, 6, projects=tied, place=place(rank, size)) for rank in range(size)
    ]
    Layers(list(layers)).check(data, torch.float32)


@settings(max_examples=examples(30))
@given(st.data(), st.integers(2, 3), st.booleans(), st.integers(1, 5), st.integers(1, 5))
def test_fp8_blocks(data: st.DataObject, size: int, by_inputs: bool, height: int, width: int) -> None:
    """Check that ranks that see only their own blocks quantise a wide float as one rank would."""
    blocks = ScaleBlocks(height, width)
    rows = height * size * data.draw(st.integers(1, 3)) if not by_inputs else data.draw(st.integers(1, 20))
    columns = width * size * data.draw(st.integers(1, 3)) if by_inputs else data.draw(st.integers(1, 20))
    twice = rows % height == 0

    def layer(rank: int, ranks: int) -> dict[str, WeightSlot]:
        where = place(rank, ranks, blocks=blocks)
        inputs, outputs = Window.whole(columns), Window.whole(rows)
        if by_inputs:
            inputs = even(columns, where.parallel, "columns")
        else:
            outputs = even(rows, where.parallel, "rows")
        parts = {"a": outputs, "b": (outputs, outputs)}
        return slots_of(
            Linear("l", inputs, {name: parts[name] for name in parts if twice or name == "a"}, place=where)
        )

    alone, by_rank = layer(0, 1), [layer(rank, size) for rank in range(size)]
    write_alike(data, alone, by_rank)
    stored = {name: slot.read().clone() for name, slot in alone.items()}
    for slots in by_rank:  # the same as it is stored
        for name, slot in slots.items():
            assert not slot.differs(stored[name], 0)


@settings(max_examples=examples(20))
@given(
    st.data(), st.integers(2, 5), st.sampled_from([2, 3, 4, 6]), st.sampled_from([2, 4]), st.integers(1, 40)
)
def test_whole_blocks_of_a_width(
    data: st.DataObject, size: int, height: int, columns: int, width: int
) -> None:
    """Check that ranks with one block more than others, or with none, quantise a float as one rank would."""

    def layer(rank: int, ranks: int) -> GatedMLP:
        where = place(rank, ranks, blocks=ScaleBlocks(height, columns))
        return GatedMLP("l", "m", 12, width, place=where, partial=True)

    whole, ranks = layer(0, 1), [layer(rank, size) for rank in range(size)]
    held = [each.gate_up.out_features for each in ranks]
    piece = 2 * lcm(height, columns)
    if 2 * width % (size * piece):
        assert max(held) <= -(-2 * width // (size * piece)) * piece, "no rank has more blocks than it must"
    assert [each.is_empty for each in ranks] == [not rows for rows in held]
    assert {each.on_all_ranks for each in ranks} == {all(held)}
    alone, by_rank = slots_of(whole), [slots_of(each) for each in ranks]
    write_alike(data, alone, by_rank)
    x = random((3, 12), 2)
    found = torch.stack([each.forward(x) for each in ranks]).sum(0)
    torch.testing.assert_close(found, whole.forward(x), rtol=1e-4, atol=1e-4)


@dataclass(frozen=True)
class Folder:
    path: Path
    tensors: dict[str, Tensor]

    ep: int = 1

    def model(self, rank: int, size: int) -> CausalLM:
        config, parallel = load_model_config(self.path), TensorParallel(rank, size)
        return build_model(config, torch.float32, CPU, parallel, ep=self.ep)


BLOCKS = {"qwen3": (12, 12), "qwen3.5": (2, 4), "deepseek-v3": (4, 4)}


@pytest.fixture(
    scope="module",
    params=[
        *("llama-tied", "qwen3-moe", "deepseek-v3", "qwen3-fp8", "qwen3-next", "qwen3.5", "qwen3.5-fp8"),
        *("deepseek-v3-ep", "deepseek-v3-fp8-ep"),
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    name = request.param.removesuffix("-ep")
    family, _, _ = name.removesuffix("-tied").partition("-fp8")
    path, ep = tmp_path_factory.mktemp("model"), 1 if name == request.param else 2
    if name.endswith("fp8"):
        make_checkpoint(path / "plain", family, dtype=torch.bfloat16)
        make_fp8_checkpoint(path / "plain", path / "fp8", BLOCKS[family], ())
        path = path / "fp8"
    else:
        make_checkpoint(path, family, tied=name.endswith("-tied"))
    return Folder(path, load_file(path / "model.safetensors"), ep)


@pytest.mark.parametrize("bucket_bytes", [300, 4096, 1 << 20])
def test_each_rank_reads_only_its_own_rows_from_disk(folder: Folder, bucket_bytes: int) -> None:
    models, read = [folder.model(rank, 2) for rank in range(2)], []
    for model in models:
        loader, checkpoint = WeightLoader(model), open_checkpoint(folder.path)
        loader.check(checkpoint.specs, complete=True)
        read.append(0)
        for piece in checkpoint.into(Workspace(), loader.owned).pieces(bucket_bytes, loader.skip):
            assert piece is not None
            read[-1] += piece.rows.nbytes
            loader.write(piece)
        loader.require_whole()
        assert loader.missing(loader.written) == []
        counts = loader.take_counts()
        assert counts.written_tensors == len(model.weight_slots())
        assert counts.written_bytes == sum(folder.tensors[name].nbytes for name in model.weight_slots())
        assert read[-1] == sum(held_bytes(slot, folder) for slot in model.weight_slots().values())
    for name, value in folder.tensors.items():
        slots = [model.weight_slots()[name] for model in models if name in model.weight_slots()]
        if slots:
            assert bits(assembled(slots)) == bits(value.to(slots[0].dtype))
    assert max(read) < 0.85 * sum(value.nbytes for value in folder.tensors.values())


def held_bytes(slot: WeightSlot, folder: Folder) -> int:
    value = folder.tensors[slot.name]
    return len(rows_of(slot)) * (value[0].nbytes if value.dim() and len(value) else value.nbytes)


def test_only_rows_of_other_ranks_may_be_left_out(folder: Folder) -> None:
    model = folder.model(1, 2)
    loader = WeightLoader(model)
    slots = model.weight_slots().values()
    slot = next(slot for slot in slots if slot.name.endswith("self_attn.o_proj.weight"))
    assert len(rows_of(slot)) == slot.shape[0], "divided by columns"
    value = folder.tensors[slot.name]
    with pytest.raises(Exception, match="row 3 came when row 0 was due"):
        loader.write(WeightPiece(slot.name, slot.shape, value.dtype, 3, value[3:]))
    embed = model.weight_slots()["model.embed_tokens.weight"]
    value, first = folder.tensors[embed.name], embed.owned[0].start
    assert first > 0
    with pytest.raises(Exception, match=f"row {first + 1} came when row 0 was due"):
        loader.write(WeightPiece(embed.name, embed.shape, value.dtype, first + 1, value[first + 1 :]))
    loader.write(WeightPiece(embed.name, embed.shape, value.dtype, first, value[first:-1]))
    assert not loader.is_whole
    with pytest.raises(Exception, match=f"row {len(value)} came when row {len(value) - 1} was due"):
        loader.write(WeightPiece(embed.name, embed.shape, value.dtype, len(value), value[:0]))
    loader.write(WeightPiece(embed.name, embed.shape, value.dtype, len(value) - 1, value[-1:]))
    assert embed.name in loader.written


def test_rows_between_owned_ones_may_be_left_out(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3.5")
    loader = WeightLoader(model := Folder(tmp_path, {}).model(0, 2))
    slot = model.weight_slots()["model.layers.0.linear_attn.in_proj_qkv.weight"]
    value = random(slot.shape, 1)
    assert len(slot.owned) == 3, "queries, keys and values"

    def write(start: int, stop: int) -> None:
        loader.write(WeightPiece(slot.name, slot.shape, value.dtype, start, value[start:stop]))

    for number, rows in enumerate(slot.owned):
        if number:
            with pytest.raises(Exception, match="when row"):
                write(rows.start + 1, rows.stop)
        write(rows.start, rows.stop)
    write(len(value), len(value))
    assert slot.name in loader.written
    assert bits(slot.read()) == bits(value[rows_of(slot)])


@settings(max_examples=examples(20))
@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), DTYPES)
def test_experts_of_one_tensor(
    data: st.DataObject, size: int, ep: int, width: int, sent: torch.dtype
) -> None:
    experts, hidden, total = 3 * ep, 5, width * size
    for rank in range(size * ep):
        group, within = divmod(rank, size)
        held, own = slice(width * within, width * (within + 1)), slice(3 * group, 3 * (group + 1))
        names, where = ExpertNames(stacked=True), place(rank, size * ep, ep=ep)
        slots = slots_of(Experts("e", "m", experts, hidden, total, names=names, bias=True, place=where))
        shapes = {
            "m.gate_up_proj": (experts, hidden, 2 * total),
            "m.gate_up_proj_bias": (experts, 2 * total),
            "m.down_proj": (experts, total, hidden),
            "m.down_proj_bias": (experts, hidden),
        }
        assert {name: slot.shape for name, slot in slots.items()} == shapes
        for number, (name, slot) in enumerate(slots.items()):
            value = random(slot.shape, number).to(sent)
            for start, stop in cuts(data, experts):
                slot.update(value[start:stop], start, compare=data.draw(st.booleans()))
                assert not slot.differs(value[start:stop], start)
            assert [*rows_of(slot)] == [*range(own.start, own.stop)]
            expected = value[own]
            if "gate_up" in name:
                expected = expected.unflatten(-1, (total, 2))[..., held, :].flatten(-2)
            elif name == "m.down_proj":
                expected = expected[:, held]
            assert bits(slot.read()) == bits(expected.to(slot.dtype))


@settings(max_examples=examples(20))
@given(st.data(), st.integers(1, 2), st.integers(1, 3), DTYPES)
def test_whole_experts(data: st.DataObject, size: int, ep: int, sent: torch.dtype) -> None:
    ranks = size * ep
    width = data.draw(st.integers(1, 9)) * size
    places = [place(rank, ranks, ep=ep) for rank in range(ranks)]
    Layers([Experts("e", "m", 2 * ep, 7, width, place=each) for each in places]).check(data, sent)
