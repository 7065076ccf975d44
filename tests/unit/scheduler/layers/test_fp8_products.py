"""FP8 products on accelerators, by stand-ins that read memory as the libraries do."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support import fake_fp8_libraries
from support.checkpoints import quantize_fp8
from torch import Tensor

from caesura.io_struct import CaesuraError
from caesura.scheduler.attention.flashinfer_mla import kernels_of
from caesura.scheduler.kernels import native, self_test
from caesura.scheduler.layers import experts as experts_module
from caesura.scheduler.layers import fp8_products
from caesura.scheduler.layers.experts import Experts
from caesura.scheduler.layers.fp8_products import dense_for, experts_for
from caesura.scheduler.layers.linear import Linear
from caesura.scheduler.layers.parameters import Placement, ScaleBlocks
from caesura.scheduler.layers.scaled_blocks import ScaledMatrix
from caesura.scheduler.parallel.group import TensorParallel

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
DENSE = [kind for _, kind in fp8_products.DENSE]
EXPERTS = [kind for _, kind in fp8_products.EXPERTS]
BROKEN = ImportError("libcudart.so.12: cannot open shared object file\nand more")


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    made = {name: SimpleNamespace(**vars(module)) for name, module in fake_fp8_libraries.MODULES.items()}

    made["torch"] = SimpleNamespace(scaled_mm=fake_fp8_libraries.scaled_mm)

    def import_module(name: str):
        if isinstance(made[name], Exception):
            raise made[name]
        return made[name]

    monkeypatch.setattr(fp8_products, "import_module", import_module)

    def scaled_mm(*given, **named):
        return import_module("torch").scaled_mm(*given, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    return made


@pytest.fixture
def capability(monkeypatch):
    found = SimpleNamespace(value=(9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found.value)
    for name in ("try_dense", "try_experts"):
        attempt = getattr(fp8_products, name)
        monkeypatch.setattr(fp8_products, name, lambda kind, device, attempt=attempt: attempt(kind, CPU))
    forget()
    yield found
    forget()


def forget() -> None:
    dense_for.cache_clear()
    experts_for.cache_clear()


@pytest.fixture
def choose(monkeypatch):
    """Let a library serve on the CPU."""

    def serve(kind) -> None:
        name, modules = "dense_for", [fp8_products]
        if kind in EXPERTS:
            name, modules = "experts_for", [fp8_products, experts_module]
        for module in modules:
            monkeypatch.setattr(module, name, lambda device: kind)

    return serve


def failure_of(kind, attempt) -> str | None:
    return self_test.failure(lambda: attempt(kind, CPU), fp8_products.AGREEMENT, "a product with it")


@pytest.mark.parametrize("kind", [*DENSE, *EXPERTS], ids=lambda kind: f"{type(kind).__name__}-{kind.by}")
def test_products_by_what_the_libraries_document_agree(kind):
    attempt = fp8_products.try_dense if kind in DENSE else fp8_products.try_experts
    assert failure_of(kind, attempt) is None
    assert max(attempt(kind, CPU)) > 1e-3, "activations are rounded"


def transposed(compute):
    def wrong(*given, **named):
        changed = [x.transpose(-1, -2).contiguous().view(x.shape) if is_grid(x) else x for x in given]
        return compute(*changed, **named)

    def is_grid(x):
        return (
            isinstance(x, Tensor) and x.dtype == torch.float32 and x.shape[-1] == 3 and x.shape[-2] in (2, 3)
        )

    return wrong


def test_another_order_of_scales_is_found_out(libraries):
    gemm = libraries["flashinfer.gemm"]
    gemm.fp8_blockscale_gemm_sm90 = transposed(gemm.fp8_blockscale_gemm_sm90)
    gemm.group_gemm_fp8_nt_groupwise = transposed(gemm.group_gemm_fp8_nt_groupwise)
    for kind, attempt in ((DENSE[0], fp8_products.try_dense), (EXPERTS[2], fp8_products.try_experts)):
        assert "a product with it is off by" in failure_of(kind, attempt)


def test_gate_before_up_is_found_out(libraries, monkeypatch):
    fused = libraries["flashinfer.fused_moe"].cutlass_fused_moe

    def swapped(*given, quant_scales, **named):
        halves = [*given]
        halves[3] = torch.cat(given[3].view(torch.uint8).chunk(2, 1)[::-1], 1).view(torch.float8_e4m3fn)
        scales = [torch.cat(quant_scales[0].chunk(2, 1)[::-1], 1), quant_scales[1]]
        return fused(*halves, quant_scales=scales, **named)

    libraries["flashinfer.fused_moe"].cutlass_fused_moe = swapped
    assert "off by" in failure_of(EXPERTS[0], fp8_products.try_experts)


def test_the_first_that_agrees_serves_and_the_others_are_told(libraries, capability, caplog):
    assert (dense_for(CUDA).by, experts_for(CUDA).by) == ("flashinfer", "flashinfer")
    forget()
    libraries["flashinfer.gemm"] = libraries["flashinfer.fused_moe"] = BROKEN
    assert (dense_for(CUDA).by, experts_for(CUDA).by) == ("torch", "deep_gemm")
    told = "not multiplied by flashinfer: a product with it fails: ImportError: libcudart.so.12: cannot open"
    assert f"FP8 weights are {told}" in caplog.text
    assert f"FP8 experts are {told}" in caplog.text
    libraries.clear()
    assert (dense_for(CUDA).by, experts_for(CUDA).by) == ("torch", "deep_gemm"), "they are tried once"


@pytest.mark.parametrize(
    "value,dense,experts",
    [((10, 0), "flashinfer", "flashinfer"), ((12, 0), "flashinfer", None), ((8, 9), None, None)],
)
def test_each_generation_has_its_libraries(capability, value, dense, experts):
    capability.value = value
    for choose, expected in ((dense_for, dense), (experts_for, experts)):
        if expected is not None:
            assert choose(CUDA).by == expected
            continue
        with pytest.raises(CaesuraError, match="there are kernels for Hopper and Blackwell only") as caught:
            choose(CUDA)
        assert caught.value.code == "unsupported"
        assert "cuda:0" in str(caught.value)


def test_without_any_library_the_engine_is_refused_by_name(libraries, capability):
    for name in libraries:
        libraries[name] = BROKEN
    place = Placement(torch.bfloat16, CUDA, ScaleBlocks())
    with pytest.raises(CaesuraError, match="FP8 weights need FlashInfer") as caught:
        Linear("l", 256, {"a": 256}, place=place)
    assert "torch: a product with it fails: ImportError" in str(caught.value)
    with pytest.raises(
        CaesuraError, match=r"FP8 experts need FlashInfer .* deep_gemm: a product with it fails"
    ):
        Experts("e", "m.experts", 4, 256, 128, place=place)


@pytest.mark.parametrize("hip,kernels", [("6.4", ("fa2",)), (None, ("fa3", "fa2"))])
def test_an_amd_card_of_the_same_capability_is_no_hopper(capability, monkeypatch, hip, kernels):
    monkeypatch.setattr(torch.version, "hip", hip)
    assert kernels_of(CUDA) == kernels
    if hip:
        with pytest.raises(CaesuraError, match="Hopper and Blackwell only"):
            dense_for(CUDA)


def test_an_accelerator_that_is_no_cuda_device_is_refused(capability):
    with pytest.raises(CaesuraError, match="on mps"):
        dense_for(torch.device("mps"))
    assert dense_for(CPU) is None
    assert experts_for(CPU) is None


@pytest.mark.parametrize(
    "dtype,blocks,parts,inputs,reason",
    [
        (torch.float16, ScaleBlocks(), [128], 128, "products in bfloat16, not float16"),
        (torch.bfloat16, ScaleBlocks(64, 128), [128], 128, "blocks of 128 x 128, not 64 x 128"),
        (torch.bfloat16, ScaleBlocks(), [64, 128], 128, "sizes in multiples of 128"),
        (torch.bfloat16, ScaleBlocks(), [128, 64], 192, "sizes in multiples of 128"),
    ],
)
def test_other_blocks_and_sizes_are_refused_by_name(choose, dtype, blocks, parts, inputs, reason):
    choose(DENSE[0])
    with pytest.raises(CaesuraError, match=f"FP8 on cpu needs {reason}"):
        ScaledMatrix("w", parts, inputs, blocks, Placement(dtype, CPU, blocks))
    ScaledMatrix("w", parts, inputs, blocks, Placement(dtype, CPU, blocks), multiplies=False)


def filled(owner, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    slots = {slot.name: slot for slot in owner.slots()}
    dense = {}
    for name in sorted(name for name in slots if name.endswith(".weight")):
        value = torch.randn(slots[name].shape, generator=generator)
        weight, scales = quantize_fp8(value, (128, 128))
        slots[name].write(weight, 0)
        slots[f"{name}_scale_inv"].write(scales, 0)
        grid = scales.repeat_interleave(128, 0)[: len(value)].repeat_interleave(128, 1)[:, : value.shape[1]]
        dense[name] = weight.float() * grid
    return dense


def off(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", DENSE, ids=lambda kind: f"{kind.by}-{kind.rows}")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("last", [128, 64, 200])
def test_a_projection_with_a_smaller_last_block(choose, kind, bias, last):
    choose(kind)
    place = Placement(torch.bfloat16, CPU, ScaleBlocks())
    linear = Linear("l", 256, {"a": 256, "b": last}, bias=bias, place=place)
    weight = torch.cat(list(filled(linear, last).values()))
    for slot in linear.slots():
        if slot.name.endswith(".bias"):
            slot.write(torch.full(slot.shape, 3.0), 0)
    for tokens in (1, 7):
        x = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(tokens)).bfloat16()
        expected = x.float() @ weight.t() + 3.0 * bias
        assert off(linear.forward(x), expected) < 0.05
        out = torch.empty(tokens, 256 + last, dtype=torch.bfloat16)
        assert linear.forward(x, out) is out
        assert torch.equal(out, linear.forward(x))


@pytest.mark.parametrize("kind", EXPERTS, ids=["fused", "deep_gemm", "grouped"])
def test_routed_experts_are_those_of_dequantised_weights(choose, kind):
    choose(kind)
    count, hidden, width, top_k = 6, 256, 128, 2
    with native.limited_to("torch"):
        place = Placement(torch.bfloat16, CPU, ScaleBlocks())
        experts = Experts("e", "m", count, hidden, width, place=place)
        ranks = [
            Experts(
                "e", "m", count, hidden, width, place=replace(place, parallel=TensorParallel(rank, 3), ep=3)
            )
            for rank in range(3)
        ]
    dense = filled(experts, 3)
    for rank in ranks:
        filled(rank, 3)
    generator = torch.Generator().manual_seed(1)
    for tokens in (1, 9, 300):
        x = torch.randn(tokens, hidden, generator=generator).bfloat16()
        ids = torch.rand(tokens, count - 1, generator=generator).argsort(1)[:, :top_k]  # the last gets none
        weights = torch.rand(tokens, top_k, generator=generator)
        expected = torch.zeros(tokens, hidden)
        for token in range(tokens):
            for expert, factor in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
                gate, up, down = (dense[f"m.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down"))
                row = x[token].float()
                gated = torch.nn.functional.silu(gate @ row) * (up @ row)
                expected[token] += factor * (down @ gated)
        found = experts.forward(x, ids, weights)
        assert found.dtype == torch.bfloat16
        assert off(found, expected) < 0.06
        assert off(sum(rank.forward(x, ids, weights).float() for rank in ranks), expected) < 0.06


def test_rows_are_spread_without_asking_for_their_number():
    x = torch.arange(1.0, 9.0)[:, None].expand(8, 3)
    ends = torch.tensor([3, 3, 8, 8], dtype=torch.int32)
    rows, padded, places = fp8_products.spread(x, ends, 4)
    assert rows[:, 0].tolist() == [1, 2, 3, 0, 4, 5, 6, 7, 8, *[0] * (len(rows) - 9)]
    assert len(rows) == 8 + 4 * 3, "four experts with three rows of padding each, at most"
    assert padded.tolist() == [4, 4, 12, 12]
    assert places.tolist() == [0, 1, 2, 4, 5, 6, 7, 8]


def test_rows_of_other_ranks_are_spread_behind_all_ends():
    x = torch.arange(1.0, 9.0)[:, None].expand(8, 128)
    for ends in ([0, 0], [3, 3], [1, 5], [4, 7], [8, 8]):
        ends = torch.tensor(ends, dtype=torch.int32)
        (values, factors), padded, owners, places = fp8_products._spread_quantized(x, ends, 4)
        assert torch.equal(values.float() * factors, fp8_products.spread(x, ends, 4)[0])
        assert (places[ends[-1] :] >= padded[-1]).all()
        assert len(set(places.tolist())) == len(x)
        assert owners[places].tolist() == [
            int((ends <= row).sum()) if row < ends[-1] else -1 for row in range(8)
        ]


def test_scratch_memory_is_asked_for_by_few_sizes():
    asked = {fp8_products.rounded(tokens) for tokens in range(1, 9000)}
    assert len(asked) < 50
    for tokens in (1, 16, 17, 100, 1025, 8191):
        assert tokens <= fp8_products.rounded(tokens) <= max(tokens + 16, tokens * 1.25)
