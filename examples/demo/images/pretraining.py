"""Pretraining of the demo's policy from random weights; it leaves something to learn.

The VAE learns the pictures. The transformer then learns them by flow matching (Lipman et al., 2022, arXiv
2210.02747; Esser et al., 2024, arXiv 2403.03206) with captions whose shape is true and whose colour mostly is
not: it comes to draw good shapes in any colour.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor, nn
from torch.nn import functional

from .pipeline import LATENT, encode
from .settings import ImageSettings
from .world import COLOURS, FILL, PROMPTS, draw

_VAE_BATCH, _FLOW_BATCH = 32, 48
_LATENT_SETS, _SET = 16, 256
"""The transformer learns from this many sets of latents of so many pictures, encoded once."""
_LEARNING_RATE = 3e-3

Progress = Callable[[str, int, float], None]
"""Called now and then with the stage, the step and its loss."""


def pretrain(pipeline: StableDiffusion3Pipeline, settings: ImageSettings, progress: Progress) -> None:
    """Train ``pipeline`` in place."""
    generator = torch.Generator().manual_seed(settings.seed)
    _train_vae(pipeline.vae, settings.vae_steps, generator, progress)
    latents, colours, shapes = _encode_world(pipeline.vae, generator)
    embeds, pooled = encode(pipeline, PROMPTS)
    flow = _Flow(latents, colours, shapes, embeds, pooled, settings.true_colours)
    flow.train(pipeline.transformer, settings.flow_steps, generator, progress)


def _pictures(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    colours, shapes = (
        torch.randint(0, kinds, (count,), generator=generator) for kinds in (len(COLOURS), len(FILL))
    )
    return draw(colours, shapes, generator), colours, shapes


def _train_vae(vae: AutoencoderKL, steps: int, generator: torch.Generator, progress: Progress) -> None:
    with _training(vae, steps, weight=0.1) as descend:
        for step in range(steps):
            pictures, _, _ = _pictures(_VAE_BATCH, generator)
            latent = vae.encode(pictures).latent_dist
            decoded = vae.decode(latent.sample(generator)).sample
            divergence = 0.5 * (latent.mean**2 + latent.var - 1 - latent.logvar).mean()
            loss = functional.mse_loss(decoded, pictures) + 0.2 * functional.l1_loss(decoded, pictures)
            descend(loss + 1e-3 * divergence)
            progress("autoencoder", step + 1, loss.item())
    vae.requires_grad_(False)


@torch.no_grad()
def _encode_world(vae: AutoencoderKL, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return latents of true pictures at unit scale, their colours and shapes; set the VAE's scale."""
    made = [_pictures(_SET, generator) for _ in range(_LATENT_SETS)]
    latents = torch.cat([vae.encode(pictures).latent_dist.mean for pictures, _, _ in made])
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())
    latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    return latents, *(torch.cat([each[place] for each in made]) for place in (1, 2))


class _Flow:
    """Flow matching on encoded pictures: the model's output is the velocity from the picture to the noise."""

    def __init__(
        self, latents: Tensor, colours: Tensor, shapes: Tensor, embeds: Tensor, pooled: Tensor, true: float
    ) -> None:
        self._latents, self._colours, self._shapes = latents, colours, shapes
        self._embeds, self._pooled, self._true = embeds, pooled, true

    def train(
        self, transformer: SD3Transformer2DModel, steps: int, generator: torch.Generator, progress: Progress
    ) -> None:
        with _training(transformer, steps, weight=0.05) as descend:
            for step in range(steps):
                loss = self._loss(transformer, generator)
                descend(loss)
                progress("transformer", step + 1, loss.item())

    def _loss(self, transformer: SD3Transformer2DModel, generator: torch.Generator) -> Tensor:
        count = _FLOW_BATCH
        rows = torch.randint(0, len(self._latents), (count,), generator=generator)
        is_true = torch.rand(count, generator=generator) < self._true
        any_colour = torch.randint(0, len(COLOURS), (count,), generator=generator)
        said = torch.where(is_true, self._colours[rows], any_colour)
        prompts = self._shapes[rows] * len(COLOURS) + said
        clean, noise = self._latents[rows], torch.randn(count, *LATENT, generator=generator)
        times = torch.rand(count, generator=generator)
        sigma = times[:, None, None, None]
        velocity = transformer(
            (1 - sigma) * clean + sigma * noise,
            self._embeds[prompts],
            self._pooled[prompts],
            times * 1000,
            return_dict=False,
        )[0]
        return functional.mse_loss(velocity, noise - clean)


@contextmanager
def _training(model: nn.Module, steps: int, weight: float) -> Iterator[Callable[[Tensor], None]]:
    """Return ``model`` in training and a function that descends, with a warm-up of the learning rate."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, steps, pct_start=weight)

    def descend(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        plan.step()

    yield descend
    model.eval()
