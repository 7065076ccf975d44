"""The last image that was made through this server, small, for the dashboard.

Invariants:
- At most one picture is kept, no side of it over :data:`LONGEST` pixels; the next one replaces it, and nothing is written down.
- It leaves by ``/dashboard/data`` only, which needs the key of a user, as the routes do that make images. Prompts, seeds and names of
  requests are not kept. Images that trainers ask the engine for without this server are never here.
"""

from base64 import b64encode
from collections.abc import Iterable
from time import time

import msgspec

from ...connection.images import ImageOutput, ImageTensor
from ..png import png_of, shrunk

LONGEST = 160
"""Pixels of a side: at most 77 KB before compression."""


class Picture(msgspec.Struct, kw_only=True, frozen=True):
    """What the page shows of an image."""

    number: int
    """Counts the answers with images of this server, from 1."""
    at: float
    """When its answer was ready, in seconds since the epoch."""
    width: int
    """Of the image itself, in pixels."""
    height: int
    png: str
    """The small picture, in base64."""


class LastImage:
    """Keeps it."""

    def __init__(self) -> None:
        self._number = 0
        self._at = 0.0
        self._size = (0, 0)
        self._small: ImageTensor | None = None

    def keep(self, outputs: Iterable[ImageOutput]) -> None:
        """The last of ``outputs`` that has an image."""
        image = next((each.image for each in reversed([*outputs]) if each.image is not None), None)
        if image is None:
            return
        self._number, self._at = self._number + 1, time()
        self._size = image.shape[1], image.shape[0]
        self._small = shrunk(image, LONGEST)

    def after(self, number: int) -> Picture | None:
        """The picture, unless it has ``number``, the one that the page shows; None too before the first."""
        if self._small is None or number == self._number:
            return None
        png = b64encode(png_of(self._small)).decode()
        return Picture(number=self._number, at=self._at, width=self._size[0], height=self._size[1], png=png)
