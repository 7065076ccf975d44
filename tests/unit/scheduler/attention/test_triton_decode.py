"""The Triton decode kernel against the torch backend, in float32 and float16, and compiled for a device."""

import pytest
import torch
from support.compiled_triton import compiling
from support.forward_batches import attention_shape, scattered_batch
from support.interpreted_triton import compiled, interpreted

from caesura.scheduler.attention import paged_triton
from caesura.scheduler.attention.paged_triton import PagedTritonBackend
from caesura.scheduler.attention.sdpa import SdpaBackend
from caesura.scheduler.cache.pool import MHAPool
from caesura.scheduler.execution.forward import StepLimits
from caesura.scheduler.kernels.attention_form import AttentionForm

pytestmark = pytest.mark.long

PAGES = 60


def limits(rows: int) -> StepLimits:
    return StepLimits(rows=rows, tokens=rows, context_len=20 * 16)


def filled_pool(kv_heads: int, size: int, dtype: torch.dtype = torch.float32) -> MHAPool:
    pool = MHAPool(num_layers=1, num_pages=PAGES, kv_heads=kv_heads, head_size=size, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for storage in pool.layer(0):
        storage.copy_(torch.randn(storage.shape, generator=generator))
        storage[0] = torch.nan
    return pool


def batch_of(lengths: list[int], seed: int):
    return scattered_batch([(length, 1) for length in lengths], len(lengths), PAGES, seed)


SMALL = [(4, 2, 16), (3, 3, 12), (20, 1, 8)]
PUBLISHED = [(8, 2, 64), (5, 1, 80), (6, 2, 96), (16, 2, 128), (40, 1, 128), (4, 2, 256)]


@interpreted
@pytest.mark.parametrize("heads,kv_heads,size,dtype,multiprocessors", [
    *[(*sizes, torch.float32, 8) for sizes in SMALL],
    *[(*sizes, torch.float32, 1) for sizes in (*SMALL[:1], *PUBLISHED[3:])],
    *[(*sizes, torch.float16, 5) for sizes in PUBLISHED],
])  # fmt: skip
def test_planned_decode_agrees_with_the_torch_backend(heads, kv_heads, size, dtype, multiprocessors):
    pool, reference = filled_pool(kv_heads, size, dtype), filled_pool(kv_heads, size, dtype)
    scale = 1.1 * size**-0.5
    backend = PagedTritonBackend(pool, attention_shape(pool, heads, scale), limits(5))
    backend.multiprocessors = multiprocessors
    decode = backend.for_decode(3)
    torch_backend = SdpaBackend(reference, attention_shape(reference, heads, scale))
    generator = torch.Generator().manual_seed(2)
    for seed, lengths in enumerate([[0, 300, 63], [15, 64, 127]] if size <= 16 else [[0, 130, 63]]):
        batch = batch_of(lengths, seed)
        qk = torch.randn((3, heads + kv_heads, size), generator=generator).to(dtype)
        qkv = torch.randn((3, heads + 2 * kv_heads, size), generator=generator).to(
            dtype
        )  # v has other strides
        q, k, v = qk[:, :heads], qk[:, heads:], qkv[:, -kv_heads:]
        decode.plan(batch)
        torch_backend.plan(batch)
        with torch.inference_mode():
            found, expected = decode.forward(q, k, v, 0), torch_backend.forward(q, k, v, 0)
        atol = 2e-5 if dtype == torch.float32 else 4e-3
        torch.testing.assert_close(found, expected, atol=atol, rtol=1e-4)
        for mine, theirs in zip(pool.layer(0), reference.layer(0), strict=True):
            assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0)), "stored elsewhere"


SINKS = torch.linspace(-3, 3, 4)
FORMS = [
    AttentionForm(window=1),
    AttentionForm(window=20),
    AttentionForm(window=64, sinks=SINKS),
    AttentionForm(window=100, softcap=0.8, scale=0.7),
    AttentionForm(softcap=5.0, sinks=SINKS),
    AttentionForm(window=1000, scale=0.2),
]


@interpreted
def test_every_form_agrees_with_the_torch_backend():
    pools = [filled_pool(2, 16) for _ in range(2)]
    pools[0].window_pages = PAGES  # with a table of its own
    backend = PagedTritonBackend(
        pools[0], attention_shape(pools[0], 4, kinds=[form.kind for form in FORMS]), limits(3)
    )
    backend.multiprocessors = 8
    decode, torch_backend = backend.for_decode(3), SdpaBackend(pools[1], attention_shape(pools[1], 4))
    q, k, v = torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    lengths = [0, 300, 63]
    for form in FORMS:
        batch = batch_of(lengths, 5)
        for row, length in zip(batch.page_table, lengths):
            row[: max(0, length + 1 - (form.window or length + 1)) // 16] = 0
        if form.window is not None:  # these layers have a table of their own
            batch.window_slots, batch.window_table = batch.kv_slots, batch.page_table
            batch.kv_slots, batch.page_table = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 1).int()
        decode.plan(batch)
        torch_backend.plan(batch)
        with torch.inference_mode():
            found, expected = (each.forward(q, k, v, 0, form) for each in (decode, torch_backend))
        assert expected.isfinite().all()
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def dense(pool: MHAPool, q: torch.Tensor, pages: list[int], length: int) -> torch.Tensor:
    """One token's attention, [kv heads, group, size]."""
    keys, values = (x[pages].transpose(0, 1).flatten(1, 2)[:, :length] for x in pool.layer(0))
    scores = torch.einsum("hgd,hnd->hgn", q.view(2, 2, 16), keys) * 16**-0.5
    return torch.einsum("hgn,hnd->hgd", scores.softmax(-1), values)


@interpreted
def test_stale_pages_and_padding_rows_disturb_nobody():
    pool = filled_pool(2, 16)
    backend = PagedTritonBackend(pool, attention_shape(pool, 4), limits(3))
    backend.multiprocessors = 8
    decode = backend.for_decode(3)
    q, k, v = torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    decode.plan(batch_of([100, 50, 7], 0))  # leaves page numbers behind
    decode.forward(q, k, v, 0)
    batch = batch_of([20, 0, 0], 1)
    batch.page_table[1:] = 0  # padding: one token on the scratch page
    row = batch.page_table[0].tolist()
    for storage in pool.layer(0):
        storage[row[1], :, 5:] = torch.nan  # beyond this step's token
    decode.plan(batch)
    found = decode.forward(q, k, v, 0)
    assert found.isfinite().all()
    torch.testing.assert_close(found[0].view(2, 2, 16), dense(pool, q[0], row, 21))


@interpreted
def test_small_steps_are_divided_and_large_ones_are_not():
    from caesura.scheduler.kernels.triton_decode import num_splits

    assert {rows: num_splits(rows, 8, 132) for rows in (1, 8, 64, 256)} == {1: 64, 8: 8, 64: 1, 256: 1}
    assert num_splits(1, 1, 500) == 64


@pytest.mark.parametrize("device,installed,reason", [
    ("cpu", True, "not on cpu"), ("cuda", False, "not installed"), ("cuda", True, None),
])  # fmt: skip
def test_backend_says_why_it_cannot_serve(monkeypatch, device, installed, reason):
    monkeypatch.setattr(paged_triton, "find_spec", lambda name: object() if installed else None)
    found = paged_triton.why_not(torch.device(device))
    assert found is None if reason is None else reason in found


@compiled
@pytest.mark.parametrize("dtype,heads,kv_heads,size,aligned", [
    (torch.bfloat16, 64, 8, 128, True), (torch.bfloat16, 16, 8, 128, False),
    (torch.float16, 5, 1, 80, True), (torch.bfloat16, 16, 8, 256, True), (torch.float32, 8, 4, 256, True),
    (torch.bfloat16, 4, 2, 8, True),
])  # fmt: skip
@pytest.mark.parametrize("bent", [False, True])
def test_kernel_compiles_for_hopper_within_its_registers(
    dtype, heads, kv_heads, size, aligned, bent, tmp_path
):
    """Compile sizes of published models and of a small one; aligned tensors lie at multiples of 16 bytes."""
    from caesura.scheduler.kernels.triton_decode import PagedDecode

    form = AttentionForm()
    if bent:
        form = AttentionForm(window=128, softcap=30.0, sinks=torch.zeros(heads, dtype=dtype))
    tables = torch.zeros((2, 2, 4), dtype=torch.int32)
    kernel = PagedDecode(
        *tables, torch.ones(2, dtype=torch.int32), num_heads=heads,
        num_kv_heads=kv_heads, head_size=size, page_size=16, scale=0.1, splits=8,
    )  # fmt: skip
    start, count = int(not aligned), 2 * (heads + 2 * kv_heads) * size
    qkv = torch.zeros(start + count, dtype=dtype)[start:].view(2, -1, size)
    pages = torch.zeros((3, kv_heads, 16, size), dtype=dtype)
    with compiling(tmp_path) as found:
        kernel(*qkv.split([heads, kv_heads, kv_heads], 1), pages, pages, form)
    assert {each.name for each in found} == {"_store", "_attend", "_combine"}
    for each in found:
        usage = each.usage
        assert (usage["STACK"], usage["LOCAL"]) == (0, 0), f"{each.name} spills: {usage}"
