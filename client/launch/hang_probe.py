"""Ask a scheduler for its status, to learn that it hangs. A refusal is an answer."""

import math
import time
from collections.abc import Sequence

import click

from ...io_struct import CaesuraError
from ..connection.blocking import ControlClient
from ..connection.client_options import ConnectionOptions
from ..exceptions import EngineDied, TimedOut
from .launcher import Child, option_value

PROBES_PER_HANG, LONGEST_INTERVAL_S = 4, 5.0


def require_keys(arguments: Sequence[str], keys: ConnectionOptions) -> None:
    """Refuse a scheduler with keys that could not be asked without any."""
    if option_value(arguments, "--curve-secret-key-file") and keys.get("curve_server_key") is None:
        raise click.UsageError(
            "a scheduler with keys accepts only clients with keys: "
            "--curve-server-key and --curve-client-key-file are required, or --hang-timeout 0"
        )


def answers_until_it_ends(child: Child, endpoint: str, keys: ConnectionOptions, patience: float) -> bool:
    """Return True when it has ended, or False once it has been silent for ``patience`` seconds, if not 0.

    Two probes must fail: if both were stopped together, the first fails at once when they go on.
    """
    if patience <= 0:
        return child.wait(math.inf)
    each = patience / PROBES_PER_HANG
    with _client(endpoint, keys, each) as client:
        child.report_exit_to(client)
        answered, missed = time.monotonic(), 0
        while not child.wait(min(each, LONGEST_INTERVAL_S)):
            try:
                client.status(timeout=each)
            except (TimedOut, EngineDied):
                missed += 1
                if missed > 1 and time.monotonic() - answered >= patience and not child.wait(0.0):
                    return False
                continue
            except CaesuraError:
                pass
            answered, missed = time.monotonic(), 0
    return True


def is_silent(endpoint: str, keys: ConnectionOptions, timeout: float) -> bool:
    """Return True if no answer comes within ``timeout`` seconds; the end of the scheduler is an answer."""
    try:
        with _client(endpoint, keys, timeout) as client:
            client.status(timeout=timeout)
    except TimedOut:
        return True
    except CaesuraError:
        pass
    return False


def _client(endpoint: str, keys: ConnectionOptions, connect_timeout: float) -> ControlClient:
    options: ConnectionOptions = {**keys, "connect_timeout": connect_timeout}
    return ControlClient(endpoint, **options)
