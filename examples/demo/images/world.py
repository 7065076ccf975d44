"""World of the image demo: prompts, true pictures, and the reward of a picture.

Pictures are float32 [n, 3, 32, 32] in [-1, 1]: one coloured shape on an off-white ground.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SIDE = 32
COLOURS = {
    "red": (0.90, 0.12, 0.12),
    "green": (0.12, 0.70, 0.20),
    "blue": (0.12, 0.25, 0.90),
    "yellow": (0.95, 0.85, 0.10),
    "purple": (0.60, 0.15, 0.75),
    "cyan": (0.10, 0.80, 0.85),
}
FILL = {"circle": 0.785, "square": 1.0, "triangle": 0.5}
"""Shapes, and the share of its bounding box that each covers."""
PROMPTS = [f"a {colour} {shape}" for shape in FILL for colour in COLOURS]
HELD_OUT = ("a purple circle", "a green square", "a blue triangle")
"""Prompts that are never trained on."""
TRAINED = [prompt for prompt in PROMPTS if prompt not in HELD_OUT]

_PALETTE = torch.tensor(list(COLOURS.values()))
_SHAPE_WEIGHT = 0.3
"""A reward for colour alone turns circles into squares: more pixels have the colour."""


def indices(prompt: str) -> tuple[int, int]:
    """Return the places of colour and shape in ``COLOURS`` and ``FILL``."""
    _, colour, shape = prompt.split()
    return list(COLOURS).index(colour), list(FILL).index(shape)


def draw(colours: Tensor, shapes: Tensor, generator: torch.Generator) -> Tensor:
    """Draw colours and shapes (indices, int64 [n]) at places and in sizes of ``generator``."""
    count = len(colours)

    def between(low: float, high: float) -> Tensor:
        return torch.rand(count, 1, 1, generator=generator) * (high - low) + low

    x_centre, y_centre, radius = between(-0.2, 0.2), between(-0.2, 0.2), between(0.42, 0.62)
    axis = (torch.arange(SIDE) + 0.5) / SIDE * 2 - 1
    x, y = axis[None, None, :] - x_centre, axis[None, :, None] - y_centre
    circle = (x * x + y * y).sqrt() - radius
    square = torch.maximum(x.abs(), y.abs()) - 0.88 * radius
    triangle = torch.maximum(y - radius, (2 * x.abs() - y - radius) / 5**0.5)
    distance = torch.stack([circle, square, triangle], 1)[torch.arange(count), shapes]
    inside = (0.5 - distance * SIDE / 2).clamp(0, 1)[:, None]
    ground = 0.92 + 0.04 * torch.randn(count, 1, 1, 1, generator=generator)
    paint = _PALETTE[colours][:, :, None, None] + 0.03 * torch.randn(count, 3, 1, 1, generator=generator)
    return ((1 - inside) * ground + inside * paint).clamp(0, 1) * 2 - 1


@dataclass(frozen=True)
class Measures:
    """Measures of n pictures, float32 [n] each."""

    reward: Tensor
    """0 to 1: nearness of colour and shape to the prompt's, less for very small or large shapes."""
    right_colour: Tensor
    """1 where the nearest colour of all is the prompt's."""
    right_shape: Tensor
    """1 where the nearest shape, by the share of its bounding box that it covers, is the prompt's."""


def measure(pictures: Tensor, prompts: list[str]) -> Measures:
    """Look at ``pictures`` [n, 3, 32, 32]; no model takes part."""
    rgb = (pictures.float().clamp(-1, 1) + 1) / 2
    wanted = torch.tensor([indices(prompt) for prompt in prompts])
    mask = ((rgb.amax(1) - rgb.amin(1) - 0.15) / 0.25).clamp(0, 1)  # saturation: what is not ground
    weight = mask.sum((1, 2)) + 1e-3
    target = _PALETTE[wanted[:, 0]][:, :, None, None]
    colour = (mask * torch.exp(-((rgb - target) ** 2).sum(1) / (2 * 0.3**2))).sum((1, 2)) / weight
    mean = (rgb * mask[:, None]).sum((2, 3)) / weight[:, None]
    area = mask.mean((1, 2))
    plausible = (area / 0.08).clamp(max=1) * ((0.55 - area) / 0.15).clamp(0, 1)
    hard = mask > 0.5
    box = hard.any(1).sum(1) * hard.any(2).sum(1)
    fill = hard.sum((1, 2)) / box.clamp(min=1)
    fills = torch.tensor(list(FILL.values()))
    shape = torch.exp(-((fill - fills[wanted[:, 1]]) ** 2) / (2 * 0.1**2))
    return Measures(
        reward=((1 - _SHAPE_WEIGHT) * colour + _SHAPE_WEIGHT * shape) * plausible,
        right_colour=(torch.cdist(mean, _PALETTE).argmin(1) == wanted[:, 0]).float(),
        right_shape=((fill[:, None] - fills).abs().argmin(1) == wanted[:, 1]).float(),
    )
