"""What an architecture's config class assumes, and what it may ask for: the part of a config that its model file knows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .config_delta import DeltaConfig
from .config_moe import MoeConfig
from .config_reader import ConfigReader


def nothing_refused(config: dict[str, Any]) -> list[str]:
    """Of an architecture that asks for nothing special."""
    return []


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture. A model file names its own in ``FAMILIES``, by the name in config.json, which is that of its class."""

    absent: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields that published configs leave out, and none of the fields below stands for."""
    num_kv_heads: int | None = None
    """Where config.json says nothing. None: as many as query heads, which is also what null in a config means."""
    head_dim: int | None = None
    """None: hidden_size / num_heads, likewise."""
    attention_bias: bool | None = None
    """Fixed by the architecture. None: the config decides."""
    window: Literal["ignored", "always", "switched", "upper_layers"] = "ignored"
    """When ``sliding_window`` is in use: never, where it is set, with ``use_sliding_window``, or with that from layer
    ``max_window_layers`` on. Where it is, ``layer_types`` names the layers if it is there."""
    full_every: int | None = None
    """Without ``layer_types``, every so-manieth layer has no window, or as many as ``sliding_window_pattern`` says."""
    theta: float = 10_000.0
    """Base of the rotary embedding where config.json says nothing."""
    local_theta: float | None = None
    """The same of layers with a window. None: theirs is that of all."""
    bias_field: tuple[str, bool] = ("attention_bias", False)
    """The field that says whether projections of attention have biases, and what its absence means."""
    qk_norm: str | None = None
    """The field that says whether queries and keys are normalised. None: the model file knows."""
    partial_rotary: float | None = None
    """``partial_rotary_factor`` where config.json says nothing: the share of a head that is rotated. None: always all of it."""
    query_scalar: float | None = None
    """Scores are divided by the root of ``query_pre_attn_scalar``, this where it is absent. None: of the head size."""
    activation: tuple[str, tuple[str, ...]] = ("hidden_act", ("silu", "swish"))
    """The field that names it, and names of the one that the model file computes."""
    tied: bool = False
    """Whether the head is the embedding where config.json does not say."""
    mtp_layers: bool = False
    """The checkpoint may carry layers for multi-token prediction behind the others, which are skipped."""
    moe: Callable[[dict[str, Any], ConfigReader, int], MoeConfig] | None = None
    """Reads what is about experts, for a number of layers. None: there are none."""
    mxfp4: bool = False
    """A checkpoint may have its experts in MXFP4."""
    delta: Callable[[dict[str, Any], ConfigReader, int], DeltaConfig] | None = None
    """Reads what is about layers of linear attention, for a number of layers. None: there are none."""
    latent: bool = False
    """Multi-head latent attention: every query head has a key of its own, so the fields above say nothing."""
    refused: Callable[[dict[str, Any]], list[str]] = nothing_refused
    """Fields of a config that ask for what the model file does not do."""
