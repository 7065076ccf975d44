"""Attention forms, head norms and gate activations, by the names that kernels know.

Invariants:
- A form says what is computed, never how: each backend does all of it, or is not chosen for a model that
  needs it.
- Forms of equal ``kind`` are served by the same kernels: the values of sinks are weights.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

Bend = Literal["silu", "gelu_tanh", "clamped"]
"""Activation of a feed-forward block's gate. ``clamped``: values are cut at 7 and -7 (the gate's at 7 only),
the gate is ``gate * sigmoid(1.702 gate)``, and 1 is added to the factor beside it (gpt-oss model card,
arXiv:2508.10925, section 2.3).
"""


class HeadNorms(NamedTuple):
    q_weight: Tensor
    """[head size]"""
    k_weight: Tensor
    """[head size]"""
    eps: float
    from_one: bool = False
    """The factor is ``1 + weight``, and the product is rounded once."""


class FormKind(NamedTuple):
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False

    @property
    def features(self) -> tuple[str, ...]:
        asked = {
            "sliding windows": self.window is not None,
            "logit soft caps": self.softcap is not None,
            "attention sinks": self.sinks,
            "scales of single layers": self.scale is not None,
        }
        return tuple(name for name, wanted in asked.items() if wanted)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionForm:
    """One layer's attention: ``softmax(bend(scale * q k^T) + mask) v``."""

    window: int | None = None
    """Positions that a token sees, itself included; None means all before it."""
    softcap: float | None = None
    """Scores become ``softcap * tanh(score / softcap)`` (Gemma 2: arXiv:2408.00118, section 2)."""
    scale: float | None = None
    """Factor of the scores; None means the backend's."""
    sinks: Tensor | None = None
    """[query heads]: a score per head that takes weight and has no value (gpt-oss model card, 2.2)."""

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window has at least one position, not {self.window}")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"a soft cap is positive, not {self.softcap}")

    @property
    def kind(self) -> "FormKind":
        return FormKind(self.window, self.softcap, self.scale, self.sinks is not None)


PLAIN = AttentionForm()
