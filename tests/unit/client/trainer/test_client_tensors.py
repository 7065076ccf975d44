"""The trainer's half: what of an update is made when and let go, and importance weights per token."""

import gc
import math
import operator
import os
import types
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.checkpoints import FAMILIES, HYBRIDS, make_checkpoint
from support.fake_scheduler import finished, floats
from support.faults import Fault
from support.lanes import every, quick
from support.multimodal_checkpoints import WHOLE, as_before_version_5, make_multimodal_checkpoint

from caesura.client import InvalidRequest, TimedOut, WeightVersionSpan, importance_weights
from caesura.client import trainer as tensors
from caesura.client.connection.channel import at_once
from caesura.client.connection.results import decode_output
from caesura.client.trainer import (
    SharedBucket,
    SharedBuckets,
    SharedTensors,
    buckets,
    checkpoint_tensors,
    sending,
)
from caesura.client.trainer.sending import send_tensors, share_tensors
from caesura.io_struct import (
    BeginWeightUpdateReqInput,
    CaesuraError,
    EndWeightUpdateReqInput,
    UpdateWeightsFromTensorReqInput,
)
from caesura.io_struct.base import MAX_FRAMES

TENSORS = [(f"w{number}", torch.full((16, 16), float(number))) for number in range(4)]
BUCKET_BYTES = 1024
"""Bytes of one tensor in ``TENSORS``."""


def memories() -> int:
    gc.collect()
    names = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
    maps = Path("/proc/self/maps").read_text()
    return sum("caesura-weights" in name for name in names) + maps.count("caesura-weights")


@pytest.mark.parametrize("dtype", [None, torch.complex64])
def test_an_unsendable_dtype_makes_no_memory(dtype):
    bad = torch.ones(4, dtype=torch.float32 if dtype else torch.complex64)
    made = Fault(os, "memfd_create", AssertionError("memory was made"))
    with made, pytest.raises(CaesuraError, match="'bad'") as caught:
        SharedTensors([("bad", bad)], dtype=dtype)
    assert caught.value.code == "invalid_request"


class Ticket:
    """An answer that does not come until it is told to."""

    def __init__(self) -> None:
        self.callbacks: list = []

    def done(self) -> bool:
        return False

    def add_done_callback(self, callback) -> None:
        self.callbacks.append(callback)


class Update:
    """An update that a test carries out from one wait for an answer to the next, and what it has sent."""

    def __init__(self, transport, tensors, options=None, *, bucket_bytes=BUCKET_BYTES, shared=None) -> None:
        self.sent, self.tickets = [], []
        sender = sending.Sender(self._start, lambda *_: suspended(), at_once(operator.call), None)
        shared = shared or SharedBuckets()
        self.coroutine = transport(sender, tensors, options or {}, bucket_bytes=bucket_bytes, shared=shared)

    def _start(self, request, expects, buffers):
        self.sent.append((request, buffers))
        self.tickets.append(Ticket())
        return self.tickets[-1]

    def go_on(self):
        """Give an answer, where one is waited for; return True at the end."""
        try:
            self.coroutine.send(None)
        except StopIteration:
            return True
        return False


@types.coroutine
def suspended():
    yield
    return "answer"


def sent_by(transport, tensors, bucket_bytes):
    update = Update(transport, tensors, bucket_bytes=bucket_bytes)
    update.go_on()
    update.coroutine.close()
    first = update.sent[0][0]
    return first.manifest if isinstance(first, BeginWeightUpdateReqInput) else first.specs


@pytest.mark.parametrize("transport", [send_tensors, share_tensors])
@pytest.mark.parametrize("bucket_bytes", [BUCKET_BYTES, 1 << 20])
def test_a_state_dict_is_as_good_as_pairs(transport, bucket_bytes):
    expected = sent_by(transport, TENSORS, bucket_bytes)
    assert {spec.name for spec in expected} == {name for name, _ in TENSORS}
    for given in (dict(TENSORS), OrderedDict(TENSORS), dict(TENSORS).items(), iter(TENSORS), tuple(TENSORS)):
        assert sent_by(transport, given, bucket_bytes) == expected


@pytest.mark.parametrize("way", ["negative", "zeros", "large"])
def test_values_are_copied_wherever_they_come_from(way):
    values = torch.arange(1.0, 9.0)
    tensor, expected = {
        "negative": (torch._neg_view(values), -values),
        "zeros": (torch._efficientzerotensor((8,)), torch.zeros(8)),
        "large": (values.repeat(40_000), values.repeat(40_000)),
    }[way]
    (bucket,) = buckets([("w", tensor)], 2 << 20)
    with SharedBucket(2 << 20) as memory:
        (spec,) = memory.fill(bucket, 64)
        assert torch.equal(memory.view(spec.offset, spec.nbytes).view(torch.float32), expected)
    if way == "negative":
        _, (frame,) = sending.as_frames(bucket)
        assert bytes(frame) == bytes_of(expected)


def test_shared_tensors_take_a_state_dict():
    with SharedTensors(dict(TENSORS)) as shared:
        assert [name for name, _ in shared] == [name for name, _ in TENSORS]
        shared.copy_from({"w1": torch.full((16, 16), 7.0)})
        assert shared["w1"][0, 0] == 7
        with pytest.raises(CaesuraError, match=r"'w00' is not among these 4 tensors \(did you mean 'w0'"):
            shared.copy_from({"w00": torch.ones(16, 16)})


class Sharded(torch.Tensor):
    """Stand-in for a DTensor."""

    def full_tensor(self):
        pytest.fail("gathering is the trainer's to do")


ONE = torch.ones(2)


@pytest.mark.parametrize(
    "given,sentence",
    [
        (torch.nn.Linear(1, 1), r"is a Linear: pass checkpoint_tensors\(model\)"),
        (ONE, "must be pairs of name and tensor or a dict, not a Tensor"),
        (None, "must be pairs of name and tensor or a dict, not a NoneType"),
        ([ONE], r"named_tensors\[0\] must be a pair of name and tensor, not a Tensor"),
        (["w"], r"named_tensors\[0\] must be a pair of name and tensor, not a str"),
        ({"w": ONE.numpy()}, r"tensor 'w' is a ndarray, not a torch.Tensor"),
        ({"w": ONE.to("meta")}, "tensor 'w' has no values: it lies on the device meta"),
        ({"w": ONE.to_sparse()}, "tensor 'w' has the layout torch.sparse_coo"),
        (
            {"w": ONE.as_subclass(Sharded)},
            r"tensor 'w' is sharded: gather it first, with its full_tensor\(\)",
        ),
        ({"w": ONE.to(torch.complex64)}, "tensor 'w' has the dtype torch.complex64, which cannot be sent"),
        ({}, "there are no tensors to send: named_tensors is empty, or a generator that was used up"),
    ],
)
@pytest.mark.parametrize("transport", [send_tensors, share_tensors])
def test_invalid_named_tensors_error_is_one_sentence(transport, given, sentence):
    with pytest.raises(InvalidRequest, match=sentence):
        Update(transport, given).go_on()


def test_dropped_and_failed_updates_leave_no_memory():
    before = memories()
    with pytest.raises(CaesuraError, match="no values"):
        SharedTensors([("w", torch.ones(4, device="meta"))])
    with pytest.raises(CaesuraError, match="shape"):
        SharedTensors(TENSORS).copy_from({"w0": torch.ones(4)})
    kept = SharedTensors(TENSORS)
    bucket = SharedBucket(64)
    assert memories() > before
    del kept, bucket
    assert memories() == before


def test_a_closed_memory_is_closed_once():
    bucket = SharedBucket(64)
    bucket.close()
    other = os.open("/dev/null", os.O_RDONLY)  # takes the descriptor's number
    bucket.close()
    del bucket
    os.fstat(other)
    os.close(other)


def test_frames_are_made_when_their_turn_comes(monkeypatch):
    made = []
    real = sending.as_frames
    monkeypatch.setattr(sending, "as_frames", lambda part: made.append(part) or real(part))
    update = Update(send_tensors, TENSORS)
    answered = 0
    while not update.go_on():
        under_way = made[max(answered - 1, 0) :]  # the answer of begin is one of them
        assert len(under_way) <= 2
        assert sum(part.nbytes for part in under_way) <= BUCKET_BYTES
        answered += 1
    sent = [type(request) for request, _ in update.sent]
    updates = [UpdateWeightsFromTensorReqInput] * len(made)
    assert len(made) > 2
    assert sent == [BeginWeightUpdateReqInput, *updates, EndWeightUpdateReqInput]
    assert answered == len(sent)


def test_tensors_that_fit_a_bucket_are_one_message():
    """Also where it would be cut otherwise: a call of its own joins whatever session is open."""
    tensors = [("w", torch.zeros(3, 4 << 20, dtype=torch.uint8))]
    update = Update(send_tensors, tensors, bucket_bytes=12 << 20)
    update.go_on()
    ((request, _),) = update.sent
    assert isinstance(request, UpdateWeightsFromTensorReqInput)
    assert [spec.name for spec in request.specs] == ["w"]
    update.coroutine.close()


def start(shared: SharedBuckets):
    update = Update(share_tensors, TENSORS, {"session_id": "s"}, shared=shared)
    update.go_on()
    return update.coroutine, update.tickets, update.sent[-1][0].handle


@pytest.mark.parametrize("error", [TimedOut("late"), KeyboardInterrupt(), None])
def test_memory_lives_until_the_engine_has_answered(error):
    before, shared = memories(), SharedBuckets()
    update, tickets, handle = start(shared)
    assert len(tickets) == 3
    if error is None:
        update.close()
    else:
        with pytest.raises(type(error)):
            update.throw(error)
        error.__traceback__ = None
    del update
    gc.collect()
    assert os.stat(f"/proc/self/fd/{handle.fd}").st_ino == handle.inode
    _, others, other = start(shared)
    assert other.inode != handle.inode
    tickets.clear()
    others.clear()
    del _
    shared.close()
    assert memories() == before


def test_updates_at_once_have_a_memory_each():
    shared = SharedBuckets()
    _first, _, one = start(shared)
    _second, _, two = start(shared)
    assert one.inode != two.inode
    bucket = shared.take(64)
    shared.give_back(bucket)
    assert shared.take(64) is bucket


def test_a_bucket_stays_within_the_frames_of_a_message():
    tensors = [(f"t{number}", torch.zeros(1)) for number in range(MAX_FRAMES + 5)]
    sizes = [len(bucket.pieces) for bucket in buckets(tensors)]
    assert sizes == [MAX_FRAMES - 1, 6]


def test_single_messages_are_copies():
    tensors = [("w", torch.ones(8))]
    update = Update(send_tensors, tensors, bucket_bytes=1 << 20)
    update.go_on()
    tensors[0][1].fill_(7.0)
    ((_, (frame,)),) = update.sent
    assert torch.frombuffer(frame, dtype=torch.float32, count=8).tolist() == [1.0] * 8
    update.coroutine.close()


CASES = [
    *every(((family, False) for family in (*FAMILIES, *HYBRIDS, *WHOLE)), 3),
    *quick((family, True) for family in (*FAMILIES, *HYBRIDS)),
]


def build(path: Path, name: str, tied: bool = False) -> transformers.PreTrainedModel:
    if name in WHOLE:
        model = make_multimodal_checkpoint(path / "wide", name)
    else:
        model = make_checkpoint(path / "wide", name, tied=tied)
    model = model.to(torch.bfloat16)
    model.save_pretrained(path)
    return model


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("name", "tied"), CASES)
def test_equal_to_save_pretrained(tmp_path: Path, name: str, tied: bool):
    model = build(tmp_path, name, tied)
    # checkpoints of some still are, and engines take both
    spelled = as_before_version_5 if name in WHOLE else str
    saved = {spelled(key): value for key, value in load_file(tmp_path / "model.safetensors").items()}
    sent = [(spelled(key), value) for key, value in checkpoint_tensors(model)]
    assert sorted(name for name, _ in sent) == sorted(saved)
    for name, tensor in sent:
        assert tensor.dtype == saved[name].dtype
        assert tensor.shape == saved[name].shape
        assert bytes_of(tensor) == bytes_of(saved[name])


def test_tensors_are_views_of_the_model(tmp_path):
    model = build(tmp_path, "qwen3-moe")
    listed = dict(checkpoint_tensors(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3)
    assert all((tensor == 3).all() for tensor in listed.values())


def test_experts_fused_in_an_unknown_way_are_refused(tmp_path):
    model = build(tmp_path, "qwen3-moe")
    model.config.model_type = "unheard_of"
    with pytest.raises(CaesuraError, match="unheard_of") as caught:
        list(checkpoint_tensors(model))
    assert caught.value.code == "unsupported"


SPANS = [
    WeightVersionSpan(version="a", epoch=1, start=0, end=2, stale_kv=False),
    WeightVersionSpan(version="b", epoch=3, start=2, end=3, stale_kv=True),
]
LEARNER, SAMPLER = [-1.0, -1.0, -3.0], [-1.0, -2.0, -1.0]


def test_each_token_has_its_ratio_up_to_a_limit():
    assert importance_weights(LEARNER, SAMPLER) == pytest.approx([1.0, 2.0, math.exp(-2.0)])
    assert importance_weights(LEARNER, SAMPLER, clip_max=5.0)[1] == pytest.approx(math.e)
    assert importance_weights([0.0], [-1e9], clip_max=3.0) == [3.0]
    assert importance_weights([-math.inf], [-1.0]) == [0.0]
    assert importance_weights([], []) == []


@pytest.mark.parametrize(
    ("max_staleness", "expected"), [(0, [0, 0, 1]), (1, [0, 0, 1]), (2, [1, 1, 1]), (None, [1, 1, 1])]
)
def test_tokens_of_older_weights_than_allowed_count_nothing(max_staleness, expected):
    assert importance_weights(LEARNER, LEARNER, SPANS, epoch=3, max_staleness=max_staleness) == expected


def test_mismatched_shapes_are_refused():
    with pytest.raises(ValueError, match="epoch"):
        importance_weights(LEARNER, SAMPLER, SPANS, max_staleness=1)
    with pytest.raises(ValueError, match="3 learner logprobs, 2"):
        importance_weights(LEARNER, SAMPLER[:2])
    with pytest.raises(ValueError, match="token 3 of 2"):
        importance_weights(LEARNER[:2], SAMPLER[:2], SPANS, epoch=3, max_staleness=0)


def test_tokens_with_kv_of_older_weights_can_be_masked():
    assert importance_weights(LEARNER, LEARNER, SPANS, mask_stale_kv=True) == [1, 1, 0]


def output(logprobs, spans):
    tokens = [7] * (3 if logprobs is None else len(logprobs))
    wire = finished("r", tokens, output_logprobs=logprobs and floats(logprobs), weight_versions=spans)
    return decode_output(wire)


SHORT = WeightVersionSpan(version="b", epoch=3, start=0, end=2, stale_kv=False)
BATCH = [output(SAMPLER, SPANS), output(SAMPLER[:2], [SHORT])]
PADDED = torch.tensor([[*LEARNER, math.nan], [*LEARNER[:2], math.inf, 5.0]], requires_grad=True)


@pytest.mark.parametrize(
    "options", [{}, {"epoch": 3, "max_staleness": 1}, {"mask_stale_kv": True}, {"clip_max": 5.0}], ids=str
)
def test_a_padded_batch_has_its_samples_weights(options):
    found = tensors.importance_weights(PADDED, BATCH, **options)
    rows = [
        importance_weights(
            LEARNER[: len(each.output_ids)], each.output_logprobs, each.weight_versions, **options
        )
        for each in BATCH
    ]
    expected = torch.tensor([[*row, *[0.0] * (4 - len(row))] for row in rows])
    torch.testing.assert_close(found, expected)
    assert (found.dtype, found.requires_grad) == (torch.float32, False)


def test_a_mask_gives_further_tokens_no_weight():
    mask = torch.tensor([[0, 1, 1, 1], [1, 0, 1, 1]])
    found = tensors.importance_weights(PADDED, BATCH, mask=mask)
    torch.testing.assert_close(found, tensors.importance_weights(PADDED, BATCH) * mask)
    assert tensors.importance_weights(PADDED.bfloat16(), BATCH).dtype == torch.bfloat16
    assert tensors.importance_weights(torch.zeros(0, 4), []).shape == (0, 4)


def test_a_batch_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"shape \[2, 2\]; it must be \[2, 3 or more\]"):
        tensors.importance_weights(PADDED[:, :2], BATCH)
    with pytest.raises(ValueError, match=r"must be \[1, 3 or more\]"):
        tensors.importance_weights(PADDED, BATCH[:1])
    with pytest.raises(ValueError, match="mask has the shape"):
        tensors.importance_weights(PADDED, BATCH, mask=torch.ones(4))
    with pytest.raises(ValueError, match="sample 0 has no logprobs: generate with return_logprob=True"):
        tensors.importance_weights(PADDED[:1], [output(None, SPANS)])
    with pytest.raises(ValueError, match="epoch"):
        tensors.importance_weights(PADDED, BATCH, max_staleness=1)
