"""Deltas of weights: staged while steps go on, swapped in by a commit, and undone."""

from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.buckets_by_hand import Sender
from support.checkpoints import make_checkpoint, make_fp8_checkpoint, write_like
from support.deltas import ROADS, SentDelta, by_disk, by_tensor, some_changed
from support.faults import Fault
from support.lanes import every, quick
from support.lora import ALL_LINEAR, make_adapter
from support.properties import examples
from support.scripted import EngineDriver, assert_error, ok, one_piece_per_slice

from caesura.client.trainer import manifest
from caesura.io_struct import (
    CaesuraError,
    DeltaBase,
    ErrorCode,
    LoadAdapterReqInput,
    RollbackWeightsReqInput,
    TensorSpec,
    UpdateWeightsFromTensorReqInput,
)
from caesura.scheduler.layers.scaled_blocks import quantize
from caesura.scheduler.weights import source
from caesura.scheduler.weights.staged_delta import _Elements, _Rows
from caesura.transfer.weight_delta import DELTA_FILE, DeltaMetadata, write_delta
from caesura.transfer.weight_digest import digest_of

WEIGHTS = "model.safetensors"
EPOCH = DeltaBase(base_epoch=0)
NORM, HEAD, TABLE = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
PROMPT = [5, 6, 7] * 20


def checksums(driver: EngineDriver) -> dict[str, str]:
    return ok(driver.check_weights()).checksums


class Versions:
    """A checkpoint, and one that differs in some elements."""

    def __init__(self, folder: Path, family: str, *, fp8: tuple[Any, ...] = (), **options: object) -> None:
        """Make a checkpoint with ``options``; ``fp8``: blocks, and modules that are not quantised."""
        self.folder, self.first, self.second = folder, folder / "first", folder / "second"
        make_checkpoint(self.first, family, seed=1, **options)
        if fp8:
            make_fp8_checkpoint(self.first, folder / "fp8", *fp8)
            self.first = folder / "fp8"
        self.old = load_file(self.first / WEIGHTS)
        self.new = some_changed(self.old)
        self.sent = SentDelta(self.old, self.new)
        write_like(self.first, self.second, self.new)

    def engine(self, **options: object) -> EngineDriver:
        return self._engine(self.first, **options)

    def cold(self, **options: object) -> dict[str, str]:
        """Return the checksums of an engine that was started with the second."""
        return self.cold_digest(**options)[0]

    def cold_digest(self, **options: object) -> tuple[dict[str, str], str]:
        """Return the same, and its digest."""
        with self._engine(self.second, **options) as driver:
            return checksums(driver), driver.status().digest

    def _engine(self, path: Path, **options: object) -> EngineDriver:
        return EngineDriver(str(path), scripted=False, **{"kv_pool_tokens": 1024, "dtype": "auto", **options})


FAMILIES = {
    "gpt-oss": ("gpt-oss", {"dtype": torch.bfloat16}),
    "deepseek-v3, FP8": ("deepseek-v3", {"dtype": torch.bfloat16, "fp8": ((4, 4),)}),
    "qwen3-moe, float16": ("qwen3-moe", {"dtype": torch.float16}),
    "qwen3": ("qwen3", {}),
    "qwen3, bfloat16": ("qwen3", {"dtype": torch.bfloat16}),
    "qwen3, float16": ("qwen3", {"dtype": torch.float16}),
    "qwen3-moe": ("qwen3-moe", {"dtype": torch.bfloat16}),
    "deepseek-v3": ("deepseek-v3", {"dtype": torch.bfloat16}),
    "deepseek-v3, float32": ("deepseek-v3", {}),
    "qwen3, FP8": ("qwen3", {"dtype": torch.bfloat16, "fp8": ((4, 4),)}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tp"), every(product(FAMILIES, (1, 2)), 3))
def test_a_delta_is_a_cold_load_and_can_be_undone(name, tp, tmp_path):
    family, options = FAMILIES[name]
    check_delta(Versions(tmp_path, family, **options), tmp_path, tp=tp)


LATENT_PROJECTIONS = "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 36}


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "ep", "family", "options"), quick([
    (4, 2, "gpt-oss", {"num_local_experts": 4, "num_key_value_heads": 4}),
    (3, 3, "deepseek-v3", {**SIX_HEADS, "dtype": torch.bfloat16}),
    (2, 2, "deepseek-v3", {"dtype": torch.bfloat16, "fp8": ((4, 4),)}),
    (2, 2, "deepseek-v3", {"dtype": torch.bfloat16, "fp8": ((48, 24), LATENT_PROJECTIONS)}),
]))  # fmt: skip
def test_a_delta_reaches_whole_experts(tp, ep, family, options, tmp_path):
    check_delta(Versions(tmp_path, family, **options), tmp_path, tp=tp, ep=ep)


def check_delta(versions, tmp_path, **ranks):
    after, digest = versions.cold_digest(**ranks)
    # The engine stores this one as float32, whatever it comes as.
    biases = {name: x.float() for name, x in versions.new.items() if name.endswith("e_score_correction_bias")}
    assert digest == digest_of({**versions.new, **biases})
    with versions.engine(**ranks) as driver:
        before, digest_before = checksums(driver), driver.status().digest
        base = DeltaBase(base_epoch=0, base_digest=digest_before, digest=digest)
        sent = SentDelta(versions.old, versions.new, whole=sorted(versions.new)[::3])
        reply = ok(by_tensor(driver, sent, base, tmp_path, weight_version="new"))
        assert reply.committed
        assert reply.digest == digest != digest_before
        assert reply.written_tensors == reply.changed_tensors
        assert checksums(driver) == after != before
        reply = ok(driver.call(RollbackWeightsReqInput()))
        assert (reply.weights_epoch, reply.weight_version, reply.digest) == (2, "default", digest_before)
        assert checksums(driver) == before


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_are_cast_as_in_a_cold_load(dtype, tmp_path):
    versions = Versions(tmp_path, "qwen3")
    with versions.engine(dtype=dtype) as driver:
        reply = ok(by_tensor(driver, SentDelta(versions.old, versions.new, whole=[HEAD]), EPOCH, tmp_path))
        assert reply.cast_tensors == reply.written_tensors == len(versions.new)
        assert checksums(driver) == versions.cold(dtype=dtype)


def test_elements_of_quantised_weights_need_originals(tmp_path):
    versions = Versions(tmp_path, "qwen3", dtype=torch.bfloat16, tied=True)
    after, digest = versions.cold_digest(quantization="int8")
    with versions.engine(quantization="int8") as driver:
        before = checksums(driver)
        error = assert_error(by_tensor(driver, versions.sent, EPOCH, tmp_path), "weight_mismatch")
        reasons = {each["name"]: each["reason"] for each in error.detail["mismatched"]}
        assert "quantization_originals" in reasons[Q_PROJ]
        assert TABLE not in reasons
        assert checksums(driver) == before != after
        whole = [name for name in versions.new if name != TABLE]
        sent = SentDelta(versions.old, versions.new, whole=whole)
        assert ok(by_tensor(driver, sent, EPOCH, tmp_path)).digest == digest
        assert checksums(driver) == after
        ok(driver.call(RollbackWeightsReqInput()))
        assert checksums(driver) == before


KEPT = {"quantization_originals": True}
WIDE = {"dtype": torch.bfloat16, "hidden_size": 64}
QUANTISED = {
    "int8": ("qwen3", {**WIDE, "tied": True}, {"quantization": "int8"}),
    "int4": ("qwen3-moe", WIDE, {"quantization": "int4"}),
    "mxfp4, latent": ("deepseek-v3", WIDE, {"quantization": "mxfp4"}),
    "int4, linear attention": ("qwen3.5", {"dtype": torch.bfloat16}, {"quantization": "int4"}),
    "int8, gated": ("qwen3.5-moe", {"dtype": torch.bfloat16}, {"quantization": "int8"}),
    "fp8": ("qwen3", {**WIDE, "dtype": torch.bfloat16}, {"quantization": "fp8"}),
    "fp8 experts": ("deepseek-v3", WIDE, {"quantization": "fp8"}),
}


@pytest.mark.parametrize("name", QUANTISED)
def test_a_delta_of_quantised_weights_is_a_cold_load(name, tmp_path, monkeypatch):
    monkeypatch.setattr(source, "ELEMENTS", 8)
    monkeypatch.setattr(source, "SPAN", 300)
    family, options, quantization = QUANTISED[name]
    check_delta(Versions(tmp_path, family, **options), tmp_path, **quantization, **KEPT)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "family", "options", "quantization"), quick([
    (2, "qwen3", {"num_attention_heads": 16, "head_dim": 16, "intermediate_size": 64, "tied": True}, "int4"),
    (2, "qwen3-moe", {"num_attention_heads": 16, "head_dim": 16, "moe_intermediate_size": 64}, "mxfp4"),
]))  # fmt: skip
def test_ranks_quantise_what_a_delta_changes(tp, family, options, quantization, tmp_path):
    versions = Versions(tmp_path, family, **WIDE, **options)
    check_delta(versions, tmp_path, tp=tp, quantization=quantization, **KEPT)


@pytest.mark.parametrize("quantization", ["int8", "int4", "mxfp4"])
def test_quantised_weights_follow_any_updates(quantization, tmp_path, monkeypatch):
    monkeypatch.setattr(source, "ELEMENTS", 4)
    sizes = {"hidden_size": 48, "intermediate_size": 264, "num_hidden_layers": 1}
    versions = Versions(tmp_path, "qwen3", dtype=torch.bfloat16, **sizes)
    with versions.engine(quantization=quantization, check_finite=True, **KEPT) as driver:
        slots = driver.engine.model.weight_slots()
        blocks = driver.engine.model.config.quantization

        @settings(max_examples=examples(10))
        @given(
            steps=st.lists(st.sampled_from(["delta", "mixed", "rollback", "broken", "full"]), max_size=4),
            share=st.sampled_from([0.001, 0.02, 0.1]),
            seed=st.integers(0, 1 << 20),
        )
        def each(steps, share, seed):
            ok(driver.update(versions.first))
            now, before = versions.old, None
            for number, step in enumerate(steps):
                new = some_changed(now, share, seed + number)
                if step == "rollback" and before is not None:
                    ok(driver.call(RollbackWeightsReqInput()))
                    now, before = before, None
                elif step == "broken":
                    new[Q_PROJ][1, 3] = torch.inf
                    reply = by_tensor(driver, SentDelta(now, new), DeltaBase(), tmp_path)
                    assert_error(reply, "weights_not_finite")
                elif step == "full":
                    ok(driver.update(versions.second))
                    now, before = versions.new, None
                else:
                    whole = sorted(new)[number::4] if step == "mixed" else []
                    reply = ok(by_tensor(driver, SentDelta(now, new, whole), DeltaBase(), tmp_path))
                    assert reply.digest == digest_of(new)
                    now, before = new, now
            for name, value in now.items():
                scales = slots[name].fills(value.dtype)
                if scales is None:
                    assert torch.equal(slots[name].read().view(torch.int16), value.view(torch.int16))
                else:
                    own = blocks.of_head if name == HEAD else blocks
                    numbers, factors = quantize(value.float(), own)
                    assert torch.equal(slots[name].read(), numbers), name
                    assert torch.equal(slots[scales].read(), factors), name

        each()


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantised")
    versions = Versions(folder, "qwen3", dtype=torch.bfloat16, tied=True)
    return versions, versions.cold(quantization="int4", **KEPT)


@pytest.mark.parametrize("road", ROADS)
def test_quantised_weights_take_deltas_by_any_transport(road, quantised, tmp_path):
    versions, after = quantised
    with versions.engine(quantization="int4", **KEPT) as driver:
        before = checksums(driver)
        reply = ok(ROADS[road](driver, versions.sent, EPOCH, tmp_path, report="full"))
        assert reply.cast_tensors == sum("proj" in name for name in versions.new)
        assert reply.report.groups.keys() == {"norms", "embeddings"}
        assert checksums(driver) == after
        ok(driver.call(RollbackWeightsReqInput()))
        assert checksums(driver) == before


@pytest.mark.parametrize("undone", [True, False])
def test_a_swap_of_quantised_weights_that_fails_is_undone(undone, quantised, tmp_path):
    versions, after = quantised
    with versions.engine(quantization="int4", **KEPT) as driver:
        before, digest = checksums(driver), driver.status().digest
        faults = {20} if undone else range(1000)  # between the blocks of two tensors
        with Fault(_Elements, "swap", RuntimeError("no memory"), faults, after=True):
            assert_error(by_tensor(driver, versions.sent, EPOCH, tmp_path), "internal")
        driver.assert_status(weights="valid" if undone else "poisoned", weights_epoch=0, digest=digest)
        if undone:
            assert checksums(driver) == before
            ok(by_tensor(driver, versions.sent, EPOCH, tmp_path))
            assert checksums(driver) == after


def test_values_that_came_as_codes_take_no_elements(quantised, tmp_path):
    versions, after = quantised
    with versions.engine(quantization="int4", **KEPT) as driver:
        slots = driver.engine.model.weight_slots()
        stored = {name: slots[name].read() for name in (Q_PROJ, f"{Q_PROJ}_scale_inv")}
        sent = SentDelta({}, stored, whole=stored)
        error = assert_error(by_tensor(driver, sent, EPOCH, tmp_path), "weight_mismatch")
        assert {each["name"] for each in error.detail["mismatched"]} == stored.keys()
        assert "values before" in error.detail["mismatched"][0]["reason"]
        message = UpdateWeightsFromTensorReqInput(specs=sent.specs)
        ok(driver.call(message, buffers=[memoryview(sent.buffer)]))
        error = assert_error(by_tensor(driver, versions.sent, DeltaBase(), tmp_path), "weight_mismatch")
        assert [each["name"] for each in error.detail["mismatched"]] == [Q_PROJ]
        ok(driver.update(versions.first))
        ok(by_tensor(driver, versions.sent, DeltaBase(), tmp_path))
        assert checksums(driver) == after


def test_elements_far_apart_are_in_several_pieces():
    new = torch.zeros(5000, 1024)
    new.view(-1)[::100_000] = 1.0
    sent = SentDelta({"a": torch.zeros(5000, 1024)}, {"a": new})
    data = torch.frombuffer(sent.buffer, dtype=torch.uint8)
    pieces = list(source.cut(sent.specs[0], data, 1 << 20))
    positions = [piece.positions for piece in pieces if piece.positions is not None]
    assert torch.equal(torch.cat(positions), torch.arange(0, 5000 * 1024, 100_000))
    assert len(positions) > 3
    assert all(each[-1] - each[0] < source.SPAN + 128 * 1024 for each in positions)


def test_scales_alone_end_the_originals(quantised, tmp_path):
    versions, _ = quantised
    with versions.engine(quantization="int8", **KEPT) as driver:
        scales = f"{Q_PROJ}_scale_inv"
        doubled = {scales: driver.engine.model.weight_slots()[scales].read() * 2}
        sent = SentDelta({}, doubled, whole=doubled)
        message = UpdateWeightsFromTensorReqInput(specs=sent.specs)
        ok(driver.call(message, buffers=[memoryview(sent.buffer)]))
        error = assert_error(by_tensor(driver, versions.sent, DeltaBase(), tmp_path), "weight_mismatch")
        assert Q_PROJ in {each["name"] for each in error.detail["mismatched"]}


def test_no_delta_has_scales_and_what_brings_them(quantised, tmp_path):
    versions, _ = quantised
    with versions.engine(quantization="int8") as driver:
        before, scales = checksums(driver), f"{Q_PROJ}_scale_inv"
        given = {scales: driver.engine.model.weight_slots()[scales].read() * 2}
        session = {"session_id": driver.begin()}
        ok(by_tensor(driver, SentDelta({}, given, whole=given), EPOCH, tmp_path, **session))
        whole = SentDelta({}, {Q_PROJ: versions.new[Q_PROJ]}, whole=[Q_PROJ])
        reply = by_tensor(driver, whole, EPOCH, tmp_path, **session)
        mismatched = assert_error(reply, "weight_mismatch").detail["mismatched"]
        assert mismatched == [{"name": Q_PROJ, "reason": "comes twice"}]
        assert checksums(driver) == before


def test_elements_of_codes_need_a_tensor_of_codes(quantised, tmp_path):
    versions, _ = quantised
    with versions.engine(quantization="int8") as driver:
        slots, before = driver.engine.model.weight_slots(), checksums(driver)
        stored = {name: slots[name].read().clone() for name in (Q_PROJ, f"{Q_PROJ}_scale_inv")}
        changed = {name: values.clone() for name, values in stored.items()}
        changed[Q_PROJ][0, 0] = 1 if stored[Q_PROJ][0, 0] != 1 else 2
        changed[f"{Q_PROJ}_scale_inv"][0, 0] *= 2
        sent = SentDelta(stored, changed)
        error = assert_error(by_tensor(driver, sent, EPOCH, tmp_path), "weight_mismatch")
        assert {each["name"] for each in error.detail["mismatched"]} == stored.keys()
        assert checksums(driver) == before
        codes = SentDelta({}, stored, whole=stored)
        message = UpdateWeightsFromTensorReqInput(specs=codes.specs)
        ok(driver.call(message, buffers=[memoryview(codes.buffer)]))
        digest = ok(by_tensor(driver, sent, DeltaBase(), tmp_path)).digest
        assert digest == digest_of({**versions.old, **changed})


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    return Versions(tmp_path_factory.mktemp("versions"), "qwen3", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def cold(versions):
    return versions.cold()


@pytest.fixture
def driver(versions):
    with versions.engine(check_finite=True) as driver:
        yield driver


@pytest.mark.parametrize("road", ROADS)
def test_a_delta_comes_by_each_transport(road, driver, versions, cold, tmp_path):
    driver.complete(PROMPT)
    assert ok(ROADS[road](driver, versions.sent, EPOCH, tmp_path)).committed
    assert checksums(driver) == cold
    found = driver.complete(PROMPT, return_logprob=True)
    driver.flush()
    expected = driver.complete(PROMPT, return_logprob=True)
    assert found.output_logprobs == expected.output_logprobs, "no KV of the weights before"


@pytest.mark.parametrize("paused", [False, True])
def test_the_calls_of_a_session_commit_together(paused, driver, versions, cold, tmp_path):
    names = sorted(versions.new)
    parts = [SentDelta(versions.old, {name: versions.new[name] for name in names[k::2]}) for k in (0, 1)]
    if paused:
        driver.pause("retract")
    fields = {} if paused else {"session_id": driver.begin()}
    before = checksums(driver)
    for part in parts:
        assert not ok(by_tensor(driver, part, EPOCH, tmp_path, **fields)).committed
        driver.assert_status(weights="valid", weights_epoch=0)
    assert checksums(driver) == before
    ok(driver.go_on() if paused else driver.end(**fields))
    driver.assert_status(weights="valid", weights_epoch=1, session=None)
    assert checksums(driver) == cold


def test_steps_go_on_while_a_delta_is_staged(driver, versions, monkeypatch, tmp_path):
    one_piece_per_slice(monkeypatch)
    monkeypatch.setattr(source, "ELEMENTS", 8)
    rid = driver.generate(PROMPT, 100)
    driver.tick(3)
    message = UpdateWeightsFromTensorReqInput(specs=versions.sent.specs, delta=EPOCH, flush_cache=False)
    driver.send(message, buffers=[memoryview(versions.sent.buffer)])
    steps = set()
    while message.id not in driver.replies:
        driver.tick()
        if driver.engine.delta.staged_bytes:
            steps.add(driver.engine.state.step)
    assert len(steps) > 5
    driver.run_until_idle()
    assert driver.result(rid).finish_reason.type == "length"


def sparse(positions: list[int], shape: list[int] | None = None) -> SentDelta:
    """Return a delta of the norm with these positions."""
    sent = SentDelta({}, {})
    count = len(positions)
    nbytes = 8 * -(-count // 2) + 2 * count
    sent.specs = [TensorSpec(name=NORM, dtype="BF16", shape=shape or [40], count=count, nbytes=nbytes)]
    data = torch.tensor(positions, dtype=torch.int32).numpy().tobytes()
    sent.buffer = bytearray(data + bytes(-len(data) % 8 + 2 * count))
    return sent


def from_row_1() -> SentDelta:
    sent = sparse([1])
    sent.specs = [msgspec.structs.replace(sent.specs[0], start_row=1)]
    return sent


def torn() -> SentDelta:
    sent = sparse([1, 2, 3])
    del sent.buffer[-2:]
    return sent


REFUSED = {
    "doubled": (sparse([1, 3, 3]), "invalid_request"),
    "reordered": (sparse([3, 1]), "invalid_request"),
    "beyond the end": (sparse([1, 40]), "invalid_request"),
    "before the begin": (sparse([-1, 4]), "invalid_request"),
    "more than there are": (sparse([*range(41)]), "invalid_request"),
    "torn": (torn(), "invalid_request"),
    "from a row on": (from_row_1(), "invalid_request"),
    "of another shape": (sparse([1], [41]), "weight_mismatch"),
    "not in the model": (SentDelta({"x": torch.zeros(2)}, {"x": torch.ones(2)}), "weight_mismatch"),
}


def test_a_delta_that_does_not_fit_changes_nothing(driver, tmp_path):
    before = checksums(driver)
    for case, (sent, code) in REFUSED.items():
        assert_error(by_tensor(driver, sent, EPOCH, tmp_path), code)
        driver.assert_status(weights="valid", weights_epoch=0, session=None)
        assert driver.engine.delta.staged_bytes == 0, case
    assert checksums(driver) == before


def test_a_delta_of_other_weights_is_refused(driver, versions, tmp_path):
    before = checksums(driver)
    error = assert_error(by_tensor(driver, versions.sent, DeltaBase(base_epoch=3), tmp_path), "base_mismatch")
    assert (error.detail["base_epoch"], error.detail["weights_epoch"]) == (3, 0)
    digest = driver.status().digest
    for base in (DeltaBase(base_digest="0" * 32), DeltaBase(base_digest=digest, digest="0" * 32)):
        error = assert_error(by_tensor(driver, versions.sent, base, tmp_path), "base_mismatch")
        assert "0" * 32 in error.detail.values()
        driver.assert_status(weights="valid", weights_epoch=0, session=None, digest=digest)
    assert checksums(driver) == before
    driver.check_weights("reset_tensors")
    assert_error(by_tensor(driver, versions.sent, EPOCH, tmp_path), "base_mismatch")
    driver.assert_status(weights="poisoned")


def test_a_session_takes_deltas_of_one_base_or_none(driver, versions, tmp_path):
    session_id = driver.begin()
    ok(by_tensor(driver, versions.sent, EPOCH, tmp_path, session_id=session_id))
    assert_error(by_tensor(driver, versions.sent, EPOCH, tmp_path, session_id=session_id), "weight_mismatch")
    assert_error(Sender(driver, versions.second, session_id=session_id).send(0), "invalid_request")
    error = by_tensor(driver, versions.sent, DeltaBase(), tmp_path, session_id=session_id)
    assert_error(error, "invalid_request")
    assert driver.engine.delta.staged_bytes > 0
    ok(driver.end(session_id=session_id, commit=False))
    assert driver.engine.delta.staged_bytes == 0
    driver.assert_status(weights="valid", weights_epoch=0)
    session_id = driver.begin(manifest=manifest(versions.old.items()))
    error = by_tensor(driver, versions.sent, EPOCH, tmp_path, session_id=session_id)
    assert_error(error, "invalid_request")


def test_sparse_tensors_need_a_base(driver, versions):
    message = UpdateWeightsFromTensorReqInput(specs=versions.sent.specs)
    error = assert_error(driver.call(message, buffers=[memoryview(versions.sent.buffer)]), "weight_mismatch")
    assert "says no base (delta)" in error.message


def test_what_is_staged_ends_with_its_session(driver, versions, tmp_path):
    session_id = driver.begin()
    ok(by_tensor(driver, versions.sent, EPOCH, tmp_path, session_id=session_id))
    driver.engine.sessions.current.deadline = 0.0
    driver.tick(2)
    driver.assert_status(weights="valid", session=None)
    driver.pause("abort")
    ok(by_tensor(driver, versions.sent, EPOCH, tmp_path))
    assert driver.engine.delta.staged_bytes > 0
    ok(driver.release("weights"))
    assert driver.engine.delta.staged_bytes == 0


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_commit_that_fails_is_undone(tp, versions, tmp_path):
    broken = {name: value.clone() for name, value in versions.new.items()}
    broken[HEAD].view(-1)[7] = torch.nan
    with versions.engine(check_finite=True, tp=tp) as driver:
        before = checksums(driver)
        sent = SentDelta(versions.old, broken, whole=[NORM])
        assert_error(by_tensor(driver, sent, EPOCH, tmp_path), "weights_not_finite")
        driver.assert_status(weights="valid", weights_epoch=0, session=None)
        assert checksums(driver) == before
        assert ok(by_tensor(driver, versions.sent, EPOCH, tmp_path)).committed


def test_only_the_last_delta_can_be_undone(driver, versions, tmp_path):
    rollback = RollbackWeightsReqInput
    assert_error(driver.call(rollback()), "no_rollback")
    ok(by_tensor(driver, versions.sent, EPOCH, tmp_path))
    session_id = driver.begin()
    assert_error(driver.call(rollback()), "session_open")
    ok(driver.end(session_id=session_id, commit=False))
    assert_error(driver.call(rollback(to_digest="0" * 32)), "no_rollback")
    ok(driver.call(rollback()))
    assert_error(driver.call(rollback()), "no_rollback")
    ok(by_tensor(driver, versions.sent, DeltaBase(), tmp_path))
    ok(driver.update(versions.second))
    assert_error(driver.call(rollback()), "no_rollback")


def test_a_rollback_waits_for_no_continue(driver, versions, tmp_path):
    before = checksums(driver)
    ok(by_tensor(driver, versions.sent, EPOCH, tmp_path))
    driver.pause("abort")
    assert ok(driver.call(RollbackWeightsReqInput(flush_cache=True))).committed
    assert checksums(driver) == before
    ok(driver.go_on())


def test_a_delta_beside_an_adapter_is_committed(versions, tmp_path):
    adapter = make_adapter(versions.first, tmp_path / "adapter", ALL_LINEAR)
    with versions.engine(enable_lora=True, max_loras=2, dtype="float32") as driver:
        before, session_id = checksums(driver), driver.begin()
        ok(by_tensor(driver, versions.sent, EPOCH, tmp_path, session_id=session_id))
        ok(driver.call(LoadAdapterReqInput(name="a", path=str(adapter), session_id=session_id)))
        assert ok(driver.end(session_id=session_id)).weights_epoch == 1
        assert checksums(driver) != before


def test_an_end_may_abort_what_it_would_have_to_flush(driver, versions, cold, tmp_path):
    rid = driver.generate(PROMPT, 100)
    driver.tick(5)
    driver.pause("in_place")
    session_id = driver.begin()
    ok(by_tensor(driver, versions.sent, EPOCH, tmp_path, session_id=session_id, abort_all_requests=True))
    assert ok(driver.end(session_id=session_id)).flushed
    assert driver.result(rid).finish_reason.type == "abort"
    assert checksums(driver) == cold


@pytest.mark.parametrize("of", [_Elements, _Rows])
@pytest.mark.parametrize("undone", [True, False])
def test_a_swap_that_fails_after_a_write_is_undone(of, undone, driver, versions, tmp_path):
    before, digest = checksums(driver), driver.status().digest
    sent = SentDelta(versions.old, versions.new, whole=sorted(versions.new)[::2])
    with Fault(of, "swap", RuntimeError("no memory"), {2} if undone else range(1000), after=True):
        assert_error(by_tensor(driver, sent, EPOCH, tmp_path), "internal")
    driver.assert_status(weights="valid" if undone else "poisoned", weights_epoch=0, digest=digest)
    if undone:
        assert checksums(driver) == before


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("delta", [None, DeltaBase()])
def test_a_label_alone_keeps_what_a_rollback_returns_to(delta, tp, versions, tmp_path):
    with versions.engine(tp=tp) as driver:
        before, digest = checksums(driver), driver.status().digest
        ok(by_tensor(driver, versions.sent, EPOCH, tmp_path, weight_version="new"))
        message = UpdateWeightsFromTensorReqInput(specs=[], delta=delta, weight_version="name")
        reply = ok(driver.call(message))
        assert (reply.weights_epoch, reply.weight_version) == (2, "name")
        reply = ok(driver.call(RollbackWeightsReqInput()))
        assert (reply.weight_version, reply.digest) == ("default", digest)
        assert checksums(driver) == before


def test_a_delta_without_tensors_keeps_the_restart(versions, tmp_path):
    state = str(tmp_path / "state")
    with versions.engine(state_file=state) as driver:
        ok(driver.update(versions.second))
        message = UpdateWeightsFromTensorReqInput(specs=[], delta=DeltaBase(), weight_version="name")
        assert ok(driver.call(message)).committed
    with versions.engine(state_file=state) as driver:
        driver.assert_status(weights="valid", weight_version="name")


def test_a_delta_of_skipped_tensors_is_compared(tmp_path):
    tied = Versions(tmp_path, "qwen3", dtype=torch.bfloat16, tied=True)
    sent = SentDelta({}, {HEAD: torch.ones(4, 4)}, whole=[HEAD])
    with tied.engine() as driver:
        error = by_tensor(driver, sent, DeltaBase(digest="0" * 32), tmp_path)
        assert_error(error, "base_mismatch")
        reply = ok(by_tensor(driver, sent, DeltaBase(), tmp_path, weight_version="name"))
        assert (reply.skipped_tensors, reply.weight_version) == (1, "name")


def test_a_rollback_that_fails_can_be_repeated(driver, versions, tmp_path):
    before = checksums(driver)
    ok(by_tensor(driver, versions.sent, EPOCH, tmp_path))
    unwritable = CaesuraError(ErrorCode.STATE_FILE_ERROR, "no space")
    with Fault(driver.engine.weights_file, "supersede", unwritable):
        assert_error(driver.call(RollbackWeightsReqInput()), "state_file_error")
    driver.assert_status(weights="valid", weights_epoch=1)
    assert checksums(driver) != before
    ok(driver.call(RollbackWeightsReqInput()))
    assert checksums(driver) == before


def test_a_torn_folder_changes_nothing(driver, versions, tmp_path):
    before = checksums(driver)
    write_delta(tmp_path, versions.sent.specs, [versions.sent.buffer], DeltaMetadata())
    whole = (tmp_path / DELTA_FILE).read_bytes()
    for length in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / DELTA_FILE).write_bytes(whole[:length])
        assert_error(driver.update(tmp_path), "checkpoint_error")
    (tmp_path / DELTA_FILE).write_bytes(whole.replace(b"caesura_delta", b"another_delta"))
    assert_error(driver.update(tmp_path), "checkpoint_error")
    assert_error(driver.update(versions.second, delta=EPOCH), "invalid_request")
    assert checksums(driver) == before
    assert ok(by_disk(driver, versions.sent, EPOCH, tmp_path)).committed


def test_a_folder_tells_base_and_label(driver, versions, cold, tmp_path):
    digest, parts = driver.status().digest, (versions.sent.specs, [versions.sent.buffer])
    write_delta(tmp_path, *parts, DeltaMetadata(base_version="41", weight_version="42"))
    error = assert_error(driver.update(tmp_path), "base_mismatch")
    assert (error.detail["base_version"], error.detail["got"]) == ("41", "default")
    write_delta(tmp_path, *parts, DeltaMetadata(base_digest=digest, digest="0" * 32))
    assert_error(driver.update(tmp_path, delta=EPOCH), "base_mismatch")
    write_delta(tmp_path, *parts, DeltaMetadata(base_version="default", weight_version="42"))
    assert ok(driver.update(tmp_path)).weight_version == "42"
    assert checksums(driver) == cold
    ok(driver.call(RollbackWeightsReqInput()))
    assert ok(driver.update(tmp_path, weight_version="43")).weight_version == "43"


@settings(max_examples=examples(60))
@given(
    steps=st.lists(st.sampled_from(["delta", "mixed", "rollback", "full", "broken"]), min_size=1, max_size=8),
    seed=st.integers(0, 1 << 20),
)
def test_any_order_of_updates_is_that_of_a_model(steps, seed, versions, one_driver):
    driver = one_driver
    ok(driver.update(versions.first))
    now, before = versions.old, None
    for number, step in enumerate(steps):
        new = some_changed(now, 0.05, seed + number)
        if step == "rollback":
            reply = driver.call(RollbackWeightsReqInput())
            if before is None:
                assert_error(reply, "no_rollback")
            else:
                ok(reply)
                now, before = before, None
        elif step == "full":
            ok(driver.update(versions.second))
            now, before = versions.new, None
        elif step == "broken":
            new[NORM][0] = torch.inf
            assert_error(by_tensor(driver, SentDelta(now, new), DeltaBase(), Path()), "weights_not_finite")
        else:
            whole = sorted(new)[number::4] if step == "mixed" else []
            ok(by_tensor(driver, SentDelta(now, new, whole), DeltaBase(), Path()))
            now, before = new, now
        held = {name: slot.read() for name, slot in driver.engine.model.weight_slots().items()}
        assert held.keys() == now.keys()
        assert all(torch.equal(held[name].view(torch.int16), now[name].view(torch.int16)) for name in held)


@pytest.fixture(scope="module")
def one_driver(versions):
    with versions.engine(check_finite=True) as driver:
        yield driver
