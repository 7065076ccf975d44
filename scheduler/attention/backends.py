"""Choice of the backend that computes a model's attention: the best one whose kernels serve on this device.

Invariants:
- A library is chosen only after a real step, mixed and as a graph's decode step, whose results agree with
  torch's: kernels may be compiled at their first use, by a missing or broken compiler.
- An error of that step is the reason why the next backend serves, and never the end of the engine.
- A backend is tried once in a process for each shape of heads.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode
from ..cache.pool import MHAPool, MLAPool
from ..execution.forward import AttentionBackend, CapturableBackend, ForwardBatch, StepLimits
from ..kernels import TORCH, best, self_test
from ..kernels.attention_form import AttentionForm
from ..layers.rotary import rotate
from ..runtime.engine_config import PAGE_SIZE, EngineConfig
from . import flashinfer, flashinfer_mla, paged_triton
from .paged_cpu import PagedCpuBackend
from .sdpa import SdpaBackend
from .sdpa_mla import LatentBackend
from .shape import Shape

logger = logging.getLogger(__name__)

_AGREEMENT = 0.02
"""Largest relative norm of the difference to torch's result; rounding to bfloat16 gives less than 0.005."""
_MIXED = ((40, 1), (15, 1), (0, 20), (17, 9))
_DECODE = ((40, 1), (16, 1))
"""Rows of the trial: tokens in the cache, and new ones. The first two of either decode."""


@dataclass(frozen=True, slots=True)
class Choice:
    by: str
    """``flashinfer``, ``triton``, an instruction set of compiled kernels, or ``torch``."""
    kernels: str = ""
    """Name of a library's kernels, if it needs one."""
    reason: str | None = None
    """Why no better library serves on CUDA, or None."""


def choose(config: EngineConfig, shape: Shape) -> Choice:
    """Return the best backend for this model, or the configured one; ``unsupported`` if that cannot serve."""
    wanted = config.attention_backend
    reasons: list[str] = []
    for name in ("flashinfer", "triton"):
        if wanted not in ("auto", name):
            continue
        found = _first(name, shape)
        if isinstance(found, Choice):
            return replace(found, reason="; ".join(reasons) or None)
        reasons.append(f"{name}: {found}")
    if wanted in ("flashinfer", "triton"):
        reason = f"attention_backend = {wanted!r}: {reasons[0].partition(': ')[2]}"
        raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field="attention_backend")
    by = TORCH if wanted != "auto" else best("attention", shape.device, shape.dtype)
    return Choice(by, reason="; ".join(reasons) or None if shape.device.type == "cuda" else None)


def _first(name: str, shape: Shape) -> Choice | str:
    reason = _why_not(name, shape)
    if reason is not None:
        return reason
    kernels: tuple[str, ...] = ("",)
    if shape.latent is not None:
        kernels = flashinfer_mla.kernels_of(shape.device)
    failures = []
    for kind in kernels:
        failure = failure_of(Choice(name, kind), shape)
        if failure is None:
            return Choice(name, kind)
        failures.append(failure if not kind else f"{kind}: {failure}")
    return "; ".join(failures)


def _why_not(name: str, shape: Shape) -> str | None:
    """Return why a library cannot serve, as far as that shows without a step, or None."""
    device, dtype = shape.device, shape.dtype
    if name == "triton":
        return "it does not serve latent attention" if shape.latent else paged_triton.why_not(device)
    if shape.latent is None:
        return flashinfer.why_not(device, dtype, shape.head_dim, shape.kinds)
    if shape.features:
        return f"it does not serve {', '.join(shape.features)} here"
    return flashinfer_mla.why_not(device, dtype, shape.latent, shape.head_dim - shape.latent)


def make(choice: Choice, shape: Shape, pool: MHAPool | MLAPool, limits: StepLimits) -> AttentionBackend:
    """Return the backend over ``pool``, for steps within ``limits``."""
    if choice.by not in ("flashinfer", "triton", TORCH):
        return PagedCpuBackend(pool, shape)
    if isinstance(pool, MLAPool):
        if choice.by == "flashinfer":
            return flashinfer_mla.FlashInferLatentBackend(pool, shape, limits, choice.kernels)
        return LatentBackend(pool, shape)
    if choice.by == "flashinfer":
        return flashinfer.FlashInferBackend(pool, shape, limits)
    if choice.by == "triton":
        return paged_triton.PagedTritonBackend(pool, shape, limits)
    return SdpaBackend(pool, shape)


@cache
def failure_of(choice: Choice, shape: Shape) -> str | None:
    """Return why a real step by ``choice`` fails, or None if it agrees with torch's. Logs a reason once."""
    by = f"{choice.by} {choice.kernels}".rstrip()
    logger.info("trying attention by %s; kernels that are not built yet are compiled now", by)
    failure = self_test.failure(lambda: _differences(choice, shape), _AGREEMENT, "a step with it")
    if failure is not None:
        logger.warning("attention is not computed by %s: %s", by, failure)
    return failure


def _differences(choice: Choice, shape: Shape) -> Iterator[float]:
    """Yield relative differences between ``choice`` and torch over equal pages, one for each step."""
    with torch.inference_mode():
        limits = StepLimits(tokens=sum(new for _, new in _MIXED), rows=len(_MIXED), context_len=4 * PAGE_SIZE)
        ours, theirs = _filled_pool(shape), _filled_pool(shape)
        tried = make(choice, shape, ours, limits)
        reference = make(Choice(TORCH), shape, theirs, limits)
        steps: list[tuple[AttentionBackend, tuple[tuple[int, int], ...]]] = [(tried, _MIXED)]
        if isinstance(tried, CapturableBackend):
            steps.append((tried.for_decode(len(_DECODE)), _DECODE))
        for backend, rows in steps:
            batch, projected = _batch(rows, shape.device), _projected(shape, sum(new for _, new in rows))
            for form in _forms(shape):
                found, expected = (
                    _attend(each, batch, projected, shape, form) for each in (backend, reference)
                )
                yield float((found - expected).norm() / expected.norm())


def _forms(shape: Shape) -> list[AttentionForm]:
    sinks = torch.linspace(-1, 1, shape.num_heads, device=shape.device).to(shape.dtype)
    return [
        AttentionForm(
            window=kind.window, softcap=kind.softcap, scale=kind.scale, sinks=sinks if kind.sinks else None
        )
        for kind in shape.kinds
    ]


def _attend(
    backend: AttentionBackend, batch: ForwardBatch, projected: Tensor, shape: Shape, form: AttentionForm
) -> Tensor:
    """Attend as an attention block does: with fused rotation and store if the backend has them."""
    backend.plan(batch)
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    if shape.latent is not None:
        q, k, _ = projected.split([heads, 1, 1], dim=1)
        return backend.forward(q, k, k[..., : shape.latent], 0).float()
    angles = torch.outer(batch.positions, 0.5 ** torch.arange(shape.head_dim // 2, device=shape.device))
    cos, sin = (each.to(shape.dtype).unsqueeze(1) for each in (angles.cos(), angles.sin()))
    if backend.fused is not None:
        return backend.fused(projected.clone(), cos, sin, 0, None, form).float()
    qk, v = projected.split([heads + kv_heads, kv_heads], dim=1)
    rotated = rotate(qk, cos, sin)
    return backend.forward(rotated[:, :heads], rotated[:, heads:], v, 0, form).float()


def _filled_pool(shape: Shape) -> MHAPool | MLAPool:
    """Return a pool of one layer, with the same random contents at each call."""
    pool = shape.pool(1, 1 + sum(_pages(start + new) for start, new in _MIXED))
    storages = pool.layer(0) if isinstance(pool, MHAPool) else (pool.layer(0),)
    generator = torch.Generator(shape.device).manual_seed(0)
    for storage in storages:
        storage.normal_(generator=generator)
    return pool


def _batch(rows: tuple[tuple[int, int], ...], device: torch.device) -> ForwardBatch:
    ends = accumulate((_pages(start + new) for start, new in rows), initial=1)
    pages = [np.arange(*span) for span in pairwise(ends)]
    ids, none = [np.zeros(new) for _, new in rows], np.empty(0, np.int64)
    return ForwardBatch.of_rows(ids, [start for start, _ in rows], pages, none, device, num_decode=2)


def _projected(shape: Shape, tokens: int) -> Tensor:
    size = (tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    generator = torch.Generator(shape.device).manual_seed(tokens)
    return torch.empty(size, dtype=shape.dtype, device=shape.device).normal_(generator=generator)


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)
