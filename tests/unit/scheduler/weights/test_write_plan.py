"""Plans write the same bytes as no plan would, and are used only where they fit."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import make_checkpoint, make_fp8_checkpoint
from torch import Tensor

from caesura.client.trainer import SharedTensors
from caesura.io_struct import CaesuraError, ErrorCode, TensorSpec
from caesura.scheduler.memory.host_copy import exhaust
from caesura.scheduler.memory.residency import ComponentResidencyManager
from caesura.scheduler.memory.storage import StorageComponent
from caesura.scheduler.models.causal_lm import CausalLM
from caesura.scheduler.models.config import load_model_config
from caesura.scheduler.models.registry import build_model
from caesura.scheduler.weights import source, write_plan
from caesura.scheduler.weights.digests import WeightDigests
from caesura.scheduler.weights.loader import WeightLoader
from caesura.scheduler.weights.source import BufferSource, BySpecs
from caesura.scheduler.weights.transports.disk import open_checkpoint
from caesura.scheduler.weights.write_plan import PlannedWrite
from caesura.transfer import words
from caesura.transfer.weight_digest import digest_of

pytestmark = pytest.mark.skipif(words.library() is None, reason="words.cpp was not compiled")
FAMILIES = ["llama", "qwen3-moe", "deepseek-v3", "qwen3.5", "fp8"]


def make_weights(folder: Path, family: str) -> tuple[CausalLM, dict[str, Tensor]]:
    if family == "fp8":
        make_checkpoint(folder / "wide", "qwen3", dtype=torch.bfloat16)
        folder = folder / "fp8"
        make_fp8_checkpoint(folder.parent / "wide", folder, (12, 12), ())
    else:
        make_checkpoint(folder, family)
    return new_model(folder), load_file(folder / "model.safetensors")


def new_model(folder: Path) -> CausalLM:
    dtype = torch.bfloat16 if folder.name == "fp8" else torch.float32
    return build_model(load_model_config(folder), dtype, torch.device("cpu"))


def source_of(shared: SharedTensors) -> BufferSource:
    buffer = shared.memory.view(0, shared.memory.nbytes)
    return BufferSource("ipc", shared.specs, [memoryview(buffer.numpy())])


def write(loader: WeightLoader, source: BufferSource) -> int:
    """Write all; return the number of tensors that a plan has written."""
    loader.check(source.specs, complete=False, last=True)
    planned = 0
    for piece in loader.pieces(source, 1 << 20):
        planned += len(piece.slots) if isinstance(piece, PlannedWrite) else 0
        loader.write(piece)
    return planned


def storage(model: CausalLM) -> dict[str, Tensor]:
    return {name: tensor.contiguous().view(torch.uint8) for name, tensor in model.named_storage()}


def same(one: CausalLM, other: CausalLM) -> bool:
    pairs = zip(storage(one).values(), storage(other).values(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_writes_what_single_tensors_write(tmp_path: Path, family: str) -> None:
    model, tensors = make_weights(tmp_path, family)
    other = new_model(tmp_path / "fp8" if family == "fp8" else tmp_path)
    planning, plain = WeightLoader(model, WeightDigests()), WeightLoader(other)
    with SharedTensors(tensors) as shared:
        for number in range(3):
            assert write(planning, source_of(shared)) > 0
            assert write(plain, source_of(shared)) == 0
            assert same(model, other)
            assert planning.counts == plain.counts
            assert planning.changed == plain.changed
            assert planning.written == plain.written and planning.is_whole
            assert planning.digests.total() == digest_of(dict(shared))
            for loader in (planning, plain):
                loader.take_counts()
                loader.forget_written()
            name = list(tensors)[number]
            shared[name].view(torch.uint8).view(-1)[-1] ^= 1


def test_fp8_weights_and_their_scales_are_planned(tmp_path: Path) -> None:
    model, tensors = make_weights(tmp_path, "fp8")
    with SharedTensors(tensors) as shared:
        assert write(WeightLoader(model, WeightDigests()), source_of(shared)) == len(tensors)


@pytest.mark.parametrize(("bucket_bytes", "least"), [(1 << 12, 10), (1 << 20, 40)])
def test_a_checkpoint_on_disk_is_planned_bucket_by_bucket(
    tmp_path: Path, bucket_bytes: int, least: int
) -> None:
    model, tensors = make_weights(tmp_path, "deepseek-v3")
    for name in list(tensors)[1::2]:
        tensors[name].view(torch.uint8).view(-1)[-1] ^= 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint, other = open_checkpoint(tmp_path), new_model(tmp_path)
    planning, plain = WeightLoader(model, WeightDigests()), WeightLoader(other)
    planned = 0
    for loader in (planning, plain):
        loader.check(checkpoint.specs, complete=True)
        for piece in loader.pieces(checkpoint, bucket_bytes):
            planned += len(piece.slots) if isinstance(piece, PlannedWrite) else 0
            loader.write(piece)
    assert planned > least
    assert same(model, other)
    assert planning.counts == plain.counts and planning.counts.skipped_tensors == 0
    assert planning.changed == plain.changed and planning.is_whole
    assert planning.digests.total() == digest_of(tensors)


def test_a_message_with_known_specs_is_not_looked_through_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: Counter[str] = Counter()
    for owner, name in ((source, "_require_fitting"), (WeightLoader, "_walk"), (write_plan, "_copied")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name), looks))
    model, tensors = make_weights(tmp_path, "qwen3-moe")
    loader, fitting = WeightLoader(model, WeightDigests()), BySpecs()
    with SharedTensors(tensors) as shared:
        buffer = memoryview(shared.memory.view(0, shared.memory.nbytes).numpy())
        messages = [shared.specs[:9], shared.specs[9:]]
        for turn in range(2):
            for message in messages:
                equal = msgspec.convert(msgspec.to_builtins(message), list[TensorSpec])
                one = BufferSource("ipc", equal, [buffer], fitting=fitting)
                loader.check(one.specs, complete=False)
                for piece in loader.pieces(one, 1 << 20):
                    loader.write(piece)
            assert looks == dict.fromkeys(looks, len(tensors)), f"turn {turn}"
        assert len(looks) == 3
        with pytest.raises(CaesuraError, match="ends at byte"):  # equal specs, in a smaller buffer
            BufferSource("ipc", messages[1], [buffer[:-64]], fitting=fitting)


@pytest.mark.parametrize("lists", [[200], [40] * 9, [1] * 200], ids=["one", "equally many", "single"])
def test_no_more_is_kept_than_the_limit(monkeypatch: pytest.MonkeyPatch, lists: list[int]) -> None:
    monkeypatch.setattr(source, "_KEPT", 100)
    kept: BySpecs[int] = BySpecs()
    for number, count in enumerate(lists):
        kept.put([_spec(f"{number}.{each}") for each in range(count)], number)
    assert sum(len(specs) for specs, _ in kept._found.values()) <= 100
    long = [_spec("x" * source._NAME * 100)]
    kept.put(long, 0)
    assert kept.get(long) is None, "a name is memory, too"


def test_lists_that_are_put_again_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_KEPT", 100)
    kept: BySpecs[int] = BySpecs()
    first = [_spec(f"first.{each}") for each in range(40)]
    kept.put(first, 1)
    for value in range(9):
        kept.put([_spec("second", offset=value)] * 50, value)
    assert kept.get(first) == (first, 1)


def _spec(name: str, offset: int = 0) -> TensorSpec:
    return TensorSpec(name=name, dtype="BF16", shape=[1], offset=offset, nbytes=2)


def counted(function: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        calls[function.__name__] += 1
        return function(*arguments)

    return call


def test_storage_that_has_moved_is_planned_anew(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    weights = StorageComponent("weights")
    manager = ComponentResidencyManager("cpu", make_component=lambda tag: weights)
    with manager.component("weights"):
        model = new_model(tmp_path)
    loader = WeightLoader(model, WeightDigests())
    with SharedTensors(load_file(tmp_path / "model.safetensors")) as shared:
        write(loader, source_of(shared))
        before = [tensor.clone() for tensor in weights.tensors]
        addresses = [tensor.data_ptr() for tensor in weights.tensors]
        exhaust(weights.release())
        taken = [torch.empty_like(tensor) for tensor in before]  # so that they do not come back
        exhaust(weights.resume())
        assert len(taken) == len(addresses)
        assert addresses != [tensor.data_ptr() for tensor in weights.tensors]
        assert write(loader, source_of(shared)) > 0
    assert all(map(torch.equal, before, weights.tensors))


def test_equal_specs_are_checked_again_while_rows_are_due(tmp_path: Path) -> None:
    model, tensors = make_weights(tmp_path, "llama")
    loader = WeightLoader(model, WeightDigests())
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2 and len(tensor) % 2 == 0)
    with SharedTensors({name: tensors[name]}) as shared:
        source = source_of(shared)
        write(loader, source)
        [whole] = source.specs
        half = type(whole)(name=name, dtype=whole.dtype, shape=whole.shape, nbytes=whole.nbytes // 2)
        with pytest.raises(CaesuraError, match=name) as error:
            loader.check([half], complete=False, last=True)
        assert error.value.code == ErrorCode.WEIGHT_MISMATCH
        loader.check([half], complete=False)
        for piece in loader.pieces(BufferSource("ipc", [half], source.buffers), 1 << 20):
            loader.write(piece)
        assert not loader.is_whole
        write(loader, source)
        assert loader.is_whole
