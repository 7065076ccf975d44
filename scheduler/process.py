"""Build an engine from a configuration and run it as a process.

Invariants:
- The launcher hears exactly one line on the ready descriptor: that the engine serves, or why it does not.
- A signal, a shutdown message, the death of the launcher and a loop that fails all end the same way: every live request
  gets its terminal message, one line of the log says why, then the process exits. ``stopping.py`` says when.
- No end takes for ever: a loop that hangs, and an end that does, are cut off (``observability/watchdog.py``).
- An engine is whole or gone: a thread of ours that fails ends it.
"""

import contextlib
import faulthandler
import gc
import json
import logging
import os
import secrets
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from .. import __version__
from ..io_struct import CaesuraError, ErrorCode, GenerateReqOutput, private_directory
from .access import ServerKeys
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
from .cache.manager import CacheManager, LedgerError
from .channel import Router
from .checker import WeightsChecker
from .chunking import ChunkSizer
from .commands import Commands
from .config import PAGE_SIZE, EngineConfig
from .descriptors import DescriptorCheck, raise_limit
from .device.cache import DeviceCache
from .device.memory import is_out_of_memory
from .device.module import device_module_for
from .device.residency import ComponentResidencyManager
from .dispatch import Dispatcher
from .failure import Recovery
from .forward import Runner
from .groups import GroupCommands
from .guard import Guard
from .lifecycle import Lifecycle
from .loop import Scheduler
from .observability import log
from .observability.memory_history import MemoryGauges, MemoryHistory
from .observability.stage_profiler import StageProfiler
from .observability.watchdog import Heartbeat, Watchdog, exit_within
from .occupation import MemoryOccupation
from .parameter_server import ParameterServerUpdates
from .reference import load_reference
from .request import Request, RequestTable, WeightStamp
from .results import Results
from .runner.model_runner import ModelRunner
from .scoring import ReferenceModel, Scoring
from .sessions import Sessions
from .status import StaticFacts, StatusReporter
from .stopping import Shutdown, StartInterruptedError, StopSignals
from .updates import WeightUpdates
from .waiting import AdmissionLimits, WaitingQueue
from .weights.transports.distributed import WeightsUpdateGroups
from .weights_record import WeightsFile

logger = logging.getLogger(__name__)

END_S = 30.0
"""How long the end may take once the loop is over: last messages, process groups, files."""


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
    handlers: Commands
    scoring: Scoring | None


class Engine:
    """All parts of a running scheduler, wired; ``scheduler.run()`` serves."""

    def __init__(
        self, config: EngineConfig, shutdown: Shutdown | None = None, make_runner: MakeRunner | None = None
    ) -> None:
        """Binds the endpoint first: a second engine must fail before it allocates.

        Args:
            config: resolved.
            shutdown: says when the loop ends. None: when a message says so.
            make_runner: builds what executes steps. None: :func:`build_runner`.
        """
        assert config.endpoint is not None
        assert config.pipeline_depth is not None
        self._cleanup = contextlib.ExitStack()
        keys = ServerKeys.read(config.curve_secret_key_file, config.curve_authorized_clients)
        self.router = Router(config.endpoint, on_gone=self._client_gone, keys=keys)
        self._cleanup.callback(self.router.close)
        self.heartbeat = Heartbeat()
        self.wakeup = Wakeup()
        self._cleanup.callback(self.wakeup.close)
        try:
            self._build(config, shutdown or _shutdown_of(config), make_runner or build_runner)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the endpoint and of what runs beside the loop."""
        self._cleanup.close()

    def _build(self, config: EngineConfig, shutdown: Shutdown, make_runner: MakeRunner) -> None:
        self._weights_file = WeightsFile(config)
        self._cleanup.callback(self._weights_file.close)
        module = device_module_for(config.device)
        self._device_cache = DeviceCache(module)
        residency = ComponentResidencyManager(config.device, device_cache=self._device_cache)
        self._cleanup.callback(residency.close)
        self._gauges = MemoryGauges(module, residency)  # before anything large is there
        self._history = MemoryHistory(self._gauges)
        self._device_cache.note_failure = lambda what, freed: self._history.note(
            "failure", what, returned=freed
        )
        self._stages = StageProfiler(log=config.log_stages, describe_memory=self._gauges.describe)
        core = self._build_core(config, residency, make_runner)
        self._device_cache.synchronize = core.runner.synchronize
        commands = self._build_commands(config, core, module)
        self.dispatcher = Dispatcher(
            config=config,
            limits=core.limits,
            lifecycle=core.lifecycle,
            sessions=commands.updates.sessions,
            handlers=commands.handlers,
            scoring=commands.scoring,
            results=core.results,
            waiting=core.waiting,
            send=self.router.send,
            status=self._build_status(config, core, commands, module),
            history=self._history,
            device_cache=self._device_cache,
            check_ledger=self.cache.check,
            shutdown=shutdown,
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
            guard=Guard(fatal=(LedgerError,) if config.check_ledger else ()),
            history=self._history,
            stages=self._stages,
            device_cache=self._device_cache,
            pipeline_depth=config.pipeline_depth or 0,
            idle_empty_s=config.idle_empty_s,
            wakeup=self.wakeup,
            shutdown=shutdown,
            heartbeat=self.heartbeat,
        )
        self._device_cache.empty("start")  # what loading left behind
        self._history.note("start", config.model_path)

    def _build_core(
        self,
        config: EngineConfig,
        residency: ComponentResidencyManager,
        make_runner: MakeRunner,
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
            device_cache=self._device_cache,
        )
        lifecycle = Lifecycle(
            sessions=Sessions(deadline_s=config.session_deadline_s, orphan_s=config.session_orphan_s),
            batcher=batcher,
            waiting=waiting,
            results=results,
            cache=self.cache,
            runner=runner,
            device_cache=self._device_cache,
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
        self.groups = WeightsUpdateGroups(
            loaded.device, self.wakeup.set, runner.synchronize, config.group_interface
        )
        self._cleanup.callback(self.groups.close)
        updates = WeightUpdates(
            config=config,
            model=loaded.model,
            loader=loaded.loader,
            runner=runner,
            lifecycle=lifecycle,
            sessions=lifecycle.sessions,
            batcher=core.batcher,
            results=core.results,
            cache=self.cache,
            device_cache=self._device_cache,
            groups=self.groups,
            history=self._history,
            stages=self._stages,
            weights_file=self._weights_file,
            model_path=core.folder or config.model_path,
            wake=self.wakeup.set,
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
            device_cache=self._device_cache,
            history=self._history,
            stages=self._stages,
            heartbeat=self.heartbeat,
        )
        checker = WeightsChecker(
            model=loaded.model, runner=runner, lifecycle=lifecycle, poison=updates.poison
        )
        handlers = Commands(
            lifecycle=lifecycle,
            updates=updates,
            parameter_server=parameter_server,
            groups=GroupCommands(self.groups),
            occupation=occupation,
            checker=checker,
        )
        return _Commands(updates, handlers, self._build_scoring(core, module))

    def _build_scoring(self, core: _Core, module: Any) -> Scoring | None:
        if core.reference is None:
            return None
        return Scoring(
            core.reference,
            residency=core.residency,
            lifecycle=core.lifecycle,
            runner=core.runner,
            device_module=module,
            device_cache=self._device_cache,
        )

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
            device_cache=self._device_cache,
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
    faulthandler.enable()  # a fault in a library says where
    signals = StopSignals()
    shutdown = _shutdown_of(config, signal_fd=signals.fd, lifeline_fd=lifeline_fd)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(log.flush)
        started = time.monotonic()
        try:
            engine = _start(config, shutdown, cleanup)
            cleanup.callback(engine.close)
            signals.serving()
        except CaesuraError as error:
            logger.error("cannot start: %s", error)
            tell(ready_fd, refusal(error))
            return 1
        except StartInterruptedError as interrupted:
            logger.info("the engine ends: %s at start", interrupted)
            return 128 + interrupted.number
        gc.freeze()  # imports and the engine live as long as the process: a full collection need not go through them
        logger.info(
            "serving %s on %s after %.2f s (%d threads)",
            config.model_path, engine.router.endpoint, time.monotonic() - started, torch.get_num_threads(),
        )  # fmt: skip
        tell(ready_fd, {"ready": True, "endpoint": engine.router.endpoint, "pid": os.getpid()})
        return _serve(engine, shutdown, config.watchdog_timeout_s)


def _shutdown_of(config: EngineConfig, **fds: int | None) -> Shutdown:
    drain = config.shutdown_mode == "drain"
    return Shutdown(drain=drain, drain_timeout_s=config.drain_timeout_s, **fds)


def _serve(engine: Engine, shutdown: Shutdown, watchdog_timeout_s: float) -> int:
    """Until the end; the exit status."""
    failed: list[str] = []

    def thread_failed(failure: threading.ExceptHookArgs) -> None:
        name = "?" if failure.thread is None else failure.thread.name
        failed.append(f"thread {name} has failed: {failure.exc_type.__name__}")
        logger.critical("%s", failed[-1], exc_info=failure.exc_value)
        shutdown.request(failed[-1], drain=False)
        engine.wakeup.set()

    threading.excepthook = thread_failed
    watchdog = Watchdog(engine.heartbeat, watchdog_timeout_s, (DescriptorCheck(),))
    watchdog.start()
    try:
        engine.scheduler.run()
    except Exception as error:  # noqa: BLE001  it was logged, and every client was told
        failed.append(f"its loop has failed: {type(error).__name__}")
        shutdown.request(failed[-1], drain=False)
    finally:
        watchdog.close()
        exit_within(END_S)
    logger.info("the engine ends: %s", failed[0] if failed else shutdown.reason)
    return 1 if failed else 0


def _start(config: EngineConfig, shutdown: Shutdown, cleanup: contextlib.ExitStack) -> Engine:
    """A serving engine; every reason against it is a CaesuraError, since the launcher must hear it."""
    try:
        log.configure(config.log_level)
    except ValueError as error:
        raise _refused("log_level", config.log_level, error) from error
    raise_limit()
    try:
        torch.empty(0, device=None if config.device == "auto" else config.device)
    except (RuntimeError, AssertionError) as error:  # unknown, not built in, or not there
        raise _refused("device", config.device, error) from error
    try:
        resolved = config.resolve()
        if config.endpoint is None:
            assert resolved.endpoint is not None
            directory = os.path.dirname(resolved.endpoint.removeprefix("ipc://"))
            cleanup.callback(private_directory.remove, directory)
        torch.set_num_threads(resolved.num_threads or 1)
        return Engine(resolved, shutdown)
    except CaesuraError:
        raise
    except MemoryError as error:
        raise CaesuraError(ErrorCode.OUT_OF_MEMORY, f"out of memory at start: {error}") from error
    except Exception as error:
        raise CaesuraError(
            ErrorCode.OUT_OF_MEMORY if is_out_of_memory(error) else ErrorCode.INTERNAL,
            f"the engine could not be built: {type(error).__name__}: {error}",
            traceback="".join(traceback.format_exception(error)),
        ) from error


def _refused(field: str, value: object, error: Exception) -> CaesuraError:
    reason = str(error).partition("\n")[0]
    return CaesuraError(ErrorCode.INVALID_REQUEST, f"{field} = {value!r}: {reason}", field=field, value=value)


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
