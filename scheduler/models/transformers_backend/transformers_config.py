"""A config.json as transformers reads it, and what the engine takes from it.

Invariants:
- What every config class can refuse is refused before a module is built: remote code, encoders, quantised
  weights, layers that keep a state instead of keys and values.
- Two equal values of :attr:`~..config.ModelConfig.transformers_config` mean the same forward pass over equal
  weights. They are what the config class makes of a config.json, so a field left out equals its default.
"""

from typing import Any

import msgspec
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ....io_struct import CaesuraError, ErrorCode
from ...layers.rotary import RopeParameters
from ...runtime.dtypes import NAMES
from ...runtime.files import checkpoint_error
from ..config import ModelConfig
from ..config_attention import rope_source
from ..config_reader import ConfigReader
from .probe import FOREIGN_FAILURES, refused

_NOT_FORWARD = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "attn_pdrop", "aux_loss_alpha", "bos_token_id",
    "chunk_size_feed_forward", "dropout", "dtype", "embd_pdrop", "eos_token_id", "gradient_checkpointing",
    "hidden_dropout", "id2label", "initializer_range", "label2id", "max_position_embeddings",
    "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp",
    "problem_type", "resid_pdrop", "return_dict", "router_aux_loss_coef", "router_jitter_noise",
    "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip
"""Fields of config classes that change no logit, or that an update may change."""
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
_COUNTS = ("head_dim", "num_experts", "num_local_experts", "num_experts_per_tok")
_POSITIVE = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
_ROTARY = (
    "rope_theta", "factor", "attention_factor", "low_freq_factor", "high_freq_factor", "beta_fast",
    "beta_slow",
)  # fmt: skip
"""Numbers of rotary parameters that config classes do not check."""
_LAYER_TYPES = ("full_attention", "sliding_attention")
FAILURES = (*FOREIGN_FAILURES, StrictDataclassError)


def parse(config: dict[str, Any], source: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Do what :func:`~..config.parse_model_config` does, by the config class that transformers has.

    :mod:`.probe` finds the rest once there is a module, which does norms and rotation itself.
    """
    kind = model_class(config)
    if not kind._supports_attention_backend:
        raise refused(kind.__name__, "its attention does not go through transformers' AttentionInterface")
    reader = ConfigReader(config, source)
    _check_numbers(config, reader)
    try:
        read = _from_dict(kind, config)
        text = read.get_text_config(decoder=True)
        if text is not read:
            raise refused(kind.__name__, "it is multimodal, and the engine does not know its language model")
        values = _values(read)
    except FAILURES as error:
        raise checkpoint_error(source, f"is not valid: {error}") from error
    _refuse(kind.__name__, config, text)
    heads = _count(text, source, "num_attention_heads")
    hidden = _count(text, source, "hidden_size")
    head_dim, num_layers = max(1, hidden // heads), _count(text, source, "num_hidden_layers")
    return ModelConfig(
        architecture=kind.__name__,
        vocab_size=_count(text, source, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_count(text, source, "intermediate_size", 4 * hidden),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=_count(text, source, "num_key_value_heads", heads),
        head_dim=head_dim,
        rms_norm_eps=reader.positive(
            {"rms_norm_eps": getattr(text, "rms_norm_eps", None)}, "rms_norm_eps", 1e-6
        ),
        rope=RopeParameters(),
        local_rope=None,
        rotary_dim=head_dim,
        windows=(None,) * num_layers,
        qk_norm=False,
        attention_scale=head_dim**-0.5,
        max_position_embeddings=_context(text, source),
        tie_word_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        attention_bias=bool(getattr(text, "attention_bias", False)),
        eos_token_ids=eos_token_ids,
        dtype=_dtype(read, source),
        transformers_config=values,
    )


def model_class(config: dict[str, Any]) -> type[PreTrainedModel]:
    """Return the class that config.json names; UNSUPPORTED_MODEL if it is no causal language model there."""
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if not isinstance(name, str) or name not in known:
        reason = (
            "it is code of the checkpoint (auto_map)"
            if config.get("auto_map")
            else "it is no causal language model of its"
        )
        raise refused(str(name), reason)
    found: type[PreTrainedModel] = getattr(transformers, name)
    return found


def read_config(config: ModelConfig) -> PreTrainedConfig:
    assert config.transformers_config is not None
    kind: type[PreTrainedModel] = getattr(transformers, config.architecture)
    return _from_dict(kind, msgspec.json.decode(config.transformers_config))


def _from_dict(kind: type[PreTrainedModel], config: dict[str, Any]) -> PreTrainedConfig:
    assert kind.config_class is not None, "every causal language model has one"
    return kind.config_class.from_dict(dict(config))


def differing_fields(a: str, b: str) -> list[str]:
    """Return the fields of two ``transformers_config`` that differ and on which the forward pass depends."""
    ours, theirs = msgspec.json.decode(a), msgspec.json.decode(b)
    names = sorted((ours.keys() | theirs.keys()) - _NOT_FORWARD)
    return [name for name in names if ours.get(name) != theirs.get(name)]


def _values(read: PreTrainedConfig) -> str:
    # Through transformers' own JSON: it knows how to write dtypes and nested configs.
    decoded = msgspec.json.decode(read.to_json_string(use_diff=False))
    return msgspec.json.encode(decoded, order="deterministic").decode()


def _refuse(name: str, config: dict[str, Any], text: PreTrainedConfig) -> None:
    asked: dict[str, Any] = {}
    if getattr(text, "is_encoder_decoder", False):
        asked["is_encoder_decoder"] = True
    if getattr(text, "add_cross_attention", False):
        asked["add_cross_attention"] = True
    if config.get("quantization_config") is not None:
        asked["quantization_config"] = config["quantization_config"]
    for field in _ACTIVATIONS:
        value = getattr(text, field, None)
        if isinstance(value, str) and value not in ACT2FN:
            asked[field] = value
    layer_types = getattr(text, "layer_types", None) or []
    if any(kind not in _LAYER_TYPES for kind in layer_types):
        asked["layer_types"] = sorted(set(layer_types) - set(_LAYER_TYPES))
    if asked:
        said = ", ".join(f"{field} = {value!r}" for field, value in asked.items())
        reason = f"{name} cannot be served through transformers with {said}"
        raise CaesuraError(ErrorCode.UNSUPPORTED_MODEL, reason, fields=list(asked))


def _check_numbers(config: dict[str, Any], reader: ConfigReader) -> None:
    for name in _COUNTS:
        reader.count_or_zero(name, 0)
    rope = config.get(rope_source(config))
    sets = [rope, *rope.values()] if isinstance(rope, dict) else []
    for where, names in ((config, _POSITIVE), *((each, _ROTARY) for each in sets if isinstance(each, dict))):
        for name in names:
            if where.get(name) is not None:
                reader.positive(where, name)
        original = "original_max_position_embeddings"
        if where.get(original) is not None:
            reader.integer(where[original], original)


def _count(text: PreTrainedConfig, source: str, name: str, default: int | None = None) -> int:
    value = getattr(text, name, None)
    reader = ConfigReader({}, source)
    if isinstance(value, list) and value:  # per layer
        return max(reader.integer(each, name) for each in value)
    return reader.integer(value, name, default)


def _context(text: PreTrainedConfig, source: str) -> int:
    """Return the longest context with one set of rotary frequencies: LongRoPE has two."""
    possible = _count(text, source, "max_position_embeddings")
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        original = parameters.get("original_max_position_embeddings")
        if parameters.get("rope_type") == "longrope" and isinstance(original, int) and original > 0:
            possible = min(possible, original)
    return possible


def _dtype(read: PreTrainedConfig, source: str) -> torch.dtype:
    dtype: Any = read.dtype if read.dtype is not None else torch.float32
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), None)
    if isinstance(dtype, torch.dtype) and dtype in (torch.float32, torch.bfloat16, torch.float16):
        return dtype
    named = NAMES.get(dtype, dtype) if isinstance(dtype, torch.dtype) else read.dtype
    raise checkpoint_error(source, f"is not valid: dtype = {named!r}")
