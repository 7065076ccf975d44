"""Assumptions of an architecture about its config: the part that only its model file knows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .config_moe import MoeFields


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture, in its model file's ``FAMILIES`` by its name in config.json, which is its class's."""

    absent: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of fields that published configs leave out, and that no field below stands for."""
    num_kv_heads: int | None = None
    """Default of the field. None means as many as query heads, which is also what null in a config means."""
    head_dim: int | None = None
    """Default of the field. None means hidden_size / num_heads, likewise."""
    attention_bias: bool | None = None
    """Value fixed by the architecture, or None if the config decides."""
    window: Literal["ignored", "always", "switched", "upper_layers"] = "ignored"
    """Use of ``sliding_window``: never, if it is set, with ``use_sliding_window``, or with that from layer
    ``max_window_layers`` on. If it is used, ``layer_types`` names the layers if it is there.
    """
    full_every: int | None = None
    """Without ``layer_types``, every N-th layer uses full attention; N is this or ``sliding_window_pattern``.
    """
    theta: float = 10_000.0
    """Default base of the rotary embedding."""
    local_theta: float | None = None
    """The same for layers with a window, or None if they have that of all."""
    bias_field: tuple[str, bool] = ("attention_bias", False)
    """Field that says whether projections of attention have biases, and its default."""
    qk_norm: str | None = None
    """Field that says whether queries and keys are normalised, or None if the model file knows."""
    partial_rotary: float | None = None
    """Default of ``partial_rotary_factor``, the rotated share of a head; None rotates always all of it."""
    query_scalar: float | None = None
    """Default of ``query_pre_attn_scalar``, by whose root scores are divided; None means the head size."""
    activation: tuple[str, tuple[str, ...]] = ("hidden_act", ("silu", "swish"))
    """Field that names the activation, and the names that the model file computes."""
    tied: bool = False
    """Default of ``tie_word_embeddings``."""
    mtp_layers: bool = False
    """The checkpoint may carry layers for multi-token prediction behind the others, which are skipped."""
    moe: MoeFields | None = None
    mxfp4: bool = False
    """A checkpoint may have its experts in MXFP4."""
    delta: bool = False
    """Some layers have linear attention."""
    latent: bool = False
    """Multi-head latent attention: every query head has a key of its own, so the fields above say nothing."""
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Values of further fields that the model file computes; absent means the first."""
