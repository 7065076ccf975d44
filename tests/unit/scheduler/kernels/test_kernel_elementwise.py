"""Compiled norms, rotations and gates."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.kernels import assert_near, instruction_sets, least, normal, threads, unit
from support.properties import examples
from torch import Tensor
from torch.nn import functional

from caesura.scheduler.kernels import native
from caesura.scheduler.kernels.attention_form import HeadNorms
from caesura.scheduler.kernels.elementwise import (
    gate_heads,
    gate_mul,
    rms_norm,
    rope_store,
    rotate_latents,
    sigmoid_mul,
)
from caesura.scheduler.layers.mlp import bent
from caesura.scheduler.layers.norm import RMSNorm, normalize
from caesura.scheduler.layers.parameters import Placement
from caesura.scheduler.layers.rotary import rotate

DTYPES = native.FLOATS
EPS = 1e-5
CANARY = 77.0

dtypes = st.sampled_from(DTYPES)
sizes = st.sampled_from([1, 2, 7, 16, 31, 64, 100, 129, 300])
rows = st.integers(0, 9)
seeds = st.integers(0, 999)


def draw(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    *outer, size = shape
    wide = torch.randn((*outer, size + 3), generator=torch.Generator().manual_seed(seed))
    return wide.to(dtype)[..., 1 : size + 1]


def framed(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
    *outer, size = shape
    wide = torch.full((*outer, size + 2), CANARY, dtype=dtype)
    return wide[..., 1 : size + 1], wide[..., :: size + 1]


def assert_rounded(got: Tensor, want: Tensor, roundings: int) -> None:
    rtol, atol = roundings * unit(got.dtype) + 1e-6, roundings * least(got.dtype)
    torch.testing.assert_close(got.double(), want.double(), rtol=rtol, atol=atol)


def by_torch(weight: Tensor, from_one: bool) -> RMSNorm:
    place = Placement(weight.dtype, torch.device("cpu"))
    norm = RMSNorm("n", "n", len(weight), EPS, from_one=from_one, place=place)
    next(norm.slots()).write(weight, 0)
    return norm


@settings(max_examples=examples(40))
@given(dtype=dtypes, rows=rows, size=sizes, seed=seeds, with_residual=st.booleans(), from_one=st.booleans())
def test_norm(dtype, rows, size, seed, with_residual, from_one) -> None:
    for _ in instruction_sets():
        x, weight = draw(seed, dtype, rows, size), draw(seed + 1, dtype, size)
        residual = draw(seed + 2, dtype, rows, size).clone() if with_residual else None
        total = x if residual is None else residual + x
        out, frame = framed(dtype, rows, size)
        assert rms_norm(x, weight, EPS, residual=residual, out=out, from_one=from_one) is out
        exact = total.double() / (total.double().square().mean(-1, keepdim=True) + EPS).sqrt()
        assert_rounded(out, exact * (weight.double() + from_one), 1 if from_one else 3)
        assert (frame == CANARY).all()
        if residual is not None:
            assert torch.equal(residual, total)
        in_place = total.clone()
        assert torch.equal(rms_norm(in_place, weight, EPS, out=in_place, from_one=from_one), out)
        assert_rounded(out, by_torch(weight, from_one).by_torch(total), 2)


@settings(max_examples=examples(50))
@given(
    dtype=dtypes,
    rows=rows,
    size=sizes,
    seed=seeds,
    bend=st.sampled_from(["silu", "gelu_tanh", "clamped"]),
)
def test_gate(dtype, rows, size, seed, bend) -> None:
    for _ in instruction_sets():
        x = draw(seed, dtype, rows, 2 * size).mul_(5)
        out, frame = framed(dtype, rows, size)
        assert gate_mul(x, out, bend=bend) is out
        gate, up = x.double().split(size, -1)
        # Where 1 + tanh cancels, what is left is small beside the gate.
        torch.testing.assert_close(
            out.double(),
            bent(gate, up, bend),
            rtol=max(unit(dtype), 2.0**-20) * 3,
            # A gate that is rounded close to zero is multiplied by what may be some twenty.
            atol=2e-6 if bend == "gelu_tanh" else 20 * least(dtype),
        )
        assert (frame == CANARY).all()
        gate, up = x.split(size, -1)
        if bend == "silu":  # of the others, torch rounds every step
            assert_rounded(out, bent(gate, up, bend), 2)


INF, NAN = torch.inf, torch.nan
ENDS = [0.0, -0.0, -60, -80, -89, -1e4, 80, 1e4, 1e38, -1e38, INF, -INF, NAN]


@pytest.mark.parametrize("bend,gate,up", [
    ("silu", ENDS, [1.0] * len(ENDS)),
    ("clamped", [-1e4, -9, -7, 0, 7, 7.5, 1e30, INF, -INF, NAN, 2.0, 2.0],
     [1.0, 9, -9, 5, 7, 7.5, -7.5, 1.0, 1.0, 1.0, NAN, -INF]),
])  # fmt: skip
def test_gates_at_the_ends_of_the_range(bend, gate, up) -> None:
    for _ in instruction_sets():
        out = gate_mul(torch.tensor([gate + up]), bend=bend)[0]
        expected = bent(torch.tensor(gate), torch.tensor(up), bend)
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-36, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_round_as_in_torch(dtype: torch.dtype) -> None:
    x, weight = draw(0, dtype, 50, 600), draw(1, dtype, 600)
    gate, up = x.split(300, -1)
    for _ in instruction_sets():
        assert (rms_norm(x, weight, EPS) == normalize(x, EPS).mul_(weight)).float().mean() > 0.99
        assert (gate_mul(x) == functional.silu(gate).mul_(up)).float().mean() > 0.99


def test_float16_overflow_is_infinite_as_in_torch() -> None:
    x = torch.tensor([[65_504.0, 40_000, -40_000, 1.0, 65_504, 2e-7]]).half().expand(2, 6).contiguous()
    addend = torch.tensor([15.9, 40_000, -40_000, 1.0, 16.0, 3e-8]).half().expand(2, 6).contiguous()
    gate_up = torch.cat((x, addend), 1)
    for _ in instruction_sets():
        residual = addend.clone()
        rms_norm(x, torch.ones(6).half(), EPS, residual=residual)
        assert torch.equal(residual, x + addend)
        assert residual[0].isinf().tolist() == [False, True, True, False, True, False]
        torch.testing.assert_close(gate_mul(gate_up), functional.silu(x) * addend, rtol=1e-3, atol=6e-8)


class Rope:
    def __init__(
        self,
        dtype: torch.dtype,
        tokens: int,
        heads: int,
        kv_heads: int,
        half: int,
        norm: bool,
        seed: int,
        *,
        kept: int = 0,
        from_one: bool = False,
    ):
        size = 2 * half + kept
        self.heads, self.kv_heads = heads, kv_heads
        # Rows of a wider projection; heads of a token are contiguous.
        fused = draw(seed, dtype, tokens, (heads + 2 * kv_heads) * size)
        self.qkv = fused.unflatten(1, (-1, size))
        angles = draw(seed + 1, torch.float32, tokens, 1, half) * 30
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        weights = draw(seed + 2, dtype, size), draw(seed + 3, dtype, size)
        self.norm = HeadNorms(*weights, EPS, from_one) if norm else None
        self.slots = torch.randperm(5 * 16, generator=torch.Generator().manual_seed(seed))[:tokens]
        self.pool = torch.full((2, 5, kv_heads, 16, size), CANARY, dtype=dtype)

    def run(self, out: Tensor) -> Tensor:
        return rope_store(
            self.qkv, self.heads, self.cos, self.sin, self.slots, *self.pool, out=out, norm=self.norm
        )

    def expected(self) -> Tensor:
        qk = self.qkv[:, : -self.kv_heads]
        if self.norm is not None:
            parts = zip(self.norm[:2], qk.split([self.heads, self.kv_heads], 1))
            qk = torch.cat([by_torch(w, self.norm.from_one).by_torch(x) for w, x in parts], 1)
        return rotate(qk, self.cos, self.sin)

    def stored(self) -> tuple[Tensor, Tensor]:
        keys, values = (pool[self.slots // 16, :, self.slots % 16] for pool in self.pool)
        return keys, values


@settings(max_examples=examples(60))
@given(
    dtype=dtypes,
    tokens=st.integers(0, 9),
    heads=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    half=st.sampled_from([0, 1, 3, 8, 16, 20, 40, 64]),
    kept=st.sampled_from([0, 0, 0, 1, 2, 16, 35, 64]),
    norm=st.booleans(),
    from_one=st.booleans(),
    seed=seeds,
)
def test_rotation_and_store(dtype, tokens, heads, kv_heads, half, kept, norm, from_one, seed) -> None:
    assume(half + kept)
    for _ in instruction_sets():
        rope = Rope(dtype, tokens, heads, kv_heads, half, norm, seed, kept=kept, from_one=from_one)
        want, before = rope.expected(), rope.qkv.clone()
        got = rope.run(torch.empty(tokens, heads, 2 * half + kept, dtype=dtype))
        keys, values = rope.stored()
        assert torch.equal(values, before[:, -kv_heads:])
        assert torch.equal(rope.qkv, before)
        # A sum in another order moves a norm by a bit, and the difference of two products cancels.
        scale = float(want.abs().max()) if tokens else 1.0
        close = max(2 * unit(dtype), 2.0**-21)
        torch.testing.assert_close(got, want[:, :heads], rtol=close, atol=close * scale)
        torch.testing.assert_close(keys, want[:, heads:], rtol=close, atol=close * scale)
        if not norm and dtype != torch.float32:
            assert torch.equal(torch.cat((got, keys), 1), want)
        # Nothing else was written, and in place is the same.
        rope.pool[:, rope.slots // 16, :, rope.slots % 16] = CANARY
        assert (rope.pool == CANARY).all()
        in_place = rope.run(rope.qkv[:, :heads])
        assert torch.equal(in_place, got)
        assert torch.equal(rope.stored()[0], keys)
        assert torch.equal(rope.qkv[:, heads:], before[:, heads:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    size, tokens = 130, 300
    for _ in instruction_sets():
        x, weight = draw(0, dtype, tokens, 2 * size), draw(1, dtype, 2 * size)
        rope = Rope(dtype, 60, 5, 2, 65, True, 2)
        with threads(1):
            norms = torch.cat([rms_norm(row[None], weight, EPS) for row in x])
            gates = torch.cat([gate_mul(row[None]) for row in x])
            one_by_one = Rope(dtype, 60, 5, 2, 65, True, 2)
            queries = torch.empty(60, 5, 130, dtype=dtype)
            for token in range(60):
                cut = slice(token, token + 1)
                qkv, *rest = (getattr(one_by_one, name)[cut] for name in ("qkv", "cos", "sin", "slots"))
                rope_store(qkv, 5, *rest, *one_by_one.pool, out=queries[cut], norm=one_by_one.norm)
        with threads(3):
            assert torch.equal(rms_norm(x, weight, EPS), norms)
            assert torch.equal(gate_mul(x), gates)
            assert torch.equal(rope.run(torch.empty(60, 5, 130, dtype=dtype)), queries)
            assert torch.equal(rope.pool, one_by_one.pool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_are_not_hidden(dtype: torch.dtype) -> None:
    for _ in instruction_sets():
        x, weight = draw(0, dtype, 3, 40).clone(), torch.ones(40, dtype=dtype)
        x[1, 39] = torch.nan
        x[2, 0] = torch.inf
        out = rms_norm(x, weight, EPS)
        assert out[0].isfinite().all()
        assert out[1].isnan().all()
        assert out[2, 0].isnan()
        gated = gate_mul(x)
        assert gated[0].isfinite().all()
        assert not gated[1:].isfinite().all(-1).any()


X = torch.zeros(3, 8)


@pytest.mark.parametrize("call", [
    lambda: rms_norm(X, X[0].bfloat16(), EPS), lambda: rms_norm(X.T, torch.zeros(3), EPS),
    lambda: rms_norm(X, torch.zeros(7), EPS), lambda: rms_norm(X, X[0], EPS, residual=torch.zeros(2, 8)),
    lambda: rms_norm(X, X[0], EPS, residual=torch.zeros(8, 3).T),
    lambda: rms_norm(X, X[0], EPS, out=torch.zeros(3, 7)),
    lambda: rms_norm(X.double(), X[0].double(), EPS),
    lambda: gate_mul(X.T), lambda: gate_mul(X, torch.zeros(3, 8)),
    lambda: gate_mul(X, torch.zeros(3, 4).bfloat16()),
    lambda: gate_mul(torch.zeros(3, 7)),
])  # fmt: skip
def test_misreadable_tensors_are_refused(call) -> None:
    for _ in instruction_sets():
        with pytest.raises(ValueError):
            call()


@pytest.mark.parametrize("change", [
    {"qkv": torch.zeros(4, 6, 16)[..., ::2]}, {"qkv": torch.zeros(6, 4, 8).transpose(0, 1)},
    {"qkv": torch.zeros(4, 7, 8)}, {"qkv": torch.zeros(4, 6, 7)}, {"cos": torch.zeros(4, 1, 3)},
    {"sin": torch.zeros(4, 1, 8)[..., :4]}, {"sin": torch.zeros(3, 1, 4)},
    {"cos": torch.zeros(4, 1, 4).bfloat16()},
    {"slots": torch.zeros(4, dtype=torch.int32)}, {"slots": torch.zeros(8, dtype=torch.int64)[::2]},
    {"slots": torch.zeros(3, dtype=torch.int64)}, {"keys": torch.zeros(2, 2, 8, 8)},
    {"values": torch.zeros(2, 2, 8, 16).transpose(2, 3)}, {"out": torch.zeros(4, 3, 8)},
    {"out": torch.zeros(2, 4, 8).transpose(0, 1)}, {"norm": HeadNorms(torch.zeros(7), torch.zeros(8), EPS)},
    {"norm": HeadNorms(torch.zeros(8), torch.zeros(8).bfloat16(), EPS)},
])  # fmt: skip
def test_invalid_rope_parameters_are_refused(change) -> None:
    for _ in instruction_sets():
        given = {
            "qkv": torch.zeros(4, 6, 8), "num_heads": 2,
            "cos": torch.zeros(4, 1, 4), "sin": torch.zeros(4, 1, 4),
            "slots": torch.zeros(4, dtype=torch.int64), "keys": torch.zeros(2, 2, 16, 8),
            "values": torch.zeros(2, 2, 16, 8),
        }  # fmt: skip
        options = {"out": torch.ones(4, 2, 8), "norm": HeadNorms(torch.zeros(8), torch.zeros(8), EPS)}
        assert not rope_store(*given.values(), **options).any()
        arguments = {name: change.get(name, value) for name, value in given.items()}
        with pytest.raises(ValueError):
            rope_store(
                *arguments.values(), **{name: change.get(name, value) for name, value in options.items()}
            )


# Latents and gates of rows


@settings(max_examples=examples(30))
@given(
    dtype=dtypes,
    tokens=st.integers(0, 9),
    heads=st.integers(1, 4),
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 40), st.integers(0, 5)),
    interleaved=st.booleans(),
    seed=seeds,
)
def test_latents_are_rotated_and_normalised_as_torch_does(
    dtype, tokens, heads, sizes, interleaved, seed
) -> None:
    rope, latent, nope = 2 * sizes[0], sizes[1], sizes[2]
    q = normal(seed, dtype, tokens, heads, nope + rope)
    kv = normal(seed + 1, dtype, tokens, latent + rope + 3)[:, 3:]
    angle = normal(seed + 2, torch.float32, tokens, 1, rope // 2)
    cos, sin, weight = angle.cos().to(dtype), angle.sin().to(dtype), normal(seed + 3, dtype, latent)
    for _ in instruction_sets():
        queries = torch.full((tokens, heads, latent + rope), 77.0, dtype=dtype)
        keys = torch.empty(tokens, latent + rope, dtype=dtype)
        rotate_latents(q[..., nope:], kv, cos, sin, (weight, 1e-6), queries, keys, interleaved=interleaved)
        assert_near(queries[..., latent:], rotate(q[..., nope:], cos, sin, interleaved=interleaved), dtype)
        assert (queries[..., :latent] == 77).all()
        rotated = rotate(kv[:, None, latent:], cos, sin, interleaved=interleaved)
        assert_near(keys[:, latent:], rotated.squeeze(1), dtype)
        assert_near(keys[:, :latent], normalize(kv[:, :latent], 1e-6) * weight, dtype, 3)


def test_latents_that_would_be_misread_are_refused() -> None:
    right = {
        "q_rope": torch.zeros(2, 3, 4), "kv": torch.zeros(2, 9), "cos": torch.zeros(2, 1, 2),
        "sin": torch.zeros(2, 1, 2),
        "norm": (torch.zeros(5), 1e-6), "queries": torch.zeros(2, 3, 9), "keys": torch.zeros(2, 9),
    }  # fmt: skip
    rotate_latents(**right, interleaved=True)
    for name, wrong in (
        ("q_rope", torch.zeros(2, 3, 6)), ("kv", torch.zeros(2, 8)),
        ("cos", torch.zeros(2, 1, 3)), ("keys", torch.zeros(9, 2).T),
        ("norm", (torch.zeros(6), 1e-6)), ("queries", torch.zeros(2, 3, 18)[..., :9]),
        ("sin", torch.zeros(2, 1, 2).bfloat16()),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="no rotation"):
            rotate_latents(**(right | {name: wrong}), interleaved=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_weighted_by_sigmoids_of_their_gates(dtype) -> None:
    for size in (5, 16, 72):
        x, qkv = normal(1, dtype, 7, 3 * size), normal(2, dtype, 7, 3, 2 * size) * 4
        gates = qkv[..., size:]
        gates[0, 0, :3] = torch.tensor([300.0, -300.0, 0.0])
        for _ in instruction_sets():
            got = gate_heads(x.clone(), gates)
            assert_near(got, x.double() * functional.sigmoid(gates.double()).flatten(1), dtype)
            assert torch.equal(gate_heads(x[4:5].clone(), gates[4:5]), got[4:5])
        for wrong in (gates[:6], gates.double(), gates.transpose(1, 2)):
            with pytest.raises(ValueError, match="no gates of heads"):
                gate_heads(x, wrong)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_weighted_by_the_sigmoid_of_its_gate(dtype) -> None:
    x, gate = normal(1, dtype, 7, 37), normal(2, dtype, 7, 1) * 4
    gate[:3, 0] = torch.tensor([300.0, -300.0, 0.0])
    for _ in instruction_sets():
        got = sigmoid_mul(x.clone(), gate)
        assert_near(got, x.double() * functional.sigmoid(gate.double()), dtype)
        assert torch.equal(got[:2], torch.stack([x[0], torch.zeros_like(x[1])]) * x[:2].sign().abs())
        assert torch.equal(sigmoid_mul(x[4:5].clone(), gate[4:5]), got[4:5])
    for wrong in (gate.T, gate[:6], gate.double()):
        with pytest.raises(ValueError, match="no product"):
            sigmoid_mul(x, wrong)
