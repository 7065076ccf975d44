"""Linear-attention fields of a config (gated delta rule).

Invariants:
- The layers with full attention follow from the list of layer types, or from their interval without a list.
- A model without linear attention has no value here at all.
"""

from dataclasses import dataclass
from typing import Any

from .config_reader import ConfigReader

LINEAR_ATTENTION = "linear_attention"


@dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    layers: tuple[bool, ...]
    """True for each layer with linear attention; the others' is full."""
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int
    """Positions that the convolution before the rule sees, its own included."""


def parse_delta(config: dict[str, Any], reader: ConfigReader, num_layers: int) -> DeltaConfig:
    types = config.get("layer_types")
    if types is None:
        every = reader.count("full_attention_interval", 4)
        layers = tuple(bool((layer + 1) % every) for layer in range(num_layers))
    elif len(types) == num_layers:
        layers = tuple(kind == LINEAR_ATTENTION for kind in types)
    else:
        raise reader.invalid("layer_types", f"names {len(types)} layers, num_hidden_layers is {num_layers}")
    if all(layers) or not any(layers):
        raise reader.invalid("layer_types", "has no layer of full attention, or none of linear attention")
    key_heads = reader.count("linear_num_key_heads", 16)
    value_heads = reader.count("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise reader.invalid("linear_num_key_heads", "does not divide linear_num_value_heads")
    return DeltaConfig(
        layers=layers,
        key_heads=key_heads,
        value_heads=value_heads,
        key_size=reader.count("linear_key_head_dim", 128),
        value_size=reader.count("linear_value_head_dim", 128),
        kernel=reader.count("linear_conv_kernel_dim", 4),
    )
