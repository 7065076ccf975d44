"""PNG and small pictures, against Pillow."""

import base64
import io
import random
from types import SimpleNamespace

import pytest

from caesura.client.connection.images import ImageTensor
from caesura.client.serve.pages.last_image import LONGEST, LastImage
from caesura.client.serve.png import png_of, shrunk

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


@pytest.mark.parametrize("shape", [(1, 1), (160, 160), (161, 10), (1, 500), (1000, 333)])
def test_a_small_picture_has_every_kth_pixel(shape):
    made = image(*shape)
    small = shrunk(made, LONGEST)
    step = -(-max(shape) // LONGEST)
    whole = Image.frombytes("RGB", shape[::-1], made.data)
    assert max(small.shape[:2]) <= LONGEST
    found = Image.frombytes("RGB", (small.shape[1], small.shape[0]), small.data)
    assert found.size == (-(-shape[1] // step), -(-shape[0] // step))
    for y in range(found.height):
        for x in range(found.width):
            assert found.getpixel((x, y)) == whole.getpixel((x * step, y * step))


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
