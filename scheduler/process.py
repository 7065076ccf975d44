"""Build an engine from a configuration and run it as a process.

Invariants:
- The launcher hears exactly one line on the ready descriptor: that the engine serves, or why it does not.
- SIGTERM, SIGINT, a shutdown message and the death of the launcher all end the same way: every live request gets its
  terminal message, then the process exits.
"""

import contextlib
import gc
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import time
import traceback
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from .. import __version__
from ..io_struct import CaesuraError, ErrorCode, GenerateReqOutput
from .background import Wakeup
from .batching import Batcher
from .build import (
    LoadedModel,
    MakeRunner,
    build_components,
    build_runner,
    kv_bytes_per_token,
    routing_bytes_per_token,
)
from .cache.manager import CacheManager
from .channel import Router
from .checker import WeightsChecker
from .chunking import ChunkSizer
from .config import PAGE_SIZE, EngineConfig
from .device.memory import device_module_for, empty_device_cache
from .device.residency import ComponentResidencyManager
from .dispatch import Dispatcher
from .failure import Recovery
from .forward import Runner
from .groups import GroupCommands
from .lifecycle import Lifecycle
from .loop import Scheduler
from .observability import log
from .observability.memory_history import MemoryGauges, MemoryHistory
from .observability.stage_profiler import StageProfiler
from .occupation import MemoryOccupation
from .parameter_server import ParameterServerUpdates
from .reference import load_reference
from .request import Request, RequestTable, WeightStamp
from .results import Results
from .runner.model_runner import ModelRunner
from .scoring import ReferenceModel, Scoring
from .status import StaticFacts, StatusReporter
from .updates import WeightUpdates
from .waiting import AdmissionLimits, WaitingQueue
from .weights.transports.distributed import WeightsUpdateGroups
from .weights_record import WeightsFile

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Core:
    """What computes, and what it works on."""

    loaded: LoadedModel
    folder: str | None
    """Has the weights; None: the configuration's does."""
    residency: ComponentResidencyManager
    reference: ReferenceModel | None
    runner: Runner
    limits: AdmissionLimits
    waiting: WaitingQueue
    batcher: Batcher
    results: Results
    recovery: Recovery
    lifecycle: Lifecycle


@dataclass(frozen=True, slots=True)
class _Commands:
    """What carries commands out that take time."""

    updates: WeightUpdates
    parameter_server: ParameterServerUpdates
    occupation: MemoryOccupation
    checker: WeightsChecker
    scoring: Scoring | None


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
        self._weights_file = WeightsFile(config)
        self._cleanup.callback(self._weights_file.close)
        module = device_module_for(config.device)
        residency = ComponentResidencyManager(config.device)
        self._cleanup.callback(residency.close)
        self._gauges = MemoryGauges(module, residency)  # before anything large is there
        self._history = MemoryHistory(self._gauges)
        self._stages = StageProfiler(log=config.log_stages, describe_memory=self._gauges.describe)
        core = self._build_core(config, residency, make_runner, module)
        commands = self._build_commands(config, core, module)
        self.dispatcher = Dispatcher(
            config=config,
            limits=core.limits,
            lifecycle=core.lifecycle,
            updates=commands.updates,
            parameter_server=commands.parameter_server,
            groups=GroupCommands(self.groups),
            occupation=commands.occupation,
            checker=commands.checker,
            scoring=commands.scoring,
            results=core.results,
            waiting=core.waiting,
            send=self.router.send,
            status=self._build_status(config, core, commands, module),
            history=self._history,
            check_ledger=self.cache.check,
        )
        self.scheduler = Scheduler(
            router=self.router,
            dispatcher=self.dispatcher,
            lifecycle=core.lifecycle,
            batcher=core.batcher,
            results=core.results,
            runner=core.runner,
            recovery=core.recovery,
            updates=commands.updates,
            history=self._history,
            stages=self._stages,
            device_module=module,
            pipeline_depth=config.pipeline_depth or 0,
            idle_empty_s=config.idle_empty_s,
            wakeup=self.wakeup,
            stop_fds=stop_fds,
        )
        empty_device_cache(module)  # what loading left behind
        self._history.note("start", config.model_path)

    def _build_core(
        self,
        config: EngineConfig,
        residency: ComponentResidencyManager,
        make_runner: MakeRunner,
        module: Any,
    ) -> _Core:
        reference = load_reference(config, residency)
        start = self._weights_file.start()
        loaded, pool, routing, limits = build_components(config, residency, start.folder)
        runner = make_runner(config, loaded, pool, routing)
        stamp = WeightStamp(start.epoch, start.version, secrets.token_hex(8))
        self._weights_file.begin(stamp, loaded.digest)
        table = RequestTable(
            config.max_running_requests, limits.context_len, PAGE_SIZE, loaded.config.vocab_size
        )
        self.cache = CacheManager(pool.num_pages, PAGE_SIZE, config.prefix_cache, stamp.epoch)
        waiting = WaitingQueue()
        chunks = ChunkSizer(config.chunked_prefill_size, config.target_step_s)
        batcher = Batcher(
            table,
            self.cache,
            waiting,
            chunks=chunks,
            share_prefixes=config.prefix_cache,
            routing=routing,
        )
        results = Results(
            table, batcher, waiting, send=self.router.send, on_finished=self._finished, stamp=stamp
        )
        recovery = Recovery(
            batcher=batcher,
            results=results,
            runner=runner,
            chunks=chunks,
            history=self._history,
            device_module=module,
        )
        lifecycle = Lifecycle(
            batcher=batcher,
            waiting=waiting,
            results=results,
            cache=self.cache,
            runner=runner,
            device_module=module,
            stamp=stamp,
            history=self._history,
            stages=self._stages,
            lost=start.lost,
            serve_lost=config.on_lost_weights == "serve_initial",
        )
        self._history.where = lambda: (lifecycle.step, lifecycle.stamp.epoch)
        return _Core(
            loaded,
            start.folder,
            residency,
            reference,
            runner,
            limits,
            waiting,
            batcher,
            results,
            recovery,
            lifecycle,
        )

    def _build_commands(self, config: EngineConfig, core: _Core, module: Any) -> _Commands:
        loaded, residency, runner, lifecycle = core.loaded, core.residency, core.runner, core.lifecycle
        self.groups = WeightsUpdateGroups(loaded.device, self.wakeup.set, runner.synchronize)
        self._cleanup.callback(self.groups.close)
        updates = WeightUpdates(
            config=config,
            model=loaded.model,
            loader=loaded.loader,
            runner=runner,
            lifecycle=lifecycle,
            batcher=core.batcher,
            results=core.results,
            cache=self.cache,
            device_module=module,
            groups=self.groups,
            history=self._history,
            stages=self._stages,
            weights_file=self._weights_file,
            model_path=core.folder or config.model_path,
        )
        parameter_server = ParameterServerUpdates(config=config, updates=updates, wake=self.wakeup.set)
        self._cleanup.callback(parameter_server.close)
        graphs = None
        if isinstance(runner, ModelRunner):
            runner.stages, graphs = self._stages, runner.graphs
        self._gauges.derived_bytes = loaded.derived_bytes
        self._gauges.graphs_bytes = lambda: 0 if graphs is None else graphs.nbytes
        occupation = MemoryOccupation(
            residency=residency,
            lifecycle=lifecycle,
            updates=updates,
            cache=self.cache,
            runner=runner,
            graphs=graphs,
            device_module=module,
            history=self._history,
            stages=self._stages,
        )
        checker = WeightsChecker(
            model=loaded.model, runner=runner, lifecycle=lifecycle, poison=updates.poison
        )
        scoring = None
        if core.reference is not None:
            scoring = Scoring(
                core.reference, residency=residency, lifecycle=lifecycle, runner=runner, device_module=module
            )
        return _Commands(updates, parameter_server, occupation, checker, scoring)

    def _build_status(
        self, config: EngineConfig, core: _Core, commands: _Commands, module: Any
    ) -> StatusReporter:
        facts = StaticFacts(
            dtype=str(core.loaded.dtype).removeprefix("torch."),
            weights_bytes=core.loaded.weights_bytes,
            kv_bytes=core.residency.nbytes("kv_cache"),
            kv_bytes_per_token=kv_bytes_per_token(core.loaded),
            routing_bytes_per_token=routing_bytes_per_token(core.loaded),
            version=__version__,
        )
        return StatusReporter(
            config=config,
            limits=core.limits,
            facts=facts,
            lifecycle=core.lifecycle,
            updates=commands.updates,
            batcher=core.batcher,
            waiting=core.waiting,
            results=core.results,
            cache=self.cache,
            scoring=commands.scoring,
            recovery=core.recovery,
            device_module=module,
            history=self._history,
            stages=self._stages,
            last_step_at=lambda: self.scheduler.last_step_at,
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
        gc.freeze()  # imports and the engine live as long as the process: a full collection need not go through them
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
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # the wake-up descriptor does the work
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
