"""Triton's operations between products against torch's composition, in Triton's interpreter on the CPU.

``tests/gpu/test_cuda_triton.py`` runs the same on a device.
"""

import os
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from support import fake_flashinfer, fake_fp8_libraries
from support.checkpoints import make_checkpoint
from support.forward_batches import PagedModel, Sequence, attention_shape, load_model
from support.interpreted_triton import INTERPRETS, interpreted
from torch import Tensor
from torch.nn import functional

from caesura.scheduler import kernels
from caesura.scheduler.attention.flashinfer import FlashInferBackend
from caesura.scheduler.attention.paged_triton import PagedTritonBackend
from caesura.scheduler.cache.pool import MHAPool
from caesura.scheduler.execution.forward import StepLimits
from caesura.scheduler.kernels import native
from caesura.scheduler.kernels.attention_form import HeadNorms
from caesura.scheduler.kernels.decoder_layers import GroupRouting
from caesura.scheduler.layers import experts as experts_module
from caesura.scheduler.layers import fp8_products, moe
from caesura.scheduler.layers.mlp import GatedMLP, bent
from caesura.scheduler.layers.moe import Router
from caesura.scheduler.layers.norm import RMSNorm
from caesura.scheduler.layers.parameters import Placement, ScaleBlocks
from caesura.scheduler.layers.rotary import RopeParameters, RotaryEmbedding, rotate

DEVICE = torch.device(os.environ.get("CAESURA_TEST_DEVICE", "cpu"))
RUNS = INTERPRETS or DEVICE.type == "cuda"
computed = pytest.mark.skipif(not RUNS, reason="run by test_the_kernels_in_the_interpreter")
# Infinities and NaN are as good as other numbers to a device; NumPy, which the interpreter computes with,
# warns.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

if RUNS:
    from caesura.scheduler.kernels import triton_elementwise, triton_experts, triton_fp8


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    if INTERPRETS:
        _round_to_nearest(monkeypatch)
    with DEVICE:
        yield


def _round_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round and multiply as devices do: the interpreter cuts, and takes bits of bfloat16 for integers."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert, multiply = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot
    narrow = {tl.bfloat16: (torch.bfloat16, "uint16"), tl.float8e4nv: (torch.float8_e4m3fn, "uint8")}

    def rounding(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if source != tl.float32 or target not in narrow:
            return convert(values, source, target, mode)
        dtype, bits = narrow[target]
        return torch.from_numpy(values.copy()).to(dtype).view(getattr(torch, bits)).numpy()

    def wide(factor: Any) -> Any:
        if factor.dtype not in narrow:
            return factor
        dtype, _ = narrow[factor.dtype]
        values = torch.from_numpy(factor.data.copy()).view(dtype).float().numpy()
        return interpreter.TensorHandle(values, tl.float32)

    def multiplying(self: Any, a: Any, b: Any, *further: Any) -> Any:
        return multiply(self, wide(a), wide(b), *further)

    monkeypatch.setattr(interpreter, "_convert_float", rounding)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", multiplying)


def assert_rounded_alike(found: Tensor, expected: Tensor) -> None:
    """Bit for bit in two bytes but for one element in a thousand, of two roundings."""
    assert found.dtype == expected.dtype
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
        return
    steps = (found.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
    assert steps.max() <= 2
    assert (steps != 0).float().mean() < 1e-3


# Between products


def from_one(x, weight, eps):
    return (functional.rms_norm(x.float(), x.shape[-1:], None, eps) * (1 + weight.float())).to(x.dtype)


@computed
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 1000, 4096])
def test_the_norm_rounds_as_torch_does(dtype, size):
    wide, residual = torch.randn(3, size + 8).to(dtype), torch.randn(3, size).to(dtype)
    x, weight = wide[:, :size], torch.randn(size).to(dtype)  # rows apart, as those of latents are
    sum_ = residual + x
    for normalized, found in (
        (x, triton_elementwise.rms_norm(x, weight, 1e-5)),
        (sum_, triton_elementwise.rms_norm(x, weight, 1e-5, residual=residual)),
    ):
        assert_rounded_alike(found, functional.rms_norm(normalized, (size,), None, 1e-5) * weight)
    found = triton_elementwise.rms_norm(x, weight, 1e-5, from_one=True)
    assert_rounded_alike(found, from_one(x, weight, 1e-5))
    assert torch.equal(residual, sum_)
    assert triton_elementwise.rms_norm(x[:0], weight, 1e-5).shape == (0, size)


@computed
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_rounds_as_torch_does(dtype):
    gate_up = 4 * torch.randn(3, 2 * 1500).to(dtype)
    gate_up[0, :3] = torch.tensor([100.0, -100.0, 0.0])
    gate, up = gate_up.chunk(2, dim=-1)
    assert_rounded_alike(triton_elementwise.gate_mul(gate_up), functional.silu(gate) * up)
    for bend in ("gelu_tanh", "clamped"):  # which torch rounds more often
        found = triton_elementwise.gate_mul(gate_up, bend=bend)
        expected = bent(gate.double(), up.double(), bend).to(dtype)
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5 if dtype == torch.float32 else 0.02)
    assert triton_elementwise.gate_mul(gate_up[:0]).shape == (0, 1500)


@computed
@pytest.mark.parametrize("dtype,heads,kv_heads,size", [
    (torch.bfloat16, 8, 2, 128), (torch.float16, 5, 5, 12), (torch.float32, 3, 1, 80)
])  # fmt: skip
@pytest.mark.parametrize(
    "norms,keys_kept,rotated", [(False, False, 1), (True, True, 1), (True, False, 0.5), (False, True, 0)]
)
@pytest.mark.parametrize("shifted", [False, True])
def test_rotation_and_store_round_as_torch_does(
    dtype, heads, kv_heads, size, norms, keys_kept, rotated, shifted
):
    tokens, slots = 5, torch.tensor([17, 0, 50, 33, 16])
    qkv = torch.randn(tokens, heads + 2 * kv_heads, size).to(dtype)
    cos, sin = torch.rand(2, tokens, 1, int(size * rotated) // 2).to(dtype)
    weights = torch.randn(2, size).to(dtype)
    norm = HeadNorms(*weights, 1e-6, shifted) if norms else None
    qk = qkv[:, :-kv_heads]
    if shifted and norms:
        qk = torch.cat([from_one(x, w, 1e-6) for x, w in zip(qk.split([heads, kv_heads], 1), weights)], 1)
    elif norms:
        qk = functional.rms_norm(qk, (size,), None, 1e-6)
        qk = torch.cat((qk[:, :heads] * weights[0], qk[:, heads:] * weights[1]), 1)
    expected = rotate(qk, cos, sin)
    keys, values = torch.full((2, 4, kv_heads, 16, size), 7.0).to(dtype)
    given = qkv.clone()
    out = given[:, : heads + kv_heads if keys_kept else heads]
    triton_elementwise.rope_store(given, heads, cos, sin, slots, keys, values, out=out, norm=norm)
    assert_rounded_alike(out, expected[:, : out.shape[1]])
    assert torch.equal(given[:, out.shape[1] :], qkv[:, out.shape[1] :]), "what is not asked for stays"
    pages, offsets = slots // 16, slots % 16
    assert_rounded_alike(keys[pages, :, offsets], expected[:, heads:])
    assert torch.equal(values[pages, :, offsets], qkv[:, -kv_heads:])
    keys[pages, :, offsets] = values[pages, :, offsets] = 7
    assert bool((keys == 7).all() and (values == 7).all()), "stored elsewhere"


@computed
@pytest.mark.parametrize("dtype,tokens,heads,nope,latent,rope,interleaved", [
    (torch.float16, 3, 3, 5, 20, 6, False), (torch.float32, 70, 3, 5, 70, 6, True),
    (torch.bfloat16, 5, 20, 128, 512, 64, True),
])  # fmt: skip
def test_latents_are_stored_as_torch_does(dtype, tokens, heads, nope, latent, rope, interleaved):
    width = latent + rope
    down = torch.randn(tokens, 7 + heads * (nope + rope) + width).to(dtype)  # of odd strides
    q = down[:, 7 : 7 + heads * (nope + rope)].unflatten(-1, (heads, -1))
    kv, weight = down[:, -width:], torch.randn(latent).to(dtype)
    w_kc = torch.randn(heads, nope, latent).to(dtype)
    cos, sin = torch.rand(2, tokens, 1, rope // 2).to(dtype)
    pool, slots = torch.full((6, 16, width), 7.0).to(dtype), torch.randperm(96)[:tokens]
    found = triton_elementwise.store_latents(
        q, w_kc, kv, cos, sin, (weight, 1e-6), pool, slots, interleaved=interleaved
    )
    absorbed = torch.bmm(q[..., :nope].transpose(0, 1).double(), w_kc.double()).transpose(0, 1)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.01, "rtol": 0.01}
    torch.testing.assert_close(found[..., :latent].double(), absorbed, **tolerance)
    assert_rounded_alike(found[..., latent:], rotate(q[..., nope:], cos, sin, interleaved=interleaved))
    cells = pool.view(-1, width)
    normalized = functional.rms_norm(kv[:, :latent], (latent,), None, 1e-6) * weight
    assert_rounded_alike(cells[slots, :latent], normalized)
    k_rope = rotate(kv[:, latent:].unsqueeze(1), cos, sin, interleaved=interleaved)
    assert_rounded_alike(cells[slots, latent:], k_rope.squeeze(1))
    cells[slots] = 7
    assert bool((cells == 7).all()), "stored elsewhere"


@computed
@pytest.mark.parametrize("dtype,half", [(torch.float32, 64), (torch.bfloat16, 24), (torch.float16, 1)])
def test_angles_are_torchs(dtype, half):
    embedding = RotaryEmbedding(
        RopeParameters(attention_factor=1.2), 2 * half, place=Placement(dtype, DEVICE)
    )
    positions = torch.tensor([0, 1, 900, 1_000_000])
    found = triton_elementwise.angles(positions, embedding._inverse_frequencies, 1.2, dtype)
    for mine, theirs in zip(found, embedding._compute(positions), strict=True):
        assert_rounded_alike(mine, theirs)


# Experts


@computed
@pytest.mark.parametrize("dtype,experts,top_k,normalize", [
    (torch.bfloat16, 128, 8, True), (torch.float16, 60, 7, False), (torch.float32, 5, 5, True),
    (torch.bfloat16, 60, 1, False),
])  # fmt: skip
def test_the_choice_is_torchs(dtype, experts, top_k, normalize):
    logits = torch.stack([torch.randperm(experts) for _ in range(6)]).to(dtype) / 8  # no two of a token alike
    record = torch.full((6, 3, top_k), -1, dtype=torch.int16)
    ids, weights = triton_experts.route(logits, top_k, normalize=normalize, record=record[:, 1])
    expected, expected_ids = logits.softmax(-1, dtype=torch.float32).topk(top_k)
    if normalize:
        expected = expected / expected.sum(-1, keepdim=True)
    assert torch.equal(ids.long(), expected_ids)
    assert_rounded_alike(weights.to(dtype), expected.to(dtype))
    assert torch.equal(weights, weights.to(dtype).float())
    assert torch.equal(record[:, 1].long(), expected_ids)
    assert bool((record[:, 0] == -1).all() and (record[:, 2] == -1).all())


@computed
def test_shared_experts_are_chosen_behind_the_others():
    logits, record = torch.randn(6, 20).bfloat16(), torch.zeros(6, 3, dtype=torch.uint8)
    chosen, expected = triton_experts.route(logits, 3, normalize=True)
    ids, weights = triton_experts.route(logits, 3, normalize=True, record=record, shared=2)
    assert torch.equal(ids[:, :3], chosen)
    assert torch.equal(record.int(), chosen)
    assert torch.equal(weights[:, :3], expected)
    assert ids[:, 3:].tolist() == [[20, 21]] * 6
    assert bool((weights[:, 3:] == 1).all())


@computed
def test_equal_experts_are_chosen_by_index_and_ids_stay_in_range():
    logits = torch.tensor([[0.0, 1, 1, -0.0, 1], [torch.nan] * 5, [0, torch.nan, 9, 0, 0], [-torch.inf] * 5])
    ids, weights = triton_experts.route(logits, 4, normalize=True)
    assert ids[0].tolist() == [1, 2, 4, 0]
    assert all(len(set(row)) == 4 and set(row) < set(range(5)) for row in ids.tolist())
    assert weights[0].isfinite().all()
    assert weights[1:].isnan().all()


@computed
@pytest.mark.parametrize("sigmoid,bias", [(False, False), (True, True)])
@pytest.mark.parametrize("groups,top_groups,group_score", [(1, 1, "max"), (4, 2, "top2"), (3, 1, "max")])
def test_the_choice_by_groups_is_torchs(sigmoid, bias, groups, top_groups, group_score, monkeypatch):
    experts, top_k = groups * 20, 6
    by = GroupRouting(
        groups=groups, top_groups=top_groups, sigmoid=sigmoid, best_two=group_score == "top2", scale=2.5
    )
    place, x = Placement(torch.float32, DEVICE), torch.randn(12, 8)
    found = []
    for library in (None, triton_experts):
        monkeypatch.setattr(moe, "triton_for", lambda *of, library=library: library)
        router = Router("r", "gate", 8, experts, top_k, by=by, normalize=bias, bias=bias, place=place)
        torch.manual_seed(1)
        for slot in router.slots():
            slot.write(torch.randn(slot.shape), 0)
        record = torch.zeros(12, top_k, dtype=torch.uint8)
        found.append((*router.forward(x, record), record))
    (expected_ids, expected, _), (ids, weights, record) = found
    assert torch.equal(ids.long(), expected_ids)
    assert torch.equal(record.long(), expected_ids)
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5)


def of_pairs(x: Tensor, ids: Tensor, weight: Tensor, first: int) -> Tensor:
    """Return float64 products of each pair with the weights of experts from ``first`` on, else NaN."""
    rows = x.double().repeat_interleave(ids.numel() // len(x), 0)
    out = torch.full((ids.numel(), weight.shape[1]), torch.nan, dtype=torch.float64)
    for pair, expert in enumerate(ids.flatten().tolist()):
        if first <= expert < first + len(weight):
            out[pair] = weight[expert - first].double() @ rows[pair]
    return out


def assert_held_close(found: Tensor, expected: Tensor, **tolerance: float) -> None:
    held = ~expected.isnan()
    torch.testing.assert_close(found[held].double(), expected[held], **tolerance)


@computed
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "top_k", "held", "size", "width"),
    [
        (1, 1, range(1), 8, 5),
        (12, 3, range(9), 50, 70),
        (150, 4, range(2, 7), 130, 33),
        (40, 7, range(9), 96, 64),
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_pairs_are_those_of_their_experts(dtype, tokens, top_k, held, size, width, biased):
    ids = torch.rand(tokens, 9 if top_k > 1 else 1).argsort(-1)[:, :top_k].contiguous().to(torch.int32)
    x = torch.randn(tokens, size + 3).to(dtype)[:, :size]
    gate_up, down = (torch.randn(len(held), *shape).to(dtype) for shape in ((2 * width, size), (size, width)))
    biases = [torch.randn(len(held), len(weight[0])).to(dtype) for weight in (gate_up, down)]
    added = biases if biased else [None, None]
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.02}
    of_rows = (ids.flatten().long() - held.start).clamp(0, len(held) - 1)
    expected = of_pairs(x, ids, gate_up, held.start) + (biases[0][of_rows] if biased else 0)
    gated = triton_experts.product(x, ids, held, gate_up, bias=added[0], bend="clamped")
    gate, up = expected.to(dtype).double().chunk(2, -1)
    assert_held_close(gated, bent(gate.clone(), up.clone(), "clamped"), **tolerance)
    expected = of_pairs(gated, ids, down, held.start) + (biases[1][of_rows] if biased else 0)
    assert_held_close(triton_experts.product(gated, ids, held, down, bias=added[1]), expected, **tolerance)


@computed
@pytest.mark.parametrize("bend", ["silu", "gelu_tanh", "clamped"])
def test_a_gate_within_the_product_is_that_behind_it(bend):
    ids = torch.rand(30, 6).argsort(-1)[:, :2].contiguous()
    x, weight = torch.randn(30, 48).bfloat16(), torch.randn(6, 2 * 40, 48).bfloat16()
    gate_up = triton_experts.product(x, ids, range(6), weight)
    found = triton_experts.product(x, ids, range(6), weight, bend=bend)
    assert torch.equal(found, triton_elementwise.gate_mul(gate_up, bend=bend))


@computed
@pytest.mark.parametrize("scaled", [False, True])
def test_a_pair_has_the_bits_that_it_has_alone(scaled):
    ids, x = torch.rand(70, 5).argsort(-1)[:, :3].contiguous(), torch.randn(70, 256).bfloat16()
    weight, scales = torch.randn(5, 256, 256).bfloat16(), torch.rand(5, 2, 2) if scaled else None
    weight = weight.to(torch.float8_e4m3fn) if scaled else weight
    together = triton_experts.product(x, ids, range(5), weight, scales, bend="silu")
    for token in (0, 41, 69):
        one = slice(token, token + 1)
        alone = triton_experts.product(x[one], ids[one], range(5), weight, scales, bend="silu")
        assert torch.equal(alone, together[3 * token : 3 * token + 3])


@computed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("held", [range(9), range(3, 7), range(8, 9)])
@pytest.mark.parametrize("tokens,size", [(1, 8), (41, 1030)])
def test_pairs_of_experts_held_are_summed_as_torch_does(dtype, held, tokens, size):
    ids = torch.rand(tokens, 9).argsort(-1)[:, :4].contiguous()
    y, weights = torch.randn(4 * tokens, size).to(dtype), torch.rand(tokens, 4)
    of_others = ((ids < held.start) | (ids >= held.stop)).view(-1, 1)
    places, addend = torch.arange(4 * tokens).view(tokens, 4), torch.randn(tokens, size).to(dtype)
    expected = experts_module.combine(y.masked_fill(of_others, 0), places, weights)
    y.masked_fill_(of_others, torch.nan)
    assert_rounded_alike(triton_experts.combine(y, ids, held, weights), expected)
    apart = torch.cat((y, y), 1)[:, :size].flip(0)  # rows apart in memory, in another order
    places = 4 * tokens - 1 - places
    found = triton_experts.combine(apart, ids, held, weights, addend, places)
    assert_rounded_alike(found, expected + addend)


@computed
@pytest.mark.parametrize(("tokens", "rows", "size"), [(3, 4, 128), (5, 8, 1152), (1, 1, 2048)])
@pytest.mark.parametrize("columns_contiguous", [False, True])
def test_tokens_are_quantised_as_torch_does(tokens, rows, size, columns_contiguous):
    x = (torch.randn(tokens, size + 8) * 10 ** torch.randn(tokens, 1)).bfloat16()[:, :size]
    x[0, :128] = 0
    padded = functional.pad(x, (0, 0, 0, rows - tokens))
    values, factors = triton_fp8.quantize(x, rows, columns_contiguous=columns_contiguous)
    expected, expected_factors = fp8_products.quantize_tokens(padded)
    assert torch.equal(values.float(), expected.float())
    assert torch.equal(factors, expected_factors)
    assert (factors.stride(0) == 1) == (columns_contiguous or factors.shape[1] == 1)


@computed
@pytest.mark.parametrize(("tokens", "rows", "size"), [(3, 4, 128), (5, 8, 1152), (4, 4, 640)])
@pytest.mark.parametrize("columns_contiguous", [False, True])
def test_norms_and_gates_are_quantised_as_torch_does(tokens, rows, size, columns_contiguous):
    layout = {"columns_contiguous": columns_contiguous}
    for bend in ("silu", "gelu_tanh", "clamped"):
        gate_up = torch.randn(tokens, 2 * size).bfloat16()
        found = triton_fp8.quantize(gate_up, rows, bend=bend, **layout)
        expected = triton_fp8.quantize(triton_elementwise.gate_mul(gate_up, bend=bend), rows, **layout)
        assert torch.equal(found[0].float(), expected[0].float())
        assert torch.equal(found[1], expected[1])
        assert found[1].stride() == expected[1].stride()
    wide, weight = torch.randn(tokens, size + 8).bfloat16(), torch.randn(size).bfloat16()
    for from_one, added in ((False, True), (True, False)):
        x, residual = wide[:, :size], torch.randn(tokens, size).bfloat16() if added else None
        kept = None if residual is None else residual.clone()
        found = triton_fp8.rms_norm(x, weight, 1e-5, rows, residual=residual, from_one=from_one, **layout)
        normalized = triton_elementwise.rms_norm(x, weight, 1e-5, residual=kept, from_one=from_one)
        expected = triton_fp8.quantize(normalized, rows, **layout)
        torch.testing.assert_close(found[1], expected[1], rtol=0.01, atol=0)
        assert (found[0].float() != expected[0].float()).float().mean() < 0.01, "of two roundings"
        assert found[1].stride() == expected[1].stride()
        assert residual is None or torch.equal(residual, kept)


@interpreted
@pytest.mark.parametrize("kind", [1, 2])
def test_quantised_rows_go_through_a_block_as_others(kind, monkeypatch):
    dense, libraries = fp8_products.DENSE[kind][1], fake_fp8_libraries.MODULES
    monkeypatch.setattr(fp8_products, "_kernels", lambda device: triton_fp8)
    monkeypatch.setattr(fp8_products, "dense_for", lambda device: dense)
    monkeypatch.setattr(fp8_products, "import_module", lambda name: libraries[name])
    monkeypatch.setattr(functional, "scaled_mm", fake_fp8_libraries.scaled_mm)
    place = Placement(torch.bfloat16, DEVICE, ScaleBlocks())
    with native.limited_to("torch"):  # compiled kernels would pack the weights
        norm, mlp = RMSNorm("n", "n", 256, 1e-6, place=place), GatedMLP("m", "m", 256, 384, place=place)
    weights = {slot.name: torch.randn(slot.shape) / 16 for slot in (*norm.slots(), *mlp.slots())}
    for slot in (*norm.slots(), *mlp.slots()):
        if not slot.name.endswith("scale_inv"):
            slot.write(weights[slot.name], 0)
    x, residual = torch.randn(2, 5, 256).bfloat16()
    expected_residual = residual + x
    rows = norm.rows(x, mlp.quantizer, residual=residual)
    assert isinstance(rows, fp8_products.Quantized)
    assert torch.equal(residual, expected_residual)
    normalized = functional.rms_norm(residual.float(), (256,), weights["n.weight"], 1e-6)
    gate, up, down = (weights[f"m.{part}_proj.weight"] for part in ("gate", "up", "down"))
    expected = (functional.silu(normalized @ gate.t()) * (normalized @ up.t())) @ down.t()
    found = mlp.forward(rows)
    assert found.shape == expected.shape
    assert (found.float() - expected).norm() / expected.norm() < 0.08  # weights are rounded, too


@computed
@pytest.mark.parametrize("multiple", [4, 128])
@pytest.mark.parametrize(
    ("ends", "pairs"), [([2, 2, 7], 7), ([0, 3, 3, 4, 4], 9), ([1], 1), ([5, 5, 300], 300)]
)
def test_rows_are_spread_as_torch_does(multiple, ends, pairs):
    x, ends = torch.randn(pairs, 256).bfloat16(), torch.tensor(ends, dtype=torch.int32)
    own, rows = int(ends[-1]), fp8_products._most_rows(pairs, len(ends), multiple)
    _, padded_ends, places = fp8_products.spread(x, ends, multiple)
    (values, factors), found_ends, owners, found_places = triton_fp8.spread(x, ends, multiple, rows)
    assert torch.equal(found_ends, padded_ends)
    assert torch.equal(found_places[:own], places[:own])
    assert min(found_places[own:].tolist(), default=rows) >= padded_ends[-1], (
        "rows behind all experts stay there"
    )
    assert len(set(found_places.tolist())) == pairs
    expected, expected_factors = fp8_products.quantize_tokens(x)
    assert torch.equal(values.float()[found_places], expected.float())
    assert torch.equal(factors[found_places], expected_factors)
    starts = [0, *padded_ends.tolist()]
    of_experts = [expert for expert, (start, end) in enumerate(pairwise(starts)) for _ in range(start, end)]
    assert owners.tolist() == [*of_experts, *[-1] * (rows - starts[-1])]


@computed
@pytest.mark.parametrize(("tokens", "held"), [(1, range(5)), (7, range(1, 4)), (90, range(5))])
def test_products_of_pairs_take_scales_of_blocks(tokens, held):
    ids = torch.rand(tokens, 5).argsort(-1)[:, :3].contiguous()
    x, outputs, inputs = torch.randn(tokens, 384).bfloat16(), 512, 384
    weight = torch.randn(len(held), outputs, inputs).to(torch.float8_e4m3fn)
    scales = torch.rand(len(held), outputs // 128, inputs // 128) + 0.5
    values, factors = fp8_products.quantize_tokens(x)
    rounded = values.float() * factors.repeat_interleave(128, 1)
    expected = of_pairs(rounded, ids, fp8_products.dequantized(weight, scales), held.start)
    found = triton_experts.product(x, ids, held, weight, scales)
    assert_held_close(found, expected, atol=0.02, rtol=0.01)
    own = ~expected.isnan()
    gated = triton_experts.product(x, ids, held, weight, scales, bend="silu")
    assert_rounded_alike(gated[own[:, 0]], triton_elementwise.gate_mul(found)[own[:, 0]])


@computed
def test_fp8_products_agree_where_they_would_serve(monkeypatch):
    monkeypatch.setattr(fp8_products, "_kernels", lambda device: triton_fp8)
    fp8_products.multiplies_experts.cache_clear()
    assert fp8_products.multiplies_experts(DEVICE)
    fp8_products.multiplies_experts.cache_clear()


# Models


@pytest.fixture
def served_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    served = {"elementwise": kernels.TRITON, "experts": kernels.TRITON}
    for module in (kernels, experts_module, moe, sys.modules[PagedTritonBackend.__module__]):
        monkeypatch.setattr(module, "best", lambda operation, *_: served.get(operation, kernels.TORCH))


def logits_of(model: Any, backend: type | None) -> list[Tensor]:
    paged = PagedModel(model, torch.float32, num_pages=20)
    config, pool = model.config, paged.pool
    if isinstance(pool, MHAPool) and backend is not None:
        limits = StepLimits(rows=4, tokens=64, context_len=8 * 16)
        library = [fake_flashinfer] if backend is FlashInferBackend else []
        paged.backend = backend(pool, attention_shape(pool, config.num_heads), limits, *library)
        assert paged.backend.fused is not None
    generator = torch.Generator().manual_seed(3)
    first, second = (Sequence(torch.randint(0, 97, (40,), generator=generator).tolist()) for _ in range(2))
    found = paged.step([], [(first, 5)])
    found += paged.step([first], [(second, 3)])
    found += paged.step([], [(first, 2)])
    return found + paged.step([first, second])


@interpreted
@pytest.mark.parametrize("family,backend", [
    ("qwen2", FlashInferBackend), ("qwen3-moe", FlashInferBackend), ("qwen3", PagedTritonBackend),
    ("deepseek-v2", None), ("deepseek-v3", None), ("gpt-oss", None),
])  # fmt: skip
def test_models_compute_the_same(family, backend, tmp_path, request):
    make_checkpoint(tmp_path, family)
    with native.limited_to("torch"):
        reference = load_model(str(tmp_path), torch.float32)
        expected_logits = logits_of(reference, None)
        request.getfixturevalue("served_by_triton")
        model = load_model(str(tmp_path), torch.float32)
        for found, expected in zip(logits_of(model, backend), expected_logits, strict=True):
            torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-4)
    if model.routing is not None and reference.routing is not None:
        assert torch.equal(model.routing.rows(2), reference.routing.rows(2))
