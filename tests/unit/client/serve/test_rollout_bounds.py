"""Bytes that one request to `/rollout/generate` may hold."""

import asyncio
import base64
import io
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from caesura.client.connection.image_generation import ImageOutput, ImageTensor
from caesura.client.exceptions import InvalidRequest
from caesura.client.serve.context import FrontEnd, ServeOptions
from caesura.client.serve.pages.document import LONGEST, LastImage, png_of
from caesura.client.serve.sglang import rollout
from caesura.io_struct import FinishReason

SIDE, STEPS = 1024, 28
IMAGE = 3 * SIDE * SIDE


class Engine:
    """In place of the client: the output of seed 0 comes at once with ``embeds`` bytes of embeddings."""

    def __init__(self, embeds: int) -> None:
        self.asked: list[int] = []
        self.abandoned: list[int] = []
        self._embeds = ImageTensor("U8", (embeds,), bytes(embeds))

    async def generate_images(self, prompt: str, *, seed: int, **options: Any) -> ImageOutput:
        self.asked.append(seed)
        try:
            if seed:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.abandoned.append(seed)
            raise
        return output_with(prompt_embeds=self._embeds)


def output_with(**embeds: ImageTensor) -> ImageOutput:
    return ImageOutput(
        rid="r", index=0, finish_reason=FinishReason(type="length"), weight_versions=[], seed=0, steps=0,
        steps_done=0,
        step_indices=[], latent_indices=[], log_probs=[], noise_stds=[], timesteps=[], sigmas=[],
        latents=None, image=None,
        final_latents=None, embeds=embeds, num_retractions=0, queue_time=0.0, e2e_latency=0.0,
    )  # fmt: skip


def run(engine: Engine, latent_bytes_per_pixel: float = 1.0, **fields: Any) -> Any:
    options = ServeOptions(latent_bytes_per_pixel=latent_bytes_per_pixel)
    front = cast(FrontEnd, SimpleNamespace(client=engine, options=options))
    body = rollout.RolloutBody(
        prompt="a", seed=0, width=SIDE, height=SIDE, num_inference_steps=STEPS, **fields
    )
    found: list[Any] = []

    async def main() -> None:  # without a result: asyncio shows that of a run for a moment, as text
        found.append(await rollout.outputs_of(front, body, "r"))

    asyncio.run(main())
    return found[0]


@pytest.mark.parametrize("per_pixel", [0.25, 1.0, 4.0])
def test_latents_count_with_this_engines_size(per_pixel):
    each = IMAGE + int((STEPS + 1) * per_pixel * SIDE * SIDE)
    most = rollout.MAX_ANSWER_BYTES // each
    engine = Engine(embeds=rollout.MAX_ANSWER_BYTES + 1)
    with pytest.raises(InvalidRequest, match=f"with their latents {(most + 1) * each} bytes"):
        run(engine, per_pixel, num_outputs_per_prompt=most + 1)
    assert engine.asked == []
    with pytest.raises(InvalidRequest, match="have more than"):
        run(engine, per_pixel, num_outputs_per_prompt=most)
    assert len(engine.asked) == most


def test_a_window_of_steps_counts_its_latents_alone():
    engine = Engine(embeds=8)
    found = run(engine, 64.0, num_outputs_per_prompt=1, rollout_return_step_indices=[0, 1, 2])
    assert len(found[1]) == 1
    with pytest.raises(InvalidRequest, match="with their latents"):
        run(engine, 64.0, num_outputs_per_prompt=1)


def test_too_many_received_bytes_abort_the_other_outputs():
    engine = Engine(embeds=rollout.MAX_ANSWER_BYTES + 1)
    with pytest.raises(InvalidRequest, match="have more than") as raised:
        run(engine, num_outputs_per_prompt=3, rollout=False)
    assert raised.value.detail["field"] == "num_outputs_per_prompt"
    assert sorted(engine.abandoned) == [1, 2]


def test_largest_message_is_answered():
    most = rollout.MAX_ANSWER_BYTES
    seeds, (found,) = run(Engine(embeds=most), num_outputs_per_prompt=1, rollout=False)
    assert seeds == [0]
    assert len(found.embeds["prompt_embeds"].data) == most


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
        ((161, 10), (160, 10)),
        ((80, 320), (40, 160)),
        ((1, 500), (1, 160)),
        ((400, 200), (160, 80)),
    ],
)
def test_downscaled_pixels_keep_their_places(shape, small):
    height, width = shape
    ramp = [[(255 * x // width, 255 * y // height, 7) for x in range(width)] for y in range(height)]
    data = bytes(value for row in ramp for pixel in row for value in pixel)
    (columns, rows), found = opened(png_of(ImageTensor("U8", (*shape, 3), data), LONGEST))
    assert (rows, columns) == small
    for y in range(rows):
        for x in range(columns):
            red, green, blue = found[3 * (y * columns + x) :][:3]
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
