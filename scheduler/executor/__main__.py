"""``caesura worker``: one rank of an engine whose rank 0 is another process."""

import os
import sys
from pathlib import Path

import click

from ..memory.host import HOST
from ..runtime.libraries import settings

os.environ.update(settings())
if "MALLOC_ARENA_MAX" not in os.environ:
    HOST.share_arena()

from ...io_struct import CaesuraError
from ...process.curve import read_key_pair, server_key, shared_key_pair
from ...process.engine_options import EngineOptions
from .worker_process import Connection, end, run


@click.command("caesura worker")
@click.option("--join", required=True, help="Address of rank 0: the engine's tp_address, tcp://HOST:PORT.")
@click.option("--rank", type=click.IntRange(min=1), required=True, help="Which rank this worker is, from 1.")
@click.option("--device", help="Device of this rank. The default is the engine's own.")
@click.option(
    "--local-rank",
    type=click.IntRange(min=0),
    help="Number of this rank on its host; the device is the engine's, counted on by it.",
)
@click.option("--curve-server-key", help="The engine's public CURVE key, or the file that holds it.")
@click.option(
    "--curve-client-key-file", help="File with this worker's CURVE key pair, as caesura keygen writes it."
)
@click.option(
    "--join-timeout-s",
    type=float,
    default=EngineOptions.join_timeout_s,
    show_default=True,
    help="Seconds to wait for a rank 0 that starts this worker, which says meanwhile what is missing.",
)
@click.option("--lifeline-fd", type=int, hidden=True)
def worker(
    join: str,
    rank: int,
    device: str | None,
    local_rank: int | None,
    curve_server_key: str | None,
    curve_client_key_file: str | None,
    join_timeout_s: float,
    lifeline_fd: int | None,
) -> None:
    """Run one rank of an engine in the foreground, until its rank 0 ends."""
    if not join_timeout_s >= 0:  # NaN, too
        raise click.UsageError(f"--join-timeout-s must be at least 0, not {join_timeout_s}")
    try:
        keys = None
        if curve_server_key is not None and curve_client_key_file is not None:
            server = server_key(curve_server_key, "curve_server_key")
            keys = (server, read_key_pair(Path(curve_client_key_file), "curve_client_key_file"))
        elif curve_server_key is not None or curve_client_key_file is not None:
            raise click.UsageError("--curve-server-key and --curve-client-key-file belong together")
        elif join.startswith("tcp:") and (shared := shared_key_pair()) is not None:
            keys = (shared.public, shared)
    except CaesuraError as error:
        raise click.UsageError(str(error)) from error
    end(run(Connection(join, rank, keys, lifeline_fd, join_timeout_s), device, local_rank))


if __name__ == "__main__":
    worker(prog_name="caesura worker")
    sys.exit(0)
