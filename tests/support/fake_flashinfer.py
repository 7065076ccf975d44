"""FlashInfer's interface as far as the engine uses it, computed by torch from what the documentation says it
means.

Attention and append are custom operators, so that a recorded graph holds them as one call each and runs them
again on whatever the buffers hold then, as the kernels would. Page lists are all they know of a step: wrong
ones give wrong numbers. Wrappers for graphs copy their plans into the buffers that they were given, and
accept no other number of rows.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

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


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    assert kv_layout == "HND"
    assert len(kv_indptr) == len(kv_last_page_len) + 1
    assert len(batch_indices) == len(positions) == len(append_key) == len(append_value)
    for ints in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len):
        assert ints.dtype == torch.int32
        assert ints.is_contiguous()
    _append(append_key, append_value, batch_indices, positions, *paged_kv_cache, kv_indices, kv_indptr)


class _Wrapper:
    """Common part of both wrappers: plans as tensors, and attention over them."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert kv_layout == "HND"
        assert not float_workspace_buffer.any(), "must be zero at first"
        self._plans: tuple[Tensor, ...] = ()
        self._form = 0.0, -1, 0.0

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        assert float_workspace_buffer.dtype == int_workspace_buffer.dtype == torch.uint8

    def _keep(
        self, plans: tuple[Tensor, ...], form: tuple[float, int, float | None], dtypes: tuple[Any, Any]
    ) -> None:
        assert dtypes[0] == dtypes[1]
        assert all(plan.dtype == torch.int32 for plan in plans)
        indptr, indices = plans[1], plans[2]
        assert int(indptr[0]) == 0
        assert int(indptr[-1]) == len(indices)
        assert bool(((plans[3] >= 1) & (plans[3] <= 16)).all())
        scale, window_left, soft_cap = form
        self._form = scale, window_left, soft_cap or 0.0
        self._plans = tuple(plan.clone() for plan in plans)  # they may be overwritten once the copy was made

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *args: Tensor, out: Tensor | None = None
    ) -> Tensor:
        assert q.stride(-1) == 1
        (sinks,) = args or (None,)
        attended = _attend(q, *paged_kv_cache, *self._plans, *self._form, sinks)
        return attended if out is None else out.copy_(attended)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal
        assert page_size == 16
        CALLS.append(f"plan prefill {len(paged_kv_last_page_len)}")
        plans = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._keep(plans, (sm_scale, window_left, logits_soft_cap), (q_data_type, kv_data_type))


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Prompts and decode rows alike; compiled for a window or for none, and for no soft cap."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        *,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self._compiled = q_data_type, kv_data_type, head_dim_qk, head_dim_vo, window_left >= 0
        self._buffers: tuple[Tensor, ...] | None = None
        if use_cuda_graph:
            given = qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf
            self._buffers = tuple(buffer for buffer in given if buffer is not None)
            assert len(self._buffers) == 4
            assert len(self._buffers[0]) == len(self._buffers[1]) == len(self._buffers[3]) + 1

    def _keep(
        self, plans: tuple[Tensor, ...], form: tuple[float, int, float | None], dtypes: tuple[Any, Any]
    ) -> None:
        assert not form[2], "not compiled for soft caps"
        assert self._compiled[4] == (form[1] >= 0), "compiled for another kind of mask"
        assert self._compiled[:2] == dtypes
        super()._keep(plans, form, dtypes)
        if self._buffers is not None:
            assert len(self._buffers[3]) == len(plans[3]), "the number of rows of a captured wrapper is fixed"
            for buffer, plan in zip(self._buffers, self._plans, strict=True):
                buffer[: len(plan)].copy_(plan)
            self._plans = self._buffers

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *args: Tensor, out: Tensor | None = None
    ) -> Tensor:
        (sinks,) = args
        assert self._compiled[2] == self._compiled[3] == q.shape[-1]
        assert sinks.dtype == torch.float32
        assert sinks.shape == q.shape[1:2]
        return super().run(q, paged_kv_cache, sinks, out=out)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self.use_tensor_cores = use_tensor_cores
        self._buffers: tuple[Tensor, ...] | None = None
        if use_cuda_graph:
            indptr, indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
            last = paged_kv_last_page_len_buffer
            assert indptr is not None
            assert indices is not None
            assert last is not None
            assert len(indptr) == len(last) + 1
            self._buffers = (torch.arange(len(indptr), dtype=torch.int32), indptr, indices, last)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        sm_scale: float,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert page_size == 16
        rows = len(last_page_len)
        CALLS.append(f"plan decode {rows}{'' if self._buffers is None else ' for a graph'}")
        plans = (torch.arange(rows + 1, dtype=torch.int32), indptr, indices, last_page_len)
        self._keep(plans, (sm_scale, window_left, logits_soft_cap), (q_data_type, kv_data_type))
        if self._buffers is not None:
            assert len(self._buffers[3]) == rows, "the number of rows of a captured wrapper is fixed"
            for buffer, plan in zip(self._buffers[1:], self._plans[1:], strict=True):
                buffer[: len(plan)].copy_(plan)
            self._plans = self._buffers


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


@dataclass(frozen=True)
class MLAPlanMetadata:
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_len_arr: Tensor

    @classmethod
    def csr(
        cls, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor
    ) -> "MLAPlanMetadata":
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    def lists(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.qo_indptr, self.kv_indptr, self.kv_indices, self.kv_len_arr


mla = SimpleNamespace(MLAPlanMetadata=MLAPlanMetadata)


class BatchMLAPagedAttentionWrapper:
    """Plans as the real one checks them."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert backend in ("fa2", "fa3")
        self._buffers: tuple[Tensor, ...] | None = None
        if use_cuda_graph:
            assert qo_indptr is not None
            assert kv_indptr is not None
            assert kv_indices is not None
            assert kv_len_arr is not None
            self._buffers = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        self._plans: tuple[Tensor, ...] = ()

    def plan(
        self,
        *,
        metadata: MLAPlanMetadata,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        lists = metadata.lists()
        qo_indptr, kv_indptr, kv_indices, kv_len_arr = lists
        rows = len(kv_len_arr)
        for ints in lists:
            assert ints.dtype == torch.int32
            assert ints.dim() == 1
            assert ints.is_contiguous()
        assert len(qo_indptr) == len(kv_indptr) == rows + 1
        assert int(qo_indptr[0]) == int(kv_indptr[0]) == 0
        assert int(kv_indptr[-1]) <= len(kv_indices)
        assert torch.equal(kv_indptr.diff(), -(-kv_len_arr // page_size))
        assert page_size == 16
        assert q_data_type == kv_data_type
        assert not causal or 128 % num_heads == 0, "a tile ends within a query"
        CALLS.append(
            f"plan latent {'prefill' if causal else 'decode'} "
            f"{rows}{' for a graph' * (self._buffers is not None)}"
        )
        self._widths, self._scale, self._causal = (head_dim_ckv, head_dim_kpe), sm_scale, causal
        if self._buffers is None:
            self._plans = tuple(each.clone() for each in lists)
            return
        for buffer, each in zip(self._buffers, lists, strict=True):
            assert len(buffer) == len(each) or buffer is self._buffers[2], "the number of rows is fixed"
            assert buffer.untyped_storage().data_ptr() != each.untyped_storage().data_ptr()
            buffer[: len(each)].copy_(each)
        self._plans = self._buffers

    def run(self, *, query: Tensor, kv_cache: Tensor, out: Tensor) -> Tensor:
        assert query.shape[-1] == kv_cache.shape[-1] == sum(self._widths)
        assert query.stride(-1) == kv_cache.stride(-1) == 1
        assert out.shape == (*query.shape[:2], self._widths[0])
        assert out.dtype == query.dtype
        _attend_latents(query, kv_cache, out, *self._plans, self._widths[0], self._scale, self._causal)
        return out
