"""What kernels compute for a layer, by name: the form of its attention, its head norms, what bends its gate.

Invariants:
- A form says what is computed, never how: each backend does all of it, or is not chosen for a model that asks for it.
- Forms of equal ``kind`` are served by the same kernels: what sinks hold is a weight.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

Bend = Literal["silu", "gelu_tanh", "clamped"]
"""What the gate of a feed-forward block is bent by. ``clamped``: values are cut at 7 and -7 (the gate's at 7 only), the gate is
``gate * sigmoid(1.702 gate)``, and 1 is added to what it multiplies (gpt-oss model card, arXiv:2508.10925, section 2.3)."""


class HeadNorms(NamedTuple):
    """Root-mean-square norms of every head's queries and keys."""

    q_weight: Tensor
    """[head size]"""
    k_weight: Tensor
    """[head size]"""
    eps: float
    from_one: bool = False
    """The factor is ``1 + weight``, and the product is rounded once."""


class FormKind(NamedTuple):
    """What a form asks of kernels; see :class:`AttentionForm`."""

    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False

    @property
    def features(self) -> tuple[str, ...]:
        """What goes beyond plain causal attention, by name."""
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
    """Positions that a token sees, itself included, which is what transformers' ``sliding_window`` counts. None: all before it."""
    softcap: float | None = None
    """Scores become ``softcap * tanh(score / softcap)`` (Gemma 2: arXiv:2408.00118, section 2). None: they stay."""
    scale: float | None = None
    """Multiplies the scores. None: the backend's, which is ``key size ** -0.5`` unless it was told otherwise."""
    sinks: Tensor | None = None
    """[query heads], of the model's dtype: a score for each head that takes weight and has no value (gpt-oss model card,
    arXiv:2508.10925, section 2.2). None: there is none."""

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window has at least one position, not {self.window}")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"a soft cap is positive, not {self.softcap}")

    @property
    def kind(self) -> "FormKind":
        """What it asks of kernels."""
        return FormKind(self.window, self.softcap, self.scale, self.sinks is not None)


PLAIN = AttentionForm()
"""Every token sees all before it."""
