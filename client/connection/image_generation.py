"""``generate_images``: arguments to requests and frames, results and their frames to typed outputs.

Invariants: a result has a log-probability for each step, a latent for each place in the grid, and frames of
the sizes in its header, or is refused as :class:`InternalError`. Frames are viewed; no array library is
imported.
"""

import array
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypedDict

from ...io_struct import (
    FinishReason,
    GenerateImagesReqInput,
    GenerateImagesReqOutput,
    SdeParams,
    TensorSpec,
    WeightVersionSpan,
)
from ...io_struct.field_errors import shown
from ...transfer.safetensors import DTYPES
from ..exceptions import InternalError, InvalidRequest
from .client_options import id_of, must_be, require_known
from .prompts import Plan, struct_of
from .results import read_floats

_TYPESTR = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2",
    "I8": "|i1", "U8": "|u1", "BOOL": "|b1",
}  # fmt: skip
_DTYPES = {typestr: name for name, typestr in _TYPESTR.items()}


class ImageOptions(TypedDict, total=False):
    """Fields of :class:`~caesura.io_struct.GenerateImagesReqInput`, with its defaults."""

    negative_prompt: str | None
    prompt_ids: Sequence[Sequence[int]] | None
    negative_prompt_ids: Sequence[Sequence[int]] | None
    width: int
    height: int
    num_inference_steps: int
    sigmas: Sequence[float] | None
    shift: float | None
    guidance_scale: float
    max_sequence_length: int
    seed: int | None
    n: int
    sde: SdeParams | Mapping[str, Any]
    return_steps: Sequence[int] | None
    return_embeds: bool
    output: str
    min_weights_epoch: int | None


@dataclass(frozen=True, slots=True)
class ImageTensor:
    """A tensor of a result. ``numpy.asarray`` gives a read-only array without a copy, except of ``BF16``."""

    dtype: str
    """Safetensors name of the type."""
    shape: tuple[int, ...]
    """Elements per dimension; empty for a scalar."""
    data: bytes | memoryview
    """Little-endian, in C order."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Numpy's array interface, version 3."""
        typestr = _TYPESTR.get(self.dtype)
        if typestr is None:
            reason = f"numpy has no {self.dtype}: torch.frombuffer(tensor.data, dtype=...) reads it"
            raise AttributeError(reason)
        return {"version": 3, "shape": self.shape, "typestr": typestr, "data": self.data}

    @classmethod
    def of_floats(cls, values: Sequence[float]) -> "ImageTensor":
        """Return ``F32`` [n]."""
        found = array.array("f", values)
        if sys.byteorder != "little":
            found.byteswap()
        return cls("F32", (len(found),), found.tobytes())

    def floats(self) -> list[float]:
        """Return the values of a tensor of ``F32``, flat."""
        return read_floats(self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOutput:
    """One finished sample, with the part of its trajectory that was asked for."""

    rid: str
    """Request id: ``rid`` of the request, else its message id."""
    index: int
    """Index of the sample, below ``n``."""
    finish_reason: FinishReason
    """``length`` after all steps; ``abort`` or ``error`` with the steps that were made."""
    weight_versions: list[WeightVersionSpan]
    """Spans of steps made with the same weights: contiguous, covering all steps that were made."""
    seed: int
    """The seed that was used."""
    steps: int
    """Steps of the grid."""
    steps_done: int
    """Steps that were made."""
    step_indices: list[int]
    """Steps of ``return_steps`` that were made."""
    latent_indices: list[int]
    """Places in the grid of ``latents``: ``k`` is before step ``k``, and after step ``k - 1``."""
    log_probs: list[float]
    """Log-probability of each of ``step_indices``; 0 where the step added no noise."""
    noise_stds: list[float]
    """Standard deviation of the noise of each of ``step_indices``."""
    timesteps: list[float]
    """Timestep of every step of the grid: 1000 sigma."""
    sigmas: list[float]
    """Noise level before every step of the grid, and after the last one."""
    latents: ImageTensor | None
    """[places, …] float32; None if no step was asked for."""
    image: ImageTensor | None
    """uint8 [height, width, 3]; None unless ``output`` is ``image``, and for a sample that did not end."""
    final_latents: ImageTensor | None
    """float32; None unless ``output`` is ``latents``, and for a sample that did not end."""
    embeds: dict[str, ImageTensor]
    """Embeddings of the prompt by the pipeline's names for them; ``embeds`` of another request takes them."""
    num_retractions: int
    """Number of times that it began again from its seed."""
    queue_time: float
    """Seconds from arrival to the first step; to the end, if there was none."""
    e2e_latency: float
    """Seconds from arrival to the end."""


_SAME = (
    "rid", "index", "finish_reason", "weight_versions", "seed", "steps", "steps_done", "step_indices",
    "latent_indices", "num_retractions", "queue_time", "e2e_latency",
)  # fmt: skip
"""Fields that need no decoding."""


def decode_images(wire: GenerateImagesReqOutput, frames: Sequence[bytes]) -> ImageOutput:
    """Decode a result; InternalError if its parts do not fit each other."""
    tensors: dict[str, ImageTensor] = {}
    for spec in wire.tensors:
        kind = DTYPES.get(spec.dtype)
        if not 0 <= spec.buffer < len(frames) or kind is None:
            raise _broken(wire, f"has no frame for {spec.name} of {spec.dtype}")
        if prod(spec.shape) * kind.nbytes != len(frames[spec.buffer]):
            raise _broken(wire, f"has {len(frames[spec.buffer])} bytes for {spec.name} {spec.shape}")
        tensors[spec.name] = ImageTensor(spec.dtype, tuple(spec.shape), frames[spec.buffer])
    lists: dict[str, Any] = {
        name: tensors.pop(name).floats() if name in tensors else []
        for name in ("log_probs", "noise_stds", "timesteps", "sigmas")
    }
    latents, image, final = (tensors.pop(name, None) for name in ("latents", "image", "final_latents"))
    places = 0 if latents is None else latents.shape[0]
    covered = sum(span.end - span.start for span in wire.weight_versions)
    counts = (len(wire.step_indices), len(wire.step_indices), len(wire.latent_indices), wire.steps_done)
    if counts != (len(lists["log_probs"]), len(lists["noise_stds"]), places, covered):
        raise _broken(wire, "has parts of different lengths")
    return ImageOutput(
        latents=latents,
        image=image,
        final_latents=final,
        embeds=tensors,
        **lists,
        **{name: getattr(wire, name) for name in _SAME},
    )


def _broken(wire: GenerateImagesReqOutput, reason: str) -> InternalError:
    return InternalError(f"the result of image {wire.index} of {wire.rid} {reason}", rid=wire.rid)


def plan_images(
    prompt: str | Sequence[str] | None,
    embeds: Mapping[str, Any] | None,
    options: ImageOptions,
    *,
    rid: str | None,
    message_id: str | None,
) -> Plan[GenerateImagesReqInput]:
    """Return the requests of one ``generate_images`` call, or raise InvalidRequest."""
    require_known("image", options, ImageOptions)
    single = prompt is None or isinstance(prompt, str)
    prompts: Any = [prompt] if single else prompt
    if not isinstance(prompts, Sequence) or not (single or all(isinstance(each, str) for each in prompts)):
        raise must_be("prompt", prompt, "text, or a list of texts")
    specs, buffers = _frames(embeds or {})
    base = id_of(message_id)
    fields: dict[str, Any] = {**options, "sde": struct_of("sde", options.get("sde"), SdeParams)}
    requests = [
        GenerateImagesReqInput(
            id=base if single else f"{base}-{number}",
            rid=rid if rid is None or single else f"{rid}-{number}",
            prompt=each,
            tensors=specs,
            **fields,
        )
        for number, each in enumerate(prompts)
    ]
    return Plan(base, requests, single, buffers)


def _frames(embeds: Mapping[str, Any]) -> tuple[list[TensorSpec], list[bytes]]:
    specs: list[TensorSpec] = []
    buffers: list[bytes] = []
    for name, given in embeds.items():
        tensor = _tensor(name, given)
        buffers.append(bytes(tensor.data))
        place = {"nbytes": len(buffers[-1]), "buffer": len(buffers) - 1}
        specs.append(TensorSpec(name=name, dtype=tensor.dtype, shape=list(tensor.shape), **place))
    return specs, buffers


def _tensor(name: str, given: Any) -> ImageTensor:
    """Convert an array of numpy, a tensor of torch (bfloat16 as float32), or an :class:`ImageTensor`."""
    if isinstance(given, ImageTensor):
        return given
    if hasattr(given, "detach"):
        given = given.detach().cpu()
        given = given.float().numpy() if "bfloat16" in str(given.dtype) else given.numpy()
    interface: dict[str, Any] = getattr(given, "__array_interface__", {})
    dtype = _DTYPES.get(interface.get("typestr", ""))
    if dtype is None:
        reason = f"embeds[{name!r}] = {shown(given)} must be an array or a tensor"
        raise InvalidRequest(reason, field="tensors")
    return ImageTensor(dtype, tuple(interface["shape"]), given.tobytes())
