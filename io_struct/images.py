"""Image rollouts: the request to a diffusion policy and the result of a sample (docs/explanation/images.md).

Tensors follow the header as frames, in C order and little-endian; the header describes each.
"""

from typing import Annotated, Literal

import msgspec

from .base import FramedMessage, Identifier, Record, ReplyRecord, Request, TensorSpec
from .field_errors import NamedFields
from .generate import MAX_SAMPLES, FinishReason, Seed, TokenId, WeightVersionSpan

MAX_STEPS = 1000
"""Maximum of ``num_inference_steps``."""
MAX_IMAGE_SIDE = 8192
"""Maximum width and height, in pixels."""
MAX_PROMPT_CHARACTERS = 1 << 14
"""Longest prompt, in characters: encoders tokenize it in tens of milliseconds and block answers."""
SdeType = Literal["ode", "sde", "cps", "dance"]
Prompt = Annotated[str, msgspec.Meta(max_length=MAX_PROMPT_CHARACTERS)]
StepIndex = Annotated[int, msgspec.Meta(ge=0, lt=MAX_STEPS)]


class SdeParams(Record, kw_only=True, frozen=True, metaclass=NamedFields):
    """How a step adds noise, and what its log-probability is."""

    type: SdeType = "sde"
    """``ode``: neither noise nor log-probabilities. ``sde``: Flow-GRPO. ``cps``: coefficients preserving.
    ``dance``: DanceGRPO."""
    noise_level: float = 0.7
    """The noise level of ``sde``, ``cps`` and ``dance``: 0 to 100, and at most 1 for ``cps``."""
    steps: Annotated[list[StepIndex], msgspec.Meta(max_length=MAX_STEPS)] | None = None
    """The window: steps that add noise; the others are those of ``ode``. None means every step."""
    log_prob: Literal["mean", "sum"] = "mean"
    """How the log-probabilities of a latent's elements become that of a step: their mean, or their sum."""
    log_prob_form: Literal["density", "squared_error"] = "density"
    """``density``: the Gaussian's logarithm with its constants. ``squared_error``: -(x' - mean)² alone."""


class GenerateImagesReqInput(Request, kw_only=True):
    """Make ``n`` images of exactly one of ``prompt``, ``prompt_ids`` and the tensor ``prompt_embeds``.

    Each is one :class:`GenerateImagesReqOutput` with its trajectory, or all are one ``ErrorReply``.
    """

    rid: Identifier | None = None
    prompt: Prompt | None = None
    """Text for the pipeline's own tokenizers. None means that the prompt comes in another form."""
    negative_prompt: Prompt | None = None
    """Text for guidance. None means the empty text."""
    prompt_ids: Annotated[list[list[TokenId]], msgspec.Meta(max_length=8)] | None = None
    """Token ids for each text encoder, in their order, padded as it wants them. None: another form."""
    negative_prompt_ids: Annotated[list[list[TokenId]], msgspec.Meta(max_length=8)] | None = None
    """The same for guidance; with ``prompt_ids``, guidance needs them. None means that they are not given."""
    tensors: Annotated[list[TensorSpec], msgspec.Meta(max_length=16)] = []
    """Embeddings in the frames, without a batch dimension, by the pipeline's argument names:
    ``prompt_embeds``, ``pooled_prompt_embeds``, and both with ``negative_`` for guidance."""
    width: Annotated[int, msgspec.Meta(ge=1, le=MAX_IMAGE_SIDE)] = 512
    """In pixels; a multiple of what the model's patches and VAE need."""
    height: Annotated[int, msgspec.Meta(ge=1, le=MAX_IMAGE_SIDE)] = 512
    """Same limits as ``width``."""
    num_inference_steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_STEPS)] = 28
    """Denoising steps, unless ``sigmas`` says them."""
    sigmas: Annotated[list[float], msgspec.Meta(min_length=1, max_length=MAX_STEPS)] | None = None
    """Noise level before each step, falling, in (0, 1]; 0 follows the last. None means the scheduler's."""
    shift: float | None = None
    """Shift of the scheduler's sigmas. None means its own. Not with ``sigmas``."""
    guidance_scale: float = 1.0
    """Classifier-free guidance, 0 to 1000, computed above 1; models with a scale input get it as is."""
    max_sequence_length: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 256
    """Tokens of the longest text encoder, for models that have one of variable length (T5)."""
    seed: Seed | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)] = 1
    """Number of samples. Sample ``i`` uses the noise of ``(seed, i)``."""
    sde: SdeParams = SdeParams()
    """Noise and log-probabilities of the steps; by default every step adds noise, with ``ode`` none."""
    return_steps: Annotated[list[StepIndex], msgspec.Meta(max_length=MAX_STEPS)] | None = []
    """Steps whose latents (before and after) and log-probabilities are returned. None means all."""
    return_embeds: bool = True
    """Return the embeddings that the steps were conditioned on."""
    output: Literal["image", "latents"] = "image"
    """``image``: decode the final latents to an image. ``latents``: return them instead."""
    min_weights_epoch: int | None = None


class ResultTensor(ReplyRecord, kw_only=True, frozen=True):
    """A tensor of a result, whole in a frame of its own."""

    name: str
    """Name of the tensor."""
    dtype: str
    """Safetensors name of the type."""
    shape: list[int]
    """Elements per dimension; empty for a scalar."""
    buffer: int
    """Index of its frame; 0 is the first after the header."""


class GenerateImagesReqOutput(FramedMessage, kw_only=True):
    """The terminal result of one sample; of an aborted one with the steps that were made.

    Tensors in this order, if asked for: ``timesteps``, ``sigmas`` (F32, [steps], [steps + 1]), ``latents``
    (F32, by ``latent_indices``), ``log_probs``, ``noise_stds`` (F32, by ``step_indices``), embeddings by the
    pipeline's argument names, ``image`` (U8, [height, width, 3]) or ``final_latents``.
    """

    rid: str
    index: int
    finish_reason: FinishReason
    weight_versions: list[WeightVersionSpan]
    """Contiguous spans over steps that cover ``[0, steps_done)``: which weights made which step."""
    seed: int
    """The seed that was used."""
    steps: int
    """Steps of the grid."""
    steps_done: int
    """Steps that were made; fewer than ``steps`` for a sample that was aborted or failed."""
    step_indices: list[int] = []
    """Steps of ``return_steps`` that were made."""
    latent_indices: list[int] = []
    """Places in the grid of the returned latents: ``k`` is before step ``k``, and after step ``k - 1``."""
    tensors: list[ResultTensor] = []
    num_retractions: int = 0
    """Times that it began again from its seed."""
    queue_time: float = 0.0
    e2e_latency: float = 0.0


class ImageLoad(ReplyRecord, kw_only=True, frozen=True):
    """Running samples of an image engine, by the step that each needs next."""

    encoding: int
    """Samples whose prompt is not encoded yet."""
    denoising: int
    """Samples with steps of their grid left, the first included."""
    decoding: int
    """Samples whose latents are complete and become an image."""
