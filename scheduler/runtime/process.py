"""Build an engine from a configuration and run it as a process.

The launcher receives exactly one line on the ready descriptor: that the engine serves, or why it does not.
However it ends, every live request gets its terminal message, and one log line gives the reason; the watchdog
ends what hangs.
"""

import contextlib
import faulthandler
import gc
import json
import logging
import os
import resource
import threading
import time
import traceback
from typing import Any

import msgspec
import torch

from ... import __version__
from ...io_struct import CaesuraError, ErrorCode
from ...process import log, private_directory
from ..executor.workers import turn_away
from ..memory.device_memory import is_out_of_memory
from ..memory.device_module import use_device
from .engine import Engine
from .engine_config import EngineConfig
from .guard import EngineEndsError
from .shutdown import Shutdown, StartInterruptedError, StopSignals, name_fatal_signals
from .watchdog import Watchdog, exit_within

logger = logging.getLogger(__name__)

MAX_DESCRIPTORS = 1 << 20
"""Highest limit on open descriptors to set: some libraries iterate up to it."""
NEAR = 0.8
"""Fraction of the limit at which a warning is logged: libzmq ends the process when none is left."""
END_S = 30.0


def run(config: EngineConfig, ready_fd: int | None, lifeline_fd: int | None) -> int:
    """Serve until told to stop; return the exit status.

    ``ready_fd`` receives ``{"ready": true, "endpoint", "pid"}`` or ``{"ready": false, "code", …}``; the
    process ends when ``lifeline_fd`` becomes readable, because its other end is closed.
    """
    faulthandler.enable()  # prints a traceback if a library crashes
    started = time.monotonic()
    try:
        with contextlib.ExitStack() as cleanup:
            signals = StopSignals(lambda: exit_within(END_S))
            name_fatal_signals(_last_words)
            drain = config.shutdown_mode == "drain"
            shutdown = Shutdown(drain, config.drain_timeout_s, signals.fd, lifeline_fd)
            try:
                engine = _start(config, shutdown, cleanup)
                cleanup.callback(engine.close)
            except CaesuraError as error:
                signals.serving()  # a launcher ends this process as soon as it knows the reason
                exit_within(END_S)
                logger.error("the engine ends: cannot start: %s (exit status 1)", error)
                if config.tp_joined and error.code != ErrorCode.STATE_FILE_ERROR:  # that may pass
                    turn_away(config, error.message)
                tell(ready_fd, refusal(error))
                return 1
            signals.serving()
            gc.freeze()  # what is there lives as long as the process, so full collections can skip it
            took, threads = time.monotonic() - started, torch.get_num_threads()
            logger.info(
                "serving %s on %s after %.2f s (%d threads)",
                config.model_path, engine.router.endpoint, took, threads,
            )  # fmt: skip
            tell(ready_fd, {"ready": True, "endpoint": engine.router.endpoint, "pid": os.getpid()})
            return _serve(engine, shutdown, config.watchdog_timeout_s)
    except StartInterruptedError as interrupted:
        status = 128 + interrupted.number
        logger.info("the engine ends: signal %s at start (exit status %d)", interrupted, status)
        return status
    finally:
        log.flush()


def _serve(engine: Engine, shutdown: Shutdown, watchdog_timeout_s: float) -> int:
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
    except Exception as error:  # noqa: BLE001  the loop has logged it and answered every client
        failed.append(f"its loop has failed: {type(error).__name__}")
        shutdown.request(failed[-1], drain=False)
    except EngineEndsError as end:  # as above
        failed.append(str(end))
        shutdown.request(failed[-1], drain=False)
    finally:
        watchdog.close()
        exit_within(END_S)
    status = 1 if failed else 0
    engine.executor.ends_for_good = not failed
    logger.info("the engine ends: %s (exit status %d)", failed[0] if failed else shutdown.reason, status)
    return status


def _last_words(reason: str) -> None:
    logger.critical("the engine ends: %s", reason)
    log.flush()


def _start(config: EngineConfig, shutdown: Shutdown, cleanup: contextlib.ExitStack) -> Engine:
    try:
        log.configure(config.log_level, log_format=config.log_format, name=config.log_name)
    except ValueError as error:
        raise _refused("log_level", config.log_level, error) from error
    logger.info("caesura %s, pid %d: loading %s", __version__, os.getpid(), config.model_path)
    raise_limit()
    try:
        torch.empty(0, device=None if config.device == "auto" else config.device)
    # The device is unknown, not built into torch, or not present.
    except (RuntimeError, AssertionError) as error:
        raise _refused("device", config.device, error) from error
    try:
        resolved = config.resolve()
        if config.endpoint is None:
            assert resolved.endpoint is not None
            directory = os.path.dirname(resolved.endpoint.removeprefix("ipc://"))
            cleanup.callback(private_directory.remove, directory)
        torch.set_num_threads(resolved.num_threads or 1)
        use_device(resolved.device)
        return Engine(resolved, shutdown)
    except CaesuraError:
        raise
    except EngineEndsError as end:
        raise end.error from end
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
    return {"ready": False, "code": error.code, "message": error.message, "detail": error.detail}


def tell(ready_fd: int | None, line: dict[str, Any]) -> None:
    if ready_fd is None:
        return
    with contextlib.suppress(BrokenPipeError), os.fdopen(ready_fd, "w") as pipe:
        json.dump(msgspec.to_builtins(line), pipe)
        pipe.write("\n")


def raise_limit() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


class DescriptorCheck:
    def __init__(self) -> None:
        self._told = False

    def __call__(self) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        used = len(os.listdir("/proc/self/fd"))
        near = limit != resource.RLIM_INFINITY and used >= NEAR * limit
        if near and not self._told:
            logger.warning(
                "%d of %d descriptors are open: near the limit (ulimit -n); beyond it the process ends",
                used,
                limit,
            )
        self._told = near
