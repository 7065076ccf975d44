"""FP8 products on a real device: what serves agrees with dequantised weights, does not wait."""

import pytest
import torch
from support.checkpoints import quantize_fp8
from torch import Tensor

from caesura.io_struct import CaesuraError
from caesura.scheduler.kernels import self_test
from caesura.scheduler.layers import fp8_products
from caesura.scheduler.layers.experts import Experts
from caesura.scheduler.layers.linear import Linear
from caesura.scheduler.layers.parameters import Placement, ScaleBlocks

DEVICE = torch.device("cuda", 0)
MAJOR = torch.cuda.get_device_capability(DEVICE)[0] if torch.cuda.is_available() else 0


def kinds(table: tuple) -> list:
    return [pytest.param(kind, id=kind.by) for capabilities, kind in table if MAJOR in capabilities]


def reason_of(kind: fp8_products.Dense | fp8_products.Experts) -> str | None:
    attempt = fp8_products.try_dense if isinstance(kind, fp8_products.Dense) else fp8_products.try_experts
    return self_test.failure(lambda: attempt(kind, DEVICE), fp8_products.AGREEMENT, "a product with it")


@pytest.mark.parametrize("kind", kinds(fp8_products.DENSE) + kinds(fp8_products.EXPERTS))
def test_each_library_that_is_there_agrees(kind):
    reason = reason_of(kind)
    if reason is not None and "No module named" in reason:
        pytest.skip(reason)
    assert reason is None


def place_for(choose) -> Placement:
    try:
        choose(DEVICE)
    except CaesuraError as error:
        pytest.skip(str(error))
    return Placement(torch.bfloat16, DEVICE, ScaleBlocks())


def filled(owner) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    slots = {slot.name: slot for slot in owner.slots()}
    dense = {}
    for name in sorted(name for name in slots if name.endswith(".weight")):
        weight, scales = quantize_fp8(torch.randn(slots[name].shape, generator=generator), (128, 128))
        slots[name].write(weight.to(DEVICE), 0)
        slots[f"{name}_scale_inv"].write(scales.to(DEVICE), 0)
        grid = scales.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)
        dense[name] = (weight.float() * grid[:, : weight.shape[1]]).to(DEVICE)
    return dense


def check(compute, inputs: tuple[Tensor, ...], expected: Tensor) -> None:
    compute(*inputs)  # libraries compile and choose
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        eager = compute(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    static = [torch.zeros_like(each) for each in inputs]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        compute(*static)
        graph.capture_begin(capture_error_mode="thread_local")
        out = compute(*static)
        graph.capture_end()
        for mine, given in zip(static, inputs, strict=True):
            mine.copy_(given)
        graph.replay()
    torch.cuda.synchronize()
    for found in (eager, out):
        assert float((found.float() - expected).norm() / expected.norm()) < 0.06


@pytest.mark.parametrize("tokens", [1, 7, 64, 500])
@pytest.mark.parametrize("last", [512, 64])
@torch.inference_mode()
def test_a_projection(tokens, last):
    place = place_for(fp8_products.dense_for)
    linear = Linear("l", 1024, {"a": 1536, "b": last}, place=place)
    weight = torch.cat(list(filled(linear).values()))
    x = torch.randn(tokens, 1024, device=DEVICE).bfloat16()
    check(linear.forward, (x,), x.float() @ weight.t())


@pytest.mark.parametrize("tokens", [1, 7, 64, 500])
@torch.inference_mode()
def test_routed_experts(tokens):
    place = place_for(fp8_products.experts_for)
    count, hidden, width, top_k = 16, 512, 256, 4
    experts = Experts("e", "m", count, hidden, width, place=place)
    dense = filled(experts)
    x = torch.randn(tokens, hidden, device=DEVICE).bfloat16()
    ids = torch.rand(tokens, count - 1, device=DEVICE).argsort(1)[:, :top_k]
    weights = torch.rand(tokens, top_k, device=DEVICE)
    gate, up, down = (
        torch.stack([dense[f"m.{e}.{part}_proj.weight"] for e in range(count)])
        for part in ("gate", "up", "down")
    )
    rows = x.float()
    inner = torch.nn.functional.silu(torch.einsum("th,ewh->tew", rows, gate)) * torch.einsum(
        "th,ewh->tew", rows, up
    )
    each = torch.einsum("taw,ahw->tah", inner, down)
    expected = (each.gather(1, ids[..., None].expand(-1, -1, hidden)) * weights[..., None]).sum(1)
    check(experts.forward, (x, ids, weights), expected)
