"""Packed products against float64, their bits across batch compositions."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import assert_near, instruction_sets, least, normal, packed, threads, unit
from support.properties import examples

from caesura.scheduler.kernels import linear, native

pytestmark = pytest.mark.usefixtures("built")
DTYPES = native.FLOATS
LAYOUTS = (*DTYPES, linear.FP8, linear.INT8)


@pytest.fixture(params=native.ISAS[1 : native.ISAS.index(native.isa()) + 1] or [native.ISAS[1]])
def isa(request):
    with native.limited_to(request.param) as possible:
        if not possible:
            pytest.skip(f"no {request.param} here")
        yield request.param


def multiplied(x, weight, bias, out):
    return linear.Product(weight, out.shape[1], x.shape[1])(x, bias, out)


def product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return multiplied(x, packed(w), bias, x.new_empty(len(x), len(w)))


def tolerance(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    magnitude = x.double().abs() @ w.double().abs().T + (0 if bias is None else bias.double().abs())
    steps = x.shape[1] + 2
    return magnitude * (steps * 2.0**-24 + unit(x.dtype)) + least(x.dtype)


@st.composite
def products(draw):
    dtype = draw(st.sampled_from(DTYPES))
    rows, outputs = draw(st.integers(0, 40)), draw(st.integers(1, 100))
    inputs = draw(st.integers(1, 150)) * (4 // dtype.itemsize)
    seed = draw(st.integers(0, 2**16))
    padding = draw(st.integers(0, 3))  # of rows, so that strides are odd and rows unaligned
    x, w = normal(seed, dtype, rows, inputs + padding)[:, padding:], normal(seed + 1, dtype, outputs, inputs)
    bias = normal(seed + 2, dtype, outputs) if draw(st.booleans()) else None
    out = torch.full((rows + 1, outputs + padding), 77.0, dtype=dtype)
    return x, w, bias, out


@settings(max_examples=examples(60))
@given(products())
def test_product_matches_float64_and_writes_nothing_else(case):
    x, w, bias, out = case
    expected = x.double() @ w.double().T + (0 if bias is None else bias.double())
    for name in instruction_sets():
        out.fill_(77.0)
        target = out[: len(x), : len(w)]
        multiplied(x, packed(w), bias, target)
        assert ((target.double() - expected).abs() <= tolerance(x, w, bias)).all(), name
        assert (out[len(x) :] == 77).all()
        assert (out[:, len(w) :] == 77).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs,inputs", [(96, 130), (256, 512), (33, 64)])
def test_a_row_has_the_same_bits_in_every_company(isa, dtype, outputs, inputs):
    x, bias = normal(5, dtype, 150, inputs), normal(6, dtype, outputs)
    w = packed(normal(7, dtype, outputs, inputs))

    def run(rows):
        return multiplied(rows, w, bias, rows.new_empty(len(rows), outputs))

    alone = torch.cat([run(x[i : i + 1]) for i in range(len(x))])
    for count in (1, 2, 3):
        with threads(count):
            for rows in (*range(1, 28), 48, 49, 97, 150):
                assert torch.equal(run(x[:rows]), alone[:rows]), (count, rows)
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(5))
            assert torch.equal(run(x[order]), alone[order])


@pytest.mark.parametrize("outputs,inputs", [(77, 130), (33, 514)])
def test_float16_is_computed_in_float32_and_rounded_once(isa, outputs, inputs):
    shapes = (60, inputs), (outputs, inputs), (outputs,)
    x, w, bias = (normal(seed, torch.float16, *shape) for seed, shape in enumerate(shapes))
    x[1], x[2] = 30_000, 65_504  # whose sums are beyond it, and some of them not
    w[3], w[4, 0], w[4, 1:] = 2e-6, 0.5, 0  # subnormal numbers; and a sum that is one product
    narrow, wide = (
        linear.Product(packed(w.to(dtype)), outputs, inputs) for dtype in (x.dtype, torch.float32)
    )
    for rows in (1, 3, 4, 5, 13, 60):
        expected = wide(x[:rows].float(), bias.float())
        assert torch.equal(narrow(x[:rows], bias), expected.half())
        assert torch.equal(narrow(x[:rows], wide=True), wide(x[:rows].float()))
    got = narrow(x)
    assert got[1].isinf().sum() > outputs / 2
    assert got[:, 4].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_long_inputs_go_through_several_chunks_of_rows(isa, dtype):
    x, w = normal(6, dtype, 130, 4096), normal(7, dtype, 64, 4096)  # more than a second-level cache holds
    expected = x.double() @ w.double().T
    assert ((product(x, w).double() - expected).abs() <= tolerance(x, w, None)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_not_a_number_stays_in_its_row(isa, dtype):
    x, w = torch.ones(5, 64, dtype=dtype), torch.ones(40, 64, dtype=dtype)
    x[2, 63] = torch.nan
    x[3, 0] = torch.inf
    y = product(x, w)
    assert y[2].isnan().all()
    assert (y[3] == torch.inf).all()
    assert (y[[0, 1, 4]] == 64).all()


# Of every head


@settings(max_examples=examples(30))
@given(
    dtype=st.sampled_from(DTYPES),
    tokens=st.integers(0, 70),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 70), st.integers(1, 40)),
    seed=st.integers(0, 999),
)
def test_products_of_heads_match_float64_and_write_nothing_else(dtype, tokens, sizes, seed) -> None:
    heads, outputs, inputs = sizes[0], sizes[1], 2 * sizes[2]
    x = normal(seed, dtype, tokens, heads, inputs + 3)[..., 3:]
    w = normal(seed + 1, dtype, heads, outputs, inputs)
    expected = torch.einsum("tbk,bnk->tbn", x.double(), w.double())
    product = linear.BatchedProduct(packed(w), outputs, inputs, count=heads)
    for _ in instruction_sets():
        memory = torch.full((tokens, heads, outputs + 2), 77.0, dtype=dtype)
        with threads(2):
            got = product(x, memory[..., 1:-1])
        assert_near(got / inputs**0.5, expected / inputs**0.5, dtype, 4)
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
        linear.BatchedProduct(packed(torch.zeros(3, 4, 6)), 4, 6, count=3)(**given)
    with pytest.raises(ValueError, match="does not hold"):
        linear.BatchedProduct(torch.zeros(32, 16), 4, 6, count=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wide_product_is_not_rounded(dtype) -> None:
    x, w = normal(1, dtype, 9, 130), normal(2, dtype, 37, 130)
    product = linear.Product(packed(w), 37, 130)
    for _ in instruction_sets():
        got = product(x, wide=True)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), x.double() @ w.double().T, rtol=1e-4, atol=1e-4)
        assert torch.equal(got.to(dtype), product(x))
    with pytest.raises(ValueError, match="no product"):
        product(x, torch.zeros(37, dtype=dtype), wide=True)
    with pytest.raises(ValueError, match="no product"):
        product(x, out=torch.empty(9, 37, dtype=torch.float64), wide=True)


# FP8


def fp8_case(outputs: int, inputs: int, columns: int, seed: int = 0):
    """Bytes of every kind but NaN, most of them of ordinary size, and scales [outputs, blocks]."""
    generator = torch.Generator().manual_seed(seed)
    w = (100 * torch.randn(outputs, inputs, generator=generator)).clamp(-448, 448).to(linear.FP8)
    some = torch.rand(outputs, inputs, generator=generator) < 0.2
    w.view(torch.uint8)[some] &= 0x87  # subnormal, or zero
    return w, torch.rand(outputs, -(-inputs // columns), generator=generator) * 1e-2


def fp8_product(w: torch.Tensor, scales: torch.Tensor, columns: int, dtype: torch.dtype) -> linear.Product:
    outputs, inputs = w.shape
    lines = torch.zeros(linear.scales_shape(outputs, inputs, columns))
    lines[:, :outputs] = scales.t()
    return linear.Product(packed(w), outputs, inputs, linear.Scales(lines, columns), dtype)


def dequantized(w: torch.Tensor, scales: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return (w.float() * scales.repeat_interleave(columns, dim=1)[:, : w.shape[1]]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs,inputs,columns", [(33, 64, 16), (97, 300, 12), (64, 516, 128), (1, 4, 4)])
def test_fp8_products_are_those_of_the_dequantised_weight(isa, dtype, outputs, inputs, columns):
    w, scales = fp8_case(outputs, inputs, columns)
    x, bias = normal(1, dtype, 110, inputs), normal(2, dtype, outputs)
    product = fp8_product(w, scales, columns, dtype)
    plain = linear.Product(packed(dequantized(w, scales, columns, dtype)), outputs, inputs)
    with native.limited_to("avx512bf16" if isa == "amx" else isa):
        expected, expected_wide = plain(x, bias), plain(x, wide=True)
    for count in (1, 3):
        with threads(count):
            for rows in (*range(1, 14), 48, 50, 110):
                assert torch.equal(product(x[:rows], bias), expected[:rows]), (count, rows)
    assert torch.equal(product(x, wide=True), expected_wide)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_of_fp8_is_multiplied_as_torch_reads_it(isa, dtype):
    w = torch.zeros(256, 64, dtype=torch.uint8)
    place = torch.arange(256) * 7 % 64
    w[torch.arange(256), place] = torch.arange(256, dtype=torch.uint8)
    w = w.view(linear.FP8)
    scales = torch.logspace(-6, 6, 256)[:, None]
    x = torch.ones(9, 64, dtype=dtype)
    x[1:] = 0.5
    expected = dequantized(w, scales, 64, dtype).gather(1, place[:, None]).t()
    product = fp8_product(w, scales, 64, dtype)
    for y in (product(x), product(x[:1]), product(x[:3])):
        torch.testing.assert_close(y[:1], expected, rtol=0, atol=0, equal_nan=True)
        assert y.isnan().sum() == 2 * len(y)


@pytest.mark.parametrize("change", [
    {"columns": 6}, {"lines": torch.zeros(3, 64)}, {"lines": torch.zeros(4, 64).bfloat16()},
    {"lines": torch.zeros(64, 4).T},
    {"weight": torch.zeros(64, 64)}, {"weight": torch.zeros(64, 128, dtype=torch.uint8).view(linear.FP8)},
    {"dtype": linear.FP8}, {"dtype": torch.float64},
])  # fmt: skip
def test_fp8_weights_that_do_not_fit_are_refused(change):
    weight = torch.zeros(64, 64, dtype=torch.uint8).view(linear.FP8)
    given = {"weight": weight, "lines": torch.zeros(4, 64), "columns": 16, "dtype": torch.float32} | change

    def make(weight, lines, columns, dtype):
        return linear.Product(weight, 40, 64, linear.Scales(lines, columns), dtype)

    make(weight, torch.zeros(4, 64), 16, torch.float32)
    with pytest.raises(ValueError, match="packed rows"):
        make(**given)


# Whole numbers of 8 and of 4 bits

NUMBERS = {"int8": (128, None), "int4": (32, linear.INT4), "e2m1": (32, linear.E2M1)}


def packed_numbers(
    w: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, kind: str = "int8"
) -> linear.Product:
    (outputs, inputs), (columns, codes) = w.shape, NUMBERS[kind]
    lines = torch.zeros(linear.scales_shape(outputs, inputs, columns))
    lines[:, :outputs] = scales.t()
    storage = packed(w if codes is None else codes.encode(w))
    return linear.Product(storage, outputs, inputs, linear.Scales(lines, columns, linear.INT8, codes), dtype)


def numbers_case(outputs: int, inputs: int, kind: str = "int8") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(outputs)
    columns, codes = NUMBERS[kind]
    each = torch.arange(-127, 128, dtype=torch.int8) if codes is None else codes.numbers
    w = each[torch.randint(0, len(each), (outputs, inputs), generator=generator)]
    w[0] = each.max()  # the largest sums that there can be
    return w, torch.rand(outputs, -(-inputs // columns), generator=generator) + 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind,outputs,inputs", [
    ("int8", 33, 64), ("int8", 97, 300), ("int8", 64, 516), ("int8", 1, 4),
    ("int4", 33, 64), ("int4", 97, 296), ("e2m1", 64, 520), ("e2m1", 1, 8),
])  # fmt: skip
def test_products_of_whole_numbers_have_the_bits_defined(isa, dtype, kind, outputs, inputs):
    (w, scales), bias = numbers_case(outputs, inputs, kind), normal(2, dtype, outputs)
    columns = NUMBERS[kind][0]
    x = normal(1, dtype, 110, inputs + 3)[:, 3:]
    x[0], x[1], x[2, 1:] = 3.0, -3.0, 0.0
    product = packed_numbers(w, scales, dtype, kind)
    expected = linear.int8_product(x, w, scales, bias, columns)
    for count in (1, 3):
        with threads(count):
            for rows in (*range(1, 14), 24, 25, 48, 50, 110):
                assert torch.equal(product(x[:rows], bias), expected[:rows]), (count, rows)
            assert torch.equal(product(x[3:9]), linear.int8_product(x[3:9], w, scales, None, columns))


@pytest.mark.parametrize("codes", [linear.INT4, linear.E2M1])
def test_every_code_becomes_its_number(codes):
    numbers = codes.numbers.repeat(3, 2)
    words = codes.encode(numbers)
    assert words.dtype == torch.uint8
    assert words.shape == (3, 16)
    assert torch.equal(codes.decode(words), numbers)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_products_are_near_those_of_float64(dtype):
    (w, scales), x = numbers_case(80, 640), normal(3, dtype, 7, 640)
    exact = x.double() @ (w * scales.repeat_interleave(linear.INT8_COLUMNS, dim=1)).double().t()
    error = (linear.int8_product(x, w, scales).double() - exact).norm() / exact.norm()
    assert error < 2 * unit(dtype) + 0.01  # 8 bits of the largest value of a block


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_large_value_of_x_makes_its_own_block_coarse(isa, kind):
    (w, scales), x = numbers_case(40, 384, kind), normal(3, torch.float32, 7, 384)
    columns = NUMBERS[kind][0]
    w[:, columns : 2 * columns] = 0
    product = packed_numbers(w, scales, x.dtype, kind)
    large = x.clone()
    large[:, columns] = 1e6
    assert torch.equal(product(large), product(x))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_int8_rows_that_are_not_finite_give_nothing_finite(isa, wrong):
    (w, scales), x = numbers_case(40, 200), torch.ones(6, 200)
    x[2, 199], x[4], x[5] = wrong, 0.0, 1e-35  # and a row too small for a scale is zero
    for y in (packed_numbers(w, scales, x.dtype)(x), linear.int8_product(x, w, scales)):
        assert y[2].isnan().all()
        assert y[[0, 1, 3]].isfinite().all()
        assert (y[4:] == 0).all()


@pytest.mark.parametrize("dtype,inputs,columns,codes", [
    (torch.int8, 256, 64, None), (torch.uint8, 256, 128, linear.INT4), (torch.int8, 256, 32, linear.INT4),
    (torch.uint8, 252, 32, linear.INT4),
])  # fmt: skip
def test_whole_numbers_in_other_blocks_are_refused(dtype, inputs, columns, codes):
    weight = torch.zeros(64, inputs if codes is None else 128, dtype=dtype)
    scales = linear.Scales(torch.zeros(-(-inputs // columns), 64), columns, linear.INT8, codes)
    with pytest.raises(ValueError, match="packed rows"):
        linear.Product(weight, 40, inputs, scales, torch.float32)


# The layout


def by_index(w: torch.Tensor) -> torch.Tensor:
    words = w.view(torch.int32).numpy()
    panels, tiles = -(-words.shape[0] // 32), -(-words.shape[1] // 16)
    layout = np.zeros((panels, tiles, 2, 16, 16), np.int32)
    for n in range(words.shape[0]):
        for k in range(words.shape[1]):
            layout[n // 32, k // 16, n // 16 % 2, k % 16, n % 16] = words[n, k]
    storage = torch.from_numpy(layout.reshape(-1)).view(w.dtype)
    return storage.view(linear.storage_shape(*w.shape, w.dtype))


@st.composite
def pieces(draw):
    dtype = draw(st.sampled_from(DTYPES))
    outputs, words = draw(st.integers(1, 100)), draw(st.integers(1, 70))
    inputs = words * (4 // dtype.itemsize)
    cuts = sorted(draw(st.sets(st.integers(1, outputs), max_size=5)) | {0, outputs})
    w = normal(draw(st.integers(0, 999)), dtype, outputs, inputs)
    ranges = draw(st.permutations(list(itertools.pairwise(cuts))))
    return w, ranges, draw(st.integers(0, 3))


@settings(max_examples=examples(60))
@given(pieces())
def test_pieces_in_any_order_give_the_layout(case):
    w, ranges, padding = case
    storage = torch.zeros(linear.storage_shape(*w.shape, w.dtype), dtype=w.dtype)
    strided = torch.zeros(w.shape[0], w.shape[1] + padding, dtype=w.dtype)
    strided[:, padding:] = w
    for start, end in ranges:
        linear.pack_rows(storage, strided[start:end, padding:], start)
    assert torch.equal(storage.view(torch.int32), by_index(w).view(torch.int32))
    for start, end in ranges:
        strided[start:end] = 7
        linear.unpack_rows(storage, start, strided[start:end, padding:])
    assert torch.equal(strided[:, padding:], w)
    assert (strided[:, :padding] == 7).all()


@settings(max_examples=examples(40))
@given(pieces(), st.data())
def test_equality_sees_every_bit_of_the_rows_and_no_other(case, data):
    w, ranges, _ = case
    storage = packed(w)
    start, end = ranges[0]
    assert linear.equal_rows(storage, w[start:end], start)
    row, column = data.draw(st.integers(0, len(w) - 1)), data.draw(st.integers(0, w.shape[1] - 1))
    bits = {2: torch.int16, 4: torch.int32}[w.itemsize]
    changed = w.clone()
    changed.view(bits)[row, column] ^= 1 << data.draw(st.integers(0, 8 * w.itemsize - 2))
    assert linear.equal_rows(storage, changed[start:end], start) is not (start <= row < end)


def test_an_update_returns_true_if_rows_differed(isa):
    w = normal(4, torch.bfloat16, 50, 70)
    storage = torch.zeros(linear.storage_shape(*w.shape, w.dtype), dtype=w.dtype)
    assert linear.update_rows(storage, w[10:40], 10)
    assert not linear.update_rows(storage, w[10:40], 10)
    assert linear.update_rows(storage, w, 0)
    assert torch.equal(storage, packed(w))


@pytest.mark.parametrize("dtype", LAYOUTS)
def test_every_instruction_set_knows_the_layout(isa, dtype):
    w = normal(8, torch.float32, 85, 108).to(dtype)
    storage, lowest = packed(w), w.view(torch.uint8)[:, :: w.itemsize]
    assert torch.equal(storage.view(torch.int32), by_index(w).view(torch.int32))
    assert torch.equal(
        linear.unpack_rows(storage, 0, torch.empty_like(w)).view(torch.uint8), w.view(torch.uint8)
    )
    assert linear.equal_rows(storage, w, 0)
    for row, column in ((0, 0), (15, 31), (16, 32), (63, 95), (84, 107)):
        lowest[row, column] ^= 1
        assert not linear.equal_rows(storage, w, 0)
        lowest[row, column] ^= 1
        assert linear.equal_rows(storage, w, 0)


def test_equality_is_of_bytes():
    w = torch.zeros(40, 32)
    w[3, 3] = torch.nan
    storage = packed(w)
    assert linear.equal_rows(storage, w, 0)
    w[7, 7] = -0.0
    assert not linear.equal_rows(storage, w, 0)


def test_large_weights_are_walked_by_all_threads():
    w = normal(1, torch.bfloat16, 1000, 200)
    with threads(3):
        storage = packed(w)
        assert linear.equal_rows(storage, w, 0)
        assert torch.equal(linear.unpack_rows(storage, 0, torch.empty_like(w)), w)
    w[999, 199] += 1
    with threads(3):
        assert not linear.equal_rows(storage, w, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gathered_rows_are_the_table_s(dtype):
    table = normal(2, dtype, 97, 66)
    ids = torch.randint(97, (50,), generator=torch.Generator().manual_seed(3))
    out = torch.empty(50, 66, dtype=dtype)
    assert torch.equal(linear.gather_rows(packed(table), ids, out), table[ids])
    for wrong in (-1, 128, 2**40):
        with pytest.raises(IndexError, match="row ids"):
            linear.gather_rows(packed(table), torch.tensor([0, wrong]), out[:2])


@pytest.mark.parametrize("change", [
    {"x": torch.zeros(4, 80)}, {"x": torch.zeros(4, 64).bfloat16()}, {"x": torch.zeros(64, 4).T},
    {"out": torch.zeros(3, 40)}, {"out": torch.zeros(4, 65)}, {"out": torch.zeros(40, 4).T},
    {"bias": torch.zeros(39)}, {"bias": torch.zeros(40, dtype=torch.float64)}, {"bias": torch.zeros(80)[::2]},
    {"weight": torch.zeros(64, 80)}, {"weight": torch.zeros(64, 64).T},
    {"weight": torch.zeros(4097)[1:].view(64, 64)},
])  # fmt: skip
def test_oversized_requests_are_refused(change):
    given = {
        "x": torch.zeros(4, 64), "weight": torch.zeros(64, 64),
        "bias": torch.zeros(40), "out": torch.zeros(4, 40),
    }  # fmt: skip
    multiplied(*given.values())
    with pytest.raises(ValueError, match="packed rows"):
        multiplied(*(given | change).values())


@pytest.mark.parametrize("rows,start", [
    (torch.zeros(2, 30), 63), (torch.zeros(2, 30), -1),
    (torch.zeros(2, 60), 0), (torch.zeros(2, 30).double(), 0),
    (torch.zeros(30, 2).T, 0),
])  # fmt: skip
def test_rows_that_do_not_fit_are_refused(rows, start):
    with pytest.raises(ValueError, match="do not fit"):
        linear.pack_rows(torch.zeros(64, 32), rows, start)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_odd_number_of_two_bytes_is_left_to_torch(dtype):
    assert not linear.packable(65, dtype)
    assert linear.packable(65, torch.float32)
    assert not linear.packable(64, torch.float64)
