"""The page about an engine as one document: empty, for the server that feeds it, or with an engine's record inside, as a file.

Invariants:
- Both are the same page with the same script, so a file shows what the server shows.
- The page runs no script and applies no style but its own (a policy of hashes says so to the browser). A file asks for nothing.
- What was told stands in a file as JSON without a ``<``, which the script shows as text.
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
from .last_image import Picture
from .ticks import Tick

FOLDER = Path(__file__).parent / "dashboard_page"
_SCRIPTS = ("facts.js", "chart.js", "page.js")
_FILE_POLICY = '<meta http-equiv="Content-Security-Policy" content="{}">'


class Percentiles(msgspec.Struct, kw_only=True, frozen=True):
    """How long something takes, in seconds, since the start of whoever counts it."""

    name: str
    count: int
    p50: float
    p90: float
    p99: float


class UpdateTimes(msgspec.Struct, kw_only=True, frozen=True):
    """The last weight update by stage."""

    at: float
    """When it was complete, in seconds since the epoch."""
    updates: int
    """Updates that came between two looks, or replicas that were updated; the times are their mean."""
    seconds: dict[str, float]
    """Seconds by stage, in their order."""


class ReplicaView(msgspec.Struct, kw_only=True, frozen=True):
    """A replica now."""

    name: str
    state: str
    reason: str
    """Why it does not serve; empty if it does."""


class PageData(msgspec.Struct, kw_only=True):
    """What the page draws next."""

    now: float
    """The clock of whoever made this, in seconds since the epoch, as all times here."""
    answered: bool = True
    """False: the engine does not answer, and ``status`` is its last."""
    age_s: float = 0.0
    """Of ``status``."""
    throughput: float | None = None
    """Tokens per second, denoise steps of an image engine. None: nobody has watched."""
    model_name: str = ""
    status: GetStatusReqOutput | None
    """None: it has never answered."""
    history: GetMemoryHistoryReqOutput | None
    """Memory events after the one that was asked for. None: the engine does not answer."""
    ticks: list[Tick] = []
    """Load at moments after the one that was asked for."""
    latencies: list[Percentiles] = []
    update: UpdateTimes | None = None
    """None: there was none since this server began to look."""
    replicas: list[ReplicaView] = []
    image: Picture | None = None
    """The last image that was made through the server. None: none, or the page has it."""


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
    """The page about ``data`` and nothing else."""
    told = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    return _page(policy=_FILE_POLICY.format(_policy()), data=told)


@cache
def served() -> tuple[bytes, str]:
    """The page without a figure in it, and the policy to send with it."""
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
    """Style, script and what is around them."""
    css, html, *scripts = (
        (FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.html", *_SCRIPTS)
    )
    return css, "\n".join(scripts), html


def _hash(inline: str) -> str:
    digest = b64encode(sha256(inline.encode()).digest()).decode()
    return f"'sha256-{digest}'"
