"""The driver's end of a pipe: one JSON object per line in each direction. Standard library only.

The protocol, which every peer script speaks and ``harness/peer_process.py`` drives:

- request ``{"op": name, ...arguments}`` -> reply ``{"result": {...}}``, strictly one after the other;
- a peer that fails dies: its traceback is in its log and the driver sees the end of the stream;
- end of input means stop.

Peers run under other interpreters, which need not have Caesura installed: nothing here may import it.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

Handler = Callable[..., dict[str, Any]]


def claim_stdout() -> TextIO:
    """Return a writer on the original stdout; whatever prints from now on prints to stderr."""
    sys.stdout.flush()
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def serve(channel: TextIO, handlers: Mapping[str, Handler]) -> None:
    """Answer requests from stdin on ``channel`` until the input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        result = handlers[request.pop("op")](**request)
        channel.write(json.dumps({"result": result}) + "\n")
        channel.flush()
