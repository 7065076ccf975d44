"""Weights from one replica to another by a process of its own: the server has no torch, and answers meanwhile.

python -m caesura.client.replicas.copying   (the addresses stand on stdin, as JSON; status 1 and the reason on stderr if it fails)
"""

import json
import subprocess
import sys
from dataclasses import asdict

from ...io_struct import CaesuraError
from ..exceptions import InternalError
from ..fleet.catching_up import RELOAD_S, copy_here
from ..fleet.members import EngineAddress


def copy_apart(donor: EngineAddress, target: EngineAddress, owner: str | None) -> None:
    """A :data:`~..fleet.catching_up.Copy` in another process. Blocks.

    Raises:
        InternalError: it failed; the message says why.
    """
    told = json.dumps({"donor": asdict(donor), "target": asdict(target), "owner": owner}, default=str)
    try:
        done = subprocess.run(  # noqa: S603 (our own interpreter and module)
            [sys.executable, "-P", "-m", __name__],
            input=told,
            capture_output=True,
            text=True,
            timeout=RELOAD_S,
            process_group=0,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InternalError(f"the weights of {donor.name} were not copied within {RELOAD_S:g} s") from None
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        raise InternalError(f"the weights of {donor.name} could not be copied: {last[0]}")


def main() -> int:
    """The process."""
    told = json.load(sys.stdin)
    try:
        copy_here(EngineAddress(**told["donor"]), EngineAddress(**told["target"]), told["owner"])
    except CaesuraError as error:
        print(error, file=sys.stderr)  # noqa: T201 (for the process that waits)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
