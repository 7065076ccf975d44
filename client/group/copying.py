"""Copies of weights by a process of its own: the server has no torch, and answers meanwhile.

``python -m caesura.client.group.copying`` reads the addresses from stdin, as JSON; if it fails, its status is
1 and the reason is the last line of stderr.
"""

import json
import subprocess
import sys
import threading
from dataclasses import asdict

from ...io_struct import CaesuraError
from ..exceptions import InternalError
from ..launch.launcher import how_it_ended
from .members import EngineAddress
from .recovery import RELOAD_S, copy_here


class Copies:
    """Copies of weights between the replicas of one server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False

    def copy(self, donor: EngineAddress, target: EngineAddress, owner: str | None) -> None:
        """Copy weights in another process, as a :data:`~.recovery.Copy`. Blocks; raises InternalError."""
        told = json.dumps({"donor": asdict(donor), "target": asdict(target), "owner": owner}, default=str)
        process = self._started(donor)
        try:
            _, said = process.communicate(told, timeout=RELOAD_S)
        except subprocess.TimeoutExpired:
            raise InternalError(
                f"the weights of {donor.name} were not copied within {RELOAD_S:g} s"
            ) from None
        finally:
            with self._lock:
                self._running.discard(process)
            process.kill()
            process.communicate()
        if process.returncode != 0:
            last = said.strip().splitlines()[-1:] or [how_it_ended(process.returncode)]
            raise InternalError(f"the weights of {donor.name} could not be copied: {last[0]}")

    def end(self) -> None:
        """Fail the copies under way, and all that begin later. Idempotent."""
        with self._lock:
            self._ended = True
            for process in self._running:
                process.kill()

    def _started(self, donor: EngineAddress) -> "subprocess.Popen[str]":
        with self._lock:
            if self._ended:
                raise InternalError(f"the weights of {donor.name} are copied no more: the server ends")
            try:
                process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
                    [sys.executable, "-P", "-m", __name__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    process_group=0,
                )
            except OSError as error:
                raise InternalError(
                    f"the weights of {donor.name} could not be copied: no process for it: {error}"
                ) from error
            self._running.add(process)
            return process


def main() -> int:
    told = json.load(sys.stdin)
    try:
        copy_here(EngineAddress(**told["donor"]), EngineAddress(**told["target"]), told["owner"])
    except CaesuraError as error:
        print(error, file=sys.stderr)  # noqa: T201 (the waiting process reads it)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
