"""How the ranks of an engine meet to compute together, and on which devices.

Invariants:
- Rank 0 founds the group and says where; every rank, rank 0 included, enters it before it builds anything
  that computes.
- Ranks on the CPU of one host share memory. All others meet over torch.distributed, whose sockets are its
  own: they are neither encrypted nor authenticated, whatever keys the engine has.
"""

from urllib.parse import urlsplit

import torch

from ...io_struct import CaesuraError, ErrorCode
from ..models.config import load_model_config
from ..parallel import process_group, shared_memory
from ..parallel.group import TensorParallel
from ..runtime.config import EngineConfig
from ..runtime.dtypes import by_torch_name

_SHARED, _LOOPBACK = "shared:", "127.0.0.1"


class Founded:
    """A group that rank 0 has founded and not entered yet."""

    def __init__(self, config: EngineConfig) -> None:
        """
        Raises:
            CaesuraError: ``unsupported``, this host cannot.
        """
        self._config = config
        self._memory: int | None = None
        if torch.device(config.device).type == "cpu" and not config.tp_joined:
            self._memory, path = shared_memory.found(config.tp)
            self.address = _SHARED + path
            return
        host = _LOOPBACK if config.tp_address is None else urlsplit(config.tp_address).hostname
        self._store, self.address = process_group.listen(host or _LOOPBACK, 0, config.tp)

    def join(self) -> TensorParallel:
        """Enter as rank 0; return when all ranks have."""
        config = self._config
        if self._memory is not None:
            return shared_memory.join(self._memory, 0, config.tp)
        return process_group.join(self._store, 0, config.tp, torch.device(config.device), _dtype_of(config))


def join(address: str, config: EngineConfig, rank: int) -> TensorParallel:
    """Enter as a worker, at the address of a :class:`Founded`."""
    if address.startswith(_SHARED):
        return shared_memory.join(address.removeprefix(_SHARED), rank, config.tp)
    return process_group.join(address, rank, config.tp, torch.device(config.device), _dtype_of(config))


def _dtype_of(config: EngineConfig) -> torch.dtype:
    """Return the dtype that the model computes in."""
    return (
        load_model_config(config.model_path).dtype if config.dtype == "auto" else by_torch_name(config.dtype)
    )


def device_of(config: EngineConfig, rank: int) -> str:
    """Return the device of a rank: rank 0's, or on accelerators of the same host one of the next.

    Raises:
        CaesuraError: ``invalid_request``, there are not so many.
    """
    kind, _, first = config.device.partition(":")
    if kind == "cpu" or rank >= config.tp - config.tp_joined:
        return config.device
    index, count = int(first or 0) + rank, torch.get_device_module(kind).device_count()
    if index >= count:
        raise CaesuraError(
            ErrorCode.INVALID_REQUEST,
            f"tp = {config.tp} from {config.device} on needs {kind}:{index}, and this host has {count} devices",
            field="tp",
            value=config.tp,
        )
    return f"{kind}:{index}"
