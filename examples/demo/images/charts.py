"""The charts and the pictures of the report."""

import base64
import io

import torch
from matplotlib.axes import Axes
from PIL import Image
from torch import Tensor

from ..charts import BLUE, CORAL, MUTED, TEAL, VIOLET, Chart, draw_chart, memory, push, smooth
from .history import Evaluation, ImageHistory

_SCALE = 3
"""Pixels of the page for one of a picture."""
_SHOWN = 5
"""Samples of each prompt."""


def all_charts(history: ImageHistory) -> dict[str, Chart]:
    """Return every chart of the report by name."""
    wide, half = (9.6, 3.1), (4.7, 2.2)
    return {
        "reward": draw_chart("reward", lambda axes: _reward(axes, history), wide),
        "push": draw_chart("push", lambda axes: push(axes, history), half),
        "memory": draw_chart("memory", lambda axes: memory(axes, history), half),
        "gap": draw_chart("gap", lambda axes: _gap(axes, history), half),
        "crossing": draw_chart("crossing", lambda axes: _crossing(axes, history), half),
    }


def _numbers(history: ImageHistory) -> list[int]:
    return [each.update for each in history.updates]


def _reward(axes: Axes, history: ImageHistory) -> None:
    sampled = [each.reward for each in history.updates]
    colours = [each.right_colour for each in history.updates]
    places = [each.update for each in history.evals]
    axes.plot(
        _numbers(history), colours, color=MUTED, alpha=0.6, linewidth=1.1, label="right colour, sampled"
    )
    axes.plot(_numbers(history), sampled, color=BLUE, linewidth=1.3, label="reward, sampled")
    axes.plot(
        places, [each.reward for each in history.evals], color=TEAL, marker="o", label="reward, without noise"
    )
    axes.plot(
        places,
        [each.held_out_reward for each in history.evals],
        color=CORAL,
        marker="o",
        label="prompts never trained on",
    )
    axes.set_ylim(0, 1.04)
    axes.set_xlabel("update")


def _gap(axes: Axes, history: ImageHistory) -> None:
    gaps = [max(each.step.gap, 1e-9) for each in history.updates]
    axes.semilogy(
        _numbers(history), gaps, ".", color=VIOLET, markersize=4, label="largest difference of a batch"
    )
    axes.set_xlabel("update")


def _crossing(axes: Axes, history: ImageHistory) -> None:
    crossed = [float(each.crossed) for each in history.updates]
    axes.bar(_numbers(history), crossed, color=BLUE, alpha=0.35, label="trajectories under two policies")
    axes.plot(_numbers(history), smooth(crossed), color=BLUE)
    axes.set_xlabel("update")


def picture_row(evaluation: Evaluation, prompt: str) -> str:
    """Return some samples of ``prompt`` side by side, as a data address of a PNG."""
    pictures = evaluation.pictures[prompt][:_SHOWN]
    pixels = ((pictures.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return f"data:image/png;base64,{base64.b64encode(_png(_side_by_side(pixels))).decode()}"


def _side_by_side(pixels: Tensor) -> Tensor:
    """Return uint8 [height, width, 3] of [n, 3, side, side], with a white line between two."""
    padded = torch.nn.functional.pad(pixels, (0, 1), value=255)
    return padded.permute(2, 0, 3, 1).flatten(1, 2)[:, :-1]


def _png(pixels: Tensor) -> bytes:
    image = Image.fromarray(pixels.contiguous().numpy())
    image = image.resize((image.width * _SCALE, image.height * _SCALE), Image.Resampling.NEAREST)
    stream = io.BytesIO()
    image.save(stream, format="png", optimize=True)
    return stream.getvalue()
