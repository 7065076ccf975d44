"""Operations that layers of experts and latents are put together from, against torch and float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.forward_batches import Row, attention_shape, forward_batch
from support.kernels import instruction_sets, threads, unit
from support.properties import examples
from torch import Tensor
from torch.nn import functional

from caesura.scheduler.attention.mla import LatentBackend
from caesura.scheduler.attention.paged_cpu import PagedCpuBackend
from caesura.scheduler.cache.pool import MLAPool
from caesura.scheduler.kernels import experts, linear, native
from caesura.scheduler.kernels.decoder_layers import GroupRouting
from caesura.scheduler.kernels.elementwise import rotate_latents, sigmoid_mul
from caesura.scheduler.layers.moe import best_in_groups
from caesura.scheduler.layers.norm import normalize
from caesura.scheduler.layers.rotary import rotate

DTYPES = native.FLOATS
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 999)


@pytest.fixture(autouse=True)
def kernels() -> None:
    if native.why_not():
        pytest.skip(f"no compiled kernels: {native.why_not()}")


def normal(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(weights: Tensor) -> Tensor:
    """[B, N, K] as storage."""
    count, outputs, inputs = weights.shape
    rows, columns = linear.storage_shape(outputs, inputs, weights.dtype)
    storage = torch.zeros(count * rows, columns, dtype=weights.dtype)
    for number, weight in enumerate(weights):
        linear.pack_rows(storage, weight, number * rows)
    return storage


def near(got: Tensor, want: Tensor, dtype: torch.dtype, steps: int = 2) -> None:
    close = steps * max(unit(dtype), 2.0**-20)
    torch.testing.assert_close(got.double(), want.double(), rtol=close, atol=close)


@settings(max_examples=examples(30))
@given(
    dtype=dtypes,
    tokens=st.integers(0, 70),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 70), st.integers(1, 40)),
    seed=seeds,
)
def test_products_of_heads_match_float64_and_write_nothing_else(dtype, tokens, sizes, seed) -> None:
    heads, outputs, inputs = sizes[0], sizes[1], 2 * sizes[2]
    x = normal(seed, dtype, tokens, heads, inputs + 3)[..., 3:]
    w = normal(seed + 1, dtype, heads, outputs, inputs)
    expected = torch.einsum("tbk,bnk->tbn", x.double(), w.double())
    product = linear.BatchedProduct(packed(w), heads, outputs, inputs)
    for _ in instruction_sets():
        memory = torch.full((tokens, heads, outputs + 2), 77.0, dtype=dtype)
        with threads(2):
            got = product(x, memory[..., 1:-1])
        near(got / inputs**0.5, expected / inputs**0.5, dtype, 4)
        assert (memory[..., [0, -1]] == 77).all()
        for row in range(min(tokens, 3)):
            assert torch.equal(
                product(x[row : row + 1], torch.empty(1, heads, outputs, dtype=dtype)), got[row : row + 1]
            )


@pytest.mark.parametrize("change", [
    {"x": torch.zeros(2, 3, 8)}, {"x": torch.zeros(2, 3, 6).bfloat16()}, {"out": torch.zeros(2, 3, 5)},
    {"out": torch.zeros(3, 3, 4)}, {"x": torch.zeros(2, 6, 3).transpose(1, 2)},
])  # fmt: skip
def test_products_of_heads_that_do_not_fit_are_refused(change) -> None:
    given = {"x": torch.zeros(2, 3, 6), "out": torch.zeros(2, 3, 4)} | change
    with pytest.raises(ValueError, match="no products"):
        linear.BatchedProduct(packed(torch.zeros(3, 4, 6)), 3, 4, 6)(**given)
    with pytest.raises(ValueError, match="does not hold"):
        linear.BatchedProduct(torch.zeros(32, 16), 3, 4, 6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wide_product_is_not_rounded(dtype) -> None:
    x, w = normal(1, dtype, 9, 130), normal(2, dtype, 37, 130)
    product = linear.Product(packed(w[None]), 37, 130)
    for _ in instruction_sets():
        got = product(x, wide=True)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), x.double() @ w.double().T, rtol=1e-4, atol=1e-4)
        assert torch.equal(got.to(dtype), product(x))
    with pytest.raises(ValueError, match="no product"):
        product(x, torch.zeros(37, dtype=dtype), wide=True)
    with pytest.raises(ValueError, match="no product"):
        product(x, out=torch.empty(9, 37, dtype=torch.float64), wide=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_expert_has_its_bias(dtype) -> None:
    ids = torch.tensor([[2, 0], [2, 3], [0, 2]])
    groups = experts.group(ids, 4)
    x, w, bias = normal(1, dtype, 6, 30), normal(2, dtype, 4, 41, 30), normal(3, dtype, 4, 41)
    product = experts.GroupedProduct(packed(w), 4, 41, 30)
    of_rows = ids.flatten().sort().values
    expected = (w[of_rows].double() @ x.double().unsqueeze(-1)).squeeze(-1) + bias[of_rows].double()
    for _ in instruction_sets():
        near(product(x, groups, bias=bias) / 30**0.5, expected / 30**0.5, dtype)
    for wrong in (bias[:3], bias[:, :40], bias.T.contiguous().T, bias.double()):
        with pytest.raises(ValueError, match="no product"):
            product(x, groups, bias=wrong)


@settings(max_examples=examples(40))
@given(
    tokens=st.integers(0, 20),
    groups=st.sampled_from([(1, 1), (3, 2), (8, 4), (64, 9)]),
    size=st.integers(2, 9),
    sigmoid=st.booleans(),
    best_two=st.booleans(),
    normalize=st.booleans(),
    biased=st.booleans(),
    seed=seeds,
)
def test_the_choice_by_groups_is_that_of_torch(
    tokens, groups, size, sigmoid, best_two, normalize, biased, seed
) -> None:
    count, top_groups = groups
    total, k = count * size, min(4, top_groups * size)
    by = GroupRouting(groups=count, top_groups=top_groups, sigmoid=sigmoid, best_two=best_two, scale=1.7)
    logits, bias = (
        normal(seed, torch.float32, tokens, total) * 3,
        normal(seed + 1, torch.float32, total) * 0.1,
    )
    expected_ids, expected = best_in_groups(logits, bias if biased else None, k, by, normalize=normalize)
    for _ in instruction_sets():
        ids, weights = experts.route_in_groups(
            logits.clone(), bias if biased else None, k, by, normalize=normalize
        )
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


def test_a_choice_by_groups_with_nan_stays_within_the_experts() -> None:
    logits = torch.zeros(3, 12)
    logits[1] = torch.nan
    logits[2, :7] = torch.nan
    by = GroupRouting(groups=3, top_groups=2, sigmoid=True, best_two=True, scale=1.0)
    for _ in instruction_sets():
        ids, weights = experts.route_in_groups(logits.clone(), None, 5, by, normalize=True)
        assert all(len(set(row)) == 5 and min(row) >= 0 and max(row) < 12 for row in ids.tolist())
        assert weights[1].isnan().all()
        assert weights[0].isfinite().all()


def test_choices_by_groups_that_do_not_fit_are_refused() -> None:
    by = GroupRouting(groups=2, top_groups=1, sigmoid=True, best_two=False, scale=1.0)
    for logits, bias in (
        (torch.zeros(3, 4).bfloat16(), None), (torch.zeros(4, 3).T, None),
        (torch.zeros(3, 4), torch.zeros(3)), (torch.zeros(3, 4), torch.zeros(4).double()),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="no choice"):
            experts.route_in_groups(logits, bias, 1, by, normalize=True)


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
        near(queries[..., latent:], rotate(q[..., nope:], cos, sin, interleaved=interleaved), dtype)
        assert (queries[..., :latent] == 77).all()
        rotated = rotate(kv[:, None, latent:], cos, sin, interleaved=interleaved)
        near(keys[:, latent:], rotated.squeeze(1), dtype)
        near(keys[:, :latent], normalize(kv[:, :latent], 1e-6) * weight, dtype, 3)


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
def test_a_row_is_weighted_by_the_sigmoid_of_its_gate(dtype) -> None:
    x, gate = normal(1, dtype, 7, 37), normal(2, dtype, 7, 1) * 4
    gate[:3, 0] = torch.tensor([300.0, -300.0, 0.0])
    for _ in instruction_sets():
        got = sigmoid_mul(x.clone(), gate)
        near(got, x.double() * functional.sigmoid(gate.double()), dtype)
        assert torch.equal(got[:2], torch.stack([x[0], torch.zeros_like(x[1])]) * x[:2].sign().abs())
        assert torch.equal(sigmoid_mul(x[4:5].clone(), gate[4:5]), got[4:5])
    for wrong in (gate.T, gate[:6], gate.double()):
        with pytest.raises(ValueError, match="no product"):
            sigmoid_mul(x, wrong)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads,latent,rope", [(1, 20, 6), (4, 64, 32), (13, 30, 8), (16, 64, 32), (26, 128, 64)]
)
def test_attention_over_latents_is_that_of_torch(dtype, heads, latent, rope) -> None:
    rows = [Row([0], 70, [1, 2, 3, 4, 5]), Row([0], 0, [6]), Row([0] * 40, 27, [7, 8, 9, 10, 11])]
    batch, width, tokens = forward_batch(rows, 2), latent + rope, 42
    q, k = normal(1, dtype, tokens, heads, width), normal(2, dtype, tokens, 1, width)
    filled = normal(3, dtype, 13 * 16, width)

    def attend(kind) -> tuple[Tensor, Tensor]:
        pool = MLAPool(num_layers=1, num_pages=13, width=width, dtype=dtype)
        pool.layer(0).view(-1, width).copy_(filled)
        backend = kind(pool, attention_shape(pool, heads, latent=latent))
        backend.plan(batch)
        return backend.forward(q, k, k[..., :latent], 0).clone(), pool.layer(0)

    expected, stored = attend(LatentBackend)
    for _ in instruction_sets():
        for count in (1, 3):
            with threads(count):
                got, ours = attend(PagedCpuBackend)
            near(got, expected, dtype, 8 if dtype == torch.float32 else 3)
            assert torch.equal(ours, stored)
