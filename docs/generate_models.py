"""Writes the table of docs/reference/models.md of what runs through transformers, by running and comparing
each of it.

Invariant: an architecture is in the table because it was compared, in the ways that
``tests/support/foreign_comparison.py`` has, and the figure is the largest difference of a logit that was
seen. Run ``python docs/generate_models.py`` after a change of ``tests/support/architectures.py``, of
``scheduler/models/transformers_backend/`` or of the version of transformers. It takes minutes, so tests
compare the names alone.
"""

import sys
from pathlib import Path

import torch
import transformers
from generated_parts import update

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "reference" / "models.md"


def table() -> str:
    """Return the table of architectures, each with its largest difference."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.architectures import ARCHITECTURES
    from support.foreign_comparison import compare

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows = [
        (
            f"Compared with transformers {transformers.__version__} and torch "
            f"{torch.__version__.partition('+')[0]} on a CPU, in fp32."
        ),
        "",
        "| architecture | largest difference of a logit |",
        "|---|---|",
    ]
    for name in sorted(ARCHITECTURES, key=str.lower):
        gap = max(compare(name).gaps.values())
        rows.append(f"| `{name}` | {gap:.1e} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(update(DOCUMENT, {"transformers": table}))
