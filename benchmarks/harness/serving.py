"""``caesura serve`` over a scheduler that runs, as a process."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

END_S = 20.0


@contextmanager
def serve(endpoint: str, *arguments: str) -> Iterator[tuple[str, int]]:
    """Start the server on a port of its own choice; yield its address and process id.

    A server that does not end in time is killed.

    Raises:
        RuntimeError: it did not start.
    """
    command = [sys.executable, "-c", "from caesura.client.cli import main; main()", "serve"]
    command += ["--endpoint", endpoint, "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            address = re.search(r"http://\S+", line)
            if address is None:
                raise RuntimeError(f"caesura serve did not start: {line!r}")
            yield address[0], process.pid
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
