"""FlashInfer's plans and page lists, against dense attention."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import fake_flashinfer
from support.forward_batches import Row, attention_shape, forward_batch
from support.properties import examples
from torch import Tensor

from caesura.io_struct import CaesuraError
from caesura.scheduler.attention import flashinfer
from caesura.scheduler.attention.flashinfer import FlashInferBackend, why_not
from caesura.scheduler.attention.page_lists import PageLists, page_lists
from caesura.scheduler.attention.sdpa import SdpaBackend
from caesura.scheduler.attention.shape import Shape
from caesura.scheduler.cache.pool import MHAPool
from caesura.scheduler.execution.forward import StepLimits
from caesura.scheduler.kernels.attention_form import PLAIN, AttentionForm, FormKind
from caesura.scheduler.runtime.config import EngineConfig

HEADS, KV_HEADS, SIZE = 4, 2, 8


@pytest.fixture(scope="module", autouse=True)
def small_workspaces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashinfer, "_INT_WORKSPACE_BYTES", 64)
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
    generator = torch.Generator().manual_seed(seed)
    ids = (torch.randperm(59, generator=generator) + 1).tolist()
    made = []
    for start, new in rows:
        made.append(Row([0] * new, start, [ids.pop() for _ in range(-(-(start + new) // 16))]))
    return forward_batch(made, num_decode)


def projections(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    qkv = torch.randn((tokens, HEADS + 2 * KV_HEADS, SIZE), generator=torch.Generator().manual_seed(seed))
    return qkv[:, :HEADS], qkv[:, HEADS:-KV_HEADS], qkv[:, -KV_HEADS:]


LENGTHS = st.tuples(st.integers(0, 60), st.integers(1, 40))


@settings(max_examples=examples(40))
@given(
    decode=st.lists(st.integers(0, 90), max_size=3),
    prefill=st.lists(LENGTHS, max_size=3),
    seed=st.integers(0, 99),
)
@example(decode=[15, 16, 0], prefill=[(0, 16), (16, 16), (0, 1)], seed=0)
def test_mixed_steps_agree_with_the_torch_backend(decode, prefill, seed):
    rows = [(start, 1) for start in decode] + prefill
    if not rows:
        return
    batch = batch_of(rows, len(decode), seed)
    q, k, v = projections(len(batch.input_ids), seed)
    ours, reference = filled_pool(), filled_pool()
    torch_backend = SdpaBackend(reference, shape_over(reference))
    backend = backend_over(ours)
    with torch.inference_mode():
        for each in (backend, torch_backend):
            each.plan(batch)
        for layer in range(2):
            got = backend.forward(q, k, v, layer)
            torch.testing.assert_close(got, torch_backend.forward(q, k, v, layer), atol=1e-5, rtol=1e-4)
            for mine, theirs in zip(ours.layer(layer), reference.layer(layer), strict=True):
                assert torch.equal(mine, theirs), "K or V went elsewhere"


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


def test_pages_before_a_window_are_not_listed():
    batch = batch_of([(63, 1), (15, 1), (30, 20)], 2)
    table = batch.page_table
    indptr, last, kv_lens, qo_indptr, prefill_indptr, _rows, positions, indices = page_lists(batch, window=17)
    assert indptr.tolist() == [0, 2, 3, 7]  # from token 47, from 0, from 14
    assert (last.tolist(), kv_lens.tolist()) == ([16, 16, 2], [32, 16, 50])
    assert (qo_indptr.tolist(), prefill_indptr.tolist()) == ([0, 20], [0, 4])
    assert positions.tolist() == [31, 15, *range(30, 50)]
    assert indices.tolist() == [*table[0, 2:4].tolist(), int(table[1, 0]), *table[2].tolist()]


def test_decode_and_prefill_rows_are_planned_apart_and_once_per_step():
    backend = backend_over(filled_pool())
    fake_flashinfer.CALLS.clear()
    batch = batch_of([(20, 1), (3, 1), (0, 40)], 2)
    backend.plan(batch)
    for layer in range(2):
        backend.forward(*projections(42, 0), layer)
    assert fake_flashinfer.CALLS == ["plan decode 2", "plan prefill 1"]


def test_page_lists_of_a_step_by_hand():
    batch = batch_of([(32, 1), (15, 1), (14, 3)], 2)
    table = batch.page_table
    indptr, last, kv_lens, qo_indptr, prefill_indptr, batch_indices, positions, indices = page_lists(batch)
    assert indptr.tolist() == [0, 3, 4, 6]
    assert last.tolist() == [1, 16, 1]
    assert kv_lens.tolist() == [33, 16, 17]
    assert (qo_indptr.tolist(), prefill_indptr.tolist()) == ([0, 3], [0, 2])
    assert batch_indices.tolist() == [0, 1, 2, 2, 2]
    assert positions.tolist() == [32, 15, 14, 15, 16]
    assert indices.tolist() == [*table[0].tolist(), int(table[1, 0]), *table[2, :2].tolist()]


def test_lists_of_steps_of_one_size_lie_where_a_graph_looks_for_them():
    lists = PageLists(StepLimits(rows=4, tokens=70, context_len=128), torch.device("cpu"))
    views = lists.decode_views(3)
    for seed in range(3):
        batch = batch_of([(seed * 17, 1), (90, 1), (3, 1)], 3, seed)
        _, device = lists.fill(batch)
        for name in ("indptr", "last_page_len", "kv_lens", "batch_indices", "positions", "indices"):
            found, expected = getattr(views, name), getattr(device, name)
            assert found.data_ptr() == expected.data_ptr()
            assert torch.equal(found[: len(expected)], expected)


def test_captured_decode_keeps_its_buffers_and_follows_each_plan():
    pool, reference = filled_pool(), filled_pool()
    captured = backend_over(pool).for_decode(3)
    torch_backend = SdpaBackend(reference, shape_over(reference))
    buffers = None
    for seed in range(4):
        batch = batch_of([(seed * 15, 1), (89, 1), (3 + seed, 1)], 3, seed)
        q, k, v = projections(3, seed)
        captured.plan(batch)
        torch_backend.plan(batch)
        found = [t.data_ptr() for t in captured.forms[PLAIN.kind][1]._plans]
        assert found == (buffers or found)
        buffers = found
        torch.testing.assert_close(
            captured.forward(q, k, v, 0), torch_backend.forward(q, k, v, 0), atol=1e-5, rtol=1e-4
        )
    with pytest.raises(AssertionError, match="another number of rows"):
        captured.plan(batch_of([(3, 1)], 1))


@pytest.mark.parametrize("captured", [False, True])
def test_a_plan_writes_host_memory_only_after_the_copies_of_the_one_before(captured):
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


@pytest.mark.parametrize(
    "heads,kv_heads,size,rows,megabytes",
    [
        (32, 8, 128, 1024, 85),
        (32, 8, 128, 64, 18.5),
        (64, 8, 128, 1024, 103),
        (32, 32, 128, 1024, 21),
        (16, 2, 256, 256, 35.8),
        (32, 1, 128, 1024, 52),
    ],
)
def test_the_workspace_is_that_of_the_largest_step(monkeypatch, heads, kv_heads, size, rows, megabytes):
    monkeypatch.setattr(flashinfer, "multiprocessors", lambda device: 132)
    found = flashinfer.workspace_bytes(heads, kv_heads, size, rows, torch.device("cuda"))
    assert found / 1e6 == pytest.approx(megabytes, abs=1.5)


@pytest.mark.parametrize("answer", [NotImplementedError("cudnn"), (50_000_000, 5), (7, 5)], ids=repr)
def test_the_library_is_asked_for_its_workspace(answer):
    asked = []

    def workspace_size(self, *lists, **options):
        asked.append((type(self).__name__, [tuple(each.shape) for each in lists[:3]]))
        if isinstance(answer, Exception):
            raise answer
        return answer

    made = {
        name: type(name, (getattr(fake_flashinfer, name),), {"workspace_size": workspace_size})
        for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
    }
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


@pytest.mark.parametrize(
    "device,dtype,size,reason",
    [
        ("cpu", torch.bfloat16, 128, "not on cpu"),
        ("cuda", torch.float32, 128, "not float32"),
        ("cuda", torch.bfloat16, 80, "heads of 80"),
    ],
)
def test_backend_says_why_it_cannot_serve(device, dtype, size, reason):
    assert reason in (why_not(torch.device(device), dtype, size) or "")


@pytest.mark.parametrize(
    ("kinds", "library", "reason"),
    [
        ([FormKind(sinks=True, softcap=3.0)], fake_flashinfer, "soft caps together with attention sinks"),
        ([FormKind(), FormKind(sinks=True)], SimpleNamespace(), "does not serve attention sinks"),
        ([FormKind(sinks=True, window=7), FormKind(softcap=2.0)], fake_flashinfer, None),
        ([FormKind(window=4, softcap=2.0, scale=0.5)], None, None),
    ],
)
def test_forms_without_kernels_are_told(monkeypatch, kinds, library, reason):
    monkeypatch.setattr(flashinfer, "find_spec", lambda name: object())
    monkeypatch.setattr("caesura.scheduler.attention.flashinfer.import_module", lambda name: library)
    found = why_not(torch.device("cuda"), torch.bfloat16, 64, kinds)
    assert (found is None) if reason is None else (reason in found)


def test_installed_or_not_decides_the_rest(monkeypatch):
    where = "caesura.scheduler.attention.flashinfer.find_spec"
    monkeypatch.setattr(where, lambda name: None)
    assert why_not(torch.device("cuda"), torch.bfloat16, 128) == "it is not installed"
    monkeypatch.setattr(where, lambda name: object())
    assert why_not(torch.device("cuda"), torch.bfloat16, 128) is None


@pytest.mark.parametrize(
    "options", [{"attention_backend": "flex"}, {"attention_backend": "sdpa", "deterministic": True}]
)
def test_an_impossible_backend_is_refused_by_name(options):
    with pytest.raises(CaesuraError) as caught:
        EngineConfig(model_path="m", **options)
    assert caught.value.detail["field"] == "attention_backend"
