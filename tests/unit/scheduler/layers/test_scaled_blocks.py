"""FP8 in blocks: quantised as transformers does, whatever the cut."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import dequantize_fp8, quantize_fp8
from support.mxfp4 import dequantize_mxfp4
from support.properties import examples
from support.workspaces import addresses_of
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from caesura.io_struct import CaesuraError
from caesura.scheduler.kernels import linear as kernel
from caesura.scheduler.kernels import native
from caesura.scheduler.layers.linear import Linear
from caesura.scheduler.layers.matrix import Matrix
from caesura.scheduler.layers.parameters import Placement, ScaleBlocks
from caesura.scheduler.layers.scaled_blocks import CHUNK, FP8, ScaledMatrix, quantize

CPU = torch.device("cpu")
SMALL = ScaleBlocks(8, 16)


def matrix_of(parts: list[int], width: int, place: Placement, *, packed: bool):
    assert place.blocks is not None
    if not packed:
        return ScaledMatrix("m", parts, width, place.blocks, place)
    if native.why_not():
        pytest.skip(f"no compiled kernels: {native.why_not()}")
    return Matrix("m", sum(parts), width, place, blocks=place.blocks)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(shape[0], *[1] * (len(shape) - 1), generator=generator)
    return (torch.randn(shape, generator=generator) * 10 ** (4 * spread - 3)).to(dtype)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def as_transformers(value: Tensor, blocks: tuple[int, int]) -> tuple[Tensor, Tensor]:
    config = SimpleNamespace(weight_block_size=blocks, scale_fmt="float")
    made = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"x.weight": value})
    return made["x.weight"], made["x.weight_scale_inv"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "blocks"), [((256, 384), (128, 128)), ((64, 32), (8, 16))])
def test_quantised_as_transformers_does(
    shape: tuple[int, int], blocks: tuple[int, int], dtype: torch.dtype
) -> None:
    value = random(*shape, dtype=dtype)
    value[: blocks[0], : blocks[1]] = 0.0
    value[blocks[0], 0] = 1e-7
    expected = as_transformers(value, blocks)
    for ours, theirs, by_hand in zip(
        quantize(value.float(), ScaleBlocks(*blocks)), expected, quantize_fp8(value, blocks), strict=True
    ):
        assert ours.dtype == theirs.dtype
        assert same_bytes(ours, theirs)
        assert same_bytes(by_hand, theirs)


def test_blocks_at_the_edges_are_smaller() -> None:
    value = random(200, 330)
    ours, by_hand = quantize(value, ScaleBlocks()), quantize_fp8(value, (128, 128))
    assert ours[1].shape == (2, 3)
    assert all(map(same_bytes, ours, by_hand))


def test_non_finite_blocks_stay_so_and_tiny_ones_become_zero() -> None:
    value = torch.ones(16, 16)
    value[0, 0], value[8, 0] = torch.nan, torch.inf
    blocks = ScaleBlocks(8, 8)
    weight, scales = quantize(value, blocks)
    back = dequantize_fp8(weight, scales, (8, 8), torch.float32)
    assert not back[0, 0].isfinite()
    assert not back[8, 0].isfinite()
    assert torch.equal(back[:, 8:], value[:, 8:])
    tiny = torch.full((8, 8), 1e-38)
    tiny[0, 0] = 0.0
    assert torch.equal(dequantize_fp8(*quantize(tiny, blocks), (8, 8), torch.float32), torch.zeros(8, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_byte_means_what_torch_says(dtype: torch.dtype) -> None:
    place = Placement(dtype, CPU, ScaleBlocks(1, 32))
    matrix = ScaledMatrix("m", [16], 16, ScaleBlocks(1, 32), place)
    weight, scales = matrix.slots("m", 0, 16)
    stored = torch.arange(256, dtype=torch.uint8).view(FP8).view(16, 16)
    factors = torch.logspace(-6, 6, 16)[:, None]  # beyond what e4m3 and float16 hold
    weight.write(stored, 0)
    scales.write(factors, 0)
    found = matrix.dequantize(torch.empty(16, 16, dtype=dtype))
    torch.testing.assert_close(found, (stored.float() * factors).to(dtype), rtol=0, atol=0, equal_nan=True)


def in_pieces(slot, value: Tensor, cuts: list[int], compare: bool = True) -> list[bool]:
    ends = [*sorted({cut for cut in cuts if cut < len(value)}), len(value)]
    return [slot.update(value[a:b], a, compare=compare) for a, b in zip([0, *ends], ends)]


@settings(max_examples=examples(60))
@given(
    parts=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    width=st.integers(1, 40),
    cuts=st.lists(st.integers(1, 40), max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    seed=st.integers(0, 5),
    packed=st.booleans(),
)
def test_quantising_does_not_depend_on_the_cut(
    parts: list[int], width: int, cuts: list[int], dtype: torch.dtype, seed: int, packed: bool
) -> None:
    width = 4 * width if packed else width
    matrix = matrix_of(parts, width, Placement(torch.float32, CPU, SMALL), packed=packed)
    start = 0
    for number, size in enumerate(parts):
        value = random(size, width, seed=seed + number, dtype=dtype)
        weight, scales = matrix.slots(f"m{number}", start, size)
        assert any(in_pieces(weight, value, cuts))
        expected = quantize_fp8(value, (SMALL.rows, SMALL.columns))
        assert same_bytes(weight.read(), expected[0])
        assert same_bytes(scales.read(), expected[1])
        assert not any(in_pieces(weight, value, cuts[:1]))  # the same again changes nothing
        start += size


def test_a_piece_of_many_blocks_is_quantised_in_bounded_steps() -> None:
    width = CHUNK // 256
    matrix = ScaledMatrix("m", [600], width, SMALL, Placement(torch.float32, CPU, SMALL))
    value = random(600, width, dtype=torch.bfloat16)
    weight, scales = matrix.slots("m", 0, 600)
    halves = [(value[:300], 0), (value[300:], 300)]
    steps = [len(rows) for half, start in halves for _, rows in weight._whole_blocks(half, start)]
    assert steps == [256, 40, 8, 256, 40]  # rows 296 to 303 wait for the second piece
    in_pieces(weight, value, [300])
    expected = quantize_fp8(value, (8, 16))
    assert same_bytes(weight.read(), expected[0])
    assert same_bytes(scales.read(), expected[1])


@pytest.mark.parametrize("packed", [False, True])
def test_a_change_is_seen_wherever_it_is(packed: bool) -> None:
    matrix = matrix_of([20], 20, Placement(torch.float32, CPU, SMALL), packed=packed)
    weight, scales = matrix.slots("m", 0, 20)
    value = random(20, 20)
    weight.update(value, 0)
    last = value.clone()
    last[-1, -1] *= 2
    assert in_pieces(weight, last, [19]) == [False, True]
    weight.update(value, 0)
    scales.update(scales.read() * 2, 0)  # the same bytes of FP8, another scale
    assert weight.update(value, 0)
    stored = weight.read().clone()
    assert not weight.update(stored, 0)
    assert not scales.update(scales.read().clone(), 0)
    weight.update(torch.zeros_like(value), 0)
    assert weight.update(stored, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("parts", "width"), [((200,), 330), ((129, 70, 128), 256), ((3,), 5), ((100, 900), CHUNK // 777)]
)
def test_product_is_that_of_the_dequantised_weight(
    parts: tuple[int, ...], width: int, bias: bool, dtype: torch.dtype
) -> None:
    names = {f"part{number}": size for number, size in enumerate(parts)}
    place = Placement(dtype, CPU, ScaleBlocks())
    linear = Linear("l", width, names, bias=bias, place=place)
    slots = {slot.name: slot for slot in linear.slots()}
    reference = []
    for number, (name, size) in enumerate(names.items()):
        weight, scales = quantize_fp8(random(size, width, seed=number), (128, 128))
        slots[f"{name}.weight"].write(weight, 0)
        slots[f"{name}.weight_scale_inv"].write(scales, 0)
        reference.append(dequantize_fp8(weight, scales, (128, 128), dtype))
        if bias:
            slots[f"{name}.bias"].write(random(size, seed=9), 0)
    dense = torch.cat(reference)
    added = torch.cat([random(size, seed=9) for size in parts]).to(dtype) if bias else None
    for tokens in (1, 7):
        x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(1)).to(dtype)
        expected = torch.nn.functional.linear(x, dense, added)
        tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(linear.forward(x), expected, **tolerance)
        out = torch.empty_like(expected)
        assert linear.forward(x, out) is out
        torch.testing.assert_close(out, expected, **tolerance)


def test_all_layers_dequantise_into_the_same_memory() -> None:
    place = Placement(torch.bfloat16, CPU, ScaleBlocks(8, 10))  # borders inside a word: torch multiplies
    first, second = (Linear(f"l{n}", 16, {f"m{n}": 8 * n}, place=place) for n in (2, 1))
    x = torch.ones(1, 16, dtype=torch.bfloat16)
    first.forward(x)
    before = addresses_of(place.workspace)
    with torch.inference_mode():
        second.forward(x)
    assert addresses_of(place.workspace) == before
    assert set(before) >= {"fp8 weight"}


INT8 = ScaleBlocks(1, 128, dtype=torch.int8)


def test_int8_values_are_the_nearest_multiples() -> None:
    value = random(70, 300)
    value[3, 200:] = 0.0
    weight, scales = quantize(value, INT8)
    assert (weight.dtype, weight.shape, scales.shape) == (torch.int8, value.shape, (70, 3))
    steps = scales.repeat_interleave(128, dim=1)[:, :300]
    assert ((weight * steps - value).abs() <= steps * 0.5001).all()
    assert weight.abs().max() == 127
    value[0, 0], value[1, 299] = torch.nan, torch.inf
    wrong = ~quantize(value, INT8)[1].isfinite()
    assert wrong.nonzero().tolist() == [[0, 0], [1, 2]]


BLOCKS = {
    "int8": INT8,
    "int4": ScaleBlocks(1, 32, dtype=torch.int8, codes=kernel.INT4),
    "mxfp4": ScaleBlocks(1, 32, dtype=torch.int8, codes=kernel.E2M1),
}


def test_int4_values_are_the_nearest_multiples() -> None:
    value = random(50, 80)
    numbers, scales = quantize(value, BLOCKS["int4"])
    assert (numbers.dtype, scales.shape) == (torch.int8, (50, 3))
    steps = scales.repeat_interleave(32, dim=1)[:, :80]
    assert ((numbers * steps - value).abs() <= steps * 0.5001).all()
    assert numbers.abs().max() == 7


def test_mxfp4_values_are_those_of_the_specification() -> None:
    value = random(50, 96) * torch.logspace(-3, 3, 50)[:, None]
    value[0, :32], value[1, :32] = 0.0, 6.9
    value[2, :8] = torch.tensor([4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, -5.0])  # as near to one as to another
    numbers, scales = quantize(value, BLOCKS["mxfp4"])
    groups = value.view(50, 3, 32)
    exponents = groups.abs().amax(-1).double().clamp_min(1e-30).log2().floor() - 2
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    sizes = (groups.abs() / 2 ** exponents[..., None]).double()
    nearest = (sizes.clamp_max(6)[..., None] - grid).abs().amin(-1)
    found = numbers.view(50, 3, 32).abs().double() / 2
    assert torch.equal((found - sizes.clamp_max(6)).abs(), nearest)
    assert torch.equal(scales[1:].double(), 2.0 ** (exponents - 1)[1:])
    assert (scales[0, 0], numbers[0, :32].any()) == (1.0, False)
    assert numbers[2, :8].tolist() == [8, 0, 2, 2, 4, 4, 8, -8]
    value[0, 0], value[1, 95] = torch.nan, -torch.inf
    wrong = ~quantize(value, BLOCKS["mxfp4"])[1].isfinite()
    assert wrong.nonzero().tolist() == [[0, 0], [1, 2]]


def test_what_is_mxfp4_stays_as_it_is() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (40, 3, 16), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(110, 140, (40, 3), generator=generator, dtype=torch.uint8)
    value = dequantize_mxfp4(blocks, exponents)
    numbers, scales = quantize(value.float(), BLOCKS["mxfp4"])
    assert torch.equal(numbers * scales.repeat_interleave(32, dim=1), value.float())


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("dtype", native.FLOATS)
def test_numbers_that_are_not_packed_have_the_same_products(dtype: torch.dtype, kind: str) -> None:
    place, parts, x = Placement(dtype, CPU, BLOCKS[kind]), [40, 24], random(9, 264, dtype=dtype)
    matrices = [matrix_of(parts, 264, place, packed=packed) for packed in (False, True)]
    assert (matrices[1].packed is None, matrices[0].packed) == (False, None)
    for matrix in matrices:
        for number, start in enumerate((0, 40)):
            next(matrix.slots(f"m{number}", start, parts[number])).write(random(parts[number], 264), 0)
    stored = [next(matrix.slots("m0", 0, 40)).read() for matrix in matrices]
    assert torch.equal(*stored)
    bias, out = random(64, dtype=dtype), torch.empty(9, 64, dtype=dtype)
    plain, packed = (matrix.product(x, bias) for matrix in matrices)
    assert torch.equal(plain, packed)
    assert torch.equal(matrices[0].product(x, bias, out), out)
    assert torch.equal(out, packed)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", BLOCKS)
def test_stored_numbers_are_taken_if_codes_stand_for_them(kind: str, packed: bool) -> None:
    blocks = BLOCKS[kind]
    numbers, _ = quantize(random(20, 64), blocks)
    matrix = matrix_of([20], 64, Placement(torch.float32, CPU, blocks), packed=packed)
    slot = next(matrix.slots("m", 0, 20))
    assert slot.accepts(numbers.dtype)
    slot.write(numbers, 0)
    assert torch.equal(slot.read(), numbers)
    numbers[5, 7] = 11
    if blocks.codes is None:
        slot.write(numbers, 0)
    else:
        with pytest.raises(CaesuraError, match="has numbers that no code"):
            slot.write(numbers, 0)
    assert (slot.read()[5, 7] == 11) == (blocks.codes is None)
