"""The ranks of a node that has no rank 0: worker processes, which are started again until the engine ends.

Invariants:
- The node ends with status 0 when rank 0 has told every worker that the engine has been shut down, or by a
  signal; with 1 when no rank 0 has started its workers within ``join_timeout_s``, or when one
  is refused or cannot start before any has served.
- No worker outlives this process, and none has another parent: each has a lifeline (:mod:`.workers`).
"""

import logging
import queue
import signal
import threading
import time
from functools import partial
from select import select

from ...io_struct import CaesuraError
from ...process import log
from ...process.placement import Placement
from ..runtime.engine_config import EngineConfig
from ..runtime.shutdown import STOP_SIGNALS
from .worker_process import LOST_STATUS, REFUSED_STATUS
from .worker_socket import worker_command
from .workers import LaunchedWorker

logger = logging.getLogger(__name__)
RETRY_S = 0.5
_CLOSE_S = 2.0
_USAGE_STATUS = 2


def run_node(config: EngineConfig, place: Placement, lifeline_fd: int | None) -> int:
    """Run the ranks of ``place`` until the engine ends; return the exit status."""
    log.configure(config.log_level, log_format=config.log_format, name=config.log_name)
    ends = _ends(lifeline_fd)
    ranks = place.ranks(config.tp)
    try:
        command = worker_command(f"tcp://{place.master_addr}", config.curve_secret_key_file)
        command += ["--join-timeout-s", str(config.join_timeout_s)]
    except CaesuraError as error:
        logger.error("the node ends: %s", error)
        return _USAGE_STATUS
    logger.info(
        "node %d of %d: ranks %s join at %s", place.node_rank, place.nnodes, list(ranks), place.master_addr
    )
    workers: dict[int, LaunchedWorker] = {}
    ended: set[int] = set()
    deadline = time.monotonic() + config.join_timeout_s
    has_served = False
    try:
        while len(ended) < len(ranks):
            for rank in set(ranks) - workers.keys() - ended:
                local = ["--local-rank", str(place.first_device + rank - ranks.start)]
                workers[rank] = LaunchedWorker(rank, [*command, *local], partial(_tell, ends, rank))
            if (end := ends.get()) is None:
                return 0
            rank, how = end
            worker = workers.pop(rank)
            worker.close(time.monotonic() + _CLOSE_S)
            status = worker.process.returncode
            if status == 0:
                ended.add(rank)
                continue
            if status == _USAGE_STATUS:
                return status
            if status < 0 or status == LOST_STATUS:
                has_served = True
                deadline = time.monotonic() + config.join_timeout_s
            elif status == REFUSED_STATUS and not has_served:
                logger.error("rank %d is refused or cannot start: the node ends", rank)
                return 1
            elif time.monotonic() >= deadline:
                logger.error("no rank 0 at %s has started rank %d: the node ends", place.master_addr, rank)
                return 1
            logger.warning("%s, and starts again", how)
        return 0
    finally:
        end_at = time.monotonic() + _CLOSE_S
        for worker in workers.values():
            worker.close(end_at)
        log.flush()


def _ends(lifeline_fd: int | None) -> "queue.SimpleQueue[tuple[int, str] | None]":
    """Return a queue of ranks whose worker has ended, and how; None once this process shall end."""
    ends: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: ends.put(None))
    if lifeline_fd is not None:
        watch = threading.Thread(target=_wait, args=(lifeline_fd, ends), name="caesura-lifeline", daemon=True)
        watch.start()
    return ends


def _tell(ends: "queue.SimpleQueue[tuple[int, str] | None]", rank: int, how: str) -> None:
    time.sleep(RETRY_S)
    ends.put((rank, how))


def _wait(lifeline_fd: int, ends: "queue.SimpleQueue[tuple[int, str] | None]") -> None:
    select([lifeline_fd], [], [])
    ends.put(None)
