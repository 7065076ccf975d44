"""Attention over latents against dense float64 references, with NaN wherever nothing may be read."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.forward_batches import Row, attention_shape, forward_batch
from support.properties import examples
from support.workspaces import memory_of
from torch import Tensor

from caesura.scheduler.attention import mla
from caesura.scheduler.attention.mla import LatentBackend
from caesura.scheduler.cache.pool import MLAPool

PAGE = 16
SCALE = 0.3


class Scene:
    """Rows with random earlier latents in scattered pages of a pool that is NaN everywhere else."""

    def __init__(
        self, heads: int, latent: int, rope: int, rows: list[tuple[int, int]], num_decode: int, seed: int
    ):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.heads, self.latent, self.rows, width = heads, latent, rows, latent + rope
        needed = [-(-(start + new) // PAGE) for start, new in rows]
        ids = list(range(1, sum(needed) + 4))
        random.Random(seed).shuffle(ids)
        self.pool = MLAPool(num_layers=1, num_pages=len(ids) + 1, width=width, dtype=torch.float32)
        self.pool.layer(0).fill_(torch.nan)
        self.latents, batch_rows = [], []
        for (start, new), count in zip(rows, needed):
            pages = [ids.pop() for _ in range(count)]
            values = draw(start + new, width)
            slots = [pages[p // PAGE] * PAGE + p % PAGE for p in range(start)]
            self.pool.store(0, values[:start], torch.tensor(slots, dtype=torch.int64))
            self.latents.append(values)
            batch_rows.append(Row([0] * new, start, pages))
        self.batch = forward_batch(batch_rows, num_decode)
        self.q = draw(sum(new for _, new in rows), heads, width)
        self.k = torch.cat([values[start:] for values, (start, _) in zip(self.latents, rows)]).unsqueeze(1)

    def backend(self) -> LatentBackend:
        return LatentBackend(self.pool, attention_shape(self.pool, self.heads, SCALE, latent=self.latent))

    @torch.inference_mode()
    def attend(self, backend: LatentBackend) -> Tensor:
        backend.plan(self.batch)
        return backend.forward(self.q, self.k, self.k[..., : self.latent], 0)

    def expected(self) -> Tensor:
        outputs, token = [], 0
        for (start, new), values in zip(self.rows, self.latents):
            q, keys = self.q[token : token + new].double(), values.double()
            scores = torch.einsum("thd,sd->hts", q, keys) * SCALE
            future = torch.arange(start + new) > torch.arange(start, start + new)[:, None]
            weights = scores.masked_fill(future, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hts,sd->thd", weights, keys[:, : self.latent]).reshape(new, -1))
            token += new
        return torch.cat(outputs)


def check(scene: Scene) -> LatentBackend:
    backend = scene.backend()
    got = scene.attend(backend)
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), scene.expected(), atol=2e-6, rtol=1e-5)
    return backend


decode_rows = st.lists(st.tuples(st.integers(0, 70), st.just(1)), max_size=6)
prefill_rows = st.lists(
    st.tuples(st.sampled_from([0, 0, 1, 16, 37]), st.sampled_from([1, 2, 15, 16, 33])), max_size=4
)


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
def test_matches_dense_attention(heads, latent, rope, decode, prefill, limit, seed) -> None:
    if decode or prefill:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(mla._WORKSPACE_BYTES, "cpu", limit)
            check(Scene(heads, latent, rope, decode + prefill, len(decode), seed))


def test_absorbed_attention_is_multi_head_attention() -> None:
    generator = torch.Generator().manual_seed(1)
    heads, nope, rope, value, latent, tokens = 3, 10, 6, 14, 20, 19
    scene = Scene(heads, latent, rope, [(0, tokens)], 0, 2)
    w_k, w_v = (
        torch.randn(heads, size, latent, generator=generator, dtype=torch.float64) for size in (nope, value)
    )
    q_nope = torch.randn(tokens, heads, nope, generator=generator, dtype=torch.float64)
    q_rope, latents = scene.q[..., latent:].double(), scene.latents[0].double()
    keys, values = (torch.einsum("knl,sl->skn", w, latents[:, :latent]) for w in (w_k, w_v))
    scores = torch.einsum("tkn,skn->kts", q_nope, keys)
    scores += torch.einsum("tkr,sr->kts", q_rope, latents[:, latent:])
    weights = (scores * SCALE).masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf).softmax(-1)
    expected = torch.einsum("kts,skv->tkv", weights, values)
    scene.q[..., :latent] = torch.einsum("tkn,knl->tkl", q_nope, w_k)
    attended = scene.attend(scene.backend()).view(tokens, heads, latent).double()
    torch.testing.assert_close(torch.einsum("tkl,kvl->tkv", attended, w_v), expected, atol=1e-4, rtol=1e-4)


def test_the_workspace_and_scores_stay_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 3 * PAGE * 26 * 4
    monkeypatch.setitem(mla._WORKSPACE_BYTES, "cpu", limit)
    backend = check(Scene(3, 20, 6, [(5, 1), (40, 1), (16, 1), (47, 1)] + [(0, 30)] * 2, 4, 3))
    assert memory_of(backend.workspace, "gathered").nbytes <= limit
    for group in backend.groups:
        for queries in group.queries:
            rows, count, _ = queries.positions.shape
            assert count == 1 or rows * count * 3 * queries.length * 4 <= limit


def test_stretches_of_a_prompt_see_no_more_than_they_must(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mla._WORKSPACE_BYTES, "cpu", 2 * 8 * 64 * 4)
    (group,) = check(Scene(2, 20, 6, [(0, 64)], 0, 4)).groups
    assert [queries.length for queries in group.queries] == list(range(8, 65, 8))


def test_one_long_row_does_not_pad_the_others() -> None:
    scene = Scene(2, 8, 2, [(20, 1), (1500, 1), (30, 1)] + [(10, 1)] * 20, 23, 4)
    assert [group.num_rows for group in check(scene).groups] == [1, 22]


def test_rows_with_equally_many_new_tokens_are_one_group() -> None:
    backend = check(Scene(2, 8, 2, [(9, 1), (3, 1), (0, 9), (16, 9), (0, 8), (25, 1)], 2, 5))
    groups = [(group.num_rows, group.queries[0].positions.shape[1]) for group in backend.groups]
    assert sorted(groups) == [(1, 8), (2, 9), (3, 1)]


def test_a_plan_serves_every_layer_and_the_workspace_only_grows() -> None:
    scene = Scene(2, 8, 2, [(100, 1)] * 4, 4, 8)
    backend = scene.backend()
    first = scene.attend(backend)
    address = memory_of(backend.workspace, "gathered").data_ptr()
    with torch.inference_mode():
        assert torch.equal(backend.forward(scene.q, scene.k, scene.k[..., :8], 0), first)
        backend.plan(forward_batch([Row([0], 4, [1])], 1))
        assert backend.forward(scene.q[:1], scene.k[:1], scene.k[:1, :, :8], 0).shape == (1, 16)
    assert memory_of(backend.workspace, "gathered").data_ptr() == address


def test_the_pool_takes_what_the_paper_says_and_nothing_twice() -> None:
    per_token = MLAPool.bytes_per_token(61, 512 + 64, torch.bfloat16)
    assert per_token == 61 * 576 * 2
    pool = MLAPool(num_layers=61, num_pages=3, width=576, dtype=torch.bfloat16)
    assert pool.nbytes == 3 * PAGE * per_token
    assert (pool.num_layers, pool.layer(7).shape) == (61, (3, PAGE, 576))
    with pytest.raises(ValueError, match="at least 1"):
        MLAPool(num_layers=1, num_pages=0, width=4, dtype=torch.float32)
