"""Tensors under the names that a trainer's modules have."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.checkpoints import FAMILIES, HYBRIDS, make_checkpoint, make_fp8_checkpoint
from support.properties import examples
from torch import Tensor

from caesura.io_struct import CaesuraError, TensorSpec
from caesura.scheduler.models.causal_lm import CausalLM
from caesura.scheduler.models.config import load_model_config
from caesura.scheduler.models.registry import build_model
from caesura.scheduler.parallel.group import TensorParallel
from caesura.scheduler.runtime.dtypes import NAMES
from caesura.scheduler.weights.loader import WeightLoader
from caesura.scheduler.weights.source import WeightPiece
from caesura.scheduler.weights.transports.disk import load_from_disk, open_checkpoint

CPU = torch.device("cpu")
WITH_EXPERTS = [
    "qwen3-moe",
    "qwen2-moe",
    "mixtral",
    "glm4-moe",
    "deepseek-v2",
    "deepseek-v3",
    "qwen3-next",
    "qwen3.5-moe",
]
GATE_UP, DOWN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"


def built(path: Path, rank: int = 0, size: int = 1) -> CausalLM:
    return build_model(load_model_config(path), torch.float32, CPU, TensorParallel(rank, size))


def from_disk(path: Path, rank: int = 0, size: int = 1) -> dict[str, Tensor]:
    model = built(path, rank, size)
    load_from_disk(WeightLoader(model), open_checkpoint(path), 1 << 16)
    model.finalize_weights()
    return dict(model.named_storage())


def spec_of(name: str, tensor: Tensor, start: int = 0, stop: int | None = None) -> TensorSpec:
    rows = tensor[start:stop] if tensor.dim() else tensor
    shape = list(tensor.shape)
    return TensorSpec(
        name=name, dtype=NAMES[tensor.dtype], shape=shape, offset=0, nbytes=rows.nbytes, start_row=start
    )


@dataclass
class Sender:
    """Sends tensors as a call of an update does."""

    model: CausalLM
    loader: WeightLoader = field(init=False)

    def __post_init__(self) -> None:
        self.loader = WeightLoader(self.model)

    def send(self, name: str, tensor: Tensor, start: int = 0, stop: int | None = None) -> None:
        spec = spec_of(name, tensor, start, stop)
        self.loader.check([spec], complete=False)
        rows = tensor[start:stop] if tensor.dim() else tensor
        self.loader.write(WeightPiece(name, tuple(tensor.shape), tensor.dtype, start, rows))

    def storage(self) -> dict[str, Tensor]:
        self.loader.require_whole()
        assert self.loader.missing(self.loader.written) == []
        self.model.finalize_weights()
        return dict(self.model.named_storage())


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("family", WITH_EXPERTS)
@pytest.mark.parametrize("size", [1, 2])
def test_the_parameters_of_a_trainer_are_the_checkpoint(family: str, size: int, tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, family)
    state = reference.state_dict()
    assert any(name.endswith("experts.gate_up_proj") for name in state)
    for rank in range(size):
        sender = Sender(built(tmp_path, rank, size))
        sender.loader.check([spec_of(name, tensor) for name, tensor in state.items()], complete=True)
        for name, tensor in state.items():
            if not sender.loader.skip(name):
                sender.send(name, tensor)
        assert_same(sender.storage(), from_disk(tmp_path, rank, size))


@pytest.mark.parametrize("family", ["qwen3.5-moe", "mixtral"])
def test_a_folder_may_have_them_so_too(family: str, tmp_path: Path) -> None:
    state = make_checkpoint(tmp_path, family).state_dict()
    expected = [from_disk(tmp_path, rank, 2) for rank in range(2)]
    (tmp_path / "model.safetensors").unlink()
    save_file(state, tmp_path / "model.safetensors")
    for rank in range(2):
        assert_same(from_disk(tmp_path, rank, 2), expected[rank])


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    path = tmp_path_factory.mktemp("experts")
    return path, make_checkpoint(path, "qwen3-moe").state_dict()


@settings(max_examples=examples(20))
@given(data=st.data())
def test_experts_come_in_any_pieces(experts: tuple[Path, dict[str, Tensor]], data: st.DataObject) -> None:
    path, state = experts
    sender, tensor = Sender(built(path)), state[GATE_UP]
    borders = sorted(data.draw(st.sets(st.integers(1, len(tensor) - 1))))
    pieces = list(zip([0, *borders], [*borders, len(tensor)], strict=True))
    for number, (start, stop) in enumerate(pieces):
        sender.send(GATE_UP, tensor, start, stop)
        assert sender.loader.is_whole == (number == len(pieces) - 1)
    checkpoint, slots = load_file(path / "model.safetensors"), sender.model.weight_slots()
    names = [name for name in slots if name.startswith("model.layers.0.mlp.experts.") and "down" not in name]
    assert sender.loader.written == set(names)
    for name in names:
        assert torch.equal(slots[name].read(), checkpoint[name])


def test_an_expert_that_does_not_come_is_due(experts: tuple[Path, dict[str, Tensor]]) -> None:
    path, state = experts
    sender, tensor = Sender(built(path)), state[DOWN]
    sender.send(DOWN, tensor, 0, len(tensor) - 1)
    last = f"model.layers.0.mlp.experts.{len(tensor) - 1}.down_proj.weight"
    with pytest.raises(CaesuraError) as caught:
        sender.loader.require_whole()
    assert caught.value.detail["missing"] == [last]
    rest = spec_of(DOWN, tensor, len(tensor) - 1)
    sender.loader.check([rest], complete=False, last=True)
    sender.send(DOWN, tensor, len(tensor) - 1)
    sender.loader.require_whole()


def test_experts_that_come_anew_are_due_again(experts: tuple[Path, dict[str, Tensor]]) -> None:
    path, state = experts
    alone, tensor = load_file(path / "model.safetensors"), state[DOWN]
    block = DOWN.removesuffix("down_proj")
    for before in ({DOWN: tensor}, {name: alone[name] for name in alone if name.startswith(block)}):
        sender = Sender(built(path))
        for name, value in before.items():
            sender.send(name, value)
        with pytest.raises(CaesuraError) as caught:
            sender.loader.check([spec_of(DOWN, tensor, 0, 2)], complete=False, last=True)
        assert len(caught.value.detail["missing"]) == len(tensor) - 2
        sender.send(DOWN, tensor, 0, 2)
        with pytest.raises(CaesuraError) as caught:
            sender.loader.require_whole()
        assert len(caught.value.detail["missing"]) == len(tensor) - 2
        sender.send(DOWN, tensor, 2)
        sender.loader.require_whole()


def test_experts_come_in_order(experts: tuple[Path, dict[str, Tensor]]) -> None:
    path, state = experts
    sender, tensor, norm = Sender(built(path)), state[DOWN], "model.norm.weight"
    for start, due in ((2, 0), (3, 2)):
        spec = spec_of(DOWN, tensor, start)
        with pytest.raises(CaesuraError) as caught:
            sender.loader.check([spec], complete=False)
        entry = {"name": DOWN, "reason": f"row {start} came when row {due} was due"}
        assert caught.value.detail["mismatched"] == [entry]
        with pytest.raises(CaesuraError, match="was due"):
            sender.loader.write(WeightPiece(DOWN, tuple(tensor.shape), tensor.dtype, start, tensor[start:]))
        sender.send(DOWN, tensor, 0, 2)
    with pytest.raises(CaesuraError, match="row 2 came when row 0 was due"):
        sender.loader.check([spec_of(norm, state[norm]), spec_of(DOWN, tensor, 2)], complete=False)


def test_other_shapes_are_refused_by_the_name_that_came(experts: tuple[Path, dict[str, Tensor]]) -> None:
    path, state = experts
    sender, right = Sender(built(path)), state[GATE_UP]
    for wrong in (right[:-1], right[:, :-1], right.transpose(1, 2), right[0], right[None]):
        with pytest.raises(CaesuraError, match="weight_mismatch") as caught:
            sender.loader.check([spec_of(GATE_UP, wrong)], complete=False)
        shapes = {"expected_shape": list(right.shape), "got_shape": list(wrong.shape)}
        assert caught.value.detail["mismatched"] == [{"name": GATE_UP, **shapes}]
        with pytest.raises(CaesuraError, match="weight_mismatch"):
            sender.loader.write(WeightPiece(GATE_UP, tuple(wrong.shape), wrong.dtype, 0, wrong))
    for start, rows in ((len(right), right[:1]), (len(right) - 1, right[:2]), (0, right[:, :1])):
        with pytest.raises(CaesuraError, match=f"at row {start} do not fit"):
            sender.loader.write(WeightPiece(GATE_UP, tuple(right.shape), right.dtype, start, rows))
    assert sender.loader.is_whole


def test_both_spellings_of_a_tensor_are_one_too_many(experts: tuple[Path, dict[str, Tensor]]) -> None:
    path, state = experts
    alone = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    with pytest.raises(CaesuraError) as caught:
        Sender(built(path)).loader.check(
            [spec_of(GATE_UP, state[GATE_UP]), spec_of(name, alone[name])], complete=False
        )
    assert caught.value.detail["mismatched"] == [{"name": name, "reason": "named twice"}]


def test_fp8_experts_and_their_scales(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", "qwen3-moe", dtype=torch.bfloat16)
    make_fp8_checkpoint(tmp_path / "plain", tmp_path / "fp8", (4, 4), ())
    alone = load_file(tmp_path / "fp8" / "model.safetensors")
    sender = Sender(built(tmp_path / "fp8"))
    for layer in range(2):
        block = f"model.layers.{layer}.mlp.experts"
        count = sum(name.startswith(block) and name.endswith("down_proj.weight") for name in alone)
        for end, spelled in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
            of = [
                [alone.pop(f"{block}.{expert}.{part}_proj.{end}") for part in ("gate", "up", "down")]
                for expert in range(count)
            ]
            gate_up = torch.stack([torch.cat(parts[:2]) for parts in of])
            sender.send(f"{block}.gate_up_proj{spelled}", gate_up)
            sender.send(f"{block}.down_proj{spelled}", torch.stack([parts[2] for parts in of]))
    for name, tensor in alone.items():
        sender.send(name, tensor)
    assert_same(sender.storage(), from_disk(tmp_path / "fp8"))


def test_every_family_with_experts_is_tried() -> None:
    configs = {name: kind() for name, (kind, _, _) in {**FAMILIES, **HYBRIDS}.items()}
    sparse = {
        name
        for name, config in configs.items()
        if any(hasattr(config, each) for each in ("num_experts", "num_local_experts", "n_routed_experts"))
    }
    assert sparse - {"gpt-oss"} == set(WITH_EXPERTS)
