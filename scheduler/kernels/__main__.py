"""``python -m caesura.scheduler.kernels``: says whether this installation has the compiled CPU kernels, for builds.

Invariant: the exit status tells of the installation alone. It is 1 where the extension is missing or does not load, and 0
where it does, also on a processor that cannot use it.
"""

import sys

from . import native


def main() -> int:
    """The exit status; one line says what serves."""
    reason = native.why_not()
    if reason is None:
        print(f"compiled kernels: {native.isa()}")  # noqa: T201 (a command's output)
        return 0
    print(f"no compiled kernels: {reason}", file=sys.stderr)  # noqa: T201
    return 0 if reason == native.NO_AVX2 else 1


if __name__ == "__main__":
    sys.exit(main())
