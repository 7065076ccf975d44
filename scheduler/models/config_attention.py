"""Attention fields of a config: windows by layer, and rotary embeddings by kind of layer.

Invariants:
- A window as wide as the context is none, and neither is one that the config's own switch has turned off.
- A list of layer types with parameters for each (transformers 5) is read, and so are its predecessors.
"""

from typing import Any

from ..layers.rotary import RopeParameters
from .config_delta import LINEAR_ATTENTION
from .config_mla import LATENT_ROPE_TYPES, parse_yarn
from .config_reader import ConfigReader
from .family import Family

_TYPES = ("full_attention", "sliding_attention")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def refused_attention(config: dict[str, Any], family: Family) -> list[str]:
    found = [] if _known_types(config, family) else ["layer_types"]
    return found + _refused_rope(config, family)


def _known_types(config: dict[str, Any], family: Family) -> bool:
    types = config.get("layer_types")
    if not isinstance(types, list):
        return types is None
    known = _TYPES[:1] if family.window == "ignored" else _TYPES
    if family.delta is not None:
        known = (*known, LINEAR_ATTENTION)
    return all(kind in known for kind in types)


def parse_windows(
    config: dict[str, Any], reader: ConfigReader, family: Family, num_layers: int
) -> tuple[int | None, ...]:
    """Return the positions that a token sees in each layer; None means all before it."""
    if family.window == "ignored" or config.get("sliding_window") is None:
        return (None,) * num_layers
    if family.window in ("switched", "upper_layers") and not config.get("use_sliding_window"):
        return (None,) * num_layers
    window = reader.count("sliding_window")
    if window >= reader.count("max_position_embeddings"):
        return (None,) * num_layers
    types = config.get("layer_types")
    if types is None:
        slides = _slides(config, reader, family, num_layers)
    elif len(types) == num_layers:
        slides = [kind == "sliding_attention" for kind in types]
    else:
        raise reader.invalid("layer_types", f"names {len(types)} layers, num_hidden_layers is {num_layers}")
    return tuple(window if sliding else None for sliding in slides)


def _slides(config: dict[str, Any], reader: ConfigReader, family: Family, num_layers: int) -> list[bool]:
    """Return True for each layer that has the window, if no list of types says so."""
    if family.window == "upper_layers":
        first = config.get("max_window_layers", 28)
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise reader.invalid("max_window_layers", f"= {first!r} is not a number of layers")
        return [layer >= first for layer in range(num_layers)]
    if family.full_every:
        every = reader.count("sliding_window_pattern", family.full_every)
        return [bool((layer + 1) % every) for layer in range(num_layers)]
    return [True] * num_layers


def rope_source(config: dict[str, Any]) -> str:
    return "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"


def _refused_rope(config: dict[str, Any], family: Family) -> list[str]:
    name = rope_source(config)
    scaling = config.get(name)
    if scaling is None:
        return []
    if not isinstance(scaling, dict):
        return [name]
    sets = [scaling]
    if any(isinstance(value, dict) for value in scaling.values()):  # one set of parameters per layer type
        if family.local_theta is None or set(scaling) != set(_TYPES):
            return [name]
        sets = [value or {} for value in scaling.values()]
    return [] if all(_served(each, family) for each in sets) else [name]


def _served(parameters: Any, family: Family) -> bool:
    if not isinstance(parameters, dict):
        return False
    if family.partial_rotary is None and parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return False
    types = LATENT_ROPE_TYPES if family.latent else _ROPE_TYPES
    return parameters.get("rope_type", parameters.get("type", "default")) in types


def parse_ropes(
    config: dict[str, Any], reader: ConfigReader, family: Family
) -> tuple[RopeParameters, RopeParameters | None]:
    """Return the rotary parameters of all layers, or of those without and with a window."""
    parameters: dict[str, Any] = config.get(rope_source(config)) or {}
    if family.local_theta is None:
        return _rope(parameters, config, reader, "rope_theta", family.theta), None
    if isinstance(parameters.get("full_attention"), dict):
        full, local = parameters["full_attention"], parameters.get("sliding_attention") or {}
    else:
        full, local = parameters, {}
    return (
        _rope(full, config, reader, "rope_theta", family.theta),
        _rope(local, config, reader, "rope_local_base_freq", family.local_theta),
    )


def rotary_dim(config: dict[str, Any], reader: ConfigReader, family: Family, head_dim: int) -> int:
    if family.partial_rotary is None:
        return head_dim
    parameters: dict[str, Any] = config.get(rope_source(config)) or {}
    where = parameters if parameters.get("partial_rotary_factor") is not None else config
    share = reader.positive(where, "partial_rotary_factor", family.partial_rotary)
    if share > 1:
        raise reader.invalid("partial_rotary_factor", f"= {share} is more than a head")
    return int(head_dim * share)


def _rope(
    parameters: dict[str, Any],
    config: dict[str, Any],
    reader: ConfigReader,
    theta_name: str,
    theta_default: float,
) -> RopeParameters:
    if parameters.get("rope_theta") is not None:
        theta = reader.positive(parameters, "rope_theta")
    else:
        theta = reader.positive(config, theta_name, theta_default)
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    context = config.get("max_position_embeddings")
    if rope_type == "linear":
        return RopeParameters(theta=theta, rope_type="linear", factor=reader.positive(parameters, "factor"))
    if rope_type == "yarn":
        return parse_yarn(parameters, reader, theta, context)
    if rope_type == "llama3":
        original = "original_max_position_embeddings"
        low, high = (reader.positive(parameters, name) for name in ("low_freq_factor", "high_freq_factor"))
        if low >= high:
            raise reader.invalid("low_freq_factor", f"= {low:g} is not below high_freq_factor = {high:g}")
        return RopeParameters(
            theta=theta,
            rope_type="llama3",
            factor=reader.positive(parameters, "factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position_embeddings=reader.integer(parameters.get(original), original, context),
        )
    return RopeParameters(theta=theta)
