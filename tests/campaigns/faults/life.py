"""One engine from its start to its end, the processes around it, and the way back to a healthy state.

Invariants:
- Whatever waits here takes in what comes to the witness meanwhile.
- An engine is left alone until what it promises to get over by itself (leases, sessions' deadlines) is over;
  what is then poisoned or invalid has refused to generate, and gets complete weights.
"""

import multiprocessing
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from caesura.client import Busy, EngineDied, EngineError, GroupError, SchedulerClient, TimedOut
from caesura.client.launch.launcher import LaunchedScheduler
from caesura.io_struct import EndWeightUpdateReqInput, GetStatusReqOutput, WeightUpdateReqOutput
from caesura.process import private_directory

from .actors import Errand, perform
from .fault_engine import set_clock
from .footprint import Footprint, footprint
from .known import CONTEXT, Version
from .ledger import Ledger, Problem
from .witness import Witness, greedy

ENGINE = Path(__file__).with_name("fault_engine.py")
PATIENT_LEASE_S = 30.0
"""Seconds of the lease of an undisturbed trainer: a busy machine must not let it expire."""
SESSION_DEADLINE_S = 2.0
ENGINE_DESCRIPTORS = 512
"""Limit of the engine's open descriptors."""
HEALING_S = 15.0
"""Seconds in which leases and deadlines must have run out, on a busy machine too."""
DEADLINE_S = 60.0
"""Seconds for everything that must happen."""
STATUS_S = 10.0
POLL_S = 0.02
UNLABELLED = "default"
"""Label of the weights that an engine was started with."""

_processes = multiprocessing.get_context("forkserver")
# What takes long to import. Not the actors' own module, which a fork server does not find: it has no sys.path
# of ours.
_processes.set_forkserver_preload(["safetensors.torch", "caesura.client.trainer"])


class Actor:
    """A process that performs an errand."""

    def __init__(self, errand: Errand) -> None:
        self.errand = errand
        self.events: list[tuple[Any, ...]] = []
        self._pipe, theirs = _processes.Pipe(duplex=False)
        self._process = _processes.Process(target=perform, args=(errand, theirs), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def outcome(self) -> tuple[Any, ...] | None:
        """Event that tells the actor's end, or None before it."""
        self._read()
        return next((event for event in self.events if event[0] != "at"), None)

    def reached(self, phase: str) -> bool:
        self._read()
        return self.outcome is not None or ("at", phase) in self.events or not self.alive()

    def alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        if self.alive():
            self._process.kill()

    def close(self) -> None:
        self.kill()
        self._process.join()
        self._pipe.close()

    def _read(self) -> None:
        pipe: Connection = self._pipe
        try:
            while not pipe.closed and pipe.poll():
                self.events.append(pipe.recv())
        except (EOFError, OSError):
            return


class Life:
    """An engine that serves the first of ``versions``, its client library's client, and a witness."""

    def __init__(
        self, versions: list[Version], known: dict[str, str] | None = None, *, log: Path | None = None
    ) -> None:
        self.versions = versions
        self.known = {} if known is None else known
        """Checksum of each version by its own label; what is missing is learned when it is first seen."""
        self.by_label: dict[str, Version] = {
            UNLABELLED: versions[0],
            **{version.label: version for version in versions},
        }
        self.directory = private_directory.make()
        self._clock = self.directory / "clock"
        self.engine = self._launch(log)
        self.ledger = Ledger(self.by_label)
        self.witness = Witness(self.endpoint, self.ledger)
        self.baseline: Footprint | None = None
        self._actors: list[Actor] = []

    @property
    def endpoint(self) -> str:
        return self.engine.endpoint

    @property
    def client(self) -> SchedulerClient:
        return self.engine.client

    @property
    def pid(self) -> int:
        return self.engine.pid

    def actor(self, errand: Errand) -> Actor:
        actor = Actor(errand)
        self._actors.append(actor)
        return actor

    def dismiss(self) -> set[int]:
        pids = {actor.pid for actor in self._actors}
        for actor in self._actors:
            actor.close()
        self._actors.clear()
        return pids

    def wait(self, condition: Callable[[], object], seconds: float = DEADLINE_S) -> bool:
        """Return True if ``condition`` came true within ``seconds``."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            self.witness.pump(POLL_S)
        return True

    def sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.witness.pump(min(left, POLL_S))

    def status(self) -> GetStatusReqOutput:
        return self.client.status(timeout=STATUS_S)

    def heal(self) -> list[Problem]:
        """Bring the engine back to running, valid and resident; return what was wrong on the way."""
        problems: list[Problem] = []
        deadline, patience = time.monotonic() + DEADLINE_S, time.monotonic() + HEALING_S
        while not healthy(status := self.status()):
            now = time.monotonic()
            if now > deadline:
                return [*problems, Problem("stuck", f"never healthy again: {describe(status)}")]
            with suppress(Busy):  # a command of somebody dead still runs: later
                idle = status.session is None and status.update is None
                if idle and status.weights in ("poisoned", "invalid"):
                    problems += self._honest(status)
                    self._repair(status)
                elif now > patience:
                    problems.append(Problem("stuck", f"did not get over it by itself: {describe(status)}"))
                    self._force(status)
                    patience = deadline
                elif status.generation == "paused" and status.pause_owner is None and status.session is None:
                    self._force(status)  # its owner's lease is over, or it had none
            self.sleep(POLL_S)
        return problems

    def version_of(self, total: str) -> Version | None:
        return next((v for v in self.versions if self.known.get(v.label) == total), None)

    def check_weights(self) -> list[Problem]:
        label = self.status().weight_version
        total = self.client.check_weights(timeout=DEADLINE_S).total
        if label not in self.by_label:
            return [Problem("torn", f"status names the unknown version {label!r}")]
        label = self.by_label[label].label
        if self.known.setdefault(label, total) != total:
            found = self.version_of(total)
            really = "no known version" if found is None else repr(found.label)
            return [Problem("torn", f"status says {label!r}, the checksum is that of {really}")]
        return []

    def set_clock(self, offset_s: float) -> None:
        set_clock(self._clock, offset_s)

    def leave_groups(self) -> None:
        """Destroy the process groups of dead trainers, as a successor does (docs/reference/lifecycle.md)."""
        with suppress(GroupError):
            self.client.destroy_weights_update_group(timeout=DEADLINE_S)

    def footprint(self) -> Footprint:
        return footprint(self.pid)

    def close(self) -> None:
        self.dismiss()
        self.witness.close()
        self.engine.close()

    def _launch(self, log: Path | None) -> LaunchedScheduler:
        options: dict[str, object] = {
            "model": self.versions[0].folder,
            "endpoint": f"ipc://{self.directory}/scheduler.sock",
            "device": "cpu",
            "num-threads": 1,
            "context-len": CONTEXT,
            "kv-pool-tokens": 64 << 10,
            "max-running-requests": 64,
            "load-bucket-bytes": 32 << 10,
            "session-deadline-s": SESSION_DEADLINE_S,
            "result-ttl-s": 1.0,
            "log-level": "INFO" if log is not None else "ERROR",
        }
        set_clock(self._clock, 0.0)
        # A crowd must be able to use them up.
        limit = ["prlimit", f"--nofile={ENGINE_DESCRIPTORS}:{ENGINE_DESCRIPTORS}"]
        command = [*limit, sys.executable, str(ENGINE), str(self._clock), "--check-ledger"]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        return LaunchedScheduler(command, directory=self.directory, log_path=log)

    def _honest(self, status: GetStatusReqOutput) -> list[Problem]:
        problems = []
        if not status.weights_detail:
            problems.append(Problem("failed", f"weights are {status.weights} and status does not say why"))
        try:
            self.client.generate([5], greedy(1), timeout=STATUS_S)
        except EngineError as error:
            if error.code not in ("weights_poisoned", "weights_invalid", "memory_released"):
                problems.append(Problem("failed", f"{status.weights} weights refused as {error.code}"))
        else:
            if self.status().weights in ("poisoned", "invalid"):
                problems.append(Problem("torn", f"{status.weights} weights generated"))
        return problems

    def _repair(self, status: GetStatusReqOutput) -> None:
        if status.released_tags:
            self.client.resume_memory(timeout=DEADLINE_S)
        self.client.update_weights_from_disk(
            self.versions[0].folder,
            weight_version=self.versions[0].label,
            flush_cache=status.pause_mode != "in_place",
            timeout=DEADLINE_S,
        )

    def _force(self, status: GetStatusReqOutput) -> None:
        """Free the engine from a dead trainer, as its successor would."""
        try:
            if status.session is not None:
                end = EndWeightUpdateReqInput(commit=False, force=True)
                self.client.start(end, WeightUpdateReqOutput).result(DEADLINE_S)
            if status.released_tags:
                self.client.resume_memory(timeout=DEADLINE_S)
            self.client.continue_generation(force=True, timeout=DEADLINE_S)
        except (TimedOut, EngineDied):
            raise
        except EngineError:
            return  # the state has changed meanwhile, or needs a repair first: status is asked again


def healthy(status: GetStatusReqOutput) -> bool:
    states = status.generation, status.weights, status.memory, status.session, status.update
    return states == ("running", "valid", "resident", None, None)


def describe(status: GetStatusReqOutput) -> str:
    owner = f" of {status.pause_owner!r}" if status.pause_owner else ""
    session = f", session {status.session}" if status.session else ""
    return (
        f"{status.generation} {status.pause_mode or ''}{owner}, {status.weights} ({status.weights_detail}), "
        f"{status.memory}{session}, {alive(status)} live requests"
    )


def alive(status: GetStatusReqOutput) -> int:
    return status.running_requests + status.prefilling_requests + status.waiting_requests
