"""SGLang's ``/rollout/generate``: trajectories of a diffusion policy, JSON in, msgpack out.

Invariants: a request is refused or answered with one element for each output; if its client leaves or an
output fails, all are aborted. What the server holds for one request is bounded: images and latents before
anything is computed, and all bytes as they come. Output ``i`` has the noise of ``seed + i``, so it can be
made again alone. A tensor is ``{"__tensor__": true, "data", "shape", "dtype"}``, whose data is a safetensors
file with one tensor, ``t``.
"""

import asyncio
import secrets
from typing import Annotated, Any

import msgspec
from litestar import Response

from ....io_struct import CaesuraError, GenerateImagesReqInput, SdeParams, new_id
from ....io_struct.images import MAX_IMAGE_SIDE, MAX_PROMPT_CHARACTERS, MAX_STEPS, SdeType, StepIndex
from ....transfer.safetensors import DTYPES, file_of_one
from ...connection.image_generation import ImageOutput, ImageTensor
from ...exceptions import InvalidRequest, Unsupported
from ..bodies import HTTPRequest, Strict, present, read_control
from ..commands import timed
from ..context import Front, FrontEnd
from ..generations import ClientLeft, client_left, unless_left
from ..middleware import generating, makes_images
from .generate import refused

MAX_OUTPUTS = 256
MAX_SEED = (1 << 63) - 1 - MAX_OUTPUTS
MAX_ANSWER_BYTES = 1 << 30
"""Maximum bytes of all outputs of one request, held until the last has come."""

Side = Annotated[int, msgspec.Meta(ge=1, le=MAX_IMAGE_SIDE)]
Steps = Annotated[list[StepIndex], msgspec.Meta(max_length=MAX_STEPS)]

_DEFAULTS = GenerateImagesReqInput()
_IMAGE_BYTES_PER_PIXEL = 3


class ExtraParams(Strict, kw_only=True):
    sigmas: Annotated[list[float], msgspec.Meta(min_length=1, max_length=MAX_STEPS)] | None = None
    shift: float | None = None
    max_sequence_length: Annotated[int, msgspec.Meta(ge=0, le=4096)] | None = None


class RolloutBody(Strict, kw_only=True):
    prompt: Annotated[str, msgspec.Meta(max_length=MAX_PROMPT_CHARACTERS)]
    negative_prompt: Annotated[str, msgspec.Meta(max_length=MAX_PROMPT_CHARACTERS)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEED)] | None = None
    width: Side | None = None
    height: Side | None = None
    num_inference_steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_STEPS)] | None = None
    num_outputs_per_prompt: Annotated[int, msgspec.Meta(ge=1, le=MAX_OUTPUTS)] = 1
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    extra_sampling_params: ExtraParams | None = None

    rollout: bool = True
    """False: an evaluation, without noise and trajectory."""
    rollout_sde_type: SdeType = "sde"
    rollout_noise_level: Annotated[float, msgspec.Meta(ge=0)] = 0.7
    rollout_log_prob_no_const: bool = False
    rollout_debug_mode: bool = True
    rollout_return_denoising_env: bool = False
    rollout_return_dit_trajectory: bool = False
    rollout_sde_step_indices: Steps | None = None
    rollout_return_step_indices: Steps | None = None

    # accepted and ignored
    generator_device: str | None = None
    suppress_logs: bool | None = None
    fps: int | None = None

    # refused unless they ask for nothing
    num_frames: int | None = None
    image_path: str | list[str] | None = None

    @property
    def scale(self) -> float | None:
        return self.guidance_scale if self.true_cfg_scale is None else self.true_cfg_scale


@generating("/rollout/generate", RolloutBody, guard=makes_images)
async def rollout_generate(request: HTTPRequest, front: Front) -> Response[bytes]:
    body = await read_control(request, RolloutBody, text=True)
    rid = new_id()
    try:
        await front.admission.check()
        seeds, outputs = await unless_left(
            request, timed(front, "rollout_generate", outputs_of(front, body, rid))
        )
    except ClientLeft:
        return client_left()
    except CaesuraError as error:
        return refused(front, error)
    front.last_image.keep(outputs)
    encoded = await front.workers.run(lambda: _encoded(body, rid, seeds, outputs))
    return Response(encoded, media_type="application/msgpack")


async def outputs_of(front: FrontEnd, body: RolloutBody, rid: str) -> tuple[list[int], list[ImageOutput]]:
    if body.image_path or (body.num_frames or 1) != 1:
        raise Unsupported("images as input and videos are not supported", field="image_path")
    options = _options(body)
    _require_small(body, options, front.options.latent_bytes_per_pixel)
    first = secrets.randbelow(MAX_SEED) if body.seed is None else body.seed
    seeds = [first + number for number in range(body.num_outputs_per_prompt)]
    held = 0

    async def one(number: int, seed: int) -> ImageOutput:
        nonlocal held
        output: ImageOutput = await front.client.generate_images(
            body.prompt, rid=f"{rid}_{number}", seed=seed, **options
        )
        tensors = (output.image, output.latents, output.final_latents, *output.embeds.values())
        held += sum(len(each.data) for each in tensors if each is not None)
        if held > MAX_ANSWER_BYTES:
            raise InvalidRequest(
                f"num_outputs_per_prompt: the outputs have more than {MAX_ANSWER_BYTES} bytes, the most in "
                "one answer",
                field="num_outputs_per_prompt",
            )
        return output

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(number, seed)) for number, seed in enumerate(seeds)]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return seeds, [task.result() for task in tasks]


def _require_small(body: RolloutBody, options: dict[str, Any], latent_bytes_per_pixel: float) -> None:
    steps = options.get("num_inference_steps", _DEFAULTS.num_inference_steps)
    if "sigmas" in options:
        steps = len(options["sigmas"])
    asked = options.get("return_steps", [])
    kept = steps + 1 if asked is None else min(2 * len(asked), steps + 1)
    width, height = options.get("width", _DEFAULTS.width), options.get("height", _DEFAULTS.height)
    pixels = body.num_outputs_per_prompt * width * height
    nbytes = int(pixels * (_IMAGE_BYTES_PER_PIXEL + kept * latent_bytes_per_pixel))
    if nbytes > MAX_ANSWER_BYTES:
        raise InvalidRequest(
            f"num_outputs_per_prompt = {body.num_outputs_per_prompt}: with their latents {nbytes} bytes, "
            f"at most {MAX_ANSWER_BYTES} in one answer",
            field="num_outputs_per_prompt",
        )


def _options(body: RolloutBody) -> dict[str, Any]:
    """Return keywords of ``generate_images``, which has defaults for what the body leaves out."""
    extra = body.extra_sampling_params or ExtraParams()
    given = {
        "negative_prompt": body.negative_prompt,
        "width": body.width,
        "height": body.height,
        "num_inference_steps": body.num_inference_steps,
        "guidance_scale": body.scale,
        "sigmas": extra.sigmas,
        "shift": extra.shift,
        "max_sequence_length": extra.max_sequence_length,
    }
    options = present(given)
    options["return_embeds"] = body.rollout and body.rollout_return_denoising_env
    if not body.rollout:
        options["sde"] = SdeParams(type="ode")
    else:
        options["return_steps"] = body.rollout_return_step_indices
        options["sde"] = SdeParams(
            type=body.rollout_sde_type,
            noise_level=body.rollout_noise_level,
            steps=body.rollout_sde_step_indices,
            log_prob_form="squared_error" if body.rollout_log_prob_no_const else "density",
        )
    return options


def _encoded(body: RolloutBody, rid: str, seeds: list[int], outputs: list[ImageOutput]) -> bytes:
    answers = [_answer(body, rid, seed, each) for seed, each in zip(seeds, outputs, strict=True)]
    return msgspec.msgpack.encode(answers)


def _answer(body: RolloutBody, rid: str, seed: int, output: ImageOutput) -> dict[str, Any]:
    """Return one output: SGLang's keys, then Caesura's own, ``finish_reason`` and ``weight_versions``."""
    rolled = body.rollout
    env = rolled and body.rollout_return_denoising_env
    trajectory = rolled and body.rollout_return_dit_trajectory
    debug = rolled and body.rollout_debug_mode
    return {
        "request_id": rid,
        "prompt": body.prompt,
        "seed": seed,
        "generated_output": None if output.image is None else _tensor(output.image),
        "rollout_log_probs": _floats(output.log_probs) if rolled else None,
        "rollout_debug_tensors": _debug(output) if debug else None,
        "denoising_env": _environment(body, output) if env else None,
        "dit_trajectory": _trajectory(output) if trajectory else None,
        "inference_time_s": output.e2e_latency - output.queue_time,
        "peak_memory_mb": None,
        "finish_reason": msgspec.to_builtins(output.finish_reason),
        "weight_versions": msgspec.to_builtins(output.weight_versions),
    }


def _debug(output: ImageOutput) -> dict[str, Any]:
    return {
        "rollout_variance_noises": None,
        "rollout_prev_sample_means": None,
        "rollout_noise_std_devs": _floats(output.noise_stds),
        "rollout_model_outputs": None,
    }


def _environment(body: RolloutBody, output: ImageOutput) -> dict[str, Any]:
    positive: dict[str, Any] = {}
    negative: dict[str, Any] = {}
    for name, each in output.embeds.items():
        kind = negative if name.startswith("negative_") else positive
        kind[name.removeprefix("negative_")] = _tensor(each)
    return {
        "image_kwargs": None,
        "pos_cond_kwargs": positive,
        "neg_cond_kwargs": negative or None,
        "guidance": None if body.scale is None else _floats([body.scale]),
    }


def _trajectory(output: ImageOutput) -> dict[str, Any]:
    return {
        "latents": None if output.latents is None else _tensor(output.latents),
        "timesteps": _floats(output.timesteps),
        "sigmas": _floats(output.sigmas),
    }


def _floats(values: list[float]) -> dict[str, Any]:
    return _tensor(ImageTensor.of_floats(values))


def _tensor(tensor: ImageTensor) -> dict[str, Any]:
    return {
        "__tensor__": True,
        "data": file_of_one("t", tensor.dtype, tensor.shape, bytes(tensor.data)),
        "shape": tensor.shape,
        "dtype": f"torch.{DTYPES[tensor.dtype].torch}",
    }
