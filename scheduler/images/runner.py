"""Executes the steps of images on the device.

Invariants:
- Latents are float32 and stay on the device from step to step; what a trajectory keeps is copied to the host
  when a step is fetched.
- The first denoise step of a sample makes its initial latent: standard normal noise.
- Guidance is one batch: the rows of the negative prompts first, as in the pipelines of diffusers.
- Nothing approximates: no cache of the transformer's activations, no skipped step.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
import torch
from torch import Tensor

from ..memory.device_module import DeviceModule, streams_of
from .components import ComponentStages
from .image_request import Conditioning, Embeds, ImageBatch, ImageRequest, Prompt
from .memory_limit import Footprint
from .pipeline_family import Family, to_pixels
from .scheduler_step import INITIAL, Coefficients, advance, coefficients, log_prob, noise_of
from .traced_module import TracedModule, traced_decode, traced_velocity

ALONE = 1 << 15
"""Elements of an operation up to which one thread computes a step: torch shares none of fewer."""


@dataclass(slots=True, kw_only=True)
class Denoised:
    """A denoise step, row by row; latents are float32 on the device."""

    before: list[Tensor]
    after: list[Tensor]
    rows: list[Coefficients]
    log_probs: list[float | None]
    """None where the request does not keep the step."""
    finite: list[bool]


@dataclass(slots=True)
class Encoded:
    """Embeddings of an encoding step's prompts, each without a batch dimension."""

    prompts: list[Prompt]
    embeds: list[Embeds]


HostResult = Denoised | Encoded | np.ndarray
"""A step's result; of decoding: images, uint8 [rows, height, width, 3]."""


@dataclass(slots=True)
class Launched:
    fetch: Callable[[], HostResult]
    """Wait for the step, and copy what the host needs."""


class ImageRunner:
    def __init__(
        self,
        family: Family,
        stages: ComponentStages,
        device: torch.device,
        device_module: DeviceModule,
        footprint: Footprint,
    ) -> None:
        self.family = family
        self.footprint = footprint
        on_cpu = device.type == "cpu"  # an accelerator's host runs ahead of the device anyway
        self._velocity, self._decoded = family.velocity, family.decode
        self.traced: dict[str, TracedModule] = {}
        if on_cpu and not stages.comes_in_blocks("transformer"):
            traced = self.traced["transformer"] = TracedModule("the transformer", family.transformer)
            self._velocity = partial(traced_velocity, family, traced)
        if on_cpu and not stages.comes_in_blocks("vae") and not family.vae_has_state:
            traced = self.traced["vae"] = TracedModule("the VAE", family.vae)
            self._decoded = partial(traced_decode, family, traced)
        self._on_cpu = on_cpu
        self._stages = stages
        self._device = device
        self._streams = streams_of(device_module)

    def execute(self, batch: ImageBatch) -> Launched:
        """Run one step; MemoryError: it cannot fit, and has not begun."""
        family = self.family
        self.footprint.check_step(batch)
        self._stages.enter(batch.kind)
        threads = step_threads(family, batch) if self._on_cpu else nullcontext()
        with torch.inference_mode(), self.on_stream(), threads:
            if batch.kind == "encode":
                encoded = self._encode(batch.prompts)
                return Launched(lambda: encoded)
            if batch.kind == "decode":
                latents = torch.stack([each.latent for each in batch.samples if each.latent is not None])
                images = to_pixels(self._decoded(latents, batch.samples[0].size))
                return Launched(lambda: images.cpu().numpy())
            return Launched(self._denoise(batch.samples))

    def synchronize(self) -> None:
        if self._streams is not None:
            self._streams.current_stream().synchronize()

    def on_stream(self) -> AbstractContextManager[None]:
        """Do nothing: all work of this engine is on the current stream."""
        return nullcontext()

    def _encode(self, prompts: list[Conditioning]) -> Encoded:
        """Encode the prompts, then those of guidance, in one batch: they have ids of the same lengths."""
        negative = [each.negative for each in prompts if each.negative is not None]
        rows = [each for each in (*(each.prompt for each in prompts), *negative) if each.embeds is None]
        everything = [each.ids for each in rows if each.ids is not None]
        stacked = [torch.tensor(each, device=self._device) for each in zip(*everything, strict=True)]
        found = self.family.encode(stacked, prompts[0].max_sequence_length)
        split = [{name: value[row].clone() for name, value in found.items()} for row in range(len(rows))]
        return Encoded(rows, split)

    def _denoise(self, samples: list[ImageRequest]) -> Callable[[], Denoised]:
        x = torch.stack([self._latent(sample) for sample in samples])
        rows = [coefficients(sample.sde, sample.sigmas, sample.step) for sample in samples]
        noise = None
        if any(row.std for row in rows):
            noise = torch.stack(
                [
                    noise_of(sample.seed, sample.index, sample.step, sample.shape)
                    if row.std
                    else torch.zeros(sample.shape)
                    for sample, row in zip(samples, rows, strict=True)
                ]
            ).to(self._device)
        after, mean = advance(x, self._guided(samples, x), rows, noise)
        log_probs = [
            log_prob(after[row], mean[row], rows[row].std, sample.sde)
            if sample.step in sample.kept_steps
            else None
            for row, sample in enumerate(samples)
        ]
        finite = torch.isfinite(after).flatten(1).all(1)
        return lambda: Denoised(
            before=list(x),
            after=list(after),
            rows=rows,
            log_probs=_on_host(log_probs),
            finite=finite.tolist(),
        )

    def _latent(self, sample: ImageRequest) -> Tensor:
        if sample.latent is not None:
            return sample.latent
        return noise_of(sample.seed, sample.index, INITIAL, sample.shape).to(self._device)

    def _guided(self, samples: list[ImageRequest], x: Tensor) -> Tensor:
        family, size = self.family, samples[0].size
        sigma = torch.from_numpy(np.stack([each.sigmas[each.step] for each in samples])).to(self._device)
        scales = [sample.message.guidance_scale for sample in samples]
        scale = torch.tensor(scales, dtype=torch.float32, device=self._device)
        given = [sample.conditioning for sample in samples]
        prompts = [each.prompt for each in given]
        negative = [each.negative for each in given if each.negative is not None]
        if not negative:
            return self._velocity(x, sigma, family.trimmed(_stacked(prompts)), scale, size)
        both = family.trimmed(_stacked([*negative, *prompts]))
        against, towards = self._velocity(
            x.repeat(2, *[1] * (x.dim() - 1)), sigma.repeat(2), both, scale.repeat(2), size
        ).chunk(2)
        return family.guide(against, towards, scale.view(-1, *[1] * (x.dim() - 1)))


def _stacked(prompts: list[Prompt]) -> Embeds:
    known = [each.embeds for each in prompts if each.embeds is not None]
    return {name: torch.stack([each[name] for each in known]) for name in known[0]}


def _on_host(scalars: list[Tensor | None]) -> list[float | None]:
    """Copy all at once, since each copy would wait for the device."""
    known = [each for each in scalars if each is not None]
    values = iter(torch.stack(known).tolist() if known else [])
    return [None if each is None else next(values) for each in scalars]


@contextmanager
def step_threads(family: Family, batch: ImageBatch) -> Iterator[None]:
    """Have torch compute with one thread within the block if ``batch`` is small.

    A parallel region ends with its last thread. In a step of a hundred small operations, handing them out
    takes as long as sharing them saves, and whoever else wants a core holds up every one.
    """
    threads = torch.get_num_threads()
    if threads == 1 or _elements(family, batch) > ALONE:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _elements(family: Family, batch: ImageBatch) -> int:
    """Return about the most elements between two operations: image tokens, or the VAE's last block."""
    if batch.kind == "encode":
        return 2 * ALONE  # nobody has looked at those, and prompts are kept
    first, rows = batch.samples[0], len(batch.samples)
    if batch.kind == "decode":
        return rows * prod(first.size) * family.vae_channels
    config = family.transformer.config
    width: int = config.num_attention_heads * config.attention_head_dim
    return rows * (1 + first.conditioning.guided) * family.image_tokens(first.shape) * width
