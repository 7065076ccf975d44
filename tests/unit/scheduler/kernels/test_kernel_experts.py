"""Choice, sorting, grouped products and weighted sums of experts against float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import assert_near, instruction_sets, least, normal, packed, threads, unit
from support.properties import examples

from caesura.scheduler.kernels import experts, native
from caesura.scheduler.kernels.decoder_layers import GroupRouting
from caesura.scheduler.layers.moe import best_in_groups

pytestmark = pytest.mark.usefixtures("built")
DTYPES = native.FLOATS


@st.composite
def logits(draw):
    dtype = draw(st.sampled_from(DTYPES))
    tokens, count = draw(st.integers(0, 20)), draw(st.integers(1, 140))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    values = torch.randn(tokens, count, generator=generator) * draw(st.sampled_from([0.01, 1.0, 30.0]))
    if draw(st.booleans()):  # ties, zeros of both signs among them
        values = values.round()
    if draw(st.booleans()) and tokens:
        values[:, 1:][torch.rand(tokens, count - 1, generator=generator) < 0.3] = -torch.inf
    return values.to(dtype), draw(st.integers(1, count)), draw(st.booleans())


@settings(max_examples=examples(60))
@given(logits())
def test_choice_is_the_largest_and_weights_are_softmax(case):
    values, k, normalize = case
    order = (-values.double()).argsort(dim=-1, stable=True)[:, :k]
    probabilities = values.double().softmax(-1).gather(1, order)
    if normalize:
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    # A logit less the largest one is rounded before its exponential is taken; beyond 88 that is 0.
    distance = (values.amax(-1, keepdim=True).double() - values.double().gather(1, order)).clamp(max=88)
    relative = unit(values.dtype) + (values.shape[1] + 10 + distance) * 2.0**-24
    for name in instruction_sets():
        ids, weights = experts.route(values, k, normalize=normalize)
        assert torch.equal(ids, order), name
        assert torch.equal(weights, weights.to(values.dtype).float())
        # Denormal float32 weights may be flushed to zero.
        assert (
            (weights - probabilities).abs() <= relative * probabilities + max(least(values.dtype), 1e-37)
        ).all(), name


def test_nan_shows_in_all_weights_of_its_token_only():
    values = torch.randn(4, 37, generator=torch.Generator().manual_seed(0))
    clean = values.clone()
    values[1, 5] = torch.nan
    values[2] = torch.nan
    for _ in instruction_sets():
        ids, weights = experts.route(values, 4, normalize=True)
        expected_ids, expected = experts.route(clean, 4, normalize=True)
        assert weights[1:3].isnan().all()
        assert torch.equal(weights[[0, 3]], expected[[0, 3]])
        assert torch.equal(ids[[0, 3]], expected_ids[[0, 3]])
        assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 37 for row in ids.tolist())


@st.composite
def choices(draw):
    """Expert ids [T, k]; nothing says that a token's are distinct."""
    tokens, k, count = draw(st.integers(0, 30)), draw(st.integers(1, 6)), draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    return torch.randint(0, count, (tokens, k), generator=generator), count


@settings(max_examples=examples(60))
@given(choices())
def test_pairs_are_sorted_by_expert_then_token(case):
    ids, count = case
    groups = experts.group(ids, count)
    flat = ids.flatten().tolist()
    order = sorted(range(len(flat)), key=lambda pair: flat[pair])
    assert groups.tokens.tolist() == [pair // ids.shape[1] for pair in order]
    assert [order[place] for place in groups.places.flatten().tolist()] == list(range(len(flat)))
    hit = sorted(set(flat))
    assert groups.count == len(hit)
    assert groups.experts[: groups.count].tolist() == hit
    sorted_ids = [flat[pair] for pair in order]
    assert groups.starts[: groups.count].tolist() == [sorted_ids.index(expert) for expert in hit]
    assert groups.starts[groups.count] == len(flat)


@pytest.mark.parametrize("wrong", [-1, 5, 2**40])
def test_an_id_of_no_expert_is_refused(wrong):
    with pytest.raises(IndexError, match=r"beyond \[0, 5\)"):
        experts.group(torch.tensor([[0, 4], [wrong, 1]]), 5)


@st.composite
def products(draw):
    dtype = draw(st.sampled_from(DTYPES))
    ids, count = draw(choices())
    outputs = draw(st.integers(1, 70))
    inputs = draw(st.integers(1, 70)) * (4 // dtype.itemsize)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    x = torch.randn(ids.numel(), inputs, generator=generator).to(dtype)
    return ids, x, torch.randn(count, outputs, inputs, generator=generator).to(dtype)


@settings(max_examples=examples(60))
@given(products())
def test_grouped_product_matches_float64_and_writes_nothing_else(case):
    ids, x, weights = case
    count, outputs, inputs = weights.shape
    groups = experts.group(ids, count)
    of_rows = weights.double()[ids.flatten().sort().values]
    expected = (of_rows @ x.double().unsqueeze(-1)).squeeze(-1)
    magnitude = (of_rows.abs() @ x.double().abs().unsqueeze(-1)).squeeze(-1)
    bound = magnitude * ((inputs + 2) * 2.0**-24 + unit(x.dtype)) + least(x.dtype)
    product = experts.GroupedProduct(packed(weights), outputs, inputs, count=count)
    for name in instruction_sets():
        memory = torch.full((len(x) + 2, outputs), 77.0, dtype=x.dtype)
        got = product(x, groups, memory[1:-1])
        assert ((got.double() - expected).abs() <= bound).all(), name
        assert (memory[[0, -1]] == 77).all()


@settings(max_examples=examples(60))
@given(choices(), st.integers(1, 70), st.sampled_from(DTYPES))
def test_sum_is_weighted_in_float32_and_rounded_once(case, size, dtype):
    ids, count = case
    generator = torch.Generator().manual_seed(size)
    y = torch.randn(ids.numel(), size, generator=generator).to(dtype)
    weights = torch.randn(ids.shape, generator=generator)
    groups = experts.group(ids, count)
    terms = y.double()[groups.places] * weights.double().unsqueeze(-1)
    bound = terms.abs().sum(1) * (ids.shape[1] + 1) * 2.0**-24 + terms.sum(1).abs() * unit(dtype)
    bound += least(dtype)
    for name in instruction_sets():
        assert ((experts.combine(y, groups, weights).double() - terms.sum(1)).abs() <= bound).all(), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_in_every_company(dtype):
    generator = torch.Generator().manual_seed(5)
    tokens, count, k, hidden, outputs = 500, 6, 3, 130, 70
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    weights = torch.randn(count, outputs, hidden, generator=generator).to(dtype) / math.sqrt(hidden)
    scores = torch.randn(tokens, count, generator=generator).to(dtype)
    scores[:, 0] += 2  # of which one expert gets nearly every token
    product = experts.GroupedProduct(packed(weights), outputs, hidden, count=count)

    def run(rows: torch.Tensor) -> torch.Tensor:
        ids, factors = experts.route(scores[rows], k, normalize=True)
        groups = experts.group(ids, count)
        return experts.combine(product(x[rows][groups.tokens], groups), groups, factors)

    for _ in instruction_sets():
        alone = torch.cat([run(torch.tensor([token])) for token in range(tokens)])
        for number in (1, 2, 3):
            with threads(number):
                for end in (2, 13, 97, tokens):
                    assert torch.equal(run(torch.arange(end)), alone[:end]), (number, end)
                order = torch.randperm(tokens, generator=generator)
                assert torch.equal(run(order), alone[order])


def test_long_rows_go_through_several_chunks():
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(130, 4096, generator=generator).bfloat16()
    weights = torch.randn(3, 40, 4096, generator=generator).bfloat16()
    ids = torch.full((130, 1), 1)
    ids[7] = 2
    groups = experts.group(ids, 3)
    for _ in instruction_sets():
        for number in (1, 2):
            with threads(number):
                got = experts.GroupedProduct(packed(weights), 40, 4096, count=3)(x[groups.tokens], groups)
            expected = torch.cat([x[ids[:, 0] == 1] @ weights[1].T, x[7:8] @ weights[2].T])
            torch.testing.assert_close(got, expected, rtol=0.02, atol=0.5)


@pytest.mark.parametrize("change", [
    {"x": torch.zeros(6, 80)}, {"x": torch.zeros(6, 64).bfloat16()}, {"x": torch.zeros(64, 6).T},
    {"x": torch.zeros(5, 64)}, {"out": torch.zeros(6, 41)}, {"out": torch.zeros(40, 6).T},
    {"out": torch.zeros(6, 40).bfloat16()}, {"ids": torch.zeros(3, 2, dtype=torch.int64), "experts": 7},
])  # fmt: skip
def test_products_that_do_not_fit_are_refused(change):
    given = {
        "x": torch.zeros(6, 64), "out": torch.zeros(6, 40),
        "ids": torch.zeros(3, 2, dtype=torch.int64), "experts": 4,
    } | change  # fmt: skip
    product = experts.GroupedProduct(torch.zeros(4 * 64, 64), 40, 64, count=4)
    with pytest.raises(ValueError, match="no product"):
        product(given["x"], experts.group(given["ids"], given["experts"]), given["out"])


@pytest.mark.parametrize("storage", [
    torch.zeros(3 * 64, 64), torch.zeros(4 * 40, 64), torch.zeros(4 * 64, 80), torch.zeros(64, 4 * 64).T,
    torch.zeros(4 * 64 * 64 + 1)[1:].view(4 * 64, 64),
])  # fmt: skip
def test_storage_of_other_shapes_is_refused(storage):
    with pytest.raises(ValueError, match="does not hold 4 x 40 packed rows of 64"):
        experts.GroupedProduct(storage, 40, 64, count=4)


def test_other_mismatches_are_refused():
    groups = experts.group(torch.zeros(3, 2, dtype=torch.int64), 4)
    for y, weights in (
        (torch.zeros(5, 8), torch.zeros(3, 2)),
        (torch.zeros(6, 8), torch.zeros(2, 3)),
        (torch.zeros(6, 8), torch.zeros(3, 2).double()),
        (torch.zeros(6, 8).double(), torch.zeros(3, 2)),
        (torch.zeros(8, 6).T, torch.zeros(3, 2)),
    ):
        with pytest.raises(ValueError, match="no sum"):
            experts.combine(y, groups, weights)
    for values, k in ((torch.zeros(3, 4), 0), (torch.zeros(3, 4), 5), (torch.zeros(4, 3).T, 1)):
        with pytest.raises(ValueError, match="no choice"):
            experts.route(values, k, normalize=True)
    with pytest.raises(ValueError, match="no choice"):
        experts.route(torch.zeros(3, 4).double(), 1, normalize=True)
    for ids in (torch.zeros(3, 2, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int64).T):
        with pytest.raises(ValueError, match="ids are"):
            experts.group(ids, 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_expert_has_its_bias(dtype) -> None:
    ids = torch.tensor([[2, 0], [2, 3], [0, 2]])
    groups = experts.group(ids, 4)
    x, w, bias = normal(1, dtype, 6, 30), normal(2, dtype, 4, 41, 30), normal(3, dtype, 4, 41)
    product = experts.GroupedProduct(packed(w), 41, 30, count=4)
    of_rows = ids.flatten().sort().values
    expected = (w[of_rows].double() @ x.double().unsqueeze(-1)).squeeze(-1) + bias[of_rows].double()
    for _ in instruction_sets():
        assert_near(product(x, groups, bias=bias) / 30**0.5, expected / 30**0.5, dtype)
    for wrong in (bias[:3], bias[:, :40], bias.T.contiguous().T, bias.double()):
        with pytest.raises(ValueError, match="no product"):
            product(x, groups, bias=wrong)


# By groups


@settings(max_examples=examples(40))
@given(
    tokens=st.integers(0, 20),
    groups=st.sampled_from([(1, 1), (3, 2), (8, 4), (64, 9)]),
    size=st.integers(2, 9),
    sigmoid=st.booleans(),
    best_two=st.booleans(),
    normalize=st.booleans(),
    biased=st.booleans(),
    seed=st.integers(0, 999),
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
