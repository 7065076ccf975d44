"""PNG and small pictures, against Pillow."""

import base64
import io
import random
from types import SimpleNamespace

import pytest

from caesura.client.connection.images import ImageTensor
from caesura.client.serve.pages.document import LONGEST, LastImage, png_of

Image = pytest.importorskip("PIL.Image")


def image(height, width, seed=0):
    return ImageTensor("U8", (height, width, 3), random.Random(seed).randbytes(3 * height * width))


def opened(png):
    with Image.open(io.BytesIO(png)) as picture:
        assert (picture.format, picture.mode) == ("PNG", "RGB")
        return picture.size, picture.tobytes()


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (9, 2), (33, 64)])
def test_a_png_holds_the_pixels(shape):
    made = image(*shape)
    assert opened(png_of(made)) == (shape[::-1], made.data)


@pytest.mark.parametrize(
    ("shape", "small"),
    [
        ((1, 1), (1, 1)),
        ((160, 160), (160, 160)),
        ((80, 320), (40, 160)),
        ((1, 500), (1, 160)),
        ((1000, 500), (160, 80)),
    ],
)
def test_a_small_picture_fits_and_looks_alike(shape, small):
    height, width = shape
    row = b"\xff\0\0" * (width // 2) + b"\0\0\xff" * (width - width // 2)  # red, then blue
    size, data = opened(png_of(ImageTensor("U8", (*shape, 3), row * height), LONGEST))
    assert size == small[::-1]
    found = Image.frombytes("RGB", size, data)
    middle = size[1] // 2
    assert found.getpixel((size[0] - 1, middle)) == (0, 0, 255)
    assert width == 1 or found.getpixel((0, middle)) == (255, 0, 0)


@pytest.mark.parametrize("shape", [(1, 1), (160, 160), (161, 10), (1, 500), (1000, 333)])
def test_every_pixel_of_a_small_picture_is_that_of_its_place(shape):
    height, width = shape
    ramp = [[(255 * x // width, 255 * y // height, 7) for x in range(width)] for y in range(height)]
    data = bytes(value for row in ramp for pixel in row for value in pixel)
    (columns, rows), small = opened(png_of(ImageTensor("U8", (*shape, 3), data), LONGEST))
    assert max(rows, columns) == min(LONGEST, max(shape))
    for y in range(rows):
        for x in range(columns):
            red, green, blue = small[3 * (y * columns + x) :][:3]
            there = ramp[int((y + 0.5) * height / rows)][int((x + 0.5) * width / columns)]
            assert (red, blue) == (pytest.approx(there[0], abs=255 / columns + 2), 7)
            assert green == pytest.approx(there[1], abs=255 / rows + 2)


def test_the_last_image_is_told_once_and_replaced():
    kept = LastImage()
    assert kept.after(0) is None
    first, second = image(8, 16, 1), image(320, 320, 2)
    kept.keep([SimpleNamespace(image=first), SimpleNamespace(image=None)])
    told = kept.after(0)
    assert (told.number, told.width, told.height) == (1, 16, 8)
    assert opened(base64.b64decode(told.png))[1] == first.data
    assert kept.after(1) is None
    kept.keep([SimpleNamespace(image=None)])
    assert kept.after(1) is None, "an aborted image replaces nothing"
    kept.keep([SimpleNamespace(image=second)])
    told = kept.after(1)
    assert (told.number, told.width) == (2, 320)
    assert opened(base64.b64decode(told.png))[0] == (160, 160)
