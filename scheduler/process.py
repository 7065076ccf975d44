"""Build an engine from a configuration and run it as a process.

Invariants:
- The launcher hears exactly one line on the ready descriptor: that the engine serves, or why it does not.
- A signal, a shutdown message, the death of the launcher and a loop that fails all end the same way: every live request
  gets its terminal message, one line of the log says why, then the process exits. ``shutdown.py`` says when.
- No end takes for ever: a loop that hangs, and an end that does, are cut off (``observability/watchdog.py``).
- An engine is whole or gone: a thread of ours that fails ends it.
"""

import contextlib
import faulthandler
import gc
import json
import logging
import os
import threading
import time
import traceback
from typing import Any

import msgspec
import torch

from ..io_struct import CaesuraError, ErrorCode, private_directory
from .config import EngineConfig
from .engine import Engine, shutdown_of
from .memory.device_memory import is_out_of_memory
from .observability import log
from .observability.descriptors import DescriptorCheck, raise_limit
from .observability.watchdog import Watchdog, exit_within
from .shutdown import Shutdown, StartInterruptedError, StopSignals

logger = logging.getLogger(__name__)

END_S = 30.0
"""How long the end may take once the loop is over: last messages, process groups, files."""


def run(config: EngineConfig, ready_fd: int | None, lifeline_fd: int | None) -> int:
    """Serve until told to stop; returns the exit status.

    Args:
        ready_fd: gets one JSON line: ``{"ready": true, "endpoint", "pid"}`` or ``{"ready": false, "code", …}``.
        lifeline_fd: the process ends when this becomes readable, which it does when its other end closes.
    """
    faulthandler.enable()  # a fault in a library says where
    signals = StopSignals()
    shutdown = shutdown_of(config, signal_fd=signals.fd, lifeline_fd=lifeline_fd)
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
