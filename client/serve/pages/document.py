"""The page about an engine: without data, for the server that feeds it, or with its record, as a file.

Invariants: both are one page and script; a policy of hashes admits nothing else. Data is inserted as text, in
a file as JSON without a ``<``, which requests nothing. Writing needs no package of ``caesura[serve]``.
"""

import io
from base64 import b64encode
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from pathlib import Path
from string import Template
from time import time

import msgspec

from ....io_struct import GetMemoryHistoryReqOutput, GetStatusReqOutput
from ...connection.image_generation import ImageOutput, ImageTensor
from ...memory_view.record import MemoryRecord

FOLDER = Path(__file__).parent / "dashboard_page"
_SCRIPTS = ("facts.js", "chart.js", "page.js")
_FILE_POLICY = '<meta http-equiv="Content-Security-Policy" content="{}">'


class Tick(msgspec.Struct, array_like=True):
    at: float
    """Unix time."""
    uptime_s: float
    generated_tokens: int
    running: int
    waiting: int
    kv_used: int
    """Tokens whose KV live requests hold."""
    reserved: int
    """Bytes that the device allocator holds."""
    loads: list[int] = []
    """Samples that each replica has to generate; -1 if it does not serve."""
    gap: bool = False
    """True if it is unknown what the engine did since the tick before."""
    drift: float | None = None
    """Mean difference of log-probabilities that the self-check found, without sign; None without one."""


class Percentiles(msgspec.Struct, kw_only=True, frozen=True):
    """Percentiles of a duration in seconds, since the process began."""

    name: str
    count: int
    p50: float
    p90: float
    p99: float


class UpdateTimes(msgspec.Struct, kw_only=True, frozen=True):
    """The last weight update by stage."""

    at: float
    """Unix time of the update's end."""
    updates: int
    """Updates between two looks, or updated replicas; the times are their mean."""
    seconds: dict[str, float]
    """Seconds by stage, in order."""


class ReplicaView(msgspec.Struct, kw_only=True, frozen=True):
    name: str
    state: str
    reason: str


class Picture(msgspec.Struct, kw_only=True, frozen=True):
    number: int
    """Number of the answer with images, from 1."""
    at: float
    width: int
    height: int
    png: str


class PageData(msgspec.Struct, kw_only=True):
    """Data that the page draws next. Times are Unix times."""

    now: float
    answered: bool = True
    """True if the engine answers; False if ``status`` is its last answer."""
    age_s: float = 0.0
    throughput: float | None = None
    """Tokens, or denoise steps of images, per second, or None if unknown."""
    model_name: str = ""
    status: GetStatusReqOutput | None
    """Status of the engine, or None before its first answer."""
    history: GetMemoryHistoryReqOutput | None
    """Memory events after the one that was asked for, or None without an answer."""
    ticks: list[Tick] = []
    """Ticks after the time that was asked for."""
    latencies: list[Percentiles] = []
    update: UpdateTimes | None = None
    """Times of the last update, or None if this server has seen none."""
    replicas: list[ReplicaView] = []
    image: Picture | None = None
    """The last image, or None if there is none or the page has it."""


LONGEST = 160
"""Pixels of the longest side of the small picture."""


def png_of(image: ImageTensor, longest: int | None = None) -> bytes:
    """Return uint8 [height, width, 3] as PNG, scaled down if a side has more than ``longest`` pixels."""
    from PIL import Image  # takes 50 ms, and only servers of diffusion pipelines need it

    height, width, _ = image.shape
    picture = Image.frombuffer("RGB", (width, height), bytes(image.data))
    if longest is not None:
        picture.thumbnail((longest, longest))
    encoded = io.BytesIO()
    picture.save(encoded, "PNG")
    return encoded.getvalue()


class LastImage:
    def __init__(self) -> None:
        self._picture: Picture | None = None

    def keep(self, outputs: Iterable[ImageOutput]) -> None:
        """Keep the last of ``outputs`` that has an image; without one, keep what there is."""
        image = next((each.image for each in reversed([*outputs]) if each.image is not None), None)
        if image is not None:
            self._picture = Picture(
                number=1 if self._picture is None else self._picture.number + 1,
                at=time(),
                width=image.shape[1],
                height=image.shape[0],
                png=b64encode(png_of(image, LONGEST)).decode(),
            )

    def after(self, number: int) -> Picture | None:
        """Return the picture; None if there is none, or if it is ``number``."""
        picture = self._picture
        return None if picture is None or picture.number == number else picture


def write_page(record: MemoryRecord, path: Path) -> None:
    """Write the page about ``record`` to ``path``; raise ValueError if it is empty."""
    if not record.events:
        raise ValueError("the engine has told of no event")
    history = GetMemoryHistoryReqOutput(
        id=record.status.id, events=list(record.events), more=False, older=list(record.older)
    )
    path.write_bytes(filed(PageData(now=time(), status=record.status, history=history)))


def filed(data: PageData) -> bytes:
    encoded = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    return _page(policy=_FILE_POLICY.format(_policy()), data=encoded)


@cache
def served() -> tuple[bytes, str]:
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
    css, html, *scripts = (
        (FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.html", *_SCRIPTS)
    )
    return css, "\n".join(scripts), html


def _hash(inline: str) -> str:
    digest = b64encode(sha256(inline.encode()).digest()).decode()
    return f"'sha256-{digest}'"
