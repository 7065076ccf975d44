"""Sizes, durations and causes in words, as the terminal shows them."""

from time import localtime, strftime

from ...io_struct import MemoryCause, MemoryEvent

MIB = 1 << 20
MINUS = "\N{MINUS SIGN}"
_WORDS: dict[MemoryCause, str] = {
    "lease_expiry": "lease expiry",
    "update_begin": "update begins",
    "update_commit": "update commits",
    "update_failed": "update failed",
}


def model_label(path: str) -> str:
    parts = path.rstrip("/").split("/")
    cached = next((part for part in reversed(parts) if part.startswith("models--")), None)
    return parts[-1] if cached is None else cached.split("--")[-1]


def size(nbytes: float, *, sign: bool = False) -> str:
    """Return a size in MiB, from 10 GiB on in GiB; with ``sign``, an increase has a plus."""
    unit, scale = ("GiB", MIB << 10) if abs(nbytes) >= 10 * (MIB << 10) else ("MiB", MIB)
    value = round(nbytes / scale, 1) + 0.0  # no minus zero
    text = f"{value:{'+' if sign and value else ''},.1f} {unit}"
    return text.replace("-", MINUS)


def span(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def clock(at: float) -> str:
    return strftime("%H:%M:%S", localtime(at)) + f".{int(at % 1 * 10)}"


def cause(event: MemoryEvent) -> str:
    return _WORDS.get(event.cause, event.cause)
