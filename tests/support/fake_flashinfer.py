"""FlashInfer's interface as far as the engine uses it, computed by torch from what the documentation says it
means.

Attention and append are custom operators, so that a recorded graph holds them as one call each and runs them
again on whatever the buffers hold then, as the kernels would. Page lists are all they know of a step: wrong
ones give wrong numbers. Wrappers for graphs copy their plans into the buffers that they were given, and
accept no other number of rows.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .flashinfer_interface import takes

CALLS: list[str] = []
"""Plans and runs since the list was cleared."""


@torch.library.custom_op("fake_flashinfer::attend", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_indptr: Tensor,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    scale: float,
    window_left: int,
    soft_cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Compute causal attention of [T, heads, size] over HND pages."""
    out = torch.full_like(q, torch.nan).contiguous()
    group = q.shape[1] // k.shape[1]
    for row in range(len(last_page_len)):
        pages = indices[int(indptr[row]) : int(indptr[row + 1])].long()
        length = (len(pages) - 1) * k.shape[2] + int(last_page_len[row])
        keys, values = (
            x[pages].transpose(1, 2).flatten(0, 1)[:length].double().repeat_interleave(group, 1)
            for x in (k, v)
        )
        queries = q[int(qo_indptr[row]) : int(qo_indptr[row + 1])].double()
        scores = torch.einsum("thd,shd->hts", queries, keys) * scale
        if soft_cap > 0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        back = torch.arange(length - len(queries), length)[:, None] - torch.arange(length)
        unseen = (back < 0) | (back > (window_left if window_left >= 0 else length))
        scores = scores.masked_fill(unseen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(queries), 1)], -1)
        weights = scores.softmax(-1)[..., :length]
        attended = torch.einsum("hts,shd->thd", weights, values)
        out[int(qo_indptr[row]) : int(qo_indptr[row + 1])] = attended.to(q.dtype)
    return out


@torch.library.custom_op("fake_flashinfer::append", mutates_args=("k_cache", "v_cache"))
def _append(
    k: Tensor,
    v: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    indices: Tensor,
    indptr: Tensor,
) -> None:
    size = k_cache.shape[2]
    pages = indices[indptr[batch_indices.long()].long() + positions.long() // size].long()
    k_cache[pages, :, positions.long() % size] = k
    v_cache[pages, :, positions.long() % size] = v


@takes("append_paged_kv_cache", kv_layout="NHD")
def append_paged_kv_cache(given: Any) -> None:
    assert given.kv_layout == "HND"
    assert len(given.kv_indptr) == len(given.kv_last_page_len) + 1
    tokens = given.append_key, given.append_value, given.batch_indices, given.positions
    assert len({len(each) for each in tokens}) == 1
    for ints in (*tokens[2:], given.kv_indices, given.kv_indptr, given.kv_last_page_len):
        assert ints.dtype == torch.int32
        assert ints.is_contiguous()
    _append(*tokens, *given.paged_kv_cache, given.kv_indices, given.kv_indptr)


FORM = {"sm_scale": None, "window_left": -1, "logits_soft_cap": None}
DTYPES = {"q_data_type": None, "kv_data_type": None}


class _Wrapper:
    """Common part of the wrappers: plans as tensors, and attention over them."""

    def _begin(self, given: Any, *buffers: Tensor) -> None:
        assert given.kv_layout == "HND"
        assert not given.float_workspace_buffer.any(), "must be zero at first"
        self._plans: tuple[Tensor, ...] = ()
        self._form = 0.0, -1, 0.0
        self._buffers = buffers
        if buffers:
            assert len(buffers[0]) == len(buffers[1]) == len(buffers[3]) + 1

    @takes("BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer")
    def reset_workspace_buffer(self, given: Any) -> None:
        assert given.float_workspace_buffer.dtype == given.int_workspace_buffer.dtype == torch.uint8

    def _keep(self, given: Any, plans: tuple[Tensor, ...]) -> None:
        assert given.page_size == 16
        assert given.q_data_type == given.kv_data_type
        assert all(plan.dtype == torch.int32 for plan in plans)
        indptr, indices = plans[1], plans[2]
        assert int(indptr[0]) == 0
        assert int(indptr[-1]) == len(indices)
        assert bool(((plans[3] >= 1) & (plans[3] <= 16)).all())
        self._form = given.sm_scale, given.window_left, given.logits_soft_cap or 0.0
        self._plans = _kept(plans, self._buffers)

    @takes("BatchPrefillWithPagedKVCacheWrapper.run", args=(), out=None)
    def run(self, given: Any) -> Tensor:
        assert given.q.stride(-1) == 1
        (sinks,) = given.args or (None,)
        attended = _attend(given.q, *given.paged_kv_cache, *self._plans, *self._form, sinks)
        return attended if given.out is None else given.out.copy_(attended)


def _kept(plans: tuple[Tensor, ...], buffers: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Copy plans, which may be overwritten afterwards, into a captured wrapper's buffers if it has any."""
    if not buffers:
        return tuple(plan.clone() for plan in plans)
    for number, (buffer, plan) in enumerate(zip(buffers, plans, strict=True)):
        assert number == 2 or len(buffer) == len(plan), "the number of rows of a captured wrapper is fixed"
        assert buffer.untyped_storage().data_ptr() != plan.untyped_storage().data_ptr()
        buffer[: len(plan)].copy_(plan)
    return buffers


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    @takes("BatchPrefillWithPagedKVCacheWrapper.__init__", kv_layout="NHD")
    def __init__(self, given: Any) -> None:
        self._begin(given)

    @takes("BatchPrefillWithPagedKVCacheWrapper.plan", causal=False, **FORM, **DTYPES)
    def plan(self, given: Any) -> None:
        assert given.causal
        CALLS.append(f"plan prefill {len(given.paged_kv_last_page_len)}")
        lists = given.paged_kv_indptr, given.paged_kv_indices, given.paged_kv_last_page_len
        self._keep(given, (given.qo_indptr, *lists))


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Prompts and decode rows alike; compiled for a window or for none, and for no soft cap."""

    @takes(
        "BatchAttentionWithAttentionSinkWrapper.__init__",
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
        head_dim_qk=128,
        head_dim_vo=128,
        window_left=-1,
    )
    def __init__(self, given: Any) -> None:
        buffers = given.qo_indptr_buf, given.paged_kv_indptr_buf, given.paged_kv_indices_buf
        self._begin(given, *((*buffers, given.paged_kv_last_page_len_buf) if given.use_cuda_graph else ()))
        self._compiled = given

    def _keep(self, given: Any, plans: tuple[Tensor, ...]) -> None:
        assert not given.logits_soft_cap, "not compiled for soft caps"
        window = self._compiled.window_left >= 0
        assert window == (given.window_left >= 0), "compiled for another kind of mask"
        assert all(getattr(given, name) == getattr(self._compiled, name) for name in DTYPES)
        super()._keep(given, plans)

    @takes("BatchAttentionWithAttentionSinkWrapper.run", args=(), out=None)
    def run(self, given: Any) -> Tensor:
        (sinks,) = given.args
        assert self._compiled.head_dim_qk == self._compiled.head_dim_vo == given.q.shape[-1]
        assert sinks.dtype == torch.float32
        assert sinks.shape == given.q.shape[1:2]
        return super().run(given.q, given.paged_kv_cache, sinks, out=given.out)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    @takes(
        "BatchDecodeWithPagedKVCacheWrapper.__init__",
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
    )
    def __init__(self, given: Any) -> None:
        self.use_tensor_cores = given.use_tensor_cores
        buffers: tuple[Tensor, ...] = ()
        if given.use_cuda_graph:
            indptr = given.paged_kv_indptr_buffer
            rows = torch.arange(len(indptr), dtype=torch.int32)
            buffers = rows, indptr, given.paged_kv_indices_buffer, given.paged_kv_last_page_len_buffer
        self._begin(given, *buffers)

    @takes("BatchDecodeWithPagedKVCacheWrapper.plan", **FORM, **DTYPES)
    def plan(self, given: Any) -> None:
        rows = len(given.last_page_len)
        CALLS.append(f"plan decode {rows}{' for a graph' if self._buffers else ''}")
        first = torch.arange(rows + 1, dtype=torch.int32)
        self._keep(given, (first, given.indptr, given.indices, given.last_page_len))


@torch.library.custom_op("fake_flashinfer::attend_latents", mutates_args=("out",))
def _attend_latents(
    q: Tensor,
    cache: Tensor,
    out: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_len_arr: Tensor,
    latent: int,
    scale: float,
    causal: bool,
) -> None:
    """Compute attention of [T, heads, latent + rotated] over [pages, page size, latent + rotated]."""
    out.fill_(torch.nan)
    for row in range(len(kv_len_arr)):
        pages, length = kv_indices[int(kv_indptr[row]) : int(kv_indptr[row + 1])].long(), int(kv_len_arr[row])
        keys = cache[pages].flatten(0, 1)[:length].double()
        here = slice(int(qo_indptr[row]), int(qo_indptr[row + 1]))
        queries = q[here].double()
        scores = torch.einsum("thd,sd->hts", queries, keys) * scale
        if causal:
            future = torch.arange(length) > torch.arange(length - len(queries), length)[:, None]
            scores = scores.masked_fill(future, -torch.inf)
        out[here] = torch.einsum("hts,sd->thd", scores.softmax(-1), keys[:, :latent]).to(q.dtype)


class MLAPlanMetadata(NamedTuple):
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_len_arr: Tensor

    @classmethod
    @takes("MLAPlanMetadata.csr")
    def csr(cls, given: Any) -> "MLAPlanMetadata":
        return cls(**vars(given))


mla = SimpleNamespace(MLAPlanMetadata=MLAPlanMetadata)
LISTS = dict.fromkeys(MLAPlanMetadata._fields)
LATENT = dict.fromkeys(["num_heads", "head_dim_ckv", "head_dim_kpe", "page_size", "causal", "sm_scale"])


class BatchMLAPagedAttentionWrapper:
    """Plans as the real one checks them."""

    @takes("BatchMLAPagedAttentionWrapper.__init__", use_cuda_graph=False, backend="auto", **LISTS)
    def __init__(self, given: Any) -> None:
        assert given.float_workspace_buffer.dtype == torch.uint8
        assert given.backend in ("fa2", "fa3")
        buffers = given.qo_indptr, given.kv_indptr, given.kv_indices, given.kv_len_arr
        self._buffers: tuple[Tensor, ...] = buffers if given.use_cuda_graph else ()
        self._plans: tuple[Tensor, ...] = ()

    @takes("BatchMLAPagedAttentionWrapper.plan", metadata=None, **LATENT, **DTYPES)
    def plan(self, given: Any) -> None:
        qo_indptr, kv_indptr, kv_indices, kv_len_arr = given.metadata
        rows = len(kv_len_arr)
        for ints in given.metadata:
            assert ints.dtype == torch.int32
            assert ints.dim() == 1
            assert ints.is_contiguous()
        assert len(qo_indptr) == len(kv_indptr) == rows + 1
        assert int(qo_indptr[0]) == int(kv_indptr[0]) == 0
        assert int(kv_indptr[-1]) <= len(kv_indices)
        assert torch.equal(kv_indptr.diff(), -(-kv_len_arr // given.page_size))
        assert given.page_size == 16
        assert given.q_data_type == given.kv_data_type
        assert not given.causal or 128 % given.num_heads == 0, "a tile ends within a query"
        kind = "prefill" if given.causal else "decode"
        CALLS.append(f"plan latent {kind} {rows}{' for a graph' if self._buffers else ''}")
        self._planned = given
        self._plans = _kept(given.metadata, self._buffers)

    @takes("BatchMLAPagedAttentionWrapper.run", query=None, kv_cache=None, out=None)
    def run(self, given: Any) -> Tensor:
        query, cache, out, latent = given.query, given.kv_cache, given.out, self._planned.head_dim_ckv
        assert query.shape[-1] == cache.shape[-1] == latent + self._planned.head_dim_kpe
        assert query.stride(-1) == cache.stride(-1) == 1
        assert out.shape == (*query.shape[:2], latent)
        assert out.dtype == query.dtype
        form = latent, self._planned.sm_scale, self._planned.causal
        _attend_latents(query, cache, out, *self._plans, *form)
        return out
