"""Forward batches built by hand, and a model run over paged KV without a scheduler."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from caesura.scheduler.attention.paged_cpu import PagedCpuBackend
from caesura.scheduler.attention.sdpa import SdpaBackend
from caesura.scheduler.attention.sdpa_mla import LatentBackend
from caesura.scheduler.attention.shape import Shape
from caesura.scheduler.cache.pool import MHAPool, MLAPool
from caesura.scheduler.execution.forward import AttentionBackend, ForwardBatch, SamplingBatch
from caesura.scheduler.kernels.attention_form import PLAIN, FormKind
from caesura.scheduler.layers.lora import AdapterSlots
from caesura.scheduler.layers.sharding import head_windows
from caesura.scheduler.models.causal_lm import CausalLM
from caesura.scheduler.models.config import ModelBackend, load_model_config, quantized
from caesura.scheduler.models.registry import build_model
from caesura.scheduler.parallel.group import SINGLE, TensorParallel
from caesura.scheduler.runtime.engine_config import EngineConfig
from caesura.scheduler.weights.loader import WeightLoader
from caesura.scheduler.weights.transports.disk import load_from_disk, open_checkpoint


@dataclass
class Row:
    tokens: list[int]
    """New tokens."""
    start: int
    """Position of the first of them."""
    pages: list[int]


def forward_batch(rows: list[Row], num_decode: int, page_size: int = 16) -> ForwardBatch:
    """Return a batch that samples every token of ``rows``, of which the first ``num_decode`` decode."""
    q_lens = [len(row.tokens) for row in rows]
    kv_lens = [row.start + len(row.tokens) for row in rows]
    positions = [list(range(row.start, row.start + len(row.tokens))) for row in rows]
    kv_slots = [
        row.pages[p // page_size] * page_size + p % page_size
        for row, where in zip(rows, positions)
        for p in where
    ]
    width = max(-(-kv_len // page_size) for kv_len in kv_lens)
    table = torch.zeros((len(rows), width), dtype=torch.int32)
    for index, (row, kv_len) in enumerate(zip(rows, kv_lens)):
        used = row.pages[: -(-kv_len // page_size)]
        table[index, : len(used)] = torch.tensor(used, dtype=torch.int32)
    total = sum(q_lens)
    return ForwardBatch(
        num_decode=num_decode,
        input_ids=torch.tensor([t for row in rows for t in row.tokens]),
        positions=torch.tensor([p for where in positions for p in where]),
        kv_slots=torch.tensor(kv_slots),
        page_table=table,
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
        q_lens_host=q_lens,
        kv_lens_host=kv_lens,
        slots=torch.arange(len(rows)),
        sample_tokens=torch.arange(total),
        sample_slots=torch.arange(total),
        sampling=greedy_sampling(total),
    )


def scattered_batch(
    rows: Iterable[tuple[int, int]], num_decode: int, num_pages: int, seed: int = 0
) -> ForwardBatch:
    """Return a batch of rows (KV that is there, new tokens) whose pages lie anywhere in the pool."""
    ids = list(range(1, num_pages))
    random.Random(seed).shuffle(ids)
    made = [Row([0] * new, start, [ids.pop() for _ in range(-(-(start + new) // 16))]) for start, new in rows]
    return forward_batch(made, num_decode)


def sampling_rows(
    rows: int,
    vocab_size: int,
    *,
    temperature: Any = 1.0,
    greedy: Any = False,
    top_k: Any = None,
    top_p: Any = 1.0,
    min_p: Any = None,
    uniforms: Any = 0.5,
    given: Any = None,
    **flags: bool,
) -> SamplingBatch:
    """Return what ``rows`` are sampled with: each option for all of them, or an array with one for each."""

    def column(value: Any, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(np.broadcast_to(np.asarray(value), (rows,)).copy()).to(dtype)

    is_greedy, p = column(greedy, torch.bool), column(top_p, torch.float32)
    k = column(vocab_size if top_k is None else top_k, torch.int64)
    found = {
        "any_sampled": not bool(is_greedy.all()),
        "any_filtered": min_p is not None or bool((~is_greedy & ((k < vocab_size) | (p < 1))).any()),
        "want_raw": True,
        "want_sampled": True,
    }
    return SamplingBatch(
        temperature=torch.where(is_greedy, 1.0, column(temperature, torch.float32)),
        greedy=is_greedy,
        top_k=k,
        top_p=p,
        uniforms=column(uniforms, torch.float64),
        min_p=None if min_p is None else column(min_p, torch.float32),
        given=None if given is None else column(given, torch.int64),
        **(found | flags),
    )


def greedy_sampling(count: int) -> SamplingBatch:
    flags = {"any_filtered": False, "want_raw": False, "want_sampled": False}
    return sampling_rows(count, 1 << 30, greedy=True, uniforms=0.0, **flags)


@dataclass
class Sequence:
    """A request: its tokens, how many have KV, and where."""

    tokens: list[int]
    computed: int = 0
    pages: list[int] = field(default_factory=list)


def load_model(
    path: str,
    dtype: torch.dtype,
    bucket_bytes: int = 1 << 20,
    parallel: TensorParallel = SINGLE,
    *,
    backend: ModelBackend = "native",
    adapters: AdapterSlots | None = None,
    quantization: str = "auto",
    ep: int = 1,
    dp_attention: int = 1,
) -> CausalLM:
    """Return a loaded model on the CPU, or this rank's shard of one."""
    config = load_model_config(path, backend)
    if quantization != "auto":
        config = quantized(config, EngineConfig(model_path=path, device="cpu", quantization=quantization))
    cpu = torch.device("cpu")
    model = build_model(config, dtype, cpu, parallel, adapters, ep=ep, dp_attention=dp_attention)
    load_from_disk(WeightLoader(model), open_checkpoint(path), bucket_bytes)
    model.finalize_weights()
    return model


def attention_shape(
    pool: MHAPool | MLAPool,
    heads: int,
    scale: float | None = None,
    *,
    latent: int | None = None,
    kinds: Iterable[FormKind] = (PLAIN.kind,),
) -> Shape:
    """Return the shape of ``heads`` query heads over ``pool``; by default with the scale of its head size."""
    keys = pool.layer(0)[0] if isinstance(pool, MHAPool) else pool.layer(0)
    return Shape(
        device=keys.device,
        dtype=keys.dtype,
        num_heads=heads,
        num_kv_heads=keys.shape[1] if isinstance(pool, MHAPool) else 1,
        head_dim=keys.shape[-1],
        scale=keys.shape[-1] ** -0.5 if scale is None else scale,
        latent=latent,
        kinds=tuple(kinds),
    )


def build_attention(
    model: CausalLM,
    dtype: torch.dtype,
    num_pages: int,
    parallel: TensorParallel = SINGLE,
    *,
    compiled: bool = False,
) -> tuple[MHAPool | MLAPool, AttentionBackend]:
    """Build a pool and its backend: torch's operations, or ``compiled`` ones for the kernel of all layers."""
    config, mla = model.config, model.config.mla
    if mla is not None:
        latents = MLAPool(
            num_layers=config.num_layers, num_pages=num_pages, width=mla.latent_width, dtype=dtype
        )
        heads = config.num_heads // parallel.size
        shape = attention_shape(latents, heads, mla.softmax_scale, latent=mla.kv_lora_rank)
        return latents, PagedCpuBackend(latents, shape) if compiled else LatentBackend(latents, shape)
    heads, kv_heads = (
        window.length for window in head_windows(config.num_heads, config.num_kv_heads, parallel)
    )
    pool = MHAPool(
        num_layers=config.num_layers,
        num_pages=num_pages,
        kv_heads=kv_heads,
        head_size=config.head_dim,
        dtype=dtype,
    )
    backend = PagedCpuBackend if compiled else SdpaBackend
    return pool, backend(pool, attention_shape(pool, heads, config.attention_scale))


def layer_by_layer(
    model: CausalLM,
    batch: ForwardBatch,
    backend: AttentionBackend,
    due: Callable[[int], object] = lambda layer: None,
) -> Tensor:
    """Return what ``model.forward`` does; ``due`` is told each layer before it is computed."""
    steps = model.forward_by_layer(batch, backend)
    while True:
        try:
            due(next(steps))
        except StopIteration as end:
            return end.value


class PagedModel:
    """A model with a pool and a backend; pages are handed out in a scrambled order and hold NaN at first."""

    def __init__(
        self,
        model: CausalLM,
        dtype: torch.dtype,
        num_pages: int = 200,
        parallel: TensorParallel = SINGLE,
        *,
        compiled: bool = False,
    ) -> None:
        self.model = model
        self.pool, self.backend = build_attention(model, dtype, num_pages, parallel, compiled=compiled)
        for layer in range(model.config.num_layers):
            storage = self.pool.layer(layer)
            for tensor in storage if isinstance(storage, tuple) else (storage,):
                tensor.fill_(torch.nan)
        self._free = list(range(1, num_pages))
        random.Random(0).shuffle(self._free)

    @torch.inference_mode()
    def step(self, decode: list[Sequence], prefill: list[tuple[Sequence, int]] = ()) -> list[Tensor]:
        """Compute one token of each ``decode`` sequence and n of each ``(sequence, n)``."""
        work = [(sequence, 1) for sequence in decode] + list(prefill)
        rows = []
        for sequence, count in work:
            end = sequence.computed + count
            while len(sequence.pages) * self.pool.page_size < end:
                sequence.pages.append(self._free.pop())
            rows.append(Row(sequence.tokens[sequence.computed : end], sequence.computed, sequence.pages))
            sequence.computed = end
        batch = forward_batch(rows, len(decode))
        self.backend.plan(batch)
        logits = self.model.logits(self.model.forward(batch, self.backend))
        return list(logits.clone().split([count for _, count in work]))
