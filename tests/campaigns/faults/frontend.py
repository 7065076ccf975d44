"""``caesura serve`` over an engine that runs already, as a process."""

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

END_S = 20.0


class FrontEnd:
    """A ``caesura serve`` of ``endpoint``, as a context manager that ends it."""

    def __init__(self, endpoint: str, weights_root: Path | None = None) -> None:
        command = [sys.executable, "-c", "from caesura.client.cli import main; main()", "serve"]
        command += ["--endpoint", endpoint, "--port", "0", "--tokenizer", "none"]
        command += ["--weights-root", "/" if weights_root is None else str(weights_root)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        announced = self._process.stdout.readline()
        if " on http://" not in announced:
            self.close()
            raise RuntimeError(f"caesura serve did not start: {announced!r}")
        self.url = announced.split(" on ")[1].split()[0]

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End the front end, by a kill if it takes too long; calling it again does nothing."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                os.kill(self._process.pid, 9)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
