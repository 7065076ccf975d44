"""A configuration into what computes: model, KV pool, attention backend, runner.

Invariants:
- What can be released is allocated inside its component (``memory/residency.py``).
- Whether memory suffices is asked before it is taken.
"""

import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...io_struct import CaesuraError, ErrorCode
from ..attention.backends import choose, make
from ..attention.delta_rule import HybridBackend
from ..attention.shape import Shape
from ..cache.layer_ledgers import StateRows, WindowPages, storage_pages
from ..cache.pool import MHAPool, MLAPool, RoutingPool, StatePool, StateShape
from ..cache.tier import PageStore
from ..kernels import serving
from ..layers.lora import AdapterSlots
from ..layers.parameters import is_within
from ..memory.device_memory import MinReduce, get_available_memory
from ..memory.device_module import device_module_for, graphs_of
from ..memory.host import HOST
from ..memory.offload import ResidentStrategy
from ..memory.residency import ComponentResidencyManager, nobody
from ..models.causal_lm import CausalLM
from ..models.config import ModelConfig, load_model_config, quantized
from ..models.registry import build_model
from ..parallel.group import SINGLE, TensorParallel
from ..runtime.dtypes import by_torch_name
from ..runtime.engine_config import PAGE_SIZE, EngineConfig
from ..scheduling.waiting_queue import AdmissionLimits, pages_for
from ..weights.digests import WeightDigests
from ..weights.loaded_model import LoadedModel
from ..weights.loader import WeightLoader
from ..weights.transports.disk import load_from_disk, open_checkpoint
from ..weights.upload import write_stream_of
from .forward import AttentionBackend, Runner, StepLimits
from .graphs import ladder
from .kernel_report import why_torch
from .model_runner import ModelRunner
from .sampler import Sampler

logger = logging.getLogger(__name__)


ADAPTERS = "adapters"
"""The component of the adapters' slots."""
_TOUCHED_KV_BYTES = 128 << 20
"""Bytes of a CPU's KV pool that are touched at start; page faults would slow down the first requests."""
_STATES_PER_ROW, _STATES_SHARE = 2, 0.5
"""Rows of states for each running request (its own, one kept for a prefix); their most of a pool's memory."""
_ROWS_IN_FLIGHT, _WIDE_ROWS, _LOGITS = 4, 3, 3
"""Rows of each token as wide as the model, and as a layer at its widest; copies of the logits."""
_LAYER_GRAPH_BYTES = 256 << 10
"""Estimate of what the driver and the allocator keep of a layer in one captured step; no card has told."""
_CPU_WARM_UP_ROWS = 16
"""Kernels are not chosen by the number of rows there: a few rows meet every kernel."""


def load_model(
    config: EngineConfig,
    folder: str | None = None,
    parallel: TensorParallel = SINGLE,
    adapters: AdapterSlots | None = None,
) -> LoadedModel:
    """Read this rank's shard of a checkpoint folder, or of the weights in ``folder``, into fresh parameters.

    CaesuraError: it cannot be read or served, the context is too long, or another library's model differs
    here.
    """
    model_config = load_model_config(config.model_path, config.model_backend)
    if config.quantization != "auto":
        model_config = quantized(model_config, config)
    possible = model_config.max_position_embeddings
    if config.context_len is not None and config.context_len > possible:
        reason = (
            f"context_len = {config.context_len} is beyond the {possible} tokens of this model "
            "(max_position_embeddings in "
            f"{config.model_path}/config.json): give at most that, or leave it out"
        )
        raise CaesuraError(
            ErrorCode.INVALID_REQUEST, reason, field="context_len", value=config.context_len, limit=possible
        )
    dtype = model_config.dtype if config.dtype == "auto" else by_torch_name(config.dtype)
    device = torch.device(config.device)
    # The reference model is one rank's.
    ep, dp_attention = (min(each, parallel.size) for each in (config.ep, config.dp_attention))
    model = build_model(model_config, dtype, device, parallel, adapters, ep=ep, dp_attention=dp_attention)
    if config.quantization_skipped:
        _require_modules(model, model_config)
    loader = WeightLoader(model, WeightDigests(parallel.rank) if config.weights_digest else None)
    checkpoint = open_checkpoint(folder or config.model_path)
    load_from_disk(loader, checkpoint, config.load_bucket_bytes, write_stream_of(device))
    loader.forget_written()
    model.finalize_weights()
    if model_config.transformers_config is not None:
        with nobody():
            model.check()
    return LoadedModel(
        config=model.config,
        model=model,
        loader=loader,
        dtype=dtype,
        device=device,
        digest=checkpoint.local_digest,
        parallel=parallel,
        adapters=adapters,
    )


def _require_modules(model: CausalLM, config: ModelConfig) -> None:
    """Refuse (INVALID_REQUEST) a skipped module that the model has not: a misspelt one would be quantised."""
    assert config.quantization is not None
    modules = ["lm_head", *(name.rpartition(".")[0] for name in model.weight_slots())]
    for skipped in sorted(config.quantization.skipped):
        if not any(is_within(module, frozenset({skipped})) for module in modules):
            reason = (
                f"quantization_skipped: {skipped!r} is no module of the model, nor the last components of a "
                "module's name"
            )
            raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="quantization_skipped", value=skipped)


def kv_bytes_per_token(loaded: LoadedModel) -> int:
    """Return the bytes of KV that one token takes on this rank, over all layers that keep it."""
    return _token_bytes(loaded, len(loaded.model.forms) - len(_window_layers(loaded)))


def _token_bytes(loaded: LoadedModel, num_layers: int) -> int:
    model = loaded.config
    if model.mla is not None:
        return MLAPool.bytes_per_token(num_layers, model.mla.latent_width, loaded.dtype)
    return MHAPool.bytes_per_token(num_layers, loaded.num_kv_heads, model.head_dim, loaded.dtype)


def _window_layers(loaded: LoadedModel) -> frozenset[int]:
    return frozenset(i for i, form in enumerate(loaded.model.forms) if form.window is not None)


def _window_pages(config: EngineConfig, loaded: LoadedModel) -> int:
    """Return the pages that layers with a window need for all requests; 0 without such layers."""
    longest = max((form.window or 0 for form in loaded.model.forms), default=0)
    if not longest:
        return 0
    return storage_pages(longest, PAGE_SIZE, rows=config.sizes.rows, step_tokens=config.sizes.chunk_tokens)


def build_windows(config: EngineConfig, loaded: LoadedModel, pool: MHAPool | MLAPool) -> WindowPages | None:
    if pool.window_pages is None:
        return None
    longest = max(form.window or 0 for form in loaded.model.forms)
    return WindowPages(pool.num_pages, pool.window_pages, PAGE_SIZE, longest)


def state_row_bytes(loaded: LoadedModel) -> int:
    """Return the bytes of a sequence's states on this rank, over all layers; 0 for a model without."""
    delta = loaded.config.delta
    return 0 if delta is None else sum(delta.layers) * _state_shape(loaded).row_bytes(loaded.dtype)


def _state_shape(loaded: LoadedModel) -> StateShape:
    assert loaded.config.delta is not None
    return loaded.config.delta.state.divided(loaded.parallel.size)


def build_states(pool: MHAPool | MLAPool) -> StateRows | None:
    return None if pool.states is None else StateRows(pool.num_pages, pool.states.num_rows)


def routing_bytes_per_token(loaded: LoadedModel) -> int:
    """Return the bytes that the experts of one token take; 0 for a model without."""
    routed = loaded.model.routing
    return 0 if routed is None else RoutingPool.bytes_per_token(routed.num_layers, routed.top_k, routed.dtype)


def build_pool(
    config: EngineConfig,
    loaded: LoadedModel,
    context_len: int,
    *,
    kept_free: int = 0,
    group: MinReduce | None = None,
    sharing: int = 1,
) -> MHAPool | MLAPool:
    """Return the KV pool: of the configured size, or a share of what is free beside ``kept_free`` bytes.

    All ranks of ``group`` have as many pages; on a CPU ``sharing`` of them have the same memory.
    """
    # Chosen experts are stored for the tokens of all ranks.
    dp = config.dp_attention
    per_page = (kv_bytes_per_token(loaded) + dp * routing_bytes_per_token(loaded)) * PAGE_SIZE
    per_window_page = _token_bytes(loaded, len(_window_layers(loaded))) * PAGE_SIZE
    most_windows = _window_pages(config, loaded)
    row_bytes = state_row_bytes(loaded)
    rows = _STATES_PER_ROW * config.sizes.rows if row_bytes else 0
    left = get_available_memory(config.device, empty_cache=True, group=group)
    if left is not None:
        left = (left - kept_free) // sharing
    if config.kv_pool_tokens is not None:
        pages = pages_for(config.kv_pool_tokens)
    elif left is None:
        reason = f"device {config.device} does not report its free memory: set kv_pool_tokens"
        raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field="kv_pool_tokens", value=None)
    else:
        usable = -(-config.sizes.rows // dp) * pages_for(context_len)
        kept_for_steps = step_bytes(config, loaded) + graph_bytes(config, loaded)
        share = max(0, left - kept_for_steps) * config.sizes.kv_fraction
        if rows:
            rows = max(1, min(rows, int(share * _STATES_SHARE) // row_bytes))
            share = max(0, share - (rows + 1) * row_bytes)
        pages = min(_affordable(int(share), per_page, per_window_page, most_windows), usable)
    windows = min(max(pages, 1), most_windows)
    needed = max(pages, 1) * per_page + windows * per_window_page
    if rows:
        if left is not None and config.kv_pool_tokens is not None:
            rows = max(1, min(rows, int((left - needed) * config.sizes.kv_fraction) // row_bytes))
        needed += (rows + 1) * row_bytes
    if left is not None and needed > left:  # an overcommitted allocation never fails, its first use does
        reason = (
            f"a KV pool of {max(pages, 1)} pages{f' and {rows} rows of states' if rows else ''} needs "
            f"{needed} bytes, {left} are free"
        )
        raise CaesuraError(ErrorCode.OUT_OF_MEMORY, reason, needed_bytes=needed, free_bytes=left)
    if group is not None:
        pages = group.all_reduce_min(pages)
        windows = min(max(pages, 1), most_windows)
        rows = group.all_reduce_min(rows)
    pool = make_pool(loaded, pages + 1, windows + 1 if windows else None)  # page 0 is scratch
    if rows:
        assert loaded.config.delta is not None
        pool.states = StatePool(
            num_layers=sum(loaded.config.delta.layers),
            num_rows=rows + 1,  # row 0 is scratch, too
            shape=_state_shape(loaded),
            dtype=loaded.dtype,
            device=loaded.device,
        )
        logger.info("%d rows of states of %d bytes each, a row for each running request", rows, row_bytes)
    return pool


def _affordable(share: int, per_page: int, per_window_page: int, most_windows: int) -> int:
    """Return the pages for ``share`` bytes: layers with a window have as many, up to ``most_windows``."""
    alike = share // (per_page + per_window_page)
    if alike <= most_windows:
        return alike
    return (share - most_windows * per_window_page) // per_page if per_page else sys.maxsize


def step_bytes(config: EngineConfig, loaded: LoadedModel) -> int:
    """Return about the bytes of the largest step: float32 logits, widest activations; 0 on the CPU."""
    if loaded.device.type == "cpu":
        return 0
    rows = config.sizes.rows
    return _bytes_of_step(loaded, rows + config.sizes.chunk_tokens, rows)


def graph_bytes(config: EngineConfig, loaded: LoadedModel) -> int:
    """Return about the bytes that captured decode steps take, or 0 where none are captured.

    All share the temporaries of the largest; each has its launches, and its results.
    """
    if not config.graph_rows or graphs_of(device_module_for(loaded.device)) is None:
        return 0
    sizes = ladder(config.graph_rows)
    results = sum(sizes) * loaded.config.hidden_size * loaded.dtype.itemsize
    launches = len(sizes) * loaded.config.num_layers * _LAYER_GRAPH_BYTES
    return _bytes_of_step(loaded, sizes[-1], sizes[-1]) + results + launches


def _bytes_of_step(loaded: LoadedModel, tokens: int, sampled: int) -> int:
    model = loaded.config
    inner = [model.intermediate_size, model.num_heads * model.head_dim]
    if model.mla is not None:
        inner.append(model.num_heads * model.mla.latent_width)
    if model.moe is not None:
        inner.append(model.moe.top_k * (model.moe.intermediate_size + model.hidden_size))
    activations = tokens * (_ROWS_IN_FLIGHT * model.hidden_size + _WIDE_ROWS * max(inner))
    return activations * loaded.dtype.itemsize + _LOGITS * sampled * model.vocab_size * 4


def make_pool(loaded: LoadedModel, num_pages: int, window_pages: int | None = None) -> MHAPool | MLAPool:
    """Return KV storage of ``num_pages`` pages; in layers with a window ``window_pages``, if given."""
    layers, windows = len(loaded.model.forms), _window_layers(loaded)
    return Shape.of(loaded).pool(layers, num_pages, window_layers=windows, window_pages=window_pages)


def build_routing_pool(loaded: LoadedModel, num_pages: int) -> RoutingPool | None:
    routed = loaded.model.routing
    if routed is None:
        return None
    return RoutingPool(
        num_layers=routed.num_layers,
        top_k=routed.top_k,
        dtype=routed.dtype,
        num_pages=num_pages,
        device=loaded.device,
        device_module=device_module_for(loaded.device),
    )


def build_page_store(
    config: EngineConfig,
    pool: MHAPool | MLAPool,
    routing: RoutingPool | None,
    on_stream: Callable[[], AbstractContextManager[Any]],
) -> PageStore | None:
    """Return this rank's part of the KV tier, or None without one."""
    nbytes, folder = config.kv_tier_bytes, config.kv_tier_folder
    if not nbytes:
        return None
    if pool.states is not None or pool.window_pages is not None:
        kept = "keep a state per sequence" if pool.states is not None else "have a sliding window"
        reason = f"the KV tier does not serve models whose layers {kept}: leave kv_tier_bytes out"
        raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field="kv_tier_bytes", value=nbytes)
    free, total = HOST.mem_get_info()
    if total and nbytes > free:
        reason = f"kv_tier_bytes = {nbytes} is more than the {free} bytes of host memory that are free"
        raise CaesuraError(ErrorCode.OUT_OF_MEMORY, reason, needed_bytes=nbytes, free_bytes=free)
    tensors = pool.by_page if routing is None else [*pool.by_page, routing.pages]
    try:
        store = PageStore(tensors, nbytes, folder, config.kv_tier_folder_bytes, on_stream)
    except OSError as error:
        reason = f"kv_tier_folder = {folder!r} takes no file: {error}"
        raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="kv_tier_folder", value=folder) from error
    if not store.num_rows:
        reason = f"kv_tier_bytes = {nbytes} is less than a page of {store.row_bytes} bytes"
        raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="kv_tier_bytes", value=nbytes)
    return store


def longest_context(config: EngineConfig, loaded: LoadedModel) -> int:
    """Return the most tokens of prompt plus output of one request."""
    possible = loaded.config.max_position_embeddings
    return min(config.context_len or possible, possible)


def build_components(
    config: EngineConfig,
    residency: ComponentResidencyManager,
    folder: str | None = None,
    parallel: TensorParallel = SINGLE,
    group: MinReduce | None = None,
    sharing: int = 1,
) -> tuple[LoadedModel, MHAPool | MLAPool, RoutingPool | None, AdmissionLimits]:
    """Return weights and pools, which can be released, and the limits that follow from their sizes."""
    adapters: AdapterSlots | None = None
    if config.enable_lora:
        residency.register(ADAPTERS, ResidentStrategy(keep_copy=False))
        memory = partial(residency.component, ADAPTERS)
        count, experts = config.max_loras + 1, config.lora_experts
        adapters = AdapterSlots(count, config.max_lora_rank, experts=experts, memory=memory)
    with residency.component("weights"):
        loaded = load_model(config, folder, parallel, adapters)
    read_by_steps = ["weights", "kv_cache", *residency.registered.keys() & {ADAPTERS}]
    loaded = replace(loaded, addresses=partial(residency.addresses, read_by_steps))
    context_len = longest_context(config, loaded)
    with residency.component("kv_cache"):
        kept_free = residency.still_to_come
        pool = build_pool(config, loaded, context_len, kept_free=kept_free, group=group, sharing=sharing)
        routing = build_routing_pool(loaded, config.dp_attention * (pool.num_pages - 1) + 1)
    if config.autotune and loaded.device.type == "cpu":
        pool.touch(_TOUCHED_KV_BYTES)
    limits = AdmissionLimits(
        context_len=context_len,
        pool_tokens=(pool.num_pages - 1) * PAGE_SIZE,
        vocab_size=loaded.config.vocab_size,
        max_waiting=config.max_waiting_requests,
        eos_token_ids=loaded.config.eos_token_ids,
        has_experts=routing is not None,
        num_layers=loaded.config.num_layers,
        hidden_bytes=loaded.config.hidden_size * loaded.dtype.itemsize,
        has_inner_states=loaded.model.has_inner_states,
    )
    return loaded, pool, routing, limits


def require_deterministic(loaded: LoadedModel) -> None:
    """Refuse (``unsupported``) products by torch, whose bits change with the number of rows; name them."""
    reason = why_torch(loaded)
    if reason is not None:
        message = f"deterministic needs the compiled CPU kernels for every operation: {reason}"
        raise CaesuraError(ErrorCode.UNSUPPORTED, message, serving=serving(loaded.device, loaded.dtype))


def build_backend(
    config: EngineConfig, loaded: LoadedModel, pool: MHAPool | MLAPool, limits: StepLimits
) -> AttentionBackend:
    """Return the attention backend. Raises as :func:`~.backends.choose`."""
    shape = Shape.of(loaded)
    backend = make(choose(config, shape), shape, pool, limits)
    return backend if pool.states is None else HybridBackend(backend, pool.states)


def build_runner(
    config: EngineConfig, loaded: LoadedModel, pool: MHAPool | MLAPool, routing: RoutingPool | None
) -> ModelRunner:
    """Return the runner, warm, with its decode graphs captured if they can be."""
    model = loaded.config
    if config.deterministic:
        require_deterministic(loaded)
    limits = StepLimits.of(
        max_rows=config.sizes.rows,
        chunk_tokens=config.sizes.chunk_tokens,
        context_len=longest_context(config, loaded),
        windows=pool.window_pages is not None,
    )
    backend = build_backend(config, loaded, pool, limits)
    logger.info("attention by %s", type(backend).__name__)
    runner = ModelRunner(
        loaded.model,
        backend,
        Sampler(model.vocab_size, limits.rows, loaded.device, loaded.dtype),
        limits=limits,
        device=loaded.device,
        device_module=device_module_for(loaded.device),
        routing=routing,
        adapters=loaded.adapters,
        parallel=loaded.parallel,
        addresses=loaded.addresses,
        graph_rows=config.graph_rows,
        pool_pages=pool.num_pages - 1,
    )
    if config.autotune:
        runner.autotune(*warm_up_rows(config, loaded))
    if runner.graphs is not None:
        for _ in runner.graphs.capture():
            pass
        taken, estimated = runner.graphs.nbytes, graph_bytes(config, loaded)
        if taken > estimated:
            logger.warning("captured decode steps take %d bytes instead of about %d", taken, estimated)
    return runner


def warm_up_rows(config: EngineConfig, loaded: LoadedModel) -> tuple[int, int]:
    """Return the rows of a warm-up, and of its head: the request pool's where kernels are chosen by size."""
    rows = config.sizes.rows
    if loaded.device.type == "cpu":
        rows = min(rows, _CPU_WARM_UP_ROWS)
    return rows, min(rows, config.autotune_lm_head_rows)


MakeRunner = Callable[[EngineConfig, LoadedModel, MHAPool | MLAPool, RoutingPool | None], Runner]
