"""Places of an engine's large components, and its encoded prompts (docs/explanation/memory.md)."""

from typing import Literal

from .base import ReplyRecord

Residency = Literal["resident", "offload", "layerwise"]
"""When a component is on the device: always; while it is used; while it is used, layer by layer."""


class ComponentStatus(ReplyRecord, kw_only=True, frozen=True):
    """A component with a strategy of its own (docs/explanation/memory.md, "Components that come and go")."""

    name: str
    """``vae``, ``text_encoder``, …; ``reference`` and ``reference_kv`` of the reference model."""
    residency: Residency
    nbytes: int
    """Its size, wherever it is."""
    device_bytes: int
    """What of it is on the device now, or on its way there."""


class PromptCacheStatus(ReplyRecord, kw_only=True, frozen=True):
    """Encoded prompts that an image engine keeps for later requests."""

    entries: int
    """Prompts, those of guidance included."""
    nbytes: int
    """Bytes of their embeddings, on the device; part of ``workspace`` in ``memory_by_tag``."""
    limit_bytes: int
    """Most bytes (``prompt_cache_bytes``); 0: nothing is kept."""
    hits: int
    """Prompts since start that were found."""
    misses: int
    """Prompts since start that were encoded."""
