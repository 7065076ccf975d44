"""The trainer's half of a weight update: its policy into the engine, by one transport.

Invariants:
- ``prepare`` does what can be done while the engine generates; ``push`` is what a paused engine waits for.
- The policy does not change before ``push`` has returned: every transport but disk reads it where it lies.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias
from urllib.parse import urlencode

import msgspec

from caesura.client import CaesuraError, ControlClient
from caesura.client.trainer import NamedTensors, WeightUpdateGroup
from caesura.io_struct import LoadAdapterReqOutput, WeightUpdateReqOutput

from .messages import Push
from .replicas import post
from .settings import LoraSettings, Transport

PATIENCE_S = 60.0
Sender: TypeAlias = "HttpSender | WeightSender | AdapterSender"


def weight_sender(
    transport: Transport, endpoint: str, write: Callable[[], Path]
) -> "HttpSender | WeightSender":
    """Return the sender of weights to the engine or engines at ``endpoint``.

    ``write`` makes a checkpoint of the policy as it is now, for the transport that reads it from a folder.
    """
    if endpoint.startswith("http"):
        return HttpSender(transport, endpoint, write)
    return WeightSender(transport, endpoint, write)


class HttpSender:
    """Weights over HTTP, to all engines behind one port."""

    def __init__(self, transport: Transport, url: str, write: Callable[[], Path]) -> None:
        self._transport, self._url, self._write = transport, url, write
        self._checkpoint: Path | None = None

    def prepare(self) -> None:
        if self._transport == "disk":
            self._checkpoint = self._write()

    def push(self, tensors: NamedTensors, push: Push) -> WeightUpdateReqOutput:
        options = {"weight_version": str(push.version), "flush_cache": push.flush_cache}
        if self._transport == "disk":
            body = {"model_path": str(self._checkpoint), **options}
            reply = post(f"{self._url}/update_weights_from_disk", body, PATIENCE_S)
        else:
            from safetensors.torch import save

            query = urlencode({**options, "flush_cache": str(push.flush_cache).lower()})
            weights = save({name: value.detach().contiguous() for name, value in dict(tensors).items()})
            path = f"{self._url}/update_weights_from_tensor?{query}"
            reply = post(path, weights, PATIENCE_S, "application/octet-stream")
        return msgspec.convert({**reply, "id": ""}, WeightUpdateReqOutput)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: there is no connection to end."""


class WeightSender:
    """A connection of the trainer's own to the engine; as a context manager it also ends it."""

    def __init__(self, transport: Transport, endpoint: str, write: Callable[[], Path]) -> None:
        self._transport = transport
        self._write = write
        self._checkpoint: Path | None = None
        self._client = ControlClient(endpoint)
        self._group = WeightUpdateGroup.create([self._client]) if transport == "distributed" else None

    def prepare(self) -> None:
        """Prepare the next push with the policy as it is now."""
        if self._transport == "disk":
            self._checkpoint = self._write()

    def push(self, tensors: NamedTensors, push: Push) -> WeightUpdateReqOutput:
        """Send what was prepared, ``tensors`` by checkpoint name, as the version that ``push`` names."""
        client = self._client
        version, flush = str(push.version), push.flush_cache
        match self._transport:
            case "disk":
                assert self._checkpoint is not None
                return client.update_weights_from_disk(
                    self._checkpoint, weight_version=version, flush_cache=flush, timeout=PATIENCE_S
                )
            case "tensor":
                return client.update_weights_from_tensor(
                    tensors, weight_version=version, flush_cache=flush, timeout=PATIENCE_S
                )
            case "ipc":
                return client.update_weights_from_ipc(
                    tensors, weight_version=version, flush_cache=flush, timeout=PATIENCE_S
                )
            case "distributed":
                assert self._group is not None
                return client.update_weights_from_distributed(
                    tensors, group=self._group, weight_version=version, flush_cache=flush, timeout=PATIENCE_S
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(CaesuraError):  # the engine may be gone
            if self._group is not None:
                self._group.close()
        self._client.close()


class AdapterSender:
    """A connection of an adapter's trainer: every push replaces the adapter, while the engine serves."""

    def __init__(
        self, endpoint: str, settings: LoraSettings, config: dict[str, Any], write: Callable[[], Path]
    ) -> None:
        self._client = ControlClient(endpoint)
        self._settings, self._config, self._write = settings, config, write
        self._folder: Path | None = None

    def prepare(self) -> None:
        """Write the adapter as it is now, if it goes by a folder."""
        if self._settings.transport == "disk":
            self._folder = self._write()

    def push(self, tensors: NamedTensors, push: Push) -> LoadAdapterReqOutput:
        """Load what was prepared, or ``tensors`` by the names that PEFT saves; the engine counts versions."""
        source: dict[str, Any] = {
            "tensors": tensors,
            "config": self._config,
            "shared": self._settings.transport == "ipc",
        }
        if self._folder is not None:
            source = {"path": self._folder}
        return self._client.load_adapter(
            self._settings.target, **source, on_running=self._settings.on_running, timeout=PATIENCE_S
        )

    def close(self) -> None:
        self._client.close()
