"""Tensors that do not fit the model, as the text and the detail of an error.

The detail lists all of them. The message names the first few with their shapes, and a prefix if that alone
keeps the names apart.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...io_struct import CaesuraError, ErrorCode
from ..layers.parameters import TensorSlot

_NAMED = 3


@dataclass(slots=True)
class Mismatches:
    """Errors of some tensors; ``slots`` has what the model takes."""

    slots: Mapping[str, TensorSlot]
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[dict[str, Any]] = field(default_factory=list)
    """Entries as :meth:`~.loader.WeightLoader.check` lists them."""
    _shapes: dict[str, list[int]] = field(default_factory=dict)

    def add_unexpected(self, name: str, shape: Sequence[int]) -> None:
        self.unexpected.append(name)
        self._shapes[name] = list(shape)

    def add(self, name: str, **facts: object) -> None:
        self.mismatched.append({"name": name, **facts})

    @property
    def any(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def raise_if_any(self, given: Collection[str] = ()) -> None:
        """Raise WEIGHT_MISMATCH if anything is wrong; ``given`` are the names of all checked tensors."""
        if not self.any:
            return
        kinds = ("missing", self.missing), ("unexpected", self.unexpected), ("mismatched", self.mismatched)
        summary = ", ".join(f"{len(found)} {kind}" for kind, found in kinds if found)
        parts = [f"these tensors do not fit the model: {summary}"]
        if self.unexpected and (prefix := self._prefix(given)) is not None:
            parts.append(prefix)
        parts.append(", ".join(self._first()))
        raise CaesuraError(
            ErrorCode.WEIGHT_MISMATCH,
            "; ".join(parts),
            missing=self.missing,
            unexpected=self.unexpected,
            mismatched=self.mismatched,
        )

    def _first(self) -> list[str]:
        said = [_text(entry) for entry in self.mismatched[:_NAMED]]
        said += [f"{name}{self._shape(name)} is not in the model" for name in self.unexpected[:_NAMED]]
        said += [f"{name}{self._shape(name)} is missing" for name in self.missing[:_NAMED]]
        left = len(self.mismatched) + len(self.unexpected) + len(self.missing) - _NAMED
        return said[:_NAMED] + ([f"and {left} more"] if left > 0 else [])

    def _shape(self, name: str) -> str:
        shape = list(self.slots[name].shape) if name in self.slots else self._shapes.get(name)
        return "" if shape is None else f" {shape}"

    def _prefix(self, given: Collection[str]) -> str | None:
        """Return a text about a prefix that all ``given`` names have or lack, unlike the model's."""
        name = self.unexpected[0]
        for known in self.slots:
            if name.endswith(f".{known}"):
                prefix = name.removesuffix(known)
                if all(n.startswith(prefix) for n in given) and not any(
                    n.startswith(prefix) for n in self.slots
                ):
                    return (
                        f"all {len(given)} names begin with {prefix!r}, which the checkpoint's names do not"
                    )
            elif known.endswith(f".{name}"):
                prefix = known.removesuffix(name)
                if all(prefix + n in self.slots for n in given):
                    return f"all {len(given)} names lack {prefix!r}, with which the checkpoint's names begin"
        return None


def _text(entry: dict[str, Any]) -> str:
    name = entry["name"]
    if "got_shape" in entry:
        return f"{name} has the shape {entry['got_shape']}, expected {entry['expected_shape']}"
    if "got_dtype" in entry:
        return f"{name} has the dtype {entry['got_dtype']}, expected {entry['expected_dtype']}"
    return f"{name}: {entry['reason']}"
