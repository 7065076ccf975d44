"""The fields of a checkpoint's config.json that the forward pass reads.

Invariants:
- A feature that the forward would need and does not have is refused by field name; nothing is silently
  ignored that would change a logit.
- Both spellings are read: transformers 4 (``torch_dtype``, ``rope_theta`` with ``rope_scaling``) and
  transformers 5 (``dtype``, ``rope_parameters``).
- Two equal :class:`ModelConfig` values mean the same forward pass over equal weights.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from ...io_struct import CaesuraError, ErrorCode
from ..kernels.linear import CODE_COLUMNS, E2M1, INT4, INT8, INT8_COLUMNS
from ..layers.parameters import ScaleBlocks
from ..layers.rotary import RopeParameters
from ..runtime.dtypes import by_torch_name
from ..runtime.files import checkpoint_error, read_json, require_folder
from .config_attention import (
    DeltaConfig,
    MlaConfig,
    parse_delta,
    parse_mla,
    parse_ropes,
    parse_windows,
    refused_attention,
    rotary_dim,
)
from .config_moe import MoeConfig, parse_moe
from .config_reader import MAX_TOKEN_ID, ConfigReader
from .family import Family
from .multimodal import LANGUAGE_MODELS, language_config
from .registry import families

if TYPE_CHECKING:
    from ..runtime.engine_config import EngineConfig

MAX_CONFIG_BYTES = 1 << 20
"""Largest config.json and generation_config.json: a hundred times what models have."""
_DTYPES = ("float32", "bfloat16", "float16")
_ONLY = {"mlp_bias": (False, None), "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,)}
_NOT_FORWARD = ("eos_token_ids", "dtype", "max_position_embeddings", "num_mtp_layers")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeParameters
    """Rotary parameters of every layer; those with a window have ``local_rope`` if it is there."""
    local_rope: RopeParameters | None
    rotary_dim: int
    windows: tuple[int | None, ...]
    """Positions that a token sees in each layer, itself included; None means all before it."""
    qk_norm: bool
    attention_scale: float
    max_position_embeddings: int
    """Context length, in tokens."""
    tie_word_embeddings: bool
    attention_bias: bool
    """True also for Qwen2, whose config does not mention it."""
    eos_token_ids: tuple[int, ...]
    """Distinct ids of config.json, then of generation_config.json; empty if neither names one."""
    dtype: torch.dtype
    """Dtype of the checkpoint; float32 if it does not say."""
    quantization: ScaleBlocks | None = None
    mla: MlaConfig | None = None
    num_mtp_layers: int = 0
    """Number of ignored layers behind the others, for multi-token prediction."""
    moe: MoeConfig | None = None
    delta: DeltaConfig | None = None
    transformers_config: str | None = None
    """The whole config as canonical JSON if transformers' modules compute the model, or None."""

    @property
    def ropes(self) -> tuple[RopeParameters, ...]:
        local = self.local_rope or self.rope
        return tuple(self.rope if window is None else local for window in self.windows)


ModelBackend = Literal["auto", "native", "transformers"]
"""Modules that compute a model: the engine's own, or transformers'; ``auto``: the engine's if they can."""


def load_model_config(path: str | Path, backend: ModelBackend = "native") -> ModelConfig:
    """Read config.json (and generation_config.json) in ``path``, or a language model's part.

    CaesuraError: CHECKPOINT_ERROR; UNSUPPORTED_MODEL with fields that the forward does not do.
    """
    folder = Path(path)
    require_folder(folder)
    if os.access(folder, os.R_OK | os.X_OK) and not os.path.lexists(folder / "config.json"):
        raise checkpoint_error(folder, f"has no config.json{_elsewhere(folder)}")
    source = str(folder / "config.json")
    config = language_config(read_json(folder / "config.json", MAX_CONFIG_BYTES), source)
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path, MAX_CONFIG_BYTES) if generation_path.exists() else {}
    if backend == "transformers":
        return _parse_by_transformers(config, generation, source)
    try:
        return parse_model_config(config, generation, source=source)
    except CaesuraError as error:
        if backend == "native" or error.code != ErrorCode.UNSUPPORTED_MODEL:
            raise
        refused = error
    try:
        return _parse_by_transformers(config, generation, source)
    except CaesuraError as error:
        raise CaesuraError(refused.code, f"{refused.message}; {error.message}", **refused.detail) from error


def _parse_by_transformers(config: dict[str, Any], generation: dict[str, Any], source: str) -> ModelConfig:
    if find_spec("transformers") is None:
        reason = "transformers, which has more models, is not installed: pip install 'caesura[transformers]'"
        raise CaesuraError(ErrorCode.UNSUPPORTED_MODEL, reason, fields=["architectures"])
    eos = _eos(ConfigReader(config, source), config, generation)
    return cast("ModelConfig", _of_transformers().parse(config, source, eos))


def _of_transformers() -> ModuleType:
    return import_module(".transformers_backend.transformers_config", package=__package__)


def _elsewhere(folder: Path) -> str:
    """Return a hint where config.json may lie: a Hugging Face cache has a folder for each revision."""
    found = sorted(folder.glob("snapshots/*/config.json")) or sorted(folder.glob("*/config.json"))
    return f"; {found[0].parent} has one" if found else ""


def parse_model_config(
    config: dict[str, Any], generation: dict[str, Any] | None = None, *, source: str = "config.json"
) -> ModelConfig:
    architecture = _architecture(config)
    family = families()[architecture]
    config = {**family.absent, **config}
    reader = ConfigReader(config, source)
    num_heads = reader.count("num_attention_heads")
    unsupported = _unsupported_fields(config, family)
    if unsupported:
        raise _unsupported(source, {name: config.get(name) for name in unsupported})
    hidden_size = reader.count("hidden_size")
    bias = family.attention_bias
    mla = parse_mla(reader) if family.latent else None
    num_layers = reader.count("num_hidden_layers")
    head_dim = reader.count_or("head_dim", family.head_dim, max(1, hidden_size // num_heads))
    if mla is not None:
        head_dim = mla.qk_head_dim
    rope, local_rope = parse_ropes(reader, family)
    moe = None if family.moe is None else parse_moe(family.moe, reader, num_layers)
    scale = head_dim**-0.5
    if family.query_scalar is not None:
        scale = reader.positive(config, "query_pre_attn_scalar", family.query_scalar) ** -0.5
    result = ModelConfig(
        architecture=architecture,
        vocab_size=reader.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.count("intermediate_size", None if moe is None else moe.intermediate_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=reader.count_or("num_key_value_heads", family.num_kv_heads, num_heads),
        head_dim=head_dim,
        rms_norm_eps=reader.positive(config, "rms_norm_eps", 1e-6),
        rope=rope,
        local_rope=local_rope,
        rotary_dim=mla.qk_rope_head_dim if mla else rotary_dim(reader, family, head_dim),
        windows=parse_windows(reader, family, num_layers),
        qk_norm=bool(family.qk_norm and config.get(family.qk_norm)),
        attention_scale=scale,
        max_position_embeddings=reader.count("max_position_embeddings"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", family.tied)),
        attention_bias=bool(config.get(*family.bias_field) or False) if bias is None else bias,
        eos_token_ids=_eos(reader, config, generation or {}),
        dtype=by_torch_name(_dtype_name(config)),
        quantization=parse_quantization(config, source, mxfp4=family.mxfp4),
        mla=mla,
        num_mtp_layers=reader.count_or_zero("num_nextn_predict_layers", 0) if family.mtp_layers else 0,
        moe=moe,
        delta=parse_delta(reader, num_layers) if family.delta else None,
    )
    if result.num_heads % result.num_kv_heads:
        raise reader.invalid("num_key_value_heads", "does not divide num_attention_heads")
    if result.rotary_dim % 2 or not result.rotary_dim:
        partial = "head_dim" if result.rotary_dim == head_dim else "partial_rotary_factor"
        field = "qk_rope_head_dim" if mla else partial
        rotated = f"rotates {result.rotary_dim} elements of head_dim = {head_dim}"
        raise reader.invalid(field, f"{rotated}, which is not a positive even number")
    return result


def config_difference(a: ModelConfig, b: ModelConfig) -> list[str]:
    """Return fields that differ and matter to the forward pass; ``a`` quantises what ``b`` does not."""
    if a.transformers_config is not None and b.transformers_config is not None:
        return list(_of_transformers().differing_fields(a.transformers_config, b.transformers_config))
    names = [field.name for field in fields(ModelConfig) if field.name not in _NOT_FORWARD]
    if b.quantization is None:
        names.remove("quantization")
    return [name for name in names if getattr(a, name) != getattr(b, name)]


def _architecture(config: dict[str, Any]) -> str:
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else None
    if not isinstance(architecture, str) or architecture not in families():
        reason = (
            f"architecture {architecture!r} is not supported; supported are "
            f"{', '.join([*families(), *LANGUAGE_MODELS])}"
        )
        raise CaesuraError(ErrorCode.UNSUPPORTED_MODEL, reason, fields=["architectures"])
    return architecture


def _unsupported_fields(config: dict[str, Any], family: Family) -> list[str]:
    def other(served: Mapping[str, tuple[object, ...]]) -> list[str]:
        return [name for name, values in served.items() if config.get(name, values[0]) not in values]

    rotary = {"partial_rotary_factor": (1.0, None)} if family.partial_rotary is None else {}
    found = other({**_ONLY, **rotary, **dict([family.activation])})
    found += refused_attention(config, family)
    found += other(family.only)
    if _dtype_name(config) not in _DTYPES:
        found.append("dtype" if config.get("dtype") is not None else "torch_dtype")
    return found


def _dtype_name(config: dict[str, Any]) -> str:
    absent = "bfloat16" if is_mxfp4(config) else "float32"  # of which published checkpoints say nothing
    name = config.get("dtype") or config.get("torch_dtype") or absent
    return str(name).removeprefix("torch.")


def _eos(reader: ConfigReader, *configs: dict[str, Any]) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for config in configs:
        value = config.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= MAX_TOKEN_ID:
                raise reader.invalid("eos_token_id", f"= {token!r:.40} is not a token id")
            ids[token] = None
    return tuple(ids)


_FIXED: dict[str, tuple[object, ...]] = {
    "quant_method": ("fp8",),
    "activation_scheme": ("dynamic",),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "scale_fmt": ("float",),
    "expert_dtype": ("fp8",),
    "modules_to_convert": ([],),
    "dequantize": (False,),
}
"""Supported values of each field; null and absent mean the first."""
_SKIPPED = ("modules_to_not_convert", "ignored_layers")
_MXFP4 = {
    "quant_method": ("mxfp4",),
    "dequantize": (False, True),  # of no consequence: the engine always does
}
_MODULE = re.compile(r"[\w.]+")


def is_mxfp4(config: dict[str, Any]) -> bool:
    """Return True if weights are said to be in MXFP4. Their names in the checkpoint show which."""
    stated = config.get("quantization_config")
    return isinstance(stated, dict) and stated.get("quant_method") == "mxfp4"


def parse_quantization(config: dict[str, Any], source: str, *, mxfp4: bool = False) -> ScaleBlocks | None:
    """Return the blocks of weights that stay quantised, or None; UNSUPPORTED_MODEL names other fields."""
    stated = config.get("quantization_config")
    if stated is None:
        return None
    if not isinstance(stated, dict):
        raise _unsupported(source, {"quantization_config": stated})
    widened = mxfp4 and is_mxfp4(config)
    refused = {
        f"quantization_config.{name}": value
        for name, value in stated.items()
        if value is not None and not _is_supported(name, value, widened)
    }
    required = () if widened else ("quant_method", "weight_block_size")  # null: one scale for all of a weight
    refused |= {f"quantization_config.{name}": None for name in required if stated.get(name) is None}
    if refused:
        raise _unsupported(source, refused)
    if widened:
        return None
    rows, columns = stated["weight_block_size"]
    skipped = frozenset(module for name in _SKIPPED for module in stated.get(name) or ())
    return ScaleBlocks(rows, columns, skipped)


def quantized(config: ModelConfig, options: "EngineConfig") -> ModelConfig:
    """Return the config of the same model, quantised but for the modules that are skipped.

    With fp8 a checkpoint in FP8 keeps its own blocks. UNSUPPORTED_MODEL if layers have no such products.
    """
    skipped = options.quantization_skipped
    names = frozenset(name.strip() for name in skipped.split(",") if name.strip())
    keeps = options.quantization_originals
    if keeps and options.device != "cpu":
        reason = f"quantization_originals is for the CPU, not for device {options.device}"
        raise CaesuraError(ErrorCode.UNSUPPORTED_MODEL, reason, fields=["quantization_originals"])
    if options.quantization in WHOLE_NUMBERS:
        return replace(config, quantization=_whole_numbers(config, options, names))
    if config.quantization is not None:
        if names:
            reason = "quantization_skipped: the checkpoint itself is in FP8, and says which modules are not"
            raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="quantization_skipped", value=skipped)
        if keeps:
            reason = "quantization_originals: the checkpoint itself is in FP8, and has no values before"
            raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="quantization_originals")
        return config
    if config.transformers_config is not None or families()[config.architecture].mxfp4:
        reason = f"{config.architecture} has no products with FP8 weights: start it without quantization"
        raise CaesuraError(ErrorCode.UNSUPPORTED_MODEL, reason, fields=["quantization"])
    return replace(config, quantization=ScaleBlocks(skipped=names, keeps_originals=keeps))


WHOLE_NUMBERS = {
    "int8": (INT8_COLUMNS, None),
    "int4": (CODE_COLUMNS, INT4),
    "mxfp4": (CODE_COLUMNS, E2M1),
}
"""Inputs that share a scale, and the codes of numbers, by the option's value."""


def _whole_numbers(config: ModelConfig, options: "EngineConfig", skipped: frozenset[str]) -> ScaleBlocks:
    """Return the blocks of a model in int8 or less; refuse (UNSUPPORTED_MODEL) what has no such products."""
    refused = {
        "weights that are in FP8 already": config.quantization is not None,
        "the modules of transformers": config.transformers_config is not None,
        "experts that are one tensor": config.transformers_config is None
        and families()[config.architecture].mxfp4,
        f"device {options.device}": options.device != "cpu",
    }
    if found := [what for what, is_there in refused.items() if is_there]:
        reason = f"{options.quantization} is for the CPU, without {' or '.join(found)}"
        raise CaesuraError(ErrorCode.UNSUPPORTED_MODEL, reason, fields=["quantization"])
    columns, codes = WHOLE_NUMBERS[options.quantization]
    return ScaleBlocks(1, columns, skipped, INT8, codes, options.quantization_originals)


def _is_supported(name: str, value: object, widened: bool) -> bool:
    if widened:
        return name in _SKIPPED or value in _MXFP4.get(name, ())
    if name == "weight_block_size":
        sizes = value if isinstance(value, list) and len(value) == 2 else [0]
        return all(type(size) is int and size > 0 for size in sizes)
    if name in _SKIPPED:  # names; transformers would also take regular expressions
        names = value if isinstance(value, list) else [None]
        return all(isinstance(name, str) and _MODULE.fullmatch(name) for name in names)
    return value in _FIXED.get(name, ())


def _unsupported(source: str, refused: dict[str, Any]) -> CaesuraError:
    named = ", ".join(f"{name} = {value!r}" for name, value in refused.items())
    reason = f"{source} asks for what this engine does not do: {named}"
    return CaesuraError(ErrorCode.UNSUPPORTED_MODEL, reason, fields=list(refused))
