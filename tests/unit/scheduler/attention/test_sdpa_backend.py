"""The torch attention backend against a dense float64 reference, with NaN wherever nothing may be read."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_forms import attended, forms
from support.forward_batches import Row, attention_shape, forward_batch
from support.properties import examples
from support.workspaces import memory_of
from torch import Tensor

from caesura.scheduler.attention import sdpa
from caesura.scheduler.attention.sdpa import SdpaBackend
from caesura.scheduler.cache.pool import MHAPool
from caesura.scheduler.execution.forward import ForwardBatch
from caesura.scheduler.kernels.attention_form import PLAIN, AttentionForm

PAGE = 16


class Scene:
    """Rows with random earlier KV in scattered pages of a pool that is NaN everywhere else."""

    def __init__(
        self,
        kv_heads: int,
        group: int,
        size: int,
        rows: list[tuple[int, int]],
        num_decode: int,
        seed: int,
        form: AttentionForm = PLAIN,
        value_size: int | None = None,
    ):
        self.form, value_size = form, value_size or size
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.kv_heads, self.group, self.size, self.rows = kv_heads, group, size, rows
        needed = [-(-(start + new) // PAGE) for start, new in rows]
        ids = list(range(1, sum(needed) + 4))
        random.Random(seed).shuffle(ids)
        self.pool = MHAPool(
            num_layers=1,
            num_pages=len(ids) + 1,
            kv_heads=kv_heads,
            head_size=size,
            dtype=torch.float32,
            value_size=value_size,
        )
        k_pool, v_pool = self.pool.layer(0)
        k_pool.fill_(torch.nan)
        v_pool.fill_(torch.nan)
        self.keys, self.values, batch_rows = [], [], []
        for (start, new), count in zip(rows, needed):
            pages = [ids.pop() for _ in range(count)]
            k, v = draw(start + new, kv_heads, size), draw(start + new, kv_heads, value_size)
            slots = torch.tensor(
                [pages[p // PAGE] * PAGE + p % PAGE for p in range(start)], dtype=torch.int64
            )
            self.pool.store(0, k[:start], v[:start], slots)
            self.keys.append(k)
            self.values.append(v)
            given_back = max(0, start + 1 - (form.window or start + new)) // PAGE
            batch_rows.append(Row([0] * new, start, [0] * given_back + pages[given_back:]))
        self.batch: ForwardBatch = forward_batch(batch_rows, num_decode)
        self.q = draw(sum(new for _, new in rows), kv_heads * group, size)
        self.k = torch.cat([k[start:] for k, (start, _) in zip(self.keys, rows)])
        self.v = torch.cat([v[start:] for v, (start, _) in zip(self.values, rows)])

    @torch.inference_mode()
    def attend(self) -> Tensor:
        backend = SdpaBackend(self.pool, attention_shape(self.pool, self.kv_heads * self.group, 0.3))
        backend.plan(self.batch)
        return backend.forward(self.q, self.k, self.v, 0, self.form)

    def expected(self) -> Tensor:
        outputs, token = [], 0
        for (start, new), k, v in zip(self.rows, self.keys, self.values):
            q = self.q[token : token + new].double().view(new, self.kv_heads, self.group, self.size)
            products = torch.einsum("tkgd,skd->kgts", q, k.double())
            outputs.append(attended(products, v.double(), start, self.form, 0.3).reshape(new, -1))
            token += new
        return torch.cat(outputs)


def check(scene: Scene) -> None:
    got = scene.attend()
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), scene.expected(), atol=2e-6, rtol=1e-5)


decode_rows = st.lists(st.tuples(st.integers(0, 70), st.just(1)), max_size=6)
prefill_rows = st.lists(
    st.tuples(st.sampled_from([0, 0, 1, 16, 37]), st.sampled_from([1, 2, 15, 16, 33])), max_size=4
)


@settings(max_examples=examples(60))
@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    size=st.sampled_from([2, 6, 16]),
    decode=decode_rows,
    prefill=prefill_rows,
    seed=st.integers(0, 1000),
)
def test_matches_dense_attention(kv_heads, group, size, decode, prefill, seed) -> None:
    if decode or prefill:
        check(Scene(kv_heads, group, size, decode + prefill, len(decode), seed))


@settings(max_examples=examples(80))
@given(
    data=st.data(),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    value_size=st.sampled_from([6, 9, 16]),
    decode=decode_rows,
    prefill=prefill_rows,
    seed=st.integers(0, 1000),
)
def test_every_form_matches_dense_attention(data, kv_heads, group, value_size, decode, prefill, seed) -> None:
    form = data.draw(forms(kv_heads * group, torch.float32))
    if decode or prefill:
        check(Scene(kv_heads, group, 6, decode + prefill, len(decode), seed, form, value_size))


def test_scores_of_a_long_prompt_are_there_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "_SCORE_ELEMENTS", 4 * 50 * 7)
    check(Scene(2, 2, 8, [(10, 40), (0, 50)], 0, 3, AttentionForm(softcap=2.0, window=30)))


def test_layers_of_every_window_share_a_step() -> None:
    scene = Scene(2, 2, 8, [(70, 1), (33, 1), (40, 20), (0, 50)], 2, 3)
    backend = SdpaBackend(scene.pool, attention_shape(scene.pool, 4, 0.3))
    with torch.inference_mode():
        backend.plan(scene.batch)
        for scene.form in (AttentionForm(window=20), PLAIN, AttentionForm(window=20, softcap=1.0)):
            got = backend.forward(scene.q, scene.k, scene.v, 0, scene.form)
            torch.testing.assert_close(got.double(), scene.expected(), atol=2e-6, rtol=1e-5)
    assert backend.plan_for(20) is backend.plan_for(20)


@pytest.mark.parametrize("limit", [1, 3 * 2 * PAGE * 8 * 4])
def test_rows_are_split_when_the_workspace_is_full(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sdpa._WORKSPACE_BYTES, "cpu", limit)
    rows = [(5, 1), (40, 1), (16, 1), (15, 1), (47, 1), (0, 1)]
    scene = Scene(2, 2, 8, rows + [(20, 9)] * 3 + [(0, 12)] * 2, len(rows), 3)
    check(scene)
    backend = SdpaBackend(scene.pool, attention_shape(scene.pool, 4))
    with torch.inference_mode():
        backend.plan(scene.batch)
        backend.forward(scene.q, scene.k, scene.v, 0)
    longest = 3 * 2 * PAGE * 8 * 4
    assert memory_of(backend.workspace, "gathered").nbytes // 2 <= max(limit, longest)


def test_one_long_row_does_not_pad_the_others() -> None:
    scene = Scene(2, 2, 8, [(20, 1), (1500, 1), (30, 1)] + [(10, 1)] * 20, 23, 4)
    check(scene)
    backend = SdpaBackend(scene.pool, attention_shape(scene.pool, 4))
    backend.plan(scene.batch)
    assert [group.num_rows for group in backend.plan_for(None).groups] == [1, 22]
    padded = sum(len(group.pages) for group in backend.plan_for(None).groups) // 2
    assert padded < 1.4 * sum(-(-length // PAGE) for length in scene.batch.kv_lens_host)


def test_equal_prompts_are_one_run() -> None:
    scene = Scene(1, 2, 8, [(0, 9)] * 3 + [(16, 9)] * 2 + [(0, 8)], 0, 5)
    backend = SdpaBackend(scene.pool, attention_shape(scene.pool, 2))
    backend.plan(scene.batch)
    assert [(run.num_rows, run.q_len, run.kv_len) for run in backend.plan_for(None).runs] == [
        (3, 9, 9),
        (2, 9, 25),
        (1, 8, 8),
    ]
    check(scene)


def test_a_plan_serves_every_layer_and_the_next_plan_replaces_it() -> None:
    first, second = Scene(2, 1, 8, [(70, 1), (3, 1)], 2, 6), Scene(2, 1, 8, [(9, 1)], 1, 7)
    backend = SdpaBackend(first.pool, attention_shape(first.pool, 2, 0.3))
    with torch.inference_mode():
        backend.plan(first.batch)
        once = backend.forward(first.q, first.k, first.v, 0)
        assert torch.equal(backend.forward(first.q, first.k, first.v, 0), once)
        backend.plan(forward_batch([Row([0], 4, [1])], 1))
        assert backend.forward(second.q, second.k, second.v, 0).shape == (1, 16)


def test_the_workspace_only_grows() -> None:
    scene = Scene(2, 2, 8, [(100, 1)] * 4, 4, 8)
    backend = SdpaBackend(scene.pool, attention_shape(scene.pool, 4))
    addresses = set()
    with torch.inference_mode():
        backend.plan(scene.batch)
        for _ in range(3):
            backend.forward(scene.q, scene.k, scene.v, 0)
            addresses.add(memory_of(backend.workspace, "gathered").data_ptr())
        backend.plan(forward_batch([Row([0], 4, [1])], 1))
        backend.forward(scene.q[:1], scene.k[:1], scene.v[:1], 0)
        addresses.add(memory_of(backend.workspace, "gathered").data_ptr())
    assert len(addresses) == 1
