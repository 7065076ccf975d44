"""Requirements of a transformers module on attention and experts, seen in one forward on the meta device.

Nothing is computed, so a model of any size takes milliseconds. Functions that only note their arguments stand
for attention and for masks; an attention's mask tells which one the model meant for it.

Invariants:
- An attention whose mask is neither causal nor a window that its keyword arguments tell as well is refused by
  name: no backend would be asked for it.
- Linear layers are one product where the same input went to neighbours in one parent module.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import causal_mask_function

from ....io_struct import CaesuraError, ErrorCode

_NAME = "caesura_probe"
_TOKENS = 7
FOREIGN_FAILURES = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""Errors of other code that models raise."""


@dataclass(frozen=True, slots=True)
class Attended:
    layer: int
    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    scale: float
    window: int | None
    """Newest tokens that a token sees, itself included; None for all."""
    softcap: float | None
    sinks: str | None
    """Name of the parameter with a logit per head in the softmax's denominator (``s_aux``), or None."""


@dataclass(slots=True)
class Probe:
    attended: list[Attended] = field(default_factory=list)
    routed: list[tuple[str, int]] = field(default_factory=list)
    """Module, and experts per token, of each call."""
    products: list[list[str]] = field(default_factory=list)
    """Linear modules that can be one product each, of two and more, in the order of their calls."""
    layers: list[nn.Module] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    """Names of the layers in the module."""
    returns_tuple: bool = False


@dataclass(slots=True)
class _Notes:
    names: dict[nn.Module, str]
    architecture: str
    probe: Probe = field(default_factory=Probe)
    masks: dict[int, tuple[Tensor, int | None, bool]] = field(default_factory=dict)
    """Masks by identity, each with its window, and True if it is plainly causal."""
    inputs: list[tuple[str, Tensor]] = field(default_factory=list)
    attending: dict[int, str] = field(default_factory=dict)
    """Module that attends in each layer."""
    return_tuples: set[nn.Module] = field(default_factory=set)


_notes: list[_Notes] = []
"""Notes of the forwards that run now, the innermost last."""


def probe(module: PreTrainedModel, decoder: nn.Module) -> Probe:
    """Run ``decoder``, a part of ``module``, on the meta device; UNSUPPORTED_MODEL: it asks for more."""
    names = {each: name for name, each in module.named_modules()}
    notes = _Notes(names, type(module).__name__)
    ids = torch.zeros((1, _TOKENS), dtype=torch.int64, device="meta")
    positions = torch.arange(_TOKENS, device="meta").unsqueeze(0)
    hooks = [each.register_forward_pre_hook(_note_input) for each in names if type(each) is nn.Linear]
    lists = [list(each) for each in decoder.children() if isinstance(each, nn.ModuleList)]
    hooks += [each.register_forward_hook(_note_output) for layers in lists for each in layers]
    with _probing(module.config), torch.no_grad():
        _notes.append(notes)
        try:
            decoder(
                input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False
            )
        except FOREIGN_FAILURES as error:
            raise _refused(notes, f"its forward fails over packed requests: {error}") from error
        finally:
            _notes.pop()
            for hook in hooks:
                hook.remove()
    return _finished(notes, lists)


@contextmanager
def _probing(config: Any) -> Iterator[None]:
    before = config._attn_implementation, config._experts_implementation
    config._attn_implementation = config._experts_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation, config._experts_implementation = before


def _finished(notes: _Notes, lists: list[list[nn.Module]]) -> Probe:
    found = notes.probe
    found.products = _products(notes.inputs)
    numbers = [call.layer for call in found.attended]
    if sorted(numbers) != list(range(len(numbers))) or not numbers:
        raise _refused(notes, f"its layers do not attend once each, but in the order {numbers}")
    sizes = {(call.num_heads, call.num_kv_heads, call.key_size, call.value_size) for call in found.attended}
    if len(sizes) > 1:
        raise _refused(notes, f"its layers have heads of different numbers or sizes: {sorted(sizes)}")
    found.attended.sort(key=lambda call: call.layer)
    for layers in lists:
        paths = [notes.names[layer] for layer in layers]
        if len(layers) == len(numbers) and all(
            notes.attending[number].startswith(f"{path}.") for number, path in enumerate(paths)
        ):
            found.layers, found.paths = layers, paths
            found.returns_tuple = layers[0] in notes.return_tuples
            return found
    raise _refused(notes, "its decoder has no list of its layers")


def _products(inputs: list[tuple[str, Tensor]]) -> list[list[str]]:
    groups: dict[tuple[str, int], list[str]] = {}
    for name, x in inputs:
        groups.setdefault((name.rpartition(".")[0], id(x)), []).append(name)
    return [group for group in groups.values() if len(group) > 1 and len(set(group)) == len(group)]


def _note_input(module: nn.Module, args: tuple[Any, ...]) -> None:
    notes = _notes[-1]
    notes.inputs.append((notes.names[module], args[0]))


def _note_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if isinstance(output, tuple):
        _notes[-1].return_tuples.add(module)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    notes = _notes[-1]
    where = notes.names[module]
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise _refused(notes, f"{where} has no layer_idx")
    asked = {name: value for name, value in options.items() if value is not None}
    window, softcap = asked.get("sliding_window"), asked.get("softcap")
    mask = None if attention_mask is None else notes.masks.get(id(attention_mask))
    if mask is None:
        raise _refused(notes, f"{where} attends with a mask of its own")
    _, meant, causal = mask
    if meant != window or (meant is None and not causal):
        raise _refused(notes, f"{where} attends with a mask that is neither causal nor a sliding window")
    if asked.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise _refused(notes, f"{where} is not causal")
    if "position_bias" in asked:
        raise _refused(notes, f"{where} adds position_bias to its scores")
    notes.attending[layer] = where
    notes.probe.attended.append(
        Attended(
            layer=layer,
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_size=key.shape[3],
            value_size=value.shape[3],
            scale=float(query.shape[3] ** -0.5 if scaling is None else scaling),
            window=window,
            softcap=softcap,
            sinks=_parameter(notes, where, asked["s_aux"]) if "s_aux" in asked else None,
        )
    )
    return value.new_empty((1, query.shape[2], query.shape[1], value.shape[3])), None


def _parameter(notes: _Notes, where: str, tensor: Tensor) -> str:
    for module, path in notes.names.items():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter is tensor:
                return f"{path}.{name}"
    raise _refused(notes, f"{where} has sinks that are no parameter")


def _mask(
    *args: Any, mask_function: Any = causal_mask_function, local_size: int | None = None, **options: Any
) -> Tensor:
    mask = torch.empty((1, 1, _TOKENS, _TOKENS), dtype=torch.bool, device="meta")
    _notes[-1].masks[id(mask)] = mask, local_size, mask_function is causal_mask_function
    return mask


def _experts(module: nn.Module, hidden: Tensor, *args: Any, **options: Any) -> Tensor:
    notes, ids = _notes[-1], args[0] if args else None
    if isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[0] == hidden.shape[0]:
        notes.probe.routed.append((notes.names[module], ids.shape[1]))
    return torch.empty_like(hidden)


def _refused(notes: _Notes, reason: str) -> CaesuraError:
    return refused(notes.architecture, reason)


def refused(architecture: str, reason: str) -> CaesuraError:
    message = f"{architecture} cannot be served through transformers: {reason}"
    return CaesuraError(ErrorCode.UNSUPPORTED_MODEL, message, fields=["architectures"])


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, _mask)
ExpertsInterface.register(_NAME, _experts)
