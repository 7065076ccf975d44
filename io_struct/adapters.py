"""LoRA adapters: loading, replacing and unloading them by name."""

from typing import Any, Literal

from .base import FolderPath, Identifier, Reply, TensorSpec
from .control import ControlRequest
from .weights import SharedMemoryHandle

AdapterName = Identifier
OnRunning = Literal["finish_old", "retract", "keep"]


class LoadAdapterReqInput(ControlRequest, kw_only=True):
    """Load an adapter while generation goes on, or replace the one of this name, at a step boundary.

    It is checked before its first byte is read; a failed load changes nothing.
    """

    name: AdapterName
    """Name that generate requests choose it by."""
    path: FolderPath | None = None
    """Folder with adapter_config.json and adapter_model.safetensors, as PEFT saves them. None: tensors come
    with the message."""
    config: dict[str, Any] | None = None
    """The content of adapter_config.json, with tensors."""
    specs: list[TensorSpec] = []
    """Tensors in the frames of this message or in ``handle``, by the names of adapter_model.safetensors."""
    handle: SharedMemoryHandle | None = None
    """Shared memory of the same host and user with all tensors, free for reuse after the reply."""
    replace: bool = True
    """False: refuse (``adapter_exists``) if an adapter of this name is loaded."""
    pinned: bool = False
    """True: it is never unloaded to make room for another."""
    on_running: OnRunning = "finish_old"
    """What samples of the replaced version do. ``finish_old``: they end with it. ``retract``: they go on with
    the new one, and their KV is computed again. ``keep``: likewise, over the KV that they have."""


class LoadAdapterReqOutput(Reply, kw_only=True):
    """The adapter serves all requests that arrive from now on."""

    adapter_epoch: int
    """Number of this version: the engine's count of loaded adapters."""
    tensors: int
    changed_tensors: int
    """Tensors that differ from those of the version that was replaced; all, if there was none."""
    norm: float
    """Frobenius norm of the change of the weights, over all modules; 0 for an adapter without effect."""
    rank: int
    """Largest rank of its modules."""
    evicted: list[str] = []
    """Names of the adapters that were unloaded to make room."""
    switched: int = 0
    """Samples that went on with the new version."""


class UnloadAdapterReqInput(ControlRequest, kw_only=True):
    """Unload an adapter. Requests that have it end with it; new ones are refused at once."""

    name: AdapterName


class UnloadAdapterReqOutput(Reply, kw_only=True):
    """No new request can have the adapter."""

    running: int
    """Samples that still end with it."""
