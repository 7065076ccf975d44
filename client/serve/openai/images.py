"""``/v1/images/generations``: images of one prompt from a diffusion policy, as PNG in base64.

Invariants: image ``i`` has the noise of ``(seed, i)``, and none between the steps, as ``generate_images``.
Fields that would change it and are not supported are refused. Images are not stored, so there are no URLs. A
client that leaves aborts its images. An aborted image is ``null``, and its ``finish_reason`` says so.
"""

import re
from base64 import b64encode
from collections.abc import Sequence
from time import time
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from litestar import Response

from ....io_struct import CaesuraError, SdeParams, new_id
from ....io_struct.base import Identifier
from ....io_struct.images import MAX_IMAGE_SIDE, MAX_PROMPT_CHARACTERS, MAX_STEPS
from ...connection.image_generation import ImageOutput
from ...exceptions import InvalidRequest
from ..bodies import HTTPRequest, present
from ..commands import timed
from ..context import Front
from ..generations import unless_left
from ..middleware import generating, makes_images
from ..pages.document import png_of
from .common import EXCEPTION_HANDLERS, NOTHING, AnySeed, decode_request, read_request

MAX_IMAGES = 256
MAX_PIXELS = 1 << 25
"""Maximum pixels of one request: 96 MiB before compression, which the server holds."""
_SIZE = re.compile(r"([0-9]{1,5})x([0-9]{1,5})\Z")

Text = Annotated[str, msgspec.Meta(max_length=MAX_PROMPT_CHARACTERS)]
Scale = Annotated[float, msgspec.Meta(ge=0)]

REFUSED = {
    "style": "the prompt says it",
    "stream": "images come when they are complete",
    "partial_images": "images come when they are complete",
    "image": "images as input are not supported",
    "mask": "images as input are not supported",
    "lora": "there are no adapters",
}
WITHOUT_EFFECT = {
    "quality": ("auto", "standard"),
    "background": ("auto", "opaque"),
    "output_format": ("png",),
    "output_compression": (100,),
}
"""Fields without effect, with the only values that are accepted."""
IGNORED_KEYS = frozenset({"user", "moderation", "metadata"})
if TYPE_CHECKING:
    _OtherFields = msgspec.Struct
else:
    _OtherFields = msgspec.defstruct(
        "OtherFields", [(name, Any, None) for name in (*REFUSED, *WITHOUT_EFFECT)], kw_only=True
    )


class ImageRequestBody(_OtherFields, kw_only=True):
    """Null means "not given"; unknown keys are ignored and logged."""

    REFUSED: ClassVar[dict[str, str]] = REFUSED

    prompt: Text
    model: str | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_IMAGES)] | None = None
    size: str | None = None
    """``WIDTHxHEIGHT`` in pixels. Null and ``auto``: the engine's default."""
    response_format: Literal["b64_json", "url"] | None = None
    """``url`` is refused."""

    # Beyond OpenAI, with the names of vLLM-Omni and SGLang's diffusion server
    negative_prompt: Text | None = None
    num_inference_steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_STEPS)] | None = None
    guidance_scale: Scale | None = None
    true_cfg_scale: Scale | None = None
    seed: AnySeed | None = None
    max_sequence_length: Annotated[int, msgspec.Meta(ge=0, le=4096)] | None = None
    rid: Identifier | None = None
    min_weights_epoch: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None


_decoder = msgspec.json.Decoder(ImageRequestBody, strict=False)


def decode_body(body: bytes) -> ImageRequestBody:
    asked = decode_request(_decoder.decode, body, ImageRequestBody)
    for name, values in WITHOUT_EFFECT.items():
        if (value := getattr(asked, name)) not in (*NOTHING, *values):
            raise InvalidRequest(
                f"{name} = {msgspec.json.encode(value)[:64].decode()} is not supported, only {values[0]!r}",
                field=name,
            )
    if asked.response_format == "url":
        raise InvalidRequest(
            "response_format = 'url' is not supported: images are not stored; ask for 'b64_json'",
            field="response_format",
        )
    return asked


def options_of(asked: ImageRequestBody) -> dict[str, Any]:
    width, height = size_of(asked.size)
    count = asked.n or 1
    if count * (width or 512) * (height or 512) > MAX_PIXELS:
        raise InvalidRequest(
            f"{count} images of {width}x{height} pixels; at most {MAX_PIXELS} pixels in one answer", field="n"
        )
    given = {
        "negative_prompt": asked.negative_prompt,
        "n": asked.n,
        "width": width,
        "height": height,
        "num_inference_steps": asked.num_inference_steps,
        "guidance_scale": asked.guidance_scale if asked.true_cfg_scale is None else asked.true_cfg_scale,
        "max_sequence_length": asked.max_sequence_length,
        "min_weights_epoch": asked.min_weights_epoch,
        "seed": None if asked.seed is None else asked.seed & (2**63 - 1),
    }
    return {**present(given), "return_embeds": False, "sde": SdeParams(type="ode")}


def size_of(size: str | None) -> tuple[int | None, int | None]:
    if size is None or size in ("", "auto"):
        return None, None
    found = _SIZE.match(size)
    width, height = (0, 0) if found is None else (int(found[1]), int(found[2]))
    if not (0 < width <= MAX_IMAGE_SIDE and 0 < height <= MAX_IMAGE_SIDE):
        raise InvalidRequest(
            f"size = {size[:32]!r} must be WIDTHxHEIGHT with 1 to {MAX_IMAGE_SIDE} pixels each, or 'auto'",
            field="size",
        )
    return width, height


@generating(
    "/v1/images/generations",
    ImageRequestBody,
    body="text",
    guard=makes_images,
    exception_handlers=EXCEPTION_HANDLERS,
)
async def generate_images(request: HTTPRequest, front: Front) -> Response[bytes]:
    asked = await read_request(front, request, decode_body, IGNORED_KEYS)
    rid = asked.rid or f"img-{new_id()}"
    await front.admission.check()
    work = front.client.generate_images(asked.prompt, rid=rid, **options_of(asked))
    try:
        made = await unless_left(request, timed(front, "image_generations", work))
    except CaesuraError as error:
        if error.detail.get("field") in ("width", "height"):  # the body has a size
            error.detail = {**error.detail, "field": "size"}
        raise
    outputs: list[ImageOutput] = made if isinstance(made, list) else [made]
    front.last_image.keep(outputs)
    encoded = await front.workers.run(lambda: _encoded(rid, outputs))
    return Response(encoded, media_type="application/json")


def _encoded(rid: str, outputs: Sequence[ImageOutput]) -> bytes:
    sizes = [each.image.shape for each in outputs if each.image is not None]
    spans = [span for each in outputs for span in each.weight_versions]
    newest = max(spans, key=lambda span: span.epoch, default=None)
    data = [
        {
            "b64_json": None if each.image is None else b64encode(png_of(each.image)).decode(),
            "finish_reason": each.finish_reason.type,
            "weight_versions": each.weight_versions,
        }
        for each in outputs
    ]
    return msgspec.json.encode(
        {
            "created": int(time()),
            "data": data,
            "size": f"{sizes[0][1]}x{sizes[0][0]}" if sizes else "",
            "output_format": "png",
            "id": rid,
            "seed": outputs[0].seed,
            "metadata": {"weight_version": None if newest is None else newest.version},
        }
    )
