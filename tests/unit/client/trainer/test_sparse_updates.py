"""Differences between two versions of weights, the copy of what engines have, and a delta's file."""

import pytest
import torch
from safetensors.torch import save_file

from caesura.client import CheckpointError, InvalidRequest, WeightMismatch
from caesura.client.trainer import DeltaTracker, SparseTensor, WeightDelta
from caesura.io_struct import DeltaBase, TensorSpec
from caesura.transfer.weight_digest import digest_of


def weights(**changes):
    tensors = {
        "embed.weight": torch.arange(60, dtype=torch.float32).view(12, 5).bfloat16(),
        "norm.weight": torch.ones(7),
        "scale": torch.tensor(2.0),
    }
    return {**tensors, **changes}


def edited(tensors, name, *places):
    new = {each: tensor.clone() for each, tensor in tensors.items()}
    new[name].view(-1)[list(places)] += 1
    return new


def test_only_elements_that_changed_are_in_a_delta():
    old = weights()
    new = edited(old, "embed.weight", 0, 31)
    delta = WeightDelta.between(old, new)
    assert set(delta) == {"embed.weight"}
    sparse = delta["embed.weight"]
    assert sparse.positions.tolist() == [0, 31] and sparse.values.tolist() == [1.0, 32.0]
    assert delta.nbytes == sparse.nbytes == 2 * 4 + 2 * 2
    assert delta.changed == 2 and delta.share == 2 / 68
    assert delta.base(3) == DeltaBase(base_epoch=3, base_digest=digest_of(old), digest=digest_of(new))


def test_a_tensor_goes_whole_where_positions_cost_more():
    old = weights()
    delta = WeightDelta.between(old, edited(old, "norm.weight", *range(4)))
    assert torch.equal(delta["norm.weight"], torch.tensor([2.0, 2, 2, 2, 1, 1, 1]))
    assert isinstance(WeightDelta.between(old, edited(old, "norm.weight", 1))["norm.weight"], SparseTensor)


def test_a_delta_of_nearly_everything_is_not_small():
    old = weights()
    few, some, most = (WeightDelta.between(old, edited(old, "embed.weight", *range(n))) for n in (1, 5, 20))
    assert few.is_small("ipc") and few.is_small("tensor")
    assert some.is_small("tensor") and not some.is_small("ipc"), "bytes cost less in shared memory"
    assert not most.is_small("tensor")


def test_names_and_dtypes_are_those_of_the_engine():
    stored = [TensorSpec(name="embed.weight", dtype="BF16", shape=[12, 5])]
    old = weights(**{"embed.weight": torch.ones(12, 5), "lm_head.weight": torch.ones(12, 5)})
    new = edited(old, "embed.weight", 5)
    new["embed.weight"][1, 1] += 1e-6  # rounded away
    new["lm_head.weight"] += 1
    delta = WeightDelta.between(old, new, like=stored)
    assert set(delta) == {"embed.weight"}
    assert delta["embed.weight"].positions.tolist() == [5]
    assert delta.digest == digest_of({"embed.weight": new["embed.weight"].bfloat16()})


def test_what_the_engine_quantises_is_compared_as_it_is():
    shape = [12, 5]
    stored = [
        TensorSpec(name="embed.weight", dtype="I8", shape=shape),
        TensorSpec(name="embed.weight_scale_inv", dtype="F32", shape=[12, 1]),
    ]
    old, new = weights(), edited(weights(), "embed.weight", 5)
    delta = WeightDelta.between(old, new, like=stored)
    assert delta["embed.weight"].dtype == old["embed.weight"].dtype
    assert delta.digest == digest_of({"embed.weight": new["embed.weight"]})


def test_a_tied_head_is_compared_once():
    old, new = weights(), edited(weights(), "embed.weight", 5)
    old["lm_head.weight"], new["lm_head.weight"] = old["embed.weight"], new["embed.weight"]
    delta = WeightDelta.between(old, new)
    assert set(delta) == {"embed.weight"} and delta.base_digest == digest_of(weights())


def gathered(tensors):
    """Yield tensors as a gather does, each in the memory of the last one."""
    room = torch.empty(4, 4)
    for name, tensor in tensors.items():
        yield name, room.copy_(tensor)


def spaced(tensors):
    """Yield temporaries of which a tracker keeps copies: the next one takes their memory."""
    for name, tensor in tensors.items():
        yield name, tensor.clone().T


def test_memory_that_is_used_again_is_no_tied_head():
    old = {f"layer.{number}": torch.full((4, 4), float(number)) for number in range(6)}
    new = {name: tensor + 1 for name, tensor in old.items()}
    tracker = DeltaTracker(gathered(old))
    assert tracker.delta(old).base_digest == digest_of(old)
    delta = tracker.delta(spaced(new))
    assert len(delta) == 6 and delta.digest == digest_of(new)
    alike = {f"norm.{number}": torch.ones(4, 4) for number in range(6)}
    assert DeltaTracker(spaced(alike)).delta({}).base_digest == digest_of(alike)


def test_a_tied_head_with_other_values_is_refused():
    old = weights()
    old["lm_head.weight"] = old["embed.weight"]
    tracker = DeltaTracker(old)
    new = edited(old, "embed.weight", 5)
    with pytest.raises(WeightMismatch, match=r"was one tensor with 'embed\.weight' before"):
        tracker.delta(new)
    new["lm_head.weight"] = new["embed.weight"].clone()
    assert set(tracker.delta(dict(reversed(new.items())))) == {"embed.weight"}


def test_only_a_delta_of_the_copy_has_been_sent(tmp_path):
    first = weights()
    second, third = edited(first, "embed.weight", 7), edited(first, "norm.weight", *range(7))
    tracker = DeltaTracker(first)
    one, other = tracker.delta(second), tracker.delta(third)
    one.save(tmp_path)
    tracker.sent(WeightDelta.load(tmp_path))
    assert tracker.delta(second).base_digest == digest_of(second), "a file has no digests of tensors"
    for wrong in (one, other):
        with pytest.raises(InvalidRequest, match="the copy is"):
            tracker.sent(wrong)
    tracker.sent(tracker.delta(second))  # nothing: engines still return to the first
    tracker.rolled_back()
    assert not tracker.delta(first) and tracker.delta(first).base_digest == digest_of(first)


def test_a_tracker_advances_with_what_was_sent_and_returns():
    first = weights()
    second, third = edited(first, "embed.weight", 7), edited(first, "embed.weight", 7, 8)
    third["norm.weight"] = torch.zeros(7)
    tracker = DeltaTracker(first)
    delta = tracker.delta(second)
    assert tracker.delta(second).digest == delta.digest, "nothing was sent: the base is the same"
    tracker.sent(delta)
    assert not tracker.delta(second) and tracker.delta(second).base_digest == digest_of(second)
    delta = tracker.delta(third)
    assert delta["embed.weight"].positions.tolist() == [8]
    tracker.sent(delta)
    assert not tracker.delta(third)
    tracker.rolled_back()
    assert not tracker.delta(second) and tracker.delta(third).base_digest == digest_of(second)
    with pytest.raises(InvalidRequest, match="nothing to return to"):
        tracker.rolled_back()
    assert torch.equal(first["embed.weight"], weights()["embed.weight"]), (
        "the trainer's own are not written to"
    )


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("other", torch.ones(1), "there was none before"),
        ("scale", torch.ones(2), r"is F32 \[2\]: it was F32 \[\] before"),
        ("norm.weight", torch.ones(7).half(), r"is F16 \[7\]: it was F32 \[7\] before"),
    ],
)
def test_a_tensor_of_another_form_is_refused(name, tensor, words):
    with pytest.raises(WeightMismatch, match=words):
        WeightDelta.between(weights(), weights(**{name: tensor}))


def test_a_file_holds_a_delta(tmp_path):
    old = weights()
    new = edited(old, "embed.weight", 1, 59)
    new["norm.weight"] = torch.zeros(7)
    delta = WeightDelta.between(old, new)
    delta.save(tmp_path, weight_version="5")
    loaded = WeightDelta.load(tmp_path)
    assert set(loaded) == set(delta) and loaded.base() == delta.base()
    assert loaded["embed.weight"].positions.tolist() == [1, 59]
    assert torch.equal(loaded["embed.weight"].values, delta["embed.weight"].values)
    assert torch.equal(loaded["norm.weight"], torch.zeros(7))
    assert loaded.is_small("ipc") and loaded.share is None


def test_checkpoint_folders_are_compared(tmp_path):
    for name, tensors in (("old", weights()), ("new", edited(weights(), "embed.weight", 2))):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    delta = WeightDelta.between(tmp_path / "old", str(tmp_path / "new"))
    assert delta["embed.weight"].positions.tolist() == [2] and delta.base_digest == digest_of(weights())


def test_folders_that_are_torn_or_empty_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no \*.safetensors"):
        DeltaTracker(tmp_path)
    save_file(weights(), tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="is truncated"):
        DeltaTracker(tmp_path)
    with pytest.raises(CheckpointError, match=r"delta\.safetensors"):
        WeightDelta.load(tmp_path)
