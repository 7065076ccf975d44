"""FlashInfer's plans and page lists, for heads and for latents, against torch's attention."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import fake_flashinfer
from support.fake_flashinfer import DTYPES, FORM
from support.flashinfer_interface import takes
from support.forward_batches import attention_shape, scattered_batch
from support.properties import examples
from torch import Tensor

from caesura.io_struct import CaesuraError
from caesura.scheduler.attention import flashinfer, flashinfer_mla
from caesura.scheduler.attention.flashinfer import FlashInferBackend, why_not
from caesura.scheduler.attention.flashinfer_mla import FlashInferLatentBackend, serves_prefill
from caesura.scheduler.attention.page_lists import PageLists, page_lists
from caesura.scheduler.attention.sdpa import SdpaBackend
from caesura.scheduler.attention.sdpa_mla import LatentBackend
from caesura.scheduler.attention.shape import Shape
from caesura.scheduler.cache.pool import MHAPool, MLAPool
from caesura.scheduler.execution.forward import StepLimits
from caesura.scheduler.kernels.attention_form import PLAIN, AttentionForm, FormKind
from caesura.scheduler.runtime.engine_config import EngineConfig

HEADS, KV_HEADS, SIZE = 4, 2, 8
LATENT, ROPE = 8, 4


@pytest.fixture(scope="module", autouse=True)
def small_workspaces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashinfer, "INT_WORKSPACE_BYTES", 64)
        yield


LIMITS = StepLimits(rows=8, tokens=200, context_len=8 * 16)


def shape_over(pool: MHAPool, **options) -> Shape:
    return attention_shape(pool, HEADS, 0.3, **options)


def backend_over(pool: MHAPool, **options) -> FlashInferBackend:
    return FlashInferBackend(pool, shape_over(pool, **options), LIMITS, fake_flashinfer)


def filled_pool(num_pages: int = 60, seed: int = 0) -> MHAPool:
    pool = MHAPool(num_layers=2, num_pages=num_pages, kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for layer in range(2):
        for storage in pool.layer(layer):
            storage.copy_(torch.randn(storage.shape, generator=generator))
    return pool


def batch_of(rows: list[tuple[int, int]], num_decode: int, seed: int = 0):
    return scattered_batch(rows, num_decode, 60, seed)


def projections(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    qkv = torch.randn((tokens, HEADS + 2 * KV_HEADS, SIZE), generator=torch.Generator().manual_seed(seed))
    return qkv[:, :HEADS], qkv[:, HEADS:-KV_HEADS], qkv[:, -KV_HEADS:]


def latent_pool() -> MLAPool:
    pool = MLAPool(num_layers=2, num_pages=60, width=LATENT + ROPE, dtype=torch.float32)
    for layer in range(2):
        generator = torch.Generator().manual_seed(layer)
        pool.layer(layer).copy_(torch.randn(pool.layer(layer).shape, generator=generator))
    return pool


def over_latents(pool: MLAPool, heads: int) -> FlashInferLatentBackend:
    shape = attention_shape(pool, heads, 0.3, latent=LATENT)
    return FlashInferLatentBackend(pool, shape, LIMITS, "fa2", fake_flashinfer)


def latent_inputs(tokens: int, seed: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn((tokens, heads, LATENT + ROPE), generator=generator)
    k = torch.randn((tokens, 1, LATENT + ROPE), generator=generator)
    return q, k, k[..., :LATENT]


def pair(latent_heads: int | None):
    """A backend and torch's over equal pools, and what makes their inputs; of latents if they have heads."""
    if latent_heads is None:
        pool = filled_pool()
        return backend_over(filled_pool()), SdpaBackend(pool, shape_over(pool)), projections
    pool = latent_pool()
    reference = LatentBackend(pool, attention_shape(pool, latent_heads, 0.3, latent=LATENT))
    return over_latents(latent_pool(), latent_heads), reference, partial(latent_inputs, heads=latent_heads)


def assert_pools_equal(one, other) -> None:
    for layer in range(2):
        mine, theirs = one.pool.layer(layer), other.pool.layer(layer)
        for each in zip(mine, theirs, strict=True):
            assert torch.equal(*each), "stored elsewhere"


LENGTHS = st.tuples(st.integers(0, 60), st.integers(1, 40))


@settings(max_examples=examples(80))
@given(
    latent_heads=st.sampled_from([None, None, None, 1, 2, 16, 3]),
    decode=st.lists(st.integers(0, 90), max_size=3),
    prefill=st.lists(LENGTHS, max_size=3),
    seed=st.integers(0, 99),
)
@example(latent_heads=None, decode=[15, 16, 0], prefill=[(0, 16), (16, 16), (0, 1)], seed=0)
@example(latent_heads=4, decode=[15, 16, 0], prefill=[(0, 16), (16, 16), (0, 1)], seed=0)
@example(latent_heads=3, decode=[15], prefill=[(0, 16)], seed=0)
def test_mixed_steps_agree_with_the_torch_backend(latent_heads, decode, prefill, seed):
    rows = [(start, 1) for start in decode] + prefill
    if not rows:
        return
    batch = batch_of(rows, len(decode), seed)
    ours, reference, inputs = pair(latent_heads)
    qkv = inputs(len(batch.input_ids), seed)
    with torch.inference_mode():
        for each in (ours, reference):
            each.plan(batch)
        for layer in range(2):
            found, expected = (each.forward(*qkv, layer) for each in (ours, reference))
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert_pools_equal(ours, reference)


SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0])
FORMS = {
    "window": AttentionForm(window=21),
    "narrow window": AttentionForm(window=1),
    "soft cap": AttentionForm(softcap=0.7),
    "scale": AttentionForm(scale=0.9),
    "all but sinks": AttentionForm(window=20, softcap=1.1, scale=0.6),
    "sinks": AttentionForm(sinks=SINKS),
    "sinks and window": AttentionForm(window=19, sinks=SINKS.bfloat16()),
}


def with_window_pages(batch, gone: int):
    """``batch`` with a table of its own for layers with a window of ``gone``."""
    table = torch.zeros_like(batch.page_table)
    slots = torch.empty_like(batch.kv_slots)
    first_token = 0
    for row, (new, length) in enumerate(zip(batch.q_lens_host, batch.kv_lens_host)):
        kept = slice(max(0, length - new + 1 - gone) // 16, -(-length // 16))
        table[row, kept] = 60 - batch.page_table[row, kept]
        positions = torch.arange(length - new, length)
        slots[first_token : first_token + new] = table[row, positions // 16] * 16 + positions % 16
        first_token += new
    return replace(batch, window_table=table, window_slots=slots)


@pytest.mark.parametrize("own_pages", [False, True])
def test_layers_of_every_form_agree_with_the_torch_backend(own_pages):
    kinds = [form.kind for form in FORMS.values()]
    ours, reference = filled_pool(61), filled_pool(61)
    backend = backend_over(ours, kinds=kinds)
    torch_backend = SdpaBackend(reference, shape_over(reference, kinds=kinds))
    captured = backend.for_decode(3)
    for seed, (rows, num_decode) in enumerate(
        (
            ([(15, 1), (90, 1), (0, 17), (40, 30), (19, 20)], 2),
            ([(3, 1), (64, 1), (88, 1)], 3),
            ([(0, 60)], 0),
            ([(16, 1), (47, 1), (20, 1)], 3),
        )
    ):
        batch = batch_of(rows, num_decode, seed)
        if own_pages:
            batch = with_window_pages(batch, 21)
        q, k, v = projections(len(batch.input_ids), seed)
        for each in [backend, captured] if num_decode == 3 else [backend]:
            each.plan(batch)
            torch_backend.plan(batch)
            for form in FORMS.values():
                got, expected = (of.forward(q, k, v, seed % 2, form) for of in (each, torch_backend))
                torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
        for mine, theirs in zip(ours.layer(seed % 2), reference.layer(seed % 2), strict=True):
            assert torch.equal(mine[1:], theirs[1:]), "K or V went elsewhere"


def test_sinks_are_those_of_the_moment():
    sinks = SINKS.clone()
    form = AttentionForm(sinks=sinks)
    backend = backend_over(filled_pool(), kinds=[form.kind])
    batch = batch_of([(20, 1), (0, 4)], 1)
    backend.plan(batch)
    before = backend.forward(*projections(5, 0), 0, form)
    sinks.fill_(50.0)  # takes nearly all weight
    assert backend.forward(*projections(5, 0), 0, form).abs().max() < 1e-3 < before.abs().max()


@pytest.mark.parametrize("rows,window,expected", [
    ([(32, 1), (15, 1), (14, 3)], None, {
        "indptr": [0, 3, 4, 6], "last": [1, 16, 1], "kv_lens": [33, 16, 17], "qo": [0, 3], "prefill": [0, 2],
        "positions": [32, 15, 14, 15, 16], "pages": [(0, 0, 3), (1, 0, 1), (2, 0, 2)],
    }),
    ([(63, 1), (15, 1), (30, 20)], 17, {  # from token 47, from 0, from 14
        "indptr": [0, 2, 3, 7], "last": [16, 16, 2], "kv_lens": [32, 16, 50], "qo": [0, 20],
        "prefill": [0, 4], "positions": [31, 15, *range(30, 50)], "pages": [(0, 2, 4), (1, 0, 1), (2, 0, 4)],
    }),
], ids=["all pages", "none before a window"])  # fmt: skip
def test_page_lists_of_a_step_by_hand(rows, window, expected):
    batch = batch_of(rows, 2)
    *found, indices = page_lists(batch, window=window) if window else page_lists(batch)
    names = ("indptr", "last", "kv_lens", "qo", "prefill", "rows", "positions")
    owners = [row for row, (_, new) in enumerate(rows) for _ in range(new)]
    wanted = {**expected, "rows": owners}
    pages = [batch.page_table[row, start:end] for row, start, end in wanted.pop("pages")]
    assert {name: each.tolist() for name, each in zip(names, found, strict=True)} == wanted
    assert indices.tolist() == torch.cat(pages).tolist()


def test_page_lists_of_one_size_keep_their_addresses():
    lists = PageLists(StepLimits(rows=4, tokens=70, context_len=128), torch.device("cpu"))
    views = lists.decode_views(3)
    for seed in range(3):
        batch = batch_of([(seed * 17, 1), (90, 1), (3, 1)], 3, seed)
        _, device = lists.fill(batch)
        for name in ("indptr", "last_page_len", "kv_lens", "batch_indices", "positions", "indices"):
            found, expected = getattr(views, name), getattr(device, name)
            assert found.data_ptr() == expected.data_ptr()
            assert torch.equal(found[: len(expected)], expected)


@pytest.mark.parametrize("latent_heads", [None, 4])
def test_captured_decode_keeps_its_buffers_and_follows_each_plan(latent_heads):
    backend, reference, inputs = pair(latent_heads)
    captured, buffers = backend.for_decode(3), None
    wrapper = captured.forms[PLAIN.kind][1] if latent_heads is None else captured.decode
    for seed in range(4):
        batch, qkv = batch_of([(seed * 15, 1), (89, 1), (3 + seed, 1)], 3, seed), inputs(3, seed)
        captured.plan(batch)
        reference.plan(batch)
        found = [t.data_ptr() for t in wrapper._plans]
        assert found == (buffers or found)
        buffers = found
        expected = reference.forward(*qkv, 0)
        torch.testing.assert_close(captured.forward(*qkv, 0), expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(AssertionError, match="another number of rows"):
        captured.plan(batch_of([(3, 1)], 1))


@pytest.mark.parametrize("latent_heads,planned,decoding", [
    (None, ["plan decode 2", "plan prefill 1"], ["plan decode 2"]),
    (16, ["plan latent decode 2", "plan latent prefill 1"], ["plan latent decode 2"]),
    (3, [], ["plan latent decode 2"]),
], ids=["heads", "latents", "latents whose queries a tile would cut: torch prefills"])  # fmt: skip
def test_decode_and_prefill_rows_are_planned_apart(latent_heads, planned, decoding):
    backend, _, inputs = pair(latent_heads)
    for rows, expected in (([(20, 1), (3, 1), (0, 40)], planned), ([(20, 1), (3, 1)], decoding)):
        fake_flashinfer.CALLS.clear()
        batch = batch_of(rows, 2)
        backend.plan(batch)
        assert backend.reads_page_table is (planned == [])
        for layer in range(2):
            backend.forward(*inputs(len(batch.input_ids), 0), layer)
        assert expected == fake_flashinfer.CALLS


@pytest.mark.parametrize("captured", [False, True])
def test_a_plan_waits_for_the_copies_of_the_one_before(captured):
    backend = backend_over(filled_pool())
    planned = backend.for_decode(2) if captured else backend
    seen: list[tuple[str, list[int]]] = []

    class Event:
        def synchronize(self) -> None:
            seen.append(("wait", backend.lists[None].host.tolist()))

        def record(self) -> None:
            seen.append(("copied", backend.lists[None].host.tolist()))

    backend.host_memory.copied = Event()
    for seed in range(3):
        planned.plan(batch_of([(40 * seed, 1), (9, 1)], 2, seed))
    assert [kind for kind, _ in seen] == ["wait", "copied"] * 3
    for (_, copied), (_, at_wait) in zip(seen[1::2], seen[2::2]):
        assert copied == at_wait, "written before the wait"


@pytest.mark.parametrize("heads,kv_heads,size,rows,megabytes", [
    (32, 8, 128, 1024, 85), (32, 8, 128, 64, 18.5), (64, 8, 128, 1024, 103), (32, 32, 128, 1024, 21),
    (16, 2, 256, 256, 35.8), (32, 1, 128, 1024, 52),
])  # fmt: skip
def test_the_workspace_is_that_of_the_largest_step(monkeypatch, heads, kv_heads, size, rows, megabytes):
    monkeypatch.setattr(flashinfer, "multiprocessors", lambda device: 132)
    found = flashinfer.workspace_bytes(heads, kv_heads, size, rows, torch.device("cuda"))
    assert found / 1e6 == pytest.approx(megabytes, abs=1.5)


@pytest.mark.parametrize("answer", [NotImplementedError("cudnn"), (50_000_000, 5), (7, 5)], ids=repr)
def test_the_library_is_asked_for_its_workspace(answer):
    asked = []

    def workspace_size(self, given):
        lists = [tuple(each.shape) for each in vars(given).values() if isinstance(each, Tensor)]
        asked.append((type(self).__name__, lists))
        if isinstance(answer, Exception):
            raise answer
        return answer

    made = {}
    for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        bound = takes(f"{name}.workspace_size", causal=False, **FORM, **DTYPES)(workspace_size)
        made[name] = type(name, (getattr(fake_flashinfer, name),), {"workspace_size": bound})
    library = SimpleNamespace(**{**vars(fake_flashinfer), **made})
    pool = filled_pool()
    backend = FlashInferBackend(pool, shape_over(pool), LIMITS, library)
    least = flashinfer.workspace_bytes(HEADS, KV_HEADS, SIZE, 8, torch.device("cpu"))
    told = 0 if isinstance(answer, Exception) else answer[0]
    assert backend.forms[PLAIN.kind][0].workspace.numel() == max(least, told)
    assert [name for name, _ in asked] == [*made]
    assert asked[0][1] == [(9,), (8,), (8,)]


@pytest.mark.parametrize("heads,expected", [(2, False), (6, False), (8, True), (16, True)])
def test_large_groups_decode_on_tensor_cores(heads, expected):
    pool, limits = filled_pool(), StepLimits(rows=1, tokens=1, context_len=16)
    backend = FlashInferBackend(pool, attention_shape(pool, heads), limits, fake_flashinfer)
    assert backend.forms[PLAIN.kind][1].use_tensor_cores is expected


@pytest.fixture
def installed(monkeypatch):
    """Let a library be installed in FlashInfer's place, or none."""

    def install(library: object = fake_flashinfer) -> None:
        monkeypatch.setattr(flashinfer, "find_spec", lambda name: library)
        monkeypatch.setattr(flashinfer, "import_module", lambda name: library)

    return install


CUDA, BF16 = torch.device("cuda"), torch.bfloat16
CAPPED_SINKS = [FormKind(sinks=True, softcap=3.0)]


@pytest.mark.parametrize("device,dtype,sizes,kinds,library,reason", [
    ("cpu", BF16, [128], [], fake_flashinfer, "not on cpu"),
    ("cuda", torch.float32, [128], [], fake_flashinfer, "not float32"),
    ("cuda", BF16, [80], [], fake_flashinfer, "heads of 80"),
    ("cpu", BF16, [512, 64], None, fake_flashinfer, "not on cpu"),
    ("cuda", torch.float32, [512, 64], None, fake_flashinfer, "not float32"),
    ("cuda", BF16, [96, 64], None, fake_flashinfer, "latents of 96"),
    ("cuda", BF16, [512, 32], None, fake_flashinfer, "rotated keys of 32"),
    ("cuda", BF16, [512, 64], None, fake_flashinfer, None),
    ("cuda", BF16, [128], [], None, "it is not installed"),
    ("cuda", BF16, [128], [], fake_flashinfer, None),
    ("cuda", BF16, [64], CAPPED_SINKS, fake_flashinfer, "soft caps together with attention sinks"),
    ("cuda", BF16, [64], [FormKind(sinks=True)], SimpleNamespace(), "does not serve attention sinks"),
    ("cuda", BF16, [64], [FormKind(sinks=True, window=7), FormKind(softcap=2.0)], fake_flashinfer, None),
    ("cuda", BF16, [64], [FormKind(window=4, softcap=2.0, scale=0.5)], SimpleNamespace(), None),
])  # fmt: skip
def test_backend_says_why_it_cannot_serve(installed, device, dtype, sizes, kinds, library, reason):
    """Sizes of latents come without kinds."""
    installed(library)
    why = flashinfer_mla.why_not if kinds is None else why_not
    found = why(torch.device(device), dtype, *sizes, *([kinds] if kinds else []))
    assert (found is None) if reason is None else (reason in found)


def test_prefill_of_latents_is_served_where_the_planner_has_room(monkeypatch):
    monkeypatch.setattr(flashinfer_mla, "multiprocessors", lambda device: 132)
    assert all(serves_prefill(heads, 1024, 9216, CUDA) for heads in (16, 128))
    assert not serves_prefill(20, 64, 512, CUDA), "a tile of 128 ends within a query of 20 heads"
    assert not serves_prefill(128, 1024, 32768, CUDA), "more tiles than the planner has room for"


@pytest.mark.parametrize(
    "options", [{"attention_backend": "flex"}, {"attention_backend": "sdpa", "deterministic": True}]
)
def test_an_impossible_backend_is_refused_by_name(options):
    with pytest.raises(CaesuraError) as caught:
        EngineConfig(model_path="m", **options)
    assert caught.value.detail["field"] == "attention_backend"
