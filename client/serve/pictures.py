"""Images as PNG, and the last one made through this server, small, for the dashboard.

Invariants: at most one picture is kept, in memory, without prompt, seed and request id. It leaves by
``/dashboard/data`` only, which needs the key of a user.
"""

import io
from base64 import b64encode
from collections.abc import Iterable
from time import time

from ..connection.images import ImageOutput, ImageTensor
from .pages.document import Picture

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
