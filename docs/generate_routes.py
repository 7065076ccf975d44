"""Writes the tables of docs/howto/integrations.md: which clients were run, and which routes they called.

Invariant: both are made of ``tests/integrations/routes.json`` alone, which the tests in that folder write.
Run ``python docs/generate_routes.py`` when it has changed (``--check``: see :mod:`generated_parts`).
"""

import json
import sys
from itertools import chain
from pathlib import Path
from typing import Any

from generated_parts import update

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "howto" / "integrations.md"
RECORD = ROOT / "tests" / "integrations" / "routes.json"


def record() -> dict[str, dict[str, Any]]:
    """Return each client's ``version``, and the calls of its ``tests``."""
    found: dict[str, dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def clients() -> str:
    """Return a row for each client: its version, and the tests it was run in."""
    rows = ["| client | run | by |", "|---|---|---|"]
    for client, known in record().items():
        files = sorted({test.partition("::")[0] for test in known["tests"]})
        rows.append(f"| {client} | {known['version']} | {', '.join(f'`{file}`' for file in files)} |")
    return "\n".join(rows)


def routes() -> str:
    """Return a row for each route: the statuses that each client was answered with."""
    names = list(record())
    seen: dict[tuple[str, str], dict[str, set[str]]] = {}
    for client, known in record().items():
        for call in chain.from_iterable(known["tests"].values()):
            method, target, status = call.split()
            seen.setdefault((target, method), {}).setdefault(client, set()).add(status)
    rows = [f"| route | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for (target, method), statuses in sorted(seen.items()):
        cells = [", ".join(sorted(statuses.get(name, ()))) for name in names]
        rows.append(f"| `{method} {target}` | {' | '.join(cells)} |")
    return "\n".join(rows)


PARTS = {"clients": clients, "routes": routes}

if __name__ == "__main__":
    sys.exit(update(DOCUMENT, PARTS))
