"""``caesura supervise`` as a process."""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from caesura.client import SchedulerClient

from .engine_template import CLI, CODE, Process
from .waiting import PATIENCE_S as PATIENCE


class Supervised:
    """A running ``caesura supervise``; ``endpoint`` is where its scheduler is."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.process = Process(
            [sys.executable, CODE, CLI, "supervise", *arguments, "--num-threads", "1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self.told: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self.process.stdout is not None
        self.announced = self.process.stdout.readline()
        self.endpoint = "ipc://" + self.announced.rpartition("ipc://")[2].split()[0] if self.announced else ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.told.append(line)
            self.lines.put(line)

    @property
    def folder(self) -> Path:
        return Path(self.endpoint.removeprefix("ipc://")).parent

    def client(self) -> SchedulerClient:
        return SchedulerClient(self.endpoint, connect_timeout=PATIENCE)

    def wait_for(self, text: str) -> str:
        while True:
            line = self.lines.get(timeout=PATIENCE)
            if text in line:
                return line

    def end(self, number: int | None = signal.SIGTERM) -> int:
        """Return the exit status after signal ``number``, or without a signal if it is None."""
        if number is not None and self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return status


@contextmanager
def supervised(*arguments: str, **options: Any) -> Iterator[Supervised]:
    running = Supervised(*arguments, **options)
    try:
        yield running
    finally:
        running.end()
        for pipe in (running.process.stdout, running.process.stderr):
            assert pipe is not None
            pipe.close()
