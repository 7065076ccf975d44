"""An engine in this process, tick by tick, as tests drive one: for what only the process itself can see."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.scripted import EngineDriver, tokens_of

__all__ = ["EngineDriver", "driver", "tokens_of"]


def driver(folder: Path, device: str, **options: Any) -> EngineDriver:
    """Return an engine on ``folder`` with the engine's defaults where the tests' own would cost time."""
    sizes = {"check_ledger": False, "load_bucket_bytes": 8 << 20, "dtype": "bfloat16"}
    return EngineDriver(str(folder), scripted=False, device=device, **{**sizes, **options})
