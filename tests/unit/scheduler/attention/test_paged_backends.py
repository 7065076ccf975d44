"""Attention over pages by torch and by compiled kernels, with NaN wherever nothing may be read.

Plain torch in float64 is the reference of the torch backends, and the torch backend that of the compiled one.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_forms import attended, forms
from support.forward_batches import Row, attention_shape, forward_batch
from support.kernels import instruction_sets
from support.properties import examples
from support.workspaces import memory_of
from torch import Tensor

from caesura.scheduler.attention import rows as row_groups
from caesura.scheduler.attention import sdpa
from caesura.scheduler.attention.paged_cpu import PagedCpuBackend
from caesura.scheduler.attention.sdpa import SdpaBackend
from caesura.scheduler.attention.sdpa_mla import LatentBackend
from caesura.scheduler.cache.pool import MHAPool, MLAPool
from caesura.scheduler.kernels.attention_form import PLAIN, AttentionForm, HeadNorms
from caesura.scheduler.layers.norm import normalize
from caesura.scheduler.layers.rotary import rotate

PAGE = 16
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
DTYPES = tuple(TOLERANCE)
COMPILED = {"kv_heads": 2, "group": 3, "size": 20}


class Scene:
    """Rows of (earlier tokens, new tokens), with random K and V in scattered pages.

    ``kind``: ``sdpa``, ``compiled``, or ``latents``: values are the first ``value_size`` elements of a key.
    """

    def __init__(
        self, kind: str, rows: list[tuple[int, int]], num_decode: int, seed: int = 0, *, kv_heads: int = 2,
        group: int = 2, size: int = 8, value_size: int | None = None, form: AttentionForm = PLAIN,
        dtype: torch.dtype = torch.float32, scale: float = 0.3,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.kind, self.rows, self.form, self.scale = kind, rows, form, scale
        self.kv_heads, self.group, self.size, self.value_size = kv_heads, group, size, value_size or size
        needed = [-(-(start + new) // PAGE) for start, new in rows]
        ids = list(range(1, sum(needed) + 4))
        random.Random(seed).shuffle(ids)
        made = {"num_layers": 1, "num_pages": len(ids) + 1, "dtype": dtype}
        self.pool: MHAPool | MLAPool = (
            MLAPool(width=size, **made)
            if kind == "latents"
            else MHAPool(kv_heads=kv_heads, head_size=size, value_size=self.value_size, **made)
        )
        for storage in self.stored():
            storage.fill_(torch.nan)
        self.keys, self.values, batch_rows = [], [], []
        for (start, new), count in zip(rows, needed):
            pages = [ids.pop() for _ in range(count)]
            k = draw(start + new, kv_heads, size)
            v = k[..., :value_size] if kind == "latents" else draw(start + new, kv_heads, self.value_size)
            slots = torch.tensor(
                [pages[p // PAGE] * PAGE + p % PAGE for p in range(start)], dtype=torch.int64
            )
            self.pool.store(0, *((k[:start, 0],) if kind == "latents" else (k[:start], v[:start])), slots)
            self.keys.append(k)
            self.values.append(v)
            given_back = max(0, start + 1 - (form.window or start + new)) // PAGE
            batch_rows.append(Row([0] * new, start, [0] * given_back + pages[given_back:]))
        self.batch = forward_batch(batch_rows, num_decode)
        self.q = draw(sum(new for _, new in rows), kv_heads * group, size)
        self.k, self.v = (
            torch.cat([x[start:] for x, (start, _) in zip(each, rows)]) for each in (self.keys, self.values)
        )

    def stored(self) -> list[Tensor]:
        found = self.pool.layer(0)
        return [found] if isinstance(found, Tensor) else list(found)

    def backend(self):
        kind = {"sdpa": SdpaBackend, "compiled": PagedCpuBackend, "latents": LatentBackend}[self.kind]
        latent = self.value_size if self.kind == "latents" else None
        return kind(
            self.pool, attention_shape(self.pool, self.kv_heads * self.group, self.scale, latent=latent)
        )

    @torch.inference_mode()
    def attend(self, backend=None) -> Tensor:
        backend = backend or self.backend()
        backend.plan(self.batch)
        return backend.forward(self.q, self.k, self.v, 0, *([self.form] if self.form != PLAIN else []))

    def expected(self) -> Tensor:
        outputs, token = [], 0
        for (start, new), k, v in zip(self.rows, self.keys, self.values):
            q = self.q[token : token + new].double().view(new, self.kv_heads, self.group, self.size)
            products = torch.einsum("tkgd,skd->kgts", q, k.double())
            outputs.append(attended(products, v.double(), start, self.form, 0.3).reshape(new, -1))
            token += new
        return torch.cat(outputs)


def check(scene: Scene):
    backend = scene.backend()
    got = scene.attend(backend)
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), scene.expected(), atol=2e-6, rtol=1e-5)
    return backend


@contextmanager
def workspace_of(limit: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_groups, "WORKSPACE_BYTES", limit)
        yield


def groups_of(backend) -> list:
    return backend.groups if isinstance(backend, LatentBackend) else backend.plan_for(None).groups


def latents(rows, num_decode, seed, *, heads=2, latent=8, rope=2) -> Scene:
    return Scene(
        "latents", rows, num_decode, seed, kv_heads=1, group=heads, size=latent + rope, value_size=latent
    )


decode_rows = st.lists(st.tuples(st.integers(0, 70), st.just(1)), max_size=6)
prefill_rows = st.lists(
    st.tuples(st.sampled_from([0, 0, 1, 16, 37]), st.sampled_from([1, 2, 15, 16, 33])), max_size=4
)


@settings(max_examples=examples(120))
@given(
    data=st.data(),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    size=st.sampled_from([2, 6, 16]),
    value_size=st.sampled_from([None, 6, 9, 16]),
    decode=decode_rows,
    prefill=prefill_rows,
    seed=st.integers(0, 1000),
)
def test_every_form_matches_dense_attention(data, kv_heads, group, size, value_size, decode, prefill, seed):
    form = data.draw(st.just(PLAIN) | forms(kv_heads * group, torch.float32))
    sizes = {"kv_heads": kv_heads, "group": group, "size": size, "value_size": value_size}
    if decode or prefill:
        check(Scene("sdpa", decode + prefill, len(decode), seed, form=form, **sizes))


@settings(max_examples=examples(60))
@given(
    heads=st.integers(1, 5),
    latent=st.sampled_from([1, 6, 20]),
    rope=st.sampled_from([2, 6]),
    decode=decode_rows,
    prefill=prefill_rows,
    limit=st.sampled_from([1, 4_000, 4 << 20]),
    seed=st.integers(0, 1000),
)
def test_latents_match_dense_attention(heads, latent, rope, decode, prefill, limit, seed):
    if decode or prefill:
        with workspace_of(limit):
            check(latents(decode + prefill, len(decode), seed, heads=heads, latent=latent, rope=rope))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norm", [False, True])
def test_the_fused_entry_is_the_layer_s_sequence(dtype, with_norm):
    for _ in instruction_sets():
        rows = [(33, 1), (0, 1), (20, 30), (0, 17)]
        own, other = (Scene(kind, rows, 2, dtype=dtype, **COMPILED) for kind in ("compiled", "sdpa"))
        generator = torch.Generator().manual_seed(1)
        qkv = torch.cat([own.q, own.k, own.v], 1)
        angles = torch.randn((len(qkv), 1, own.size // 2), generator=generator)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        q_weight, k_weight = torch.randn((2, own.size), generator=generator).to(dtype)
        qk, heads = qkv[:, : -own.kv_heads], own.kv_heads * own.group
        if with_norm:
            qk = normalize(qk, 1e-6)
            qk[:, :heads].mul_(q_weight)
            qk[:, heads:].mul_(k_weight)
        other.q, other.k = rotate(qk, cos, sin).split([heads, own.kv_heads], 1)
        backend = own.backend()
        with torch.inference_mode():
            backend.plan(own.batch)
            norm = HeadNorms(q_weight, k_weight, 1e-6) if with_norm else None
            got = backend.store_and_attend(qkv, cos, sin, 0, norm, PLAIN)
        torch.testing.assert_close(got, other.attend(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("kind", ["sdpa", "compiled", "latents"])
def test_a_plan_serves_every_layer_and_the_workspace_only_grows(kind):
    for _ in instruction_sets() if kind == "compiled" else [None]:
        sizes = {"kv_heads": 1, "size": 10, "value_size": 8} if kind == "latents" else {}
        scene = Scene(kind, [(100, 1)] * 4 + [(0, 50)], 4, 8, **sizes)
        backend = scene.backend()
        first = scene.attend(backend)

        def address(out: Tensor, backend=backend) -> int:
            return (out if kind == "compiled" else memory_of(backend.workspace, "gathered")).data_ptr()

        where, first = address(first), first.clone()
        with torch.inference_mode():
            again = backend.forward(scene.q, scene.k, scene.v, 0)
            assert torch.equal(again, first)
            assert address(again) == where
            backend.plan(forward_batch([Row([0], 4, [1])], 1))
            small = backend.forward(scene.q[:1], scene.k[:1], scene.v[:1], 0)
        assert small.shape == (1, first.shape[1])
        assert address(small) == where


@pytest.mark.parametrize("kind", ["sdpa", "latents"])
def test_one_long_row_does_not_pad_the_others(kind):
    rows = [(20, 1), (1500, 1), (30, 1)] + [(10, 1)] * 20
    scene = Scene(kind, rows, 23, 4) if kind == "sdpa" else latents(rows, 23, 4)
    groups = groups_of(check(scene))
    assert [group.num_rows for group in groups] == [1, 22]
    if kind == "sdpa":
        padded = sum(len(group.pages) for group in groups) // 2
        assert padded < 1.4 * sum(-(-length // PAGE) for length in scene.batch.kv_lens_host)


def test_scores_of_a_long_prompt_are_computed_in_parts(monkeypatch):
    monkeypatch.setattr(sdpa, "SCORE_ELEMENTS", 4 * 50 * 7)
    check(Scene("sdpa", [(10, 40), (0, 50)], 0, 3, form=AttentionForm(softcap=2.0, window=30)))


def test_layers_of_every_window_share_a_step():
    scene = Scene("sdpa", [(70, 1), (33, 1), (40, 20), (0, 50)], 2, 3)
    backend = scene.backend()
    with torch.inference_mode():
        backend.plan(scene.batch)
        for scene.form in (AttentionForm(window=20), PLAIN, AttentionForm(window=20, softcap=1.0)):
            got = backend.forward(scene.q, scene.k, scene.v, 0, scene.form)
            torch.testing.assert_close(got.double(), scene.expected(), atol=2e-6, rtol=1e-5)
    assert backend.plan_for(20) is backend.plan_for(20)


@pytest.mark.parametrize("limit", [1, 3 * 2 * PAGE * 8 * 4])
def test_rows_are_split_when_the_workspace_is_full(limit):
    rows = [(5, 1), (40, 1), (16, 1), (15, 1), (47, 1), (0, 1)]
    with workspace_of(limit):
        backend = check(Scene("sdpa", rows + [(20, 9)] * 3 + [(0, 12)] * 2, len(rows), 3))
    assert memory_of(backend.workspace, "gathered").nbytes // 2 <= max(limit, 3 * 2 * PAGE * 8 * 4)


def test_equal_prompts_are_one_run():
    backend = check(Scene("sdpa", [(0, 9)] * 3 + [(16, 9)] * 2 + [(0, 8)], 0, 5, kv_heads=1))
    runs = [(run.num_rows, run.q_len, run.kv_len) for run in backend.plan_for(None).runs]
    assert runs == [(3, 9, 9), (2, 9, 25), (1, 8, 8)]


def test_pages_of_another_size_are_refused():
    pool = MHAPool(num_layers=1, num_pages=3, kv_heads=1, head_size=8, dtype=torch.float32, page_size=8)
    with pytest.raises(ValueError, match="pages of 16"):
        PagedCpuBackend(pool, attention_shape(pool, 1))


def test_workspaces_of_latents_stay_within_the_limit():
    limit, rows = 3 * PAGE * 26 * 4, [(5, 1), (40, 1), (16, 1), (47, 1)] + [(0, 30)] * 2
    with workspace_of(limit):
        backend = check(latents(rows, 4, 3, heads=3, latent=20, rope=6))
    assert memory_of(backend.workspace, "gathered").nbytes <= limit
    for group in groups_of(backend):
        for queries in group.queries:
            count, tokens, _ = queries.positions.shape
            assert tokens == 1 or count * tokens * 3 * queries.length * 4 <= limit


def test_parts_of_a_prompt_read_only_the_keys_they_attend_to():
    with workspace_of(2 * 8 * 64 * 4):
        (group,) = groups_of(check(latents([(0, 64)], 0, 4, latent=20, rope=6)))
    assert [queries.length for queries in group.queries] == list(range(8, 65, 8))


def test_rows_with_equally_many_new_tokens_are_one_group():
    backend = check(latents([(9, 1), (3, 1), (0, 9), (16, 9), (0, 8), (25, 1)], 2, 5))
    groups = [(group.num_rows, group.queries[0].positions.shape[1]) for group in groups_of(backend)]
    assert sorted(groups) == [(1, 8), (2, 9), (3, 1)]


def test_the_latent_pool_has_the_size_in_the_paper():
    per_token = MLAPool.bytes_per_token(61, 512 + 64, torch.bfloat16)
    assert per_token == 61 * 576 * 2
    pool = MLAPool(num_layers=61, num_pages=3, width=576, dtype=torch.bfloat16)
    assert pool.nbytes == 3 * PAGE * per_token
    assert (pool.num_layers, pool.layer(7).shape) == (61, (3, PAGE, 576))
    with pytest.raises(ValueError, match="at least 1"):
        MLAPool(num_layers=1, num_pages=0, width=4, dtype=torch.float32)
