"""Compiled paged attention against dense attention in float64, and the bits of a row in every company."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_forms import attended, forms
from support.forward_batches import Row, attention_shape, forward_batch
from support.kernels import assert_near, instruction_sets, normal, threads
from support.properties import examples
from torch import Tensor

from caesura.scheduler.attention.paged_cpu import PagedCpuBackend
from caesura.scheduler.attention.sdpa_mla import LatentBackend
from caesura.scheduler.cache.pool import MLAPool
from caesura.scheduler.kernels import native
from caesura.scheduler.kernels.attention import (
    PAGE_SIZE,
    PagedAttention,
    plan_tasks,
    share_prefixes,
)
from caesura.scheduler.kernels.attention_form import PLAIN, AttentionForm

DTYPES = native.FLOATS
SCALE = 0.3


@dataclass
class Piece:
    """Query tokens [start, end) of request ``request``."""

    request: int
    start: int
    end: int


class Scene:
    """Requests of given lengths, their K and V in scattered pages of a pool; all else in the pool is NaN."""

    def __init__(
        self,
        lengths: Sequence[int],
        kv_heads: int,
        group: int,
        size: int,
        dtype: torch.dtype,
        seed: int,
        form: AttentionForm = PLAIN,
        value_size: int | None = None,
    ):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.lengths, self.kv_heads, self.group, self.size, self.dtype = lengths, kv_heads, group, size, dtype
        self.keys = [draw(length, kv_heads, size) for length in lengths]
        self.form, self.value_size = form, value_size or size
        self.values = [draw(length, kv_heads, self.value_size) for length in lengths]
        self.queries = [draw(length, kv_heads * group, size) for length in lengths]
        self.place(seed)

    def place(self, seed: int) -> None:
        needed = [-(-length // PAGE_SIZE) for length in self.lengths]
        ids = list(range(1, sum(needed) + 3))
        random.Random(seed).shuffle(ids)
        self.pages = [[ids.pop() for _ in range(count)] for count in needed]
        self.fill()

    def fill(self) -> None:
        needed = [len(pages) for pages in self.pages]
        shape = (sum(needed) + 3, self.kv_heads, PAGE_SIZE)
        self.pool = [
            torch.full((*shape, size), torch.nan, dtype=self.dtype) for size in (self.size, self.value_size)
        ]
        for index, pages in enumerate(self.pages):
            for pool, rows in zip(self.pool, (self.keys[index], self.values[index])):
                for position, row in enumerate(rows):
                    pool[pages[position // PAGE_SIZE], :, position % PAGE_SIZE] = row

    def share(self, request: int, parent: int, pages: int) -> None:
        """Let a request begin with that many pages of another one."""
        for each in (self.keys, self.values):
            each[request][: pages * PAGE_SIZE] = each[parent][: pages * PAGE_SIZE]
        self.pages[request][:pages] = self.pages[parent][:pages]

    def attend(self, pieces: Sequence[Piece], most: int = 1) -> list[Tensor]:
        """One step's outputs [tokens, heads, size], piece by piece; ``most`` requests attend together."""
        width = max(len(pages) for pages in self.pages) + 1
        table = torch.zeros(len(pieces), width + 2, dtype=torch.int32)[:, :width]
        for row, piece in zip(table, pieces):
            pages = self.pages[piece.request][: -(-piece.end // PAGE_SIZE)]
            row[: len(pages)] = torch.tensor(pages)
            row[: max(0, piece.start + 1 - (self.form.window or piece.end)) // PAGE_SIZE] = 0
        q_lens = [piece.end - piece.start for piece in pieces]
        heads = self.kv_heads * self.group
        # As slices of a fused projection, into wider rows.
        fused = torch.full((sum(q_lens), heads + 3, self.size), torch.nan, dtype=self.dtype)
        q = fused[:, 1 : heads + 1]
        q.copy_(torch.cat([self.queries[piece.request][piece.start : piece.end] for piece in pieces]))
        wide = torch.full((sum(q_lens), heads * self.value_size + 5), 77.0, dtype=self.dtype)
        out = wide[:, : heads * self.value_size]
        attention = PagedAttention(self.dtype, self.kv_heads, self.group, self.size, SCALE, self.value_size)
        tasks = plan_tasks(q_lens, [piece.end for piece in pieces], self.group)
        tasks = share_prefixes(tasks, table.numpy(), self.group, most)
        self.together = int(tasks[:, 4].max())
        attention(q, *self.pool, table, tasks, out, self.form)
        assert (wide[:, heads * self.value_size :] == 77).all()
        return list(out.clone().view(-1, heads, self.value_size).split(q_lens))

    def expected(self, piece: Piece) -> Tensor:
        q = self.queries[piece.request][piece.start : piece.end].double()
        k, v = (x[piece.request][: piece.end].double() for x in (self.keys, self.values))
        scores = torch.einsum("tkgd,skd->kgts", q.view(len(q), self.kv_heads, self.group, -1), k)
        return attended(scores, v, piece.start, self.form, SCALE)


TOLERANCE = {
    torch.float32: {"atol": 3e-6, "rtol": 2e-5},
    # Weights and result are rounded to eight bits each; a result is a mean of values of about 1.
    torch.bfloat16: {"atol": 2.0**-7, "rtol": 2.0**-7},
    torch.float16: {"atol": 3e-6, "rtol": 2.0**-10},
}

pieces_of_work = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 15, 16, 47, 63, 64, 65, 130]), st.sampled_from([1, 1, 2, 7, 16, 33, 70])
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=examples(100))
@given(
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 5, 7, 8]),
    size=st.sampled_from([1, 2, 5, 16, 24, 33, 64, 80, 128]),
    value_size=st.sampled_from([None, None, 3, 16, 32, 64, 72]),
    work=pieces_of_work,
    seed=st.integers(0, 1000),
)
def test_every_form_matches_dense_attention(
    data, dtype, kv_heads, group, size, value_size, work, seed
) -> None:
    form = data.draw(st.just(PLAIN) | forms(kv_heads * group, dtype)) if size <= 64 else PLAIN
    lengths = [earlier + new for earlier, new in work]
    for _ in instruction_sets():
        scene = Scene(lengths, kv_heads, group, size, dtype, seed, form, value_size)
        pieces = [Piece(index, earlier, earlier + new) for index, (earlier, new) in enumerate(work)]
        for piece, got in zip(pieces, scene.attend(pieces)):
            torch.testing.assert_close(got.double(), scene.expected(piece), **TOLERANCE[dtype])


def test_a_sink_of_minus_infinity_is_none() -> None:
    for _ in instruction_sets():
        plain = Scene([90], 1, 2, 16, torch.float32, 1)
        sinks = AttentionForm(sinks=torch.full((2,), -torch.inf))
        with_sinks = Scene([90], 1, 2, 16, torch.float32, 1, sinks)
        assert torch.equal(*(scene.attend([Piece(0, 0, 90)])[0] for scene in (plain, with_sinks)))


def test_heads_larger_than_a_task() -> None:
    for _ in instruction_sets():
        scene = Scene([20], 1, 250, 8, torch.float32, 1)
        (got,) = scene.attend([Piece(0, 0, 20)])
        torch.testing.assert_close(got.double(), scene.expected(Piece(0, 0, 20)), **TOLERANCE[torch.float32])


# The same bits in every company


def scenes(
    dtype: torch.dtype, group: int, size: int, form: AttentionForm = PLAIN, value_size: int | None = None
) -> Iterator[Scene]:
    for _ in instruction_sets():
        yield Scene([203, 90, 16], 2, group, size, dtype, 5, form, value_size)


def alone(scene: Scene, request: int) -> Tensor:
    with threads(1):
        tokens = range(scene.lengths[request])
        return torch.cat([scene.attend([Piece(request, token, token + 1)])[0] for token in tokens])


@settings(max_examples=examples(16))
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from([(1, 16), (2, 64), (3, 40), (5, 33), (8, 7)]),
    cuts=st.sets(st.integers(1, 202), max_size=6),
    count=st.integers(1, 3),
    seed=st.integers(0, 1000),
    window=st.sampled_from([None, None, 1, 7, 64, 75, 140]),
    bent=st.booleans(),
    value_size=st.sampled_from([None, None, 32, 9]),
)
def test_a_token_has_the_same_bits_decoded_and_in_any_chunk(
    dtype, shape, cuts, count, seed, window, bent, value_size
) -> None:
    form = AttentionForm(window=window)
    if bent:
        sinks = torch.linspace(-2, 2, 2 * shape[0]).to(dtype)
        form = AttentionForm(window=window, softcap=3.0, sinks=sinks, scale=0.4)
    for scene in scenes(dtype, *shape, form, value_size):
        want = [alone(scene, request) for request in range(3)]
        scene.place(seed)
        edges = [0, *sorted(cuts), 203]
        got = []
        with threads(count):
            for start, end in itertools.pairwise(edges):
                first, *others = scene.attend([Piece(0, start, end), Piece(1, 10, 87), Piece(2, 15, 16)])
                got.append(first)
                assert torch.equal(others[0], want[1][10:87])
                assert torch.equal(others[1], want[2][15:])
        assert torch.equal(torch.cat(got), want[0])


@settings(max_examples=examples(16))
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from([(1, 64), (2, 64), (3, 40), (8, 32), (16, 16), (17, 16)]),
    parents=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 12)), min_size=6, max_size=6),
    lengths=st.lists(st.integers(1, 200), min_size=7, max_size=7),
    most=st.integers(2, 7),
    count=st.integers(1, 3),
    window=st.sampled_from([None, None, None, 70]),
    value_size=st.sampled_from([None, None, 9]),
)
def test_requests_that_attend_together_keep_their_bits(
    dtype, shape, parents, lengths, most, count, window, value_size
) -> None:
    for _ in instruction_sets():
        scene = Scene(lengths, 2, *shape, dtype, 5, AttentionForm(window=window), value_size)
        for request, (parent, pages) in enumerate(parents, 1):
            parent %= request
            scene.share(
                request, parent, min(pages, lengths[request] // PAGE_SIZE, lengths[parent] // PAGE_SIZE)
            )
        scene.fill()
        pieces = [Piece(request, length - 1, length) for request, length in enumerate(lengths)]
        pieces.insert(3, Piece(0, 0, lengths[0]))  # a prompt beside them
        want = scene.attend(pieces)
        with threads(count):
            for got, expected in zip(scene.attend(pieces, most), want, strict=True):
                assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_one_request_does_not_see_spoils_no_other(dtype: torch.dtype) -> None:
    for _ in instruction_sets():
        scene = Scene([150, 200, 140], 2, 3, 33, dtype, 5)
        scene.share(1, 0, 8)
        scene.share(2, 0, 8)
        scene.fill()
        pieces = [Piece(request, length - 1, length) for request, length in enumerate(scene.lengths)]
        want = scene.attend(pieces)
        scene.values[1][130], scene.keys[2][135] = torch.nan, torch.inf
        scene.fill()
        got = scene.attend(pieces, 3)
        assert scene.together == 3
        assert torch.equal(got[0], want[0])
        assert got[1].isnan().all()
        assert not got[2].isfinite().any()


@pytest.mark.parametrize("size,group", [(64, 2), (128, 7), (64, 15), (33, 3), (80, 1)])
@pytest.mark.parametrize("form", [PLAIN, AttentionForm(window=37, softcap=9.0, scale=0.2)])
def test_float16_is_computed_in_float32_and_rounded_once(size: int, group: int, form: AttentionForm) -> None:
    pieces = [Piece(1, 46, 47), Piece(2, 0, 1), Piece(0, 33, 100), Piece(3, 129, 130)]
    for _ in instruction_sets():
        narrow = Scene([100, 47, 1, 130], 2, group, size, torch.float16, 0, form)
        wide = Scene([100, 47, 1, 130], 2, group, size, torch.float32, 0, form)
        for name in ("keys", "values", "queries"):
            setattr(wide, name, [each.float() for each in getattr(narrow, name)])
        wide.place(3)
        for got, expected in zip(narrow.attend(pieces), wide.attend(pieces), strict=True):
            assert torch.equal(got, expected.half())


@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_later_tokens_do_not_leak(dtype: torch.dtype) -> None:
    """A weight of zero times infinity would be NaN: what a query may not see is left out."""
    for scene in scenes(dtype, 2, 32):
        for position in (3, 64, 101, 150):
            want = alone(scene, 0)
            scene.values[0][position:] = torch.inf
            scene.keys[0][position + 1 :] = torch.nan
            scene.place(5)
            (got,) = scene.attend([Piece(0, 0, 203)])
            assert torch.equal(got[:position], want[:position])
            assert not got[position:].isfinite().any()
            scene = Scene([203, 90, 16], 2, 2, 32, dtype, 5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [40, 65])
def test_non_finite_tokens_before_the_window_do_not_leak(dtype: torch.dtype, window: int) -> None:
    form = AttentionForm(window=window)
    for scene in scenes(dtype, 2, 32, form):
        want = alone(scene, 0)
        for position in (3, 64, 101, 150):
            values, keys = scene.values[0].clone(), scene.keys[0].clone()
            scene.values[0][position], scene.keys[0][position - 1] = torch.inf, torch.nan
            scene.place(5)
            (got,) = scene.attend([Piece(0, 0, 203)])
            assert torch.equal(got[: position - 1], want[: position - 1])
            assert not got[position - 1 : position + window].isfinite().any()
            assert torch.equal(got[position + window :], want[position + window :])
            scene.values[0], scene.keys[0] = values, keys


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_that_is_not_finite_spoils_its_own_row_only(dtype: torch.dtype) -> None:
    for scene in scenes(dtype, 2, 32):
        (want,) = scene.attend([Piece(0, 0, 203)])
        scene.queries[0][100, 1] = torch.nan
        (got,) = scene.attend([Piece(0, 0, 203)])
        assert got[100, 1].isnan().all()
        got[100, 1] = want[100, 1]
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_do_not_overflow(dtype: torch.dtype) -> None:
    for scene in scenes(dtype, 2, 16):
        scene.queries[0] *= 1000
        for piece in (Piece(0, 0, 203), Piece(0, 202, 203)):
            (got,) = scene.attend([piece])
            torch.testing.assert_close(got.double(), scene.expected(piece), atol=0.05, rtol=0.02)


# Planning


@settings(max_examples=examples(100))
@given(
    rows=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 500)), min_size=1, max_size=20),
    group=st.sampled_from([1, 2, 8, 200]),
)
def test_a_plan_covers_every_token_once(rows, group) -> None:
    q_lens, kv_lens = [q for q, _ in rows], [q + earlier for q, earlier in rows]
    tasks = plan_tasks(q_lens, kv_lens, group)
    seen = []
    for row, first, tokens, position, count, shared in tasks.tolist():
        assert (count, shared) == (1, 0)
        assert tokens >= 1
        assert tokens == 1 or tokens * group <= 192
        token = sum(q_lens[:row])
        assert position - (kv_lens[row] - q_lens[row]) == first - token
        seen += range(first, first + tokens)
        assert token <= first < first + tokens <= token + q_lens[row]
    assert sorted(seen) == list(range(sum(q_lens)))


def test_decoding_rows_are_planned_alike_beside_a_prompt() -> None:
    kv_lens = [5, 300, 300, 1, 64, 17]
    beside = plan_tasks([1] * 6 + [2], [*kv_lens, 2], 3)
    assert np.array_equal(plan_tasks([1] * 6, kv_lens, 3), beside[beside[:, 0] < 6])
    assert plan_tasks([], [], 3).shape == (0, 6)


def test_the_longest_task_comes_first() -> None:
    rows = [row for row, *_ in plan_tasks([1, 1, 90, 1], [10, 3000, 90, 200], 1).tolist()]
    assert rows == [1, 2, 3, 0]


def tables(samples: Sequence[Sequence[int]], width: int = 12) -> np.ndarray:
    return np.array([[*pages, *[0] * (width - len(pages))] for pages in samples], np.int32)


def test_samples_attend_to_their_prompt_together() -> None:
    """Also where all prompts begin with the same pages, and in any order of rows."""
    prompts = [[1, 2, 3, 4, 5, *range(10 * p, 10 * p + 4)] for p in range(1, 5)]
    samples = [[*prompts[i % 4], 100 + i] for i in range(12)]
    kv_lens = [9 * PAGE_SIZE + 1 + i for i in range(12)]
    tasks = share_prefixes(plan_tasks([1] * 12, kv_lens, 2), tables(samples), 2, 8)
    leaders = tasks[tasks[:, 4] > 0]
    assert leaders[:, 4:].tolist() == [[3, 128]] * 4
    assert [{row % 4 for row in tasks[i : i + 3, 0].tolist()} for i in (0, 3, 6, 9)] == [{3}, {2}, {1}, {0}]
    assert sorted(tasks[:, 0].tolist()) == list(range(12))


def test_a_short_prefix_of_long_contexts_is_not_shared() -> None:
    samples = [[1, 2, 3, 4, *range(10 * i, 10 * i + 8)] for i in range(1, 5)]
    for end, together in ((128, 4), (129, 1)):
        tasks = share_prefixes(plan_tasks([1] * 4, [end] * 4, 2), tables(samples), 2, 8)
        assert tasks[:, 4].max() == together


def test_what_is_longest_together_comes_first() -> None:
    samples = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [7, 8, 9, 10, 11, 12, 13, 14]]
    tasks = share_prefixes(plan_tasks([1, 1, 1], [66, 65, 120], 2), tables(samples), 2, 8)
    assert tasks[:, [0, 4, 5]].tolist() == [[2, 1, 0], [0, 2, 64], [1, 0, 0]]


@settings(max_examples=examples(100))
@given(
    branches=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12), st.integers(1, 200)), max_size=20),
    group=st.sampled_from([1, 2, 16, 17]),
    most=st.integers(0, 30),
    prompt=st.booleans(),
)
def test_a_unit_has_what_all_of_it_see_in_common(branches, group, most, prompt) -> None:
    rows: list[list[int]] = [[*range(1, 14)]]
    for number, (parent, pages, _) in enumerate(branches, 1):
        before = rows[parent % len(rows)][:pages]
        rows.append([*before, *range(100 * number, 100 * number + 13 - len(before))])
    q_lens, kv_lens = [1] * len(rows), [150, *(length for *_, length in branches)]
    if prompt:
        q_lens[0] = 100
    plan, table = plan_tasks(q_lens, kv_lens, group), tables(rows, 13)
    tasks = share_prefixes(plan, table, group, most)
    assert sorted(tasks[:, :4].tolist()) == sorted(plan[:, :4].tolist())
    following = 0
    for row, _, tokens, position, count, shared in tasks.tolist():
        assert (count == 0) == (following > 0)
        if count:
            leader, following, common = row, count, shared
        following -= 1
        assert common % 64 == 0
        assert common <= position + 1
        assert (table[row, : common // PAGE_SIZE] == table[leader, : common // PAGE_SIZE]).all()
        assert count <= 1 or (count <= most and count * group <= 192 and group <= 16 and common > 0)
        assert tokens == 1 or count == 1


# Latents


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads,latent,rope", [(1, 20, 6), (4, 64, 32), (13, 30, 8), (16, 64, 32), (26, 128, 64)]
)
def test_attention_over_latents_is_that_of_torch(dtype, heads, latent, rope) -> None:
    rows = [Row([0], 70, [1, 2, 3, 4, 5]), Row([0], 0, [6]), Row([0] * 40, 27, [7, 8, 9, 10, 11])]
    batch, width, tokens = forward_batch(rows, 2), latent + rope, 42
    q, k = normal(1, dtype, tokens, heads, width), normal(2, dtype, tokens, 1, width)
    filled = normal(3, dtype, 13 * 16, width)

    def attend(kind) -> tuple[Tensor, Tensor]:
        pool = MLAPool(num_layers=1, num_pages=13, width=width, dtype=dtype)
        pool.layer(0).view(-1, width).copy_(filled)
        backend = kind(pool, attention_shape(pool, heads, latent=latent))
        backend.plan(batch)
        return backend.forward(q, k, k[..., :latent], 0).clone(), pool.layer(0)

    expected, stored = attend(LatentBackend)
    for _ in instruction_sets():
        for count in (1, 3):
            with threads(count):
                got, ours = attend(PagedCpuBackend)
            assert_near(got, expected, dtype, 8 if dtype == torch.float32 else 3)
            assert torch.equal(ours, stored)


# Refusals


@pytest.mark.parametrize("change", [
    {"q": torch.zeros(3, 4, 8).bfloat16()}, {"q": torch.zeros(3, 5, 8)},
    {"q": torch.zeros(3, 4, 16)[..., ::2]},
    {"keys": torch.zeros(2, 2, 8, 16).transpose(2, 3)}, {"values": torch.zeros(2, 2, 16, 4)},
    {"keys": torch.zeros(2, 1, 16, 8), "values": torch.zeros(2, 1, 16, 8)},
    {"keys": torch.zeros(3, 2, 16, 8)},
    {"table": torch.zeros(3, 1, dtype=torch.int64)}, {"table": torch.zeros(3, 2, dtype=torch.int32)[:, ::2]},
    {"out": torch.zeros(3, 31)}, {"out": torch.zeros(2, 32)}, {"out": torch.zeros(32, 3).T},
    {"tasks": np.zeros((3, 4), dtype=np.int32)}, {"tasks": np.zeros((3, 8), dtype=np.int64)[:, ::2]},
])  # fmt: skip
def test_misreadable_tensors_are_refused(change) -> None:
    for _ in instruction_sets():
        given = {
            "q": torch.zeros(3, 4, 8), "keys": torch.zeros(2, 2, 16, 8), "values": torch.zeros(2, 2, 16, 8),
            "table": torch.ones(3, 1, dtype=torch.int32), "tasks": plan_tasks([1] * 3, [5] * 3, 2),
            "out": torch.ones(3, 32),
        }  # fmt: skip
        attention = PagedAttention(torch.float32, 2, 2, 8, SCALE)
        assert not attention(*given.values()).any()
        with pytest.raises(ValueError):
            attention(*(given | change).values())


@pytest.mark.parametrize(
    "sinks",
    [torch.zeros(2), torch.zeros(4).bfloat16(), torch.zeros(8)[::2]],
    ids=["heads", "dtype", "strides"],
)
def test_sinks_that_would_be_misread_are_refused(sinks: Tensor) -> None:
    for _ in instruction_sets():
        attention = PagedAttention(torch.float32, 2, 2, 8, SCALE)
        pool, table = torch.zeros(2, 2, 16, 8), torch.ones(1, 1, dtype=torch.int32)
        tasks, out = plan_tasks([1], [5], 2), torch.zeros(1, 32)
        with pytest.raises(ValueError, match="sinks of 4 heads"):
            attention(torch.zeros(1, 4, 8), pool, pool, table, tasks, out, AttentionForm(sinks=sinks))


@pytest.mark.parametrize("wrong", [{"window": 0}, {"softcap": 0.0}, {"softcap": float("nan")}], ids=str)
def test_a_form_that_means_nothing_is_refused(wrong) -> None:
    with pytest.raises(ValueError):
        AttentionForm(**wrong)
