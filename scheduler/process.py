"""Build an engine from a configuration and run it as a process.

Invariants:
- The launcher hears exactly one line on the ready descriptor: that the engine serves, or why it does not.
- SIGTERM, SIGINT, a shutdown message and the death of the launcher all end the same way: every live request gets its
  terminal message, then the process exits.
"""

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from .. import __version__
from ..io_struct import CaesuraError, ErrorCode, GenerateReqOutput
from .attention.paged_cpu import PagedCpuBackend
from .attention.sdpa import SdpaBackend
from .background import Wakeup
from .batching import Batcher
from .cache.manager import CacheManager
from .cache.pool import MHAPool
from .channel import Router
from .checker import WeightsChecker
from .chunking import ChunkSizer
from .config import PAGE_SIZE, EngineConfig
from .device.memory import device_module_for, empty_device_cache, get_available_memory
from .device.residency import ComponentResidencyManager
from .dispatch import Dispatcher
from .distributed import ParallelState
from .forward import AttentionBackend, Runner
from .groups import GroupCommands
from .kernels import TORCH, best, serving
from .kernels.linear import packable
from .kernels.native import why_not
from .lifecycle import Lifecycle
from .loop import Scheduler
from .models.base import CausalLM
from .models.config import ModelConfig, load_model_config
from .models.registry import build_model
from .observability import log
from .occupation import MemoryOccupation
from .parameter_server import ParameterServerUpdates
from .request import Request, RequestTable, WeightStamp
from .results import Results
from .runner.model_runner import ModelRunner
from .runner.sampler import Sampler
from .status import StaticFacts, StatusReporter
from .updates import WeightUpdates
from .waiting import AdmissionLimits, WaitingQueue, pages_for
from .weights.loader import WeightLoader
from .weights.transports.disk import load_from_disk, open_checkpoint
from .weights.transports.distributed import WeightsUpdateGroups

logger = logging.getLogger(__name__)

INITIAL_VERSION = "default"
"""The public label before any update, as in SGLang."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights in, and what follows from it."""

    config: ModelConfig
    model: CausalLM
    loader: WeightLoader
    dtype: torch.dtype
    device: torch.device

    @property
    def weights_bytes(self) -> int:
        """Bytes of parameters and derived tensors."""
        return sum(tensor.nbytes for _, tensor in self.model.named_storage())


def load_model(config: EngineConfig) -> LoadedModel:
    """Read the checkpoint folder into freshly allocated parameters."""
    model_config = load_model_config(config.model_path)
    dtype = model_config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    device = torch.device(config.device)
    model = build_model(model_config, dtype, device)
    loader = WeightLoader(model)
    load_from_disk(loader, open_checkpoint(config.model_path), config.load_bucket_bytes)
    loader.forget_written()
    model.finalize_weights()
    return LoadedModel(model_config, model, loader, dtype, device)


def kv_bytes_per_token(loaded: LoadedModel) -> int:
    """Bytes of KV that one token takes, over all layers."""
    model = loaded.config
    return MHAPool.bytes_per_token(model.num_layers, model.num_kv_heads, model.head_dim, loaded.dtype)


def build_pool(config: EngineConfig, loaded: LoadedModel, context_len: int) -> MHAPool:
    """The KV pool: as many tokens as asked for, else a share of what is free, never more than could be used."""
    model = loaded.config
    per_token = kv_bytes_per_token(loaded)
    free = get_available_memory(config.device, empty_cache=True, group=ParallelState())
    if config.kv_pool_tokens is not None:
        pages = pages_for(config.kv_pool_tokens)
    else:
        usable = config.max_running_requests * pages_for(context_len)
        pages = min(int(free * config.kv_memory_fraction) // (per_token * PAGE_SIZE), usable)
    needed = max(pages, 1) * per_token * PAGE_SIZE
    if needed > free:  # asked, not tried: an overcommitted allocation never fails, its first use does
        raise CaesuraError(
            ErrorCode.OUT_OF_MEMORY,
            f"a KV pool of {max(pages, 1)} pages needs {needed} bytes, {free} are free",
            needed_bytes=needed,
            free_bytes=free,
        )
    return MHAPool(
        num_layers=model.num_layers,
        num_pages=pages + 1,  # page 0 is scratch
        kv_heads=model.num_kv_heads,
        head_size=model.head_dim,
        dtype=loaded.dtype,
        device=loaded.device,
        page_size=PAGE_SIZE,
    )


def build_components(
    config: EngineConfig, residency: ComponentResidencyManager
) -> tuple[LoadedModel, MHAPool, AdmissionLimits]:
    """What can be released, weights and KV pool, and the limits that follow from their sizes."""
    with residency.component("weights"):
        loaded = load_model(config)
    context_len = min(
        config.context_len or loaded.config.max_position_embeddings, loaded.config.max_position_embeddings
    )
    with residency.component("kv_cache"):
        pool = build_pool(config, loaded, context_len)
    limits = AdmissionLimits(
        context_len=context_len,
        pool_tokens=(pool.num_pages - 1) * PAGE_SIZE,
        vocab_size=loaded.config.vocab_size,
        max_waiting=config.max_waiting_requests,
        eos_token_ids=loaded.config.eos_token_ids,
    )
    return loaded, pool, limits


def require_deterministic(loaded: LoadedModel) -> None:
    """Row-invariant kernels must serve everything that computes: torch's products change bits with the number of rows.

    Raises:
        CaesuraError: ``unsupported``, with what serves which operation.
    """
    found = serving(loaded.device, loaded.dtype)
    if TORCH in found.values() or not packable(loaded.config.hidden_size, loaded.dtype):
        raise CaesuraError(
            ErrorCode.UNSUPPORTED,
            f"deterministic needs the compiled CPU kernels for every operation: {why_not() or 'not on this device'}",
            serving=found,
        )


def build_runner(config: EngineConfig, loaded: LoadedModel, pool: MHAPool) -> ModelRunner:
    """The model with its attention backend and sampler."""
    model = loaded.config
    if config.deterministic:
        require_deterministic(loaded)
    compiled = best("attention", loaded.device, loaded.dtype) != TORCH
    make_backend: Callable[..., AttentionBackend] = PagedCpuBackend if compiled else SdpaBackend
    backend = make_backend(pool, model.num_heads, model.num_kv_heads, model.head_dim, model.head_dim**-0.5)
    sampler = Sampler(model.vocab_size, config.max_running_requests, loaded.device, loaded.dtype)
    return ModelRunner(
        loaded.model,
        backend,
        sampler,
        device=loaded.device,
        max_slots=config.max_running_requests,
        device_module=device_module_for(loaded.device),
    )


MakeRunner = Callable[[EngineConfig, LoadedModel, MHAPool], Runner]


@dataclass(frozen=True, slots=True)
class _Core:
    """The parts below dispatch and loop."""

    loaded: LoadedModel
    pool: MHAPool
    runner: Runner
    limits: AdmissionLimits
    waiting: WaitingQueue
    batcher: Batcher
    results: Results
    lifecycle: Lifecycle
    updates: WeightUpdates
    occupation: MemoryOccupation
    checker: WeightsChecker


class Engine:
    """All parts of a running scheduler, wired; ``scheduler.run()`` serves."""

    def __init__(
        self, config: EngineConfig, stop_fds: tuple[int, ...] = (), make_runner: MakeRunner | None = None
    ) -> None:
        """Binds the endpoint first: a second engine must fail before it allocates.

        Args:
            config: resolved.
            stop_fds: the loop ends when one of them becomes readable.
            make_runner: builds what executes steps. None: :func:`build_runner`.
        """
        assert config.endpoint is not None
        assert config.pipeline_depth is not None
        self._cleanup = contextlib.ExitStack()
        self.router = Router(config.endpoint, on_gone=self._client_gone)
        self._cleanup.callback(self.router.close)
        self.wakeup = Wakeup()
        self._cleanup.callback(self.wakeup.close)
        try:
            self._build(config, stop_fds, make_runner or build_runner)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the endpoint and of what runs beside the loop."""
        self._cleanup.close()

    def _build(self, config: EngineConfig, stop_fds: tuple[int, ...], make_runner: MakeRunner) -> None:
        module = device_module_for(config.device)
        core = self._build_core(config, make_runner, module)
        facts = StaticFacts(
            dtype=str(core.loaded.dtype).removeprefix("torch."),
            weights_bytes=core.loaded.weights_bytes,
            kv_bytes=core.pool.nbytes,
            kv_bytes_per_token=kv_bytes_per_token(core.loaded),
            version=__version__,
        )
        status = StatusReporter(
            config=config,
            limits=core.limits,
            facts=facts,
            lifecycle=core.lifecycle,
            updates=core.updates,
            batcher=core.batcher,
            waiting=core.waiting,
            results=core.results,
            cache=self.cache,
            device_module=module,
            last_step_at=lambda: self.scheduler.last_step_at,
        )
        parameter_server = ParameterServerUpdates(config=config, updates=core.updates, wake=self.wakeup.set)
        self._cleanup.callback(parameter_server.close)
        self.dispatcher = Dispatcher(
            config=config,
            limits=core.limits,
            lifecycle=core.lifecycle,
            updates=core.updates,
            parameter_server=parameter_server,
            groups=GroupCommands(self.groups),
            occupation=core.occupation,
            checker=core.checker,
            results=core.results,
            waiting=core.waiting,
            send=self.router.send,
            status=status,
            check_ledger=self.cache.check,
        )
        self.scheduler = Scheduler(
            router=self.router,
            dispatcher=self.dispatcher,
            lifecycle=core.lifecycle,
            batcher=core.batcher,
            results=core.results,
            runner=core.runner,
            updates=core.updates,
            device_module=module,
            pipeline_depth=config.pipeline_depth or 0,
            idle_empty_s=config.idle_empty_s,
            wakeup=self.wakeup,
            stop_fds=stop_fds,
        )
        empty_device_cache(module)  # what loading left behind

    def _build_core(self, config: EngineConfig, make_runner: MakeRunner, module: Any) -> _Core:
        """What computes and what it works on."""
        residency = ComponentResidencyManager(config.device)
        loaded, pool, limits = build_components(config, residency)
        runner = make_runner(config, loaded, pool)
        stamp = WeightStamp(0, INITIAL_VERSION)
        table = RequestTable(
            config.max_running_requests, limits.context_len, PAGE_SIZE, loaded.config.vocab_size
        )
        self.cache = CacheManager(pool.num_pages, PAGE_SIZE, config.prefix_cache)
        waiting = WaitingQueue()
        batcher = Batcher(
            table,
            self.cache,
            waiting,
            chunks=ChunkSizer(config.chunked_prefill_size, config.target_step_s),
            share_prefixes=config.prefix_cache,
        )
        results = Results(
            table, batcher, waiting, send=self.router.send, on_finished=self._finished, stamp=stamp
        )
        lifecycle = Lifecycle(
            batcher=batcher,
            waiting=waiting,
            results=results,
            cache=self.cache,
            runner=runner,
            device_module=module,
            stamp=stamp,
        )
        self.groups = WeightsUpdateGroups(loaded.device, self.wakeup.set, runner.synchronize)
        self._cleanup.callback(self.groups.close)
        updates = WeightUpdates(
            config=config,
            model=loaded.model,
            loader=loaded.loader,
            runner=runner,
            lifecycle=lifecycle,
            batcher=batcher,
            results=results,
            cache=self.cache,
            device_module=module,
            groups=self.groups,
        )
        checker = WeightsChecker(
            model=loaded.model, runner=runner, lifecycle=lifecycle, poison=updates.poison
        )
        occupation = MemoryOccupation(
            residency=residency,
            lifecycle=lifecycle,
            updates=updates,
            cache=self.cache,
            runner=runner,
            device_module=module,
        )
        return _Core(
            loaded, pool, runner, limits, waiting, batcher, results, lifecycle, updates, occupation, checker
        )

    def _client_gone(self, client: bytes) -> None:
        self.dispatcher.client_gone(client)

    def _finished(self, request: Request, result: GenerateReqOutput) -> None:
        self.dispatcher.finished(request, result)


def run(config: EngineConfig, ready_fd: int | None, lifeline_fd: int | None) -> int:
    """Serve until told to stop; returns the exit status.

    Args:
        ready_fd: gets one JSON line: ``{"ready": true, "endpoint", "pid"}`` or ``{"ready": false, "code", …}``.
        lifeline_fd: the process ends when this becomes readable, which it does when its other end closes.
    """
    started = time.monotonic()
    stop_fds = [_signal_fd()]
    if lifeline_fd is not None:
        stop_fds.append(lifeline_fd)
    with contextlib.ExitStack() as cleanup:
        try:
            engine = _start(config, tuple(stop_fds), cleanup)
        except CaesuraError as error:
            logger.error("cannot start: %s", error)
            tell(ready_fd, refusal(error))
            return 1
        cleanup.callback(engine.close)
        logger.info(
            "serving %s on %s after %.2f s (%d threads)",
            config.model_path, engine.router.endpoint, time.monotonic() - started, torch.get_num_threads(),
        )  # fmt: skip
        tell(ready_fd, {"ready": True, "endpoint": engine.router.endpoint, "pid": os.getpid()})
        engine.scheduler.run()
    return 0


def _start(config: EngineConfig, stop_fds: tuple[int, ...], cleanup: contextlib.ExitStack) -> Engine:
    """A serving engine; every reason against it is a CaesuraError, since the launcher must hear it."""
    try:
        log.configure(config.log_level)
    except ValueError as error:
        raise _refused("log_level", config.log_level, error) from error
    try:
        torch.empty(0, device=None if config.device == "auto" else config.device)
    except (RuntimeError, AssertionError) as error:  # unknown, not built in, or not there
        raise _refused("device", config.device, error) from error
    try:
        resolved = config.resolve()
        if config.endpoint is None:
            assert resolved.endpoint is not None
            directory = os.path.dirname(resolved.endpoint.removeprefix("ipc://"))
            cleanup.callback(shutil.rmtree, directory, ignore_errors=True)
        torch.set_num_threads(resolved.num_threads or 1)
        return Engine(resolved, stop_fds)
    except CaesuraError:
        raise
    except MemoryError as error:
        raise CaesuraError(ErrorCode.OUT_OF_MEMORY, f"out of memory at start: {error}") from error
    except Exception as error:
        raise CaesuraError(
            ErrorCode.INTERNAL,
            f"the engine could not be built: {type(error).__name__}: {error}",
            traceback="".join(traceback.format_exception(error)),
        ) from error


def _refused(field: str, value: object, error: Exception) -> CaesuraError:
    reason = str(error).partition("\n")[0]
    return CaesuraError(ErrorCode.INVALID_REQUEST, f"{field} = {value!r}: {reason}", field=field, value=value)


def _signal_fd() -> int:
    """A descriptor that becomes readable on SIGTERM or SIGINT."""
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)
    signal.set_wakeup_fd(writer.fileno())
    ignore: Callable[[int, Any], None] = lambda *_: None  # noqa: E731  the wake-up descriptor does the work
    signal.signal(signal.SIGTERM, ignore)
    signal.signal(signal.SIGINT, ignore)
    writer.detach()
    return reader.detach()


def refusal(error: CaesuraError) -> dict[str, Any]:
    """The ready line of an engine that does not start."""
    return {"ready": False, "code": error.code, "message": error.message, "detail": error.detail}


def tell(ready_fd: int | None, line: dict[str, Any]) -> None:
    """Write the ready line and close the descriptor; None: nobody listens."""
    if ready_fd is None:
        return
    with os.fdopen(ready_fd, "w") as pipe:
        json.dump(msgspec.to_builtins(line), pipe)
        pipe.write("\n")
