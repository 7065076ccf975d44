"""``python -m demo`` (with ``examples/`` on the path)."""

import sys

from .main import main

if __name__ == "__main__":
    sys.exit(main())
