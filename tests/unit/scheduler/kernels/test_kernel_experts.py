"""Choice, sorting, grouped products and weighted sums of experts against float64."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import instruction_sets, least, threads, unit
from support.properties import examples
from support.sanitized import run_sanitized

from caesura.scheduler.kernels import experts, linear, native

DTYPES = native.FLOATS


@pytest.fixture(autouse=True)
def kernels() -> None:
    if native.why_not():
        pytest.skip(f"no compiled kernels: {native.why_not()}")


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


def packed(weights: torch.Tensor) -> torch.Tensor:
    """[experts, N, K] as storage."""
    count, outputs, inputs = weights.shape
    rows, columns = linear.storage_shape(outputs, inputs, weights.dtype)
    storage = torch.zeros(count * rows, columns, dtype=weights.dtype)
    for expert, weight in enumerate(weights):
        linear.pack_rows(storage, weight, expert * rows)
    return storage


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
    product = experts.GroupedProduct(packed(weights), count, outputs, inputs)
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
    product = experts.GroupedProduct(packed(weights), count, outputs, hidden)

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
                got = experts.GroupedProduct(packed(weights), 3, 40, 4096)(x[groups.tokens], groups)
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
    product = experts.GroupedProduct(torch.zeros(4 * 64, 64), 4, 40, 64)
    with pytest.raises(ValueError, match="no product"):
        product(given["x"], experts.group(given["ids"], given["experts"]), given["out"])


@pytest.mark.parametrize("storage", [
    torch.zeros(3 * 64, 64), torch.zeros(4 * 40, 64), torch.zeros(4 * 64, 80), torch.zeros(64, 4 * 64).T,
    torch.zeros(4 * 64 * 64 + 1)[1:].view(4 * 64, 64),
])  # fmt: skip
def test_storage_of_other_shapes_is_refused(storage):
    with pytest.raises(ValueError, match="does not hold 4 x 40 packed rows of 64"):
        experts.GroupedProduct(storage, 4, 40, 64)


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


SANITIZED = """
import torch
from caesura.scheduler.kernels import experts, linear
torch.set_num_threads(2)
torch.manual_seed(0)


def forward(dtype, tokens, count, k, outputs, inputs):
    x, w = torch.randn(tokens, inputs).to(dtype), torch.randn(count, outputs, inputs).to(dtype)
    rows, columns = linear.storage_shape(outputs, inputs, dtype)
    store = torch.zeros(count * rows, columns, dtype=dtype)
    for expert in range(count):
        linear.pack_rows(store, w[expert], expert * rows)
    ids, weights = experts.route(torch.randn(tokens, count).to(dtype), k, normalize=True)
    groups = experts.group(ids, count)
    product = experts.GroupedProduct(store, count, outputs, inputs)

    def run(part):
        groups = experts.group(ids[part], count)
        return experts.combine(product(x[part][groups.tokens], groups), groups, weights[part])

    y = run(slice(None))
    terms = (w[ids].double() @ x.double()[:, None, :, None]).squeeze(-1) * weights.double().unsqueeze(-1)
    torch.testing.assert_close(y.double(), terms.sum(1), rtol=0.02, atol=0.1)
    assert torch.equal(run(slice(tokens // 2, None)), y[tokens // 2 :])
    try:
        experts.group(torch.full((3, 2), count), count)
    except IndexError:
        return
    raise AssertionError


for isa in native.ISAS[1:]:
    with native.limited_to(isa) as possible:
        for dtype in native.FLOATS if possible else ():
            tokens = 300 if dtype == torch.bfloat16 else 60  # more than an AMX chunk, or than wait unpacked
            for shape in (
                (1, 1, 1, 1, 2), (13, 5, 3, 33, 30), (3, 40, 17, 64, 32),
                (tokens, 2, 2, 97, 98), (0, 4, 2, 8, 8),
            ):
                forward(dtype, *shape)
print("clean")
"""


@pytest.mark.long
def test_no_access_out_of_bounds_and_no_undefined_behaviour(tmp_path):
    with native.limited_to("avx512bf16") as possible:
        header = Path(__file__).parents[3] / "support" / "fake_amx.h"
        flags = ("-include", str(header)) if possible else ()
    assert run_sanitized(SANITIZED, tmp_path, "linear", "experts", flags=flags) == "clean\n"
