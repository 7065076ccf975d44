"""Attention fields of a config: windows, rotary embeddings, latent attention, and linear attention.

Invariants:
- A window as wide as the context is none, and neither is one that the config's own switch has turned off.
- A list of layer types with parameters for each (transformers 5) is read, and so are its predecessors.
- Fields on whose meaning implementations disagree are refused, not guessed.
"""

import math
from dataclasses import dataclass
from typing import Any

from ..cache.pool import StateShape
from ..kernels.decoder_layers import LatentShape
from ..layers.rotary import RopeParameters
from .config_reader import ConfigReader
from .family import Family

_LINEAR, _FULL, _SLIDING = "linear_attention", "full_attention", "sliding_attention"
_ROPE_TYPES = ("default", "yarn", "linear", "llama3")
_ORIGINAL = "original_max_position_embeddings"


def refused_attention(config: dict[str, Any], family: Family) -> list[str]:
    """Return attention fields that ask for something that the forward does not do."""
    types = config.get("layer_types")
    known = [_FULL, *([] if family.window == "ignored" else [_SLIDING]), *([_LINEAR] if family.delta else [])]
    fits = types is None if not isinstance(types, list) else all(kind in known for kind in types)
    found = [] if fits else ["layer_types"]
    if not _serves_rope(config, family):
        found.append(rope_source(config))
    if family.latent:
        if config.get("num_key_value_heads") not in (None, config.get("num_attention_heads")):
            found += ["num_attention_heads", "num_key_value_heads"]
        if config.get("attention_bias") and config.get("q_lora_rank", 0) is None:
            found.append("attention_bias")
    return found


def _layer_types(reader: ConfigReader, num_layers: int) -> list[str] | None:
    types: list[str] | None = reader.config.get("layer_types")
    if types is not None and len(types) != num_layers:
        raise reader.invalid("layer_types", f"names {len(types)} layers, num_hidden_layers is {num_layers}")
    return types


def parse_windows(reader: ConfigReader, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Return the positions that a token sees in each layer; None means all before it."""
    config, everything = reader.config, (None,) * num_layers
    if family.window == "ignored" or config.get("sliding_window") is None:
        return everything
    if family.window in ("switched", "upper_layers") and not config.get("use_sliding_window"):
        return everything
    window = reader.count("sliding_window")
    if window >= reader.count("max_position_embeddings"):
        return everything
    types = _layer_types(reader, num_layers)
    if types is None:
        slides = _slides(reader, family, num_layers)
    else:
        slides = [kind == _SLIDING for kind in types]
    return tuple(window if sliding else None for sliding in slides)


def _slides(reader: ConfigReader, family: Family, num_layers: int) -> list[bool]:
    """Return True for each layer that has the window, if no list of types says so."""
    if family.window == "upper_layers":
        first = reader.config.get("max_window_layers", 28)
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise reader.invalid("max_window_layers", f"= {first!r} is not a number of layers")
        return [layer >= first for layer in range(num_layers)]
    if family.full_every:
        every = reader.count("sliding_window_pattern", family.full_every)
        return [bool((layer + 1) % every) for layer in range(num_layers)]
    return [True] * num_layers


def rope_source(config: dict[str, Any]) -> str:
    return "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"


def _serves_rope(config: dict[str, Any], family: Family) -> bool:
    scaling = config.get(rope_source(config))
    if not isinstance(scaling, dict):
        return scaling is None
    sets = [scaling]
    if any(isinstance(value, dict) for value in scaling.values()):  # one set of parameters per layer type
        if family.local_theta is None or set(scaling) != {_FULL, _SLIDING}:
            return False
        sets = [value or {} for value in scaling.values()]
    return all(_served(each, family) for each in sets)


def _served(parameters: Any, family: Family) -> bool:
    if not isinstance(parameters, dict):
        return False
    if family.partial_rotary is None and parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return False
    return _rope_type(parameters) in (_ROPE_TYPES[:2] if family.latent else _ROPE_TYPES)


def _rope_type(parameters: dict[str, Any]) -> Any:
    return parameters.get("rope_type", parameters.get("type", "default"))


def parse_ropes(reader: ConfigReader, family: Family) -> tuple[RopeParameters, RopeParameters | None]:
    """Return the rotary parameters of all layers, or of those without and with a window."""
    parameters: dict[str, Any] = reader.config.get(rope_source(reader.config)) or {}
    if family.local_theta is None:
        return _rope(parameters, reader, "rope_theta", family.theta), None
    apart = isinstance(parameters.get(_FULL), dict)
    full = parameters[_FULL] if apart else parameters
    local = (parameters.get(_SLIDING) if apart else None) or {}
    return (
        _rope(full, reader, "rope_theta", family.theta),
        _rope(local, reader, "rope_local_base_freq", family.local_theta),
    )


def rotary_dim(reader: ConfigReader, family: Family, head_dim: int) -> int:
    if family.partial_rotary is None:
        return head_dim
    parameters: dict[str, Any] = reader.config.get(rope_source(reader.config)) or {}
    where = parameters if parameters.get("partial_rotary_factor") is not None else reader.config
    share = reader.positive(where, "partial_rotary_factor", family.partial_rotary)
    if share > 1:
        raise reader.invalid("partial_rotary_factor", f"= {share} is more than a head")
    return int(head_dim * share)


def _rope(rope: dict[str, Any], reader: ConfigReader, base: str, default: float) -> RopeParameters:
    if rope.get("rope_theta") is not None:
        theta = reader.positive(rope, "rope_theta")
    else:
        theta = reader.positive(reader.config, base, default)
    kind, context = _rope_type(rope), reader.config.get("max_position_embeddings")
    if kind == "linear":
        return RopeParameters(theta=theta, rope_type="linear", factor=reader.positive(rope, "factor"))
    if kind == "yarn":
        return RopeParameters(
            theta=theta,
            rope_type="yarn",
            attention_factor=_yarn_attention(rope, reader),
            factor=reader.positive(rope, "factor"),
            original_max_position_embeddings=reader.integer(rope.get(_ORIGINAL), _ORIGINAL, context),
            beta_fast=reader.positive(rope, "beta_fast", 32.0),
            beta_slow=reader.positive(rope, "beta_slow", 1.0),
            truncate=rope.get("truncate") is not False,
        )
    if kind == "llama3":
        low, high = (reader.positive(rope, name) for name in ("low_freq_factor", "high_freq_factor"))
        if low >= high:
            raise reader.invalid("low_freq_factor", f"= {low:g} is not below high_freq_factor = {high:g}")
        return RopeParameters(
            theta=theta,
            rope_type="llama3",
            factor=reader.positive(rope, "factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position_embeddings=reader.integer(rope.get(_ORIGINAL), _ORIGINAL, context),
        )
    return RopeParameters(theta=theta)


def _yarn_attention(rope: dict[str, Any], reader: ConfigReader) -> float:
    """Return the factor of cosines and sines, also from DeepSeek's two."""
    if rope.get("attention_factor") is not None:
        return reader.positive(rope, "attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return _mscale(rope, reader, "mscale") / _mscale(rope, reader, "mscale_all_dim")
    return 0.1 * math.log(max(reader.positive(rope, "factor"), 1.0)) + 1.0


def _mscale(rope: dict[str, Any], reader: ConfigReader, name: str) -> float:
    """Return the magnitude for a context ``factor`` times as long; 1 without YaRN, or without ``name``."""
    if rope.get("rope_type", rope.get("type")) != "yarn":
        return 1.0
    mscale = reader.positive(rope, name) if rope.get(name) else 0.0
    return 0.1 * mscale * math.log(max(reader.positive(rope, "factor"), 1.0)) + 1.0


@dataclass(frozen=True, kw_only=True)
class MlaConfig(LatentShape):
    softmax_scale: float
    """Factor of the scores, YaRN's included."""

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim


def parse_mla(reader: ConfigReader) -> MlaConfig:
    """Parse DeepSeek's latent attention; absent fields have the defaults of transformers' config classes."""
    config = reader.config
    nope, rotated = reader.count("qk_nope_head_dim", 128), reader.count("qk_rope_head_dim", 64)
    interleave = config.get("rope_interleave")
    mscale = _mscale(config.get(rope_source(config)) or {}, reader, "mscale_all_dim")
    return MlaConfig(
        q_lora_rank=None if config.get("q_lora_rank", 0) is None else reader.count("q_lora_rank", 1536),
        kv_lora_rank=reader.count("kv_lora_rank", 512),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rotated,
        v_head_dim=reader.count("v_head_dim", 128),
        rope_interleave=True if interleave is None else bool(interleave),
        softmax_scale=(nope + rotated) ** -0.5 * mscale**2,
    )


@dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """Layers with linear attention (gated delta rule)."""

    layers: tuple[bool, ...]
    """True for each layer with linear attention; the others' is full."""
    state: StateShape
    """State of a layer, over all ranks."""


def parse_delta(reader: ConfigReader, num_layers: int) -> DeltaConfig:
    types = _layer_types(reader, num_layers)
    if types is None:
        every = reader.count("full_attention_interval", 4)
        layers = tuple(bool((layer + 1) % every) for layer in range(num_layers))
    else:
        layers = tuple(kind == _LINEAR for kind in types)
    if all(layers) or not any(layers):
        raise reader.invalid("layer_types", "has no layer of full attention, or none of linear attention")
    key_heads = reader.count("linear_num_key_heads", 16)
    value_heads = reader.count("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise reader.invalid("linear_num_key_heads", "does not divide linear_num_value_heads")
    state = StateShape(
        key_heads=key_heads,
        value_heads=value_heads,
        key_size=reader.count("linear_key_head_dim", 128),
        value_size=reader.count("linear_value_head_dim", 128),
        kernel=reader.count("linear_conv_kernel_dim", 4),
    )
    return DeltaConfig(layers=layers, state=state)
