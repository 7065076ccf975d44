"""Admission of image requests: everything that can be refused is refused here.

Invariants:
- A request whose sample could not run alone is refused with the field; later stages refuse nothing.
- Noise that nobody could tell from a defect later, a grid that does not fall for instance, is refused now.
"""

import math
import secrets
from collections.abc import Sequence
from time import monotonic

import numpy as np
import torch
from torch import Tensor

from ...io_struct import GenerateImagesReqInput, TensorSpec
from ..runtime.dtypes import DTYPES
from ..scheduling.waiting_queue import LiveRequests, require_room
from ..weights.source import BufferSource
from .image_request import Conditioning, Embeds, ImageRequest, Prompt
from .memory_limit import Footprint, MemoryLimit
from .pipeline_family import MAX_IDS, Family, invalid
from .scheduler_step import problem_of

MAX_RESULT_BYTES = 128 << 20
MAX_GUIDANCE = 1000.0
"""Largest ``guidance_scale``: with more, latents leave float32 before a defect could be told from it."""
MAX_NOISE_LEVEL = 100.0
"""Largest ``sde.noise_level``, for the same reason."""
MAX_EMBED_TOKENS = 2 * MAX_IDS
"""Most tokens of ``prompt_embeds``: more than text or ids make. A step takes time with their square."""
_NEGATIVE = "negative_"
_IMAGE_CHANNELS = 3


class ImageAdmission:
    def __init__(
        self,
        family: Family,
        device: torch.device,
        footprint: Footprint,
        limit: MemoryLimit,
        live: LiveRequests[ImageRequest],
        *,
        max_waiting: int,
    ) -> None:
        self._family = family
        self._footprint = footprint
        self._limit = limit
        self._live = live
        self._device = device
        self._max_waiting = max_waiting

    def admit(
        self, message: GenerateImagesReqInput, buffers: list[memoryview], client: bytes, waiting: int
    ) -> list[ImageRequest]:
        """Check a message and make its samples, without changing state.

        CaesuraError: ``invalid_request``, ``unsupported``, ``queue_full``, or ``out_of_memory`` for this
        machine.
        """
        require_room(message.n, waiting, self._max_waiting)
        _check_numbers(message)
        unit, longest = self._family.pixels, self._family.longest_side
        for name in ("width", "height"):
            side = getattr(message, name)
            if side % unit:
                raise invalid(name, side, f"must be a multiple of {unit}")
            if longest is not None and side > longest:
                raise invalid(name, side, f"this pipeline makes at most {longest} pixels")
        self._footprint.check_request(message, guided=self._family.is_guided(message.guidance_scale))
        shape = self._family.latent_shape(message.height, message.width)
        sigmas = self._grid(message, shape)
        kept = _kept_steps(message, sigmas, shape)
        conditioning = self._conditioning(message, buffers)
        self._footprint.check_prompt(conditioning)
        self._measure(conditioning)
        seed = secrets.randbits(63) if message.seed is None else message.seed
        now = monotonic()
        return [
            ImageRequest(
                message_id=message.id,
                rid=message.rid if message.rid is not None else message.id,
                index=index,
                client=client,
                message=message,
                conditioning=conditioning,
                sigmas=sigmas,
                shape=shape,
                seed=seed,
                kept_steps=kept,
                arrival=now,
                latent_bytes=_latent_bytes(shape),
                kept_bytes=_places(kept) * _latent_bytes(shape)
                + (message.output == "image") * message.width * message.height * _IMAGE_CHANNELS,
            )
            for index in range(message.n)
        ]

    def _grid(self, message: GenerateImagesReqInput, shape: tuple[int, ...]) -> np.ndarray:
        if message.sigmas is not None:
            if message.shift is not None:
                raise invalid("shift", message.shift, "sigmas are used as they are")
            if (problem := problem_of(message.sigmas)) is not None:
                raise invalid("sigmas", message.sigmas, problem)
            return np.asarray([*message.sigmas, 0.0], np.float32)
        grid = self._family.sigmas(message.num_inference_steps, message.shift, shape)
        if not (np.isfinite(grid).all() and (np.diff(grid) < 0).all() and 0 < grid[0] <= 1 and grid[-1] == 0):
            field = "num_inference_steps" if message.shift is None else "shift"
            reason = "the scheduler's sigmas do not fall from at most 1 to 0"
            raise invalid(field, getattr(message, field), reason)
        return grid

    def _conditioning(self, message: GenerateImagesReqInput, buffers: list[memoryview]) -> Conditioning:
        family = self._family
        guided = family.is_guided(message.guidance_scale)
        embeds, negative = self._embeds(message.tensors, buffers)
        if not family.takes_negative and (
            message.negative_prompt or message.negative_prompt_ids or negative is not None
        ):
            raise invalid("negative_prompt", message.negative_prompt, f"{family.pipeline} takes none")
        given = [message.prompt is not None, message.prompt_ids is not None, embeds is not None]
        if sum(given) != 1:
            reason = "give exactly one of prompt, prompt_ids and the tensor prompt_embeds"
            raise invalid("prompt", None, reason)
        ids = self._ids(message.prompt, message.prompt_ids, "prompt_ids", message)
        if not guided:
            return Conditioning(Prompt(ids, embeds), None, message.max_sequence_length)
        against = None
        if negative is None:
            text = message.negative_prompt
            if message.negative_prompt_ids is None and text is None and message.prompt is not None:
                text = ""
            against = self._ids(text, message.negative_prompt_ids, "negative_prompt_ids", message)
            if against is None:
                raise invalid("negative_prompt", None, "guidance needs one, in the form of the prompt")
        if embeds and negative and any(embeds[name].shape != negative[name].shape for name in embeds):
            told = "embeddings of prompt and negative prompt must have the same shapes"
            raise invalid("tensors", sorted(embeds), told)
        if ids is not None and against is not None:
            ids, against = family.align(ids, against)
            if [*map(len, ids)] != [*map(len, against)]:
                reason = "must have the lengths of prompt_ids"
                raise invalid("negative_prompt_ids", [*map(len, against)], reason)
        longest = message.max_sequence_length
        tokens = [self._tokens(embeds, ids, longest), self._tokens(negative, against, longest)]
        if tokens[0] != tokens[1]:
            reason = f"makes embeddings of {tokens[1]} tokens, and the prompt has {tokens[0]}"
            raise invalid("negative_prompt", message.negative_prompt, reason)
        return Conditioning(Prompt(ids, embeds), Prompt(against, negative), longest)

    def _measure(self, conditioning: Conditioning) -> None:
        """Say how large its embeddings are; ``queue_full`` if those sent do not fit beside others."""
        sent = [each for prompt in conditioning.prompts for each in (prompt.embeds or {}).values()]
        conditioning.sent_bytes = sum(each.nbytes for each in sent)
        self._limit.check_sent(self._live, conditioning.sent_bytes)
        longest = conditioning.max_sequence_length
        tokens = sum(self._family.encoded_tokens(ids, longest) for ids in conditioning.unencoded)
        conditioning.nbytes = conditioning.sent_bytes + self._family.embed_bytes(tokens)

    def _ids(
        self, text: str | None, ids: list[list[int]] | None, field: str, message: GenerateImagesReqInput
    ) -> list[list[int]] | None:
        family, longest = self._family, message.max_sequence_length
        value: object = longest
        if ids is not None:
            family.check_ids(ids, field)
            value = [*map(len, ids)]
        elif text is not None:
            ids, field = family.tokenize(text, longest), "max_sequence_length"
        if ids is not None and family.encoded_tokens(ids, longest) < 1:
            raise invalid(field, value, "leaves no tokens of the prompt")
        return ids

    def _tokens(self, embeds: Embeds | None, ids: list[list[int]] | None, longest: int) -> int:
        if embeds is not None:
            return len(embeds["prompt_embeds"])
        assert ids is not None, "a prompt has one form"
        return self._family.encoded_tokens(ids, longest)

    def _embeds(
        self, specs: Sequence[TensorSpec], buffers: list[memoryview]
    ) -> tuple[Embeds | None, Embeds | None]:
        family, found = self._family, {}
        if len(buffers) != len({spec.buffer for spec in specs}):
            raise invalid("tensors", len(specs), f"describe not all of {len(buffers)} frames, or more")
        if len({spec.name for spec in specs}) != len(specs):
            raise invalid("tensors", [spec.name for spec in specs], "must have different names")
        for spec in specs:
            self._check_shape(spec)
        for piece in BufferSource("tensor", list(specs), buffers).pieces(1 << 62, lambda name: False):
            found[piece.name] = self._embed(piece.name, piece.rows)
        negative = {
            name.removeprefix(_NEGATIVE): found.pop(name) for name in [*found] if name.startswith(_NEGATIVE)
        }
        for field, each in (("prompt_embeds", found), (f"{_NEGATIVE}prompt_embeds", negative)):
            if each and each.keys() != set(family.embed_names):
                reason = f"{field}: a prompt has {', '.join(family.embed_names)}"
                raise invalid("tensors", sorted(each), reason)
            mask = each.get("prompt_embeds_mask")
            if mask is not None and len(mask) != len(each["prompt_embeds"]):
                raise invalid("tensors", len(mask), "the mask has another length than prompt_embeds")
        return found or None, negative or None

    def _check_shape(self, spec: TensorSpec) -> None:
        family, name, shape = self._family, spec.name, tuple(spec.shape)
        plain = name.removeprefix(_NEGATIVE)
        if plain not in family.embed_names:
            reason = f"is none of {', '.join(family.embed_names)}, nor one with {_NEGATIVE}"
            raise invalid("tensors", name, reason)
        if not family.embed_shape(plain, shape):
            raise invalid("tensors", name, f"of shape {[*shape]} does not fit the transformer")
        if plain == "prompt_embeds" and shape[0] > MAX_EMBED_TOKENS:
            raise invalid("tensors", name, f"has {shape[0]} tokens, the limit is {MAX_EMBED_TOKENS}")
        dtype = DTYPES.get(spec.dtype)
        if dtype is not None and spec.nbytes != math.prod(shape) * dtype.itemsize:
            raise invalid("tensors", name, f"of shape {[*shape]} has {spec.nbytes} bytes of {spec.dtype}")

    def _embed(self, name: str, rows: Tensor) -> Tensor:
        family, plain = self._family, name.removeprefix(_NEGATIVE)
        if not rows.is_floating_point():
            if not plain.endswith("_mask"):
                raise invalid("tensors", name, "must have a floating point type")
            return rows.to(device=self._device, copy=True)
        values = rows.to(device=self._device, dtype=family.dtype, copy=True)
        if not bool(torch.isfinite(values).all()):
            raise invalid("tensors", name, f"has values that are not finite as {values.dtype}")
        return values


def _check_numbers(message: GenerateImagesReqInput) -> None:
    sde, guidance, shift = message.sde, message.guidance_scale, message.shift
    problems = (
        ("guidance_scale", guidance, f"must be in [0, {MAX_GUIDANCE:g}]", 0.0 <= guidance <= MAX_GUIDANCE),
        ("shift", shift, "must be finite and above 0", shift is None or 0.0 < shift < math.inf),
        ("sde.noise_level", sde.noise_level, f"must be in [0, {MAX_NOISE_LEVEL:g}], and at most 1 for cps",
         0.0 <= sde.noise_level <= (1.0 if sde.type == "cps" else MAX_NOISE_LEVEL)),
    )  # fmt: skip
    for field, value, requirement, holds in problems:
        if not holds:
            raise invalid(field, value if value == value else "nan", requirement)


def _kept_steps(
    message: GenerateImagesReqInput, sigmas: np.ndarray, shape: tuple[int, ...]
) -> frozenset[int]:
    steps = len(sigmas) - 1
    for field, given in (("sde.steps", message.sde.steps), ("return_steps", message.return_steps)):
        if given is not None and any(step >= steps for step in given):
            raise invalid(field, max(given), f"there are steps 0 to {steps - 1}")
    kept = frozenset(range(steps) if message.return_steps is None else message.return_steps)
    nbytes = _places(kept) * _latent_bytes(shape)
    if nbytes > MAX_RESULT_BYTES:
        reason = f"the latents of these steps take {nbytes} bytes, the limit is {MAX_RESULT_BYTES}"
        raise invalid("return_steps", len(kept), reason)
    return kept


def _places(kept: frozenset[int]) -> int:
    return len({place for step in kept for place in (step, step + 1)})


def _latent_bytes(shape: tuple[int, ...]) -> int:
    return 4 * math.prod(shape)
