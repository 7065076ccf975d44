"""Operations between the products of images: torch's results with every instruction set, and refusals."""

import pytest
import torch
from support.kernels import instruction_sets, normal, packed, threads
from torch.nn.functional import gelu, layer_norm, linear, rms_norm, scaled_dot_product_attention

from caesura.scheduler.kernels.linear import Product
from caesura.scheduler.kernels.modulation import (
    add_and_modulate,
    add_gated,
    gelu_of_product,
    join_heads,
    joint_attention,
    modulate,
    packed_product,
)

EPS = 1e-6
CLOSE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2**-10, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2e-2},
}
WIDTHS = (1, 7, 16, 64, 70, 512)


@pytest.fixture(params=CLOSE, ids=str)
def dtype(request):
    return request.param


def chunks(width, count, dtype=torch.float32):
    """Return parts of one product, as a norm has them: their rows do not follow each other."""
    return torch.randn(3, count * width).to(dtype).chunk(count, dim=1)


def modulated(x, scale, shift):
    unit = layer_norm(x.float(), x.shape[-1:], eps=EPS)
    return (unit * (1 + scale.float()[:, None]) + shift.float()[:, None]).to(x.dtype)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_gated_and_modulated_as_by_torch(width, dtype):
    gate, scale, shift = chunks(width, 3, dtype)
    x, update = (torch.randn(3, 5, width) * 3 + 1).to(dtype), torch.randn(5, 3, width).to(dtype)
    update, close = update.transpose(0, 1), CLOSE[dtype]
    total = (x.float() + gate.float()[:, None] * update.float()).to(dtype)
    for _ in instruction_sets():
        torch.testing.assert_close(found := add_gated(x, update, gate), total, **close)
        expected = found, modulated(found, scale, shift)
        torch.testing.assert_close(add_and_modulate(x, update, gate, scale, shift, EPS), expected, **close)
        torch.testing.assert_close(modulate(x, scale, shift, EPS), modulated(x, scale, shift), **close)


@pytest.mark.parametrize("size", [4, 13, 64])
@pytest.mark.parametrize("text_tokens", [0, 2])
def test_heads_are_joined_and_normalised_as_by_torch(size, text_tokens, dtype):
    image, text = torch.randn(3, 5, 2 * size).to(dtype), torch.randn(3, text_tokens, 2 * size).to(dtype)
    of_image, of_text = torch.randn(2, size).to(dtype)
    parts = [
        rms_norm(x.float().unflatten(2, (2, size)), (size,), norm.float(), EPS).to(dtype)
        for x, norm in ((image, of_image), (text, of_text))
    ]
    for _ in instruction_sets():
        joined = join_heads(image, text, 2, of_image, of_text, EPS)
        torch.testing.assert_close(joined, torch.cat(parts, dim=1), **CLOSE[dtype])
        assert torch.equal(
            join_heads(image, text, 2, None, None, EPS).flatten(2), torch.cat((image, text), dim=1)
        )


@pytest.mark.parametrize("size", [8, 16, 32, 64, 128, 160])
@pytest.mark.parametrize("tokens", [1, 17, 203, 333])
def test_tokens_attend_to_all_of_their_sample(tokens, size, dtype):
    q, k, v = (torch.randn(2, tokens, 3, size).to(dtype) for _ in range(3))
    q[0, 0] *= 30  # a weight of one beside others of nearly zero
    exact = scaled_dot_product_attention(*(x.float().transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    for isa in instruction_sets():
        found = joint_attention(q, k, v)
        torch.testing.assert_close(found, exact.to(dtype), **CLOSE[dtype])
        if dtype != torch.float16 and size in (32, 64, 128) and isa != "amx":
            with threads(3):
                assert torch.equal(joint_attention(q[1:], k[1:], v[1:]), found[1:])


def test_attention_of_values_without_bound(dtype):
    """The first block of keys has scores of -inf alone; the last value, of an odd position, is infinite."""
    q, k, v = torch.full((1, 321, 1, 64), 1e20), torch.full((1, 321, 1, 64), -1e20), torch.ones(1, 321, 1, 64)
    if dtype == torch.float16:
        q, k = 0 * q, 0 * k
    k[:, -1], v[:, -1, :, 0] = 0, torch.inf
    for _ in instruction_sets():
        found = joint_attention(q.to(dtype), k.to(dtype), v.to(dtype))
        assert (found[..., 0] == torch.inf).all()
        torch.testing.assert_close(found[..., 1:], torch.ones(1, 321, 1, 63, dtype=dtype))


def test_gelu_is_that_of_torch_at_every_size(dtype):
    x, weight, bias = (torch.randn(*size).to(dtype) for size in ((7, 9), (1001, 9), (1001,)))
    x[0], bias[:6] = 0, torch.tensor([0, -0.0, 30, -30, torch.inf, 1e4])
    expected = gelu(linear(x, weight, bias), approximate="tanh")
    for _ in instruction_sets():
        found = gelu_of_product(x, weight, bias, lambda x: linear(x, weight, bias))
        torch.testing.assert_close(found, expected, **CLOSE[dtype])
        assert gelu_of_product(x, weight, bias, lambda _: torch.full_like(expected, torch.nan)).isnan().all()


def test_packed_products_keep_the_shape_of_their_rows():
    x, w, bias = (
        normal(1, torch.bfloat16, 2, 3, 10),
        normal(2, torch.bfloat16, 7, 10),
        normal(3, torch.bfloat16, 7),
    )
    weight = packed(w)
    product = Product(weight, 7, 10)
    for rows in (x, x[0], x[:0], x.transpose(0, 1), x[0, 0]):
        exact = rows.float() @ w.float().t() + bias.float()
        found = packed_product(rows, weight, bias, product)
        torch.testing.assert_close(found, exact.bfloat16(), **CLOSE[torch.bfloat16])
    for rows, out in ((x.transpose(0, 1), None), (x, torch.empty(2, 3, 7).bfloat16()), (x[..., :8], None)):
        with pytest.raises(ValueError, match="no product"):
            product(rows, bias, out)


def test_rows_do_not_depend_on_other_rows_or_threads():
    gate, scale, shift = chunks(512, 3)
    x, update = torch.randn(2, 3, 50, 512)
    of_one = x[1:2], update[1:2], gate[1:2], scale[1:2], shift[1:2]
    for _ in instruction_sets():
        with threads(3):
            together = add_and_modulate(x, update, gate, scale, shift, EPS)
        for all_rows, one in zip(together, add_and_modulate(*of_one, EPS), strict=True):
            assert torch.equal(all_rows[1:2], one)


def test_what_a_kernel_would_misread_is_refused():
    x, (scale, shift) = torch.randn(3, 5, 8), chunks(8, 2)
    for wrong in (scale[:2], scale.double(), torch.randn(8, 3).t(), scale.contiguous()):
        with pytest.raises(ValueError, match="no modulation"):
            modulate(x, wrong, shift, EPS)
    with pytest.raises(ValueError, match="no modulation"):
        add_gated(x, x[:, :4], scale)
    heads = torch.randn(3, 5, 2, 64)
    for wrong in (heads[:, :4], heads.bfloat16(), torch.randn(3, 2, 5, 64).transpose(1, 2)):
        with pytest.raises(ValueError, match="no attention"):
            joint_attention(heads, wrong, heads)
    with pytest.raises(ValueError, match="no heads"):
        join_heads(x, x[:2], 2, None, None, EPS)
    with pytest.raises(ValueError, match="no heads"):
        join_heads(x, x, 2, torch.ones(3), torch.ones(4), EPS)
