"""``python -m caesura.scheduler.kernels``: check that this installation has the compiled CPU kernels.

Invariant: the exit status describes the installation alone: 1 if the extension is missing or does not load,
else 0, also on a processor that cannot use it.
"""

import sys

from . import native


def main() -> int:
    reason = native.why_not()
    if reason is None:
        print(f"compiled kernels: {native.isa()}")  # noqa: T201 (a command's output)
        return 0
    print(f"no compiled kernels: {reason}", file=sys.stderr)  # noqa: T201
    return 0 if reason == native.NO_AVX2 else 1


if __name__ == "__main__":
    sys.exit(main())
