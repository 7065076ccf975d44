"""The page about an engine: without data, for the server that feeds it, or with its record, as a file.

Invariants:
- Both are the same page with the same script, so a file shows what the server shows.
- The page runs no script and applies no style but its own, which a policy of hashes enforces. A file requests
  nothing.
- Data stands in a file as JSON without a ``<``, which the script shows as text.
- Writing a file needs no package of ``caesura[serve]``.
"""

from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path
from string import Template
from time import time

import msgspec

from ....io_struct import GetMemoryHistoryReqOutput, GetStatusReqOutput
from ...memory_view.record import MemoryRecord

FOLDER = Path(__file__).parent / "dashboard_page"
_SCRIPTS = ("facts.js", "chart.js", "page.js")
_FILE_POLICY = '<meta http-equiv="Content-Security-Policy" content="{}">'


class Tick(msgspec.Struct, array_like=True):
    """The load at one moment."""

    at: float
    """Seconds since the epoch."""
    uptime_s: float
    generated_tokens: int
    running: int
    waiting: int
    kv_used: int
    """Tokens whose KV live requests hold."""
    reserved: int
    """Bytes that the device allocator holds."""
    loads: list[int] = []
    """Samples that each replica has to generate; -1 if it does not serve. Empty without replicas."""
    gap: bool = False
    """Nobody knows what the engine did since the tick before."""


class Percentiles(msgspec.Struct, kw_only=True, frozen=True):
    """Percentiles of a duration in seconds, since the start of the process that counts it."""

    name: str
    count: int
    p50: float
    p90: float
    p99: float


class UpdateTimes(msgspec.Struct, kw_only=True, frozen=True):
    """The last weight update by stage."""

    at: float
    """End of the update, in seconds since the epoch."""
    updates: int
    """Number of updates between two looks, or of replicas that were updated; the times are their mean."""
    seconds: dict[str, float]
    """Seconds by stage, in the order of the stages."""


class ReplicaView(msgspec.Struct, kw_only=True, frozen=True):
    """A replica now."""

    name: str
    state: str
    reason: str
    """Reason why it does not serve; empty if it does."""


class Picture(msgspec.Struct, kw_only=True, frozen=True):
    """An image, made small."""

    number: int
    """Number of the answer with images, counted from 1 by this server."""
    at: float
    """Time of the answer, in seconds since the epoch."""
    width: int
    """Pixels of the image itself."""
    height: int
    png: str
    """The small picture, in base64."""


class PageData(msgspec.Struct, kw_only=True):
    """Data that the page draws next. Times are seconds since the epoch, by the same clock as ``now``."""

    now: float
    answered: bool = True
    """False: the engine does not answer, and ``status`` is its last."""
    age_s: float = 0.0
    """Age of ``status``."""
    throughput: float | None = None
    """Tokens per second, or denoise steps of an image engine. None: nobody has watched."""
    model_name: str = ""
    status: GetStatusReqOutput | None
    """None: the engine has never answered."""
    history: GetMemoryHistoryReqOutput | None
    """Memory events after the one that was asked for. None: the engine does not answer."""
    ticks: list[Tick] = []
    """Ticks after the time that was asked for."""
    latencies: list[Percentiles] = []
    update: UpdateTimes | None = None
    """None: there was no update since this server began to look."""
    replicas: list[ReplicaView] = []
    image: Picture | None = None
    """The last image that was made through the server. None: there is none, or the page has it."""


def write_page(record: MemoryRecord, path: Path) -> None:
    """Write the page about ``record`` to ``path``.

    Raises:
        ValueError: the record is empty: an engine that serves has at least the event of its start.
    """
    if not record.events:
        raise ValueError("the engine has told of no event")
    history = GetMemoryHistoryReqOutput(
        id=record.status.id, events=list(record.events), more=False, older=list(record.older)
    )
    path.write_bytes(filed(PageData(now=time(), status=record.status, history=history)))


def filed(data: PageData) -> bytes:
    """Return the page with ``data`` inside."""
    encoded = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    return _page(policy=_FILE_POLICY.format(_policy()), data=encoded)


@cache
def served() -> tuple[bytes, str]:
    """Return the page without data, and the policy to send with it."""
    return _page(), f"{_policy()}; connect-src 'self'; frame-ancestors 'none'"


def _page(**filled: str) -> bytes:
    css, script, html = _sources()
    fields = {"policy": "", "data": "", "css": css, "script": script, **filled}
    return Template(html).substitute(fields).encode()


def _policy() -> str:
    css, script, _ = _sources()
    return (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(css)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


@cache
def _sources() -> tuple[str, str, str]:
    """Return style, script and the HTML around them."""
    css, html, *scripts = (
        (FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.html", *_SCRIPTS)
    )
    return css, "\n".join(scripts), html


def _hash(inline: str) -> str:
    digest = b64encode(sha256(inline.encode()).digest()).decode()
    return f"'sha256-{digest}'"
