"""All layers in one call against the same layers one by one."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import make_checkpoint, make_fp8_checkpoint
from support.forward_batches import (
    PagedModel,
    Row,
    Sequence,
    attention_shape,
    build_attention,
    forward_batch,
    layer_by_layer,
    load_model,
    sampling_rows,
)
from support.kernels import instruction_sets, threads
from support.properties import examples
from support.workspaces import memory_of

from caesura.scheduler.attention.delta_rule import HybridBackend
from caesura.scheduler.attention.paged_cpu import PagedCpuBackend
from caesura.scheduler.attention.sdpa import SdpaBackend
from caesura.scheduler.cache.pool import MHAPool, StatePool
from caesura.scheduler.execution.forward import StateSegment, StateStep
from caesura.scheduler.execution.sampler import Sampler
from caesura.scheduler.kernels import native
from caesura.scheduler.kernels.decoder import DecoderKernel
from caesura.scheduler.kernels.decoder_layers import (
    ExpertsForm,
    GroupRouting,
    LayerKind,
    LayerShape,
    LayerTensors,
)
from caesura.scheduler.kernels.linear import storage_shape
from caesura.scheduler.layers.lora import AdapterRows, AdapterSlots, Factors

FAMILIES = {
    "llama": {"num_attention_heads": 6, "head_dim": 10, "hidden_size": 36},
    "qwen2": {"intermediate_size": 50},
    "qwen3": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 3},
    "mistral": {"hidden_size": 64, "head_dim": 16},
    "qwen3-moe": {"mlp_only_layers": [1], "num_hidden_layers": 3, "moe_intermediate_size": 26},
    "qwen2-moe": {"num_experts": 7, "num_experts_per_tok": 7},
    "mixtral": {"sliding_window": 18, "num_local_experts": 40, "num_experts_per_tok": 2},
    "gemma3": {"head_dim": 14},
    "gpt-oss": {},
    "glm4-moe": {"n_routed_experts": 20},
    "deepseek-v2": {
        "n_routed_experts": 6,
        "n_group": 2,
        "topk_group": 1,
        "num_attention_heads": 13,
        "num_key_value_heads": 13,
        "hidden_size": 52,
    },
    "deepseek-v3": {
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 34,
        "qk_rope_head_dim": 32,
        "head_dim": 32,
        "q_lora_rank": None,
    },
}
FP8 = {
    "qwen3": ((16, 32), {}),
    "qwen2-moe": ((16, 20), {}),
    "deepseek-v3": ((16, 16), {"q_lora_rank": 20}),
}
"""Families that are FP8, too, in such blocks."""
NUMBERS = (
    "qwen3-int8", "qwen3-int4", "qwen3-mxfp4", "gemma3-int8",
    "qwen2-moe-int8", "qwen2-moe-mxfp4", "deepseek-v3-int8", "deepseek-v3-int4",
)  # fmt: skip
"""Families that are in whole numbers, too, in sizes that can be packed."""
EVEN = {"hidden_size": 40, "moe_intermediate_size": 24, "v_head_dim": 16, "q_lora_rank": 24}
HYBRIDS = {
    "qwen3-next": {"num_key_value_heads": 1, "head_dim": 18},
    "qwen3.5": {"linear_num_value_heads": 2, "hidden_size": 36},
    "qwen3.5-moe": {},
}
HYBRID_NUMBERS = ("qwen3.5-moe-int8", "qwen3.5-mxfp4")
KINDS = sorted([*FAMILIES, *(f"{family}-fp8" for family in FP8), *NUMBERS])
PAGES = 40


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    if native.why_not():
        pytest.skip(f"no compiled kernels: {native.why_not()}")
    folder = tmp_path_factory.mktemp("models")
    for family, overrides in (FAMILIES | HYBRIDS).items():
        make_checkpoint(folder / family, family, **overrides)
    for family, (blocks, overrides) in FP8.items():
        plain = folder / f"{family}-plain"
        make_checkpoint(plain, family, **overrides)
        make_fp8_checkpoint(plain, folder / f"{family}-fp8", blocks)

    numbers, hybrids = (*NUMBERS, *HYBRID_NUMBERS), (*HYBRIDS, *HYBRID_NUMBERS)
    for family in {kind.rpartition("-")[0] for kind in numbers}:
        make_checkpoint(folder / f"{family}-even", family, **EVEN)

    def load(kind, dtype):
        family, _, form = kind.rpartition("-")
        if kind in numbers:
            return load_model(str(folder / f"{family}-even"), dtype, quantization=form)
        return load_model(str(folder / kind), dtype)

    return {(kind, dtype): load(kind, dtype) for kind in (*KINDS, *hybrids) for dtype in native.FLOATS}


def attention(model, dtype, seed=0):
    pool, backend = build_attention(model, dtype, PAGES, compiled=True)
    if (delta := model.config.delta) is not None:
        states = StatePool(num_layers=sum(delta.layers), num_rows=PAGES, shape=delta.state, dtype=dtype)
        pool.states, backend = states, HybridBackend(backend, states)
    generator = torch.Generator().manual_seed(seed)
    for tensor in stored(model, pool):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return pool, backend


def stored(model, pool):
    layers = [pool.layer(layer) for layer in range(pool.num_layers)]
    if pool.states is not None:
        layers += [pool.states.layer(layer) for layer in range(sum(model.config.delta.layers))]
    return [tensor for layer in layers for tensor in (layer if isinstance(layer, tuple) else (layer,))]


def compute(model, dtype, batch, how):
    pool, backend = attention(model, dtype)
    with torch.inference_mode():
        backend.plan(batch)
        hidden = how(model, batch, backend).clone()
    return hidden, stored(model, pool)


def at_once(model, batch, backend):
    return model.forward(batch, backend)


def batch_of(lengths, num_decode):
    rows, free = [], list(range(1, PAGES))
    for number, (count, start) in enumerate(lengths):
        pages = [free.pop() for _ in range(-(-(start + count) // 16))]
        rows.append(Row([(7 * number + 3 * i) % 97 for i in range(count)], start, pages))
    return forward_batch(rows, num_decode)


def agree(model, dtype, batch, num_threads):
    with threads(num_threads):
        hidden, pool = compute(model, dtype, batch, at_once)
        noted = None if model.routing is None else model.routing.rows(len(batch.positions)).clone()
    expected, expected_pool = compute(model, dtype, batch, layer_by_layer)
    assert hidden.isfinite().all()
    assert torch.equal(hidden, expected)
    assert all(torch.equal(*pair) for pair in zip(pool, expected_pool, strict=True))
    assert noted is None or torch.equal(noted, model.routing.rows(len(batch.positions)))


@pytest.mark.parametrize("dtype", native.FLOATS)
@pytest.mark.parametrize("family", KINDS)
def test_head_and_sampler_in_the_same_call(models, family, dtype):
    """A call that also samples leaves the bits of calls one after the other."""
    model, batch = models[family, dtype], batch_of([(1, 50), (1, 7), (37, 20), (1, 0)], 2)
    vocab_size, rows = model.config.vocab_size, torch.tensor([0, 1, 20, 38, 39])
    sampler = Sampler(vocab_size, 8, "cpu", dtype)
    top_k, greedy = [97, 97, 97, 5, 97], [False, False, False, False, True]
    options = {"temperature": [1.0, 0.7, 1.0, 2.0, 1.0], "greedy": greedy, "top_k": top_k}
    sampling = sampling_rows(len(rows), vocab_size, uniforms=[0.1, 0.5, 0.9, 0.7, 0.3], **options)
    batch = replace(batch, sample_tokens=rows, sampling=sampling)

    def results(out):
        return [out.token_ids, out.logprobs, out.raw_logprobs, out.sampled_logprobs]

    for _ in instruction_sets():
        with threads(2):
            hidden, expected_pool = compute(model, dtype, batch, at_once)
            expected = results(sampler.sample(model.logits(hidden), sampling))
            pool, backend = attention(model, dtype)
            with torch.inference_mode():
                backend.plan(batch)
                out = model.sample(batch, backend, sampler.arguments)
        if family.endswith(("-int4", "-mxfp4")):
            assert out is None, "its head has another form of scaled weights"
            continue
        found = results(out)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert all(torch.equal(*pair) for pair in zip(stored(model, pool), expected_pool, strict=True))


def test_ids_beyond_the_vocabulary_are_refused(models):
    model, batch = models["qwen3", torch.float32], batch_of([(1, 3), (5, 0)], 1)
    for wrong in (-1, model.config.vocab_size):
        ids = batch.input_ids.clone()
        ids[3] = wrong
        with pytest.raises(IndexError, match="beyond"):
            compute(model, torch.float32, replace(batch, input_ids=ids), at_once)


def random_adapter(slots, seed, left_out):
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for module, (outputs, inputs) in slots.shapes().items():
        if not module.endswith(left_out):
            a, b = torch.randn(3 + seed, inputs + outputs, generator=generator).split([inputs, outputs], 1)
            factors[module] = Factors(a, b.t().contiguous(), 0.1)
    return factors


@pytest.mark.parametrize("dtype", native.FLOATS)
@pytest.mark.parametrize("chosen", [[0, 0, 0, 0, 0], [2, -1, 0, 2, 1], [-1, 1, 1, -1, -1]])
def test_adapters_are_computed_alike(tmp_path, dtype, chosen):
    make_checkpoint(tmp_path, "qwen3", hidden_size=72, intermediate_size=98)
    slots = AdapterSlots(3, 20)
    model = load_model(str(tmp_path), dtype, adapters=slots)
    for slot, left_out in enumerate(
        (("nothing",), ("k_proj", "gate_proj"), ("o_proj", "v_proj", "down_proj"))
    ):
        list(slots.write(slot, random_adapter(slots, slot, left_out)))
    lengths = [(1, 50), (1, 7), (1, 16), (37, 20), (40, 0)]
    batch = batch_of(lengths, 3)
    batch.adapters = torch.tensor(chosen).repeat_interleave(torch.tensor([count for count, _ in lengths]))
    slots.rows = AdapterRows(batch.adapters)
    for _ in instruction_sets():
        for num_threads in (1, 3):
            agree(model, dtype, batch, num_threads)
    with_adapters, _ = compute(model, dtype, batch, at_once)
    adapted = batch.adapters >= 0
    batch.adapters = slots.rows = None
    without, _ = compute(model, dtype, batch, at_once)
    assert torch.equal((with_adapters != without).any(1), adapted)


@pytest.mark.parametrize("dtype", native.FLOATS)
@pytest.mark.parametrize("family", KINDS)
def test_layers_of_every_kind_are_computed_alike(models, family, dtype):
    model = models[family, dtype]
    assert model.in_one_call
    for _ in instruction_sets():
        agree(model, dtype, batch_of([(1, 50), (1, 7), (1, 16), (37, 20), (1, 0)], 3), 2)


@pytest.mark.parametrize("dtype", native.FLOATS)
@pytest.mark.parametrize("family", [*HYBRIDS, *HYBRID_NUMBERS])
def test_layers_with_states_are_computed_alike(models, family, dtype):
    model, batch = models[family, dtype], batch_of([(1, 50), (1, 7), (1, 16), (37, 20), (1, 0)], 3)
    assert model.in_one_call
    batch.states = StateStep(
        rows=torch.tensor([3, 1, 7, 4, 9]),
        sources=torch.tensor([3, 2, 7]),
        segments=[StateSegment(3, 40, 5, 4, 6), StateSegment(40, 41, None, 9, None)],
        kept=(torch.tensor([1]), torch.tensor([8])),
    )
    for _ in instruction_sets():
        for num_threads in (1, 3):
            agree(model, dtype, batch, num_threads)


def test_states_that_would_be_misread_are_refused(models):
    model, batch = models["qwen3.5", torch.float32], batch_of([(1, 3)], 1)
    _, backend = attention(model, torch.float32)
    backend.plan(batch)
    model.forward(batch, backend)
    past, recurrent = backend.pool.layer(0)
    for layer in ((past.bfloat16(), recurrent), (past[..., 1:], recurrent), (past, recurrent[:, :, 1:])):
        backend.paged.states = replace(backend.paged.states, layer=lambda _, layer=layer: layer)
        with pytest.raises(ValueError, match="no layers of"):
            model.forward(batch, backend)
    backend.paged.states = None
    with pytest.raises(ValueError, match="no layers of"):
        model.forward(batch, backend)


def test_layers_with_a_window_find_their_own_pages(models):
    for family in ("gemma3", "gpt-oss", "mixtral"):
        model = models[family, torch.float32]
        batch = batch_of([(1, 50), (30, 3)], 1)
        moved = torch.arange(PAGES).flip(0).to(torch.int32)
        table = moved[batch.page_table.long()]
        slots = moved[batch.kv_slots // 16].long() * 16 + batch.kv_slots % 16
        agree(model, torch.float32, replace(batch, window_slots=slots, window_table=table), 2)


@pytest.mark.parametrize("dtype", native.FLOATS)
@pytest.mark.parametrize("family", sorted({*KINDS} - {"llama", "qwen2", "qwen3", "mistral", "mixtral"}))
def test_the_bits_of_a_request_do_not_depend_on_others(models, family, dtype):
    model = models[family, dtype]

    def logits(chunks, beside, count):
        paged = PagedModel(model, dtype, compiled=True)
        mine = Sequence([(5 * i + 1) % 97 for i in range(40)])
        others = [Sequence([(3 * i + other) % 97 for i in range(60)]) for other in range(beside)]
        for other in others:
            paged.step([], [(other, 20)])
        with threads(count):
            parts = [paged.step(others, [(mine, chunk)])[-1] for chunk in chunks]
            parts += [paged.step([*others, mine])[-1] for _ in range(3)]
        return torch.cat(parts)

    for _ in instruction_sets():
        alone = logits([37], 0, 1)
        assert torch.equal(logits([1, 20, 16], 0, 2), alone)
        assert torch.equal(logits([7, 30], 6, 3), alone)


@settings(max_examples=examples(25))
@given(
    family=st.sampled_from(KINDS),
    dtype=st.sampled_from(native.FLOATS),
    decoding=st.lists(st.integers(0, 60), max_size=5),
    prompts=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 20)), max_size=2),
    num_threads=st.sampled_from([1, 2, 5]),
)
def test_the_bits_are_those_of_layers_one_by_one(models, family, dtype, decoding, prompts, num_threads):
    lengths = [(1, start) for start in decoding] + prompts or [(1, 0)]
    batch, model = batch_of(lengths, len(decoding)), models[family, dtype]
    for _ in instruction_sets():
        agree(model, dtype, batch, num_threads)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_many_more_threads_than_cores_compute_the_same(models, family):
    """Threads come late and find their share done, or all of it; what they then read must still be there."""
    model, batch = models[family, torch.float32], batch_of([(1, 30)] * 6 + [(40, 0)], 6)
    expected, _ = compute(model, torch.float32, batch, layer_by_layer)
    for count in (16, 64, 200):
        with threads(count):
            for _ in range(5):
                assert torch.equal(compute(model, torch.float32, batch, at_once)[0], expected)


def test_unsampled_positions_are_left_out(models):
    model, batch = models["qwen3", torch.float32], batch_of([(1, 3), (5, 0)], 1)
    every, _ = compute(model, torch.float32, batch, at_once)
    some, _ = compute(model, torch.float32, replace(batch, sample_tokens=torch.tensor([0, 5])), at_once)
    none, _ = compute(model, torch.float32, replace(batch, sample_tokens=batch.sample_tokens[:0]), at_once)
    assert torch.equal(some, every[[0, 5]])
    assert none.shape == (0, model.config.hidden_size)


def test_memory_is_taken_for_the_longest_step_once(models):
    model = models["llama", torch.float32]
    _, backend = attention(model, torch.float32)
    addresses = set()
    with torch.inference_mode():
        for count in (30, 3, 30, 17):
            backend.plan(batch := batch_of([(count, 0)], 0))
            model.forward(batch, backend)
            addresses.add(memory_of(model._kernel.kernel._workspace, "activations").data_ptr())
    assert len(addresses) == 1


@pytest.mark.parametrize("family,options", [
    ("qwen3-moe", {"moe_intermediate_size": 23}), ("qwen2-moe", {"shared_expert_intermediate_size": 23}),
    ("deepseek-v3", {"qk_nope_head_dim": 9}), ("deepseek-v3", {"n_routed_experts": 130, "n_group": 65}),
])  # fmt: skip
def test_other_layers_are_computed_one_by_one(tmp_path, family, options):
    make_checkpoint(tmp_path, family, **options)
    assert not load_model(str(tmp_path), torch.bfloat16).in_one_call


def test_layers_without_the_paged_kernel_go_one_by_one(models):
    model, batch = models["qwen3", torch.float32], batch_of([(1, 3), (5, 0)], 1)
    pool, _ = attention(model, torch.float32)
    backend = SdpaBackend(pool, attention_shape(pool, model.config.num_heads))
    with torch.inference_mode():
        backend.plan(batch)
        hidden = model.forward(batch, backend)
    expected, _ = compute(model, torch.float32, batch, at_once)
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)


SHAPE = LayerShape(hidden=24, heads=4, kv_heads=2, head_size=8, rotated=8)
EXPERTS = ExpertsForm(count=3, held=range(3), top_k=2, size=16, bend="silu", normalize=True)
GROUPS = GroupRouting(groups=3, top_groups=2, sigmoid=True, best_two=False, scale=1.0)


def layer(**changed):
    def weight(outputs, inputs):
        return torch.zeros(storage_shape(outputs, inputs, torch.float32))

    tensors = LayerTensors(
        input_norm=torch.ones(24), qkv=weight(64, 24), qkv_bias=None, q_norm=torch.ones(8),
        k_norm=torch.ones(8),
        o=weight(24, 32), o_bias=None, mlp_norm=torch.ones(24), gate_up=weight(80, 24), down=weight(24, 40),
    )  # fmt: skip
    return tensors._replace(**changed)


def kernel_of(*layers, last_norm=None, head_eps=1e-6, experts=None):
    norm = torch.ones(24) if last_norm is None else last_norm
    kinds = [LayerKind(intermediate=40, experts=experts)] * len(layers)
    return DecoderKernel(layers, kinds, norm, SHAPE, eps=1e-6, head_eps=head_eps)


@pytest.mark.parametrize("changed", [
    {"input_norm": torch.ones(23)}, {"input_norm": torch.ones(48)[::2]}, {"mlp_norm": None}, {"q_norm": None},
    {"qkv": torch.zeros(64, 24)}, {"qkv": None},
    {"down": torch.zeros(32, 32)}, {"gate_up": torch.zeros(96, 32).bfloat16()},
    {"qkv_bias": torch.zeros(63)}, {"o_bias": torch.zeros(24).bfloat16()}, {"k_norm": torch.ones(16)},
])  # fmt: skip
def test_layers_that_would_be_misread_are_refused(changed):
    kernel_of(layer())
    with pytest.raises(ValueError, match=f"no layer 1 of .*: {next(iter(changed))} is"):
        kernel_of(layer(), layer(**changed))


def with_experts(**changed):
    def weights(count, outputs, inputs):
        rows, columns = storage_shape(outputs, inputs, torch.float32)
        return torch.zeros(count * rows, columns)

    tensors = layer(
        router=weights(1, 3, 24), router_bias=torch.zeros(3), shared_gate=weights(1, 1, 24),
        experts_gate_up=weights(3, 32, 24), experts_gate_up_bias=torch.zeros(3, 32),
        experts_down=weights(3, 24, 16), experts_down_bias=torch.zeros(3, 24),
    )  # fmt: skip
    return tensors._replace(**changed)


@pytest.mark.parametrize("changed", [
    {"router": None}, {"router": torch.zeros(3, 24)}, {"router_bias": torch.zeros(4)},
    {"shared_gate": torch.zeros(1, 24)},
    {"experts_gate_up": torch.zeros(64, 32)}, {"experts_gate_up_bias": torch.zeros(32)},
    {"experts_down": None},
    {"experts_down_bias": torch.zeros(24, 3).T}, {"sinks": torch.zeros(4)}, {"w_kc": torch.zeros(32, 32)},
])  # fmt: skip
def test_experts_that_would_be_misread_are_refused(changed):
    kernel_of(with_experts(), experts=EXPERTS)
    with pytest.raises(ValueError, match=f"no layer 1 of .*: {next(iter(changed))} is"):
        kernel_of(with_experts(), with_experts(**changed), experts=EXPERTS)


@pytest.mark.parametrize("changed", [
    {"top_k": 0}, {"top_k": 4},
    {"in_groups": replace(GROUPS, groups=2)}, {"in_groups": replace(GROUPS, top_groups=4)},
    {"in_groups": replace(GROUPS, best_two=True)}, {"in_groups": replace(GROUPS, top_groups=1)},
])  # fmt: skip
def test_choices_that_the_kernel_cannot_make_are_refused(changed):
    kernel_of(with_experts(), experts=replace(EXPERTS, in_groups=GROUPS))
    with pytest.raises(ValueError, match="no layer 0 of"):
        kernel_of(with_experts(), experts=replace(EXPERTS, **changed))


@pytest.mark.parametrize("changed,told", [
    ({"head_eps": None}, "q_norm"), ({"last_norm": torch.ones(23)}, "no last norm"),
    ({"last_norm": torch.ones(24).bfloat16()}, "no last norm"),
])  # fmt: skip
def test_norms_that_would_be_misread_are_refused(changed, told):
    with pytest.raises(ValueError, match=told):
        kernel_of(layer(), **changed)


@pytest.mark.parametrize("change", [
    {"residual": torch.zeros(2, 25)}, {"residual": torch.zeros(2, 24).bfloat16()},
    {"residual": torch.zeros(24, 2).T},
    {"cos": torch.zeros(9, 1, 8)}, {"sin": torch.zeros(9, 1, 8)[..., ::2]}, {"sin": torch.zeros(8, 1, 4)},
    {"positions": torch.zeros(3, dtype=torch.int64)}, {"positions": torch.zeros(4, dtype=torch.int64)[::2]},
    {"sampled": torch.zeros(1)}, {"sampled": torch.zeros(1, 1, dtype=torch.int64)},
    {"slots": torch.zeros(3, dtype=torch.int64)}, {"slots": torch.zeros(2, dtype=torch.int32)},
    {"table": torch.zeros(2, 1, dtype=torch.int64)}, {"keys": torch.zeros(3, 2, 16, 4)},
    {"values": torch.zeros(3, 2, 8, 16).transpose(2, 3)},
])  # fmt: skip
@pytest.mark.usefixtures("built")
def test_steps_that_would_be_misread_are_refused(change):
    pool = MHAPool(num_layers=1, num_pages=3, kv_heads=2, head_size=8, dtype=torch.float32)
    backend = PagedCpuBackend(pool, attention_shape(pool, 4))
    backend.plan(forward_batch([Row([1], 0, [1]), Row([1], 3, [2])], 2))
    keys, values = pool.layer(0)
    right = {
        "residual": torch.zeros(2, 24), "cos": torch.ones(9, 1, 4), "sin": torch.ones(9, 1, 4),
        "positions": torch.tensor([0, 3]), "sampled": torch.tensor([1]), "slots": backend.paged.kv_slots,
        "table": backend.paged.page_table, "keys": keys, "values": values,
    }  # fmt: skip

    def compute(residual, cos, sin, positions, sampled, slots, table, keys, values):
        step = replace(backend.paged, kv=lambda _: (keys, values), kv_slots=slots, page_table=table)
        return kernel_of(layer())(residual, [(cos, sin)], positions, sampled, step)

    assert not compute(**right).any()
    with pytest.raises(ValueError, match="no layers of"):
        compute(**(right | change))
