"""FlashInfer's wrappers for layers of one form: windows, soft caps, scales and sinks for its plans and runs.

Invariants:
- A form is planned by wrappers of its own: the options of a plan hold for all runs until the next.
- A window of n positions is ``window_left`` of n - 1: FlashInfer does not count the token itself.
- With sinks, decode rows and prompts both go through ``BatchAttentionWithAttentionSinkWrapper``, which knows
  no soft caps. It takes sinks in float32 at each run, so an update of them is seen at the next step.

Written against FlashInfer 0.7.2, from its documentation and signatures; not run on a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..execution.forward import ForwardBatch
from ..kernels.attention_form import AttentionForm, FormKind
from .page_lists import Lists, PageLists

_SINKS = "BatchAttentionWithAttentionSinkWrapper"


def why_no_kernels(kinds: Sequence[FormKind], library: Any = None) -> str | None:
    """Return which of ``kinds`` FlashInfer (``library``, or the installed one) has no kernels for."""
    if any(kind.sinks and kind.softcap is not None for kind in kinds):
        return "it has no kernels for soft caps together with attention sinks"
    if any(kind.sinks for kind in kinds):
        library = import_module("flashinfer") if library is None else library
        if not hasattr(library, _SINKS):
            return f"this release does not serve attention sinks ({_SINKS})"
    return None


@dataclass(frozen=True, kw_only=True)
class Sizes:
    heads: tuple[int, int, int]
    """Query heads, key heads, size of a head."""
    page_size: int
    dtype: torch.dtype
    scale: float
    tensor_cores: bool


class FormWrappers:
    """Plans and runs the layers of one form."""

    def __init__(
        self,
        library: Any,
        kind: FormKind,
        sizes: Sizes,
        lists: PageLists,
        workspace: Tensor,
        *,
        graph_plans: Tensor,
        graph_pages: Tensor,
    ) -> None:
        """Args:
        workspace: for partial results, of all forms: their layers run one after the other.
        graph_plans, graph_pages: buffers that captured steps of all sizes plan into.
        """
        self.lists = lists
        self._library, self._kind, self._sizes = library, kind, sizes
        self._workspace, self._graph_plans, self._graph_pages = workspace, graph_plans, graph_pages
        self._options: dict[str, Any] = {
            "sm_scale": sizes.scale if kind.scale is None else kind.scale,
            "q_data_type": sizes.dtype,
            "kv_data_type": sizes.dtype,
        }
        if kind.window is not None:
            self._options["window_left"] = kind.window - 1
        if kind.softcap is not None:
            self._options["logits_soft_cap"] = kind.softcap
        self.decode = self._with_sinks() if kind.sinks else self._decoding()
        self.prefill = self._with_sinks() if kind.sinks else self._prefilling()

    def _decoding(self, **options: Any) -> Any:
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_tensor_cores=self._sizes.tensor_cores, **options
        )

    def _prefilling(self) -> Any:
        return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")

    def _with_sinks(self, **options: Any) -> Any:
        size = self._sizes.heads[2]
        return getattr(self._library, _SINKS)(
            self._workspace,
            "HND",
            q_data_type=self._sizes.dtype,
            kv_data_type=self._sizes.dtype,
            head_dim_qk=size,
            head_dim_vo=size,
            window_left=self._options.get("window_left", -1),
            **options,
        )

    def captured(self, rows: int) -> Any:
        device = self._workspace.device
        ends, last = (torch.zeros(size, dtype=torch.int32, device=device) for size in (rows + 1, rows))
        if self._kind.sinks:
            wrapper = self._with_sinks(
                use_cuda_graph=True,
                qo_indptr_buf=torch.zeros_like(ends),
                paged_kv_indptr_buf=ends,
                paged_kv_indices_buf=self._graph_pages,
                paged_kv_last_page_len_buf=last,
            )
        else:
            wrapper = self._decoding(
                use_cuda_graph=True,
                paged_kv_indptr_buffer=ends,
                paged_kv_indices_buffer=self._graph_pages,
                paged_kv_last_page_len_buffer=last,
            )
        wrapper.reset_workspace_buffer(self._workspace, self._graph_plans)  # instead of one of its own
        return wrapper

    def plan(self, batch: ForwardBatch, host: Lists, device: Lists) -> None:
        decode = batch.num_decode
        if decode:
            self.plan_decode(self.decode, host, device, decode)
        if batch.num_rows > decode:
            self.prefill.plan(
                host.qo_indptr,
                host.prefill_indptr,
                device.indices[int(host.indptr[decode]) :],
                host.last_page_len[decode:],
                *self._sizes.heads,
                self._sizes.page_size,
                causal=True,
                **self._options,
            )

    def plan_decode(self, wrapper: Any, host: Lists, device: Lists, rows: int) -> None:
        """Plan the first ``rows`` rows; with the host's page numbers, a graph's wrapper would wait."""
        pages = (
            host.indptr[: rows + 1],
            device.indices[: int(host.indptr[rows])],
            host.last_page_len[:rows],
            *self._sizes.heads,
            self._sizes.page_size,
        )
        if self._kind.sinks:
            wrapper.plan(torch.arange(rows + 1, dtype=torch.int32), *pages, causal=True, **self._options)
        else:
            wrapper.plan(*pages, **self._options)

    def workspace_size(self, wrapper: Any, lists: tuple[Tensor, ...], **options: Any) -> int:
        sizes = self._sizes
        return int(
            wrapper.workspace_size(*lists, *sizes.heads, sizes.page_size, **options, **self._options)[0]
        )

    def run(
        self, wrapper: Any, q: Tensor, cache: tuple[Tensor, Tensor], form: AttentionForm, out: Tensor | None
    ) -> Tensor:
        sinks = () if form.sinks is None else (form.sinks.float(),)
        found: Tensor = wrapper.run(q, cache, *sinks, out=out)
        return found
