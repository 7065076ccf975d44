"""How the ranks of an engine meet to compute together, and on which devices.

Invariants: rank 0 founds the group, and every rank enters it before it builds anything that computes. Ranks
on the CPU of one host share memory. All others meet over torch.distributed, whose sockets are neither
encrypted nor authenticated, whatever keys the engine has.
"""

from collections.abc import Callable
from urllib.parse import urlsplit

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from ...io_struct import CaesuraError, ErrorCode
from ..models.config import load_model_config
from ..parallel import host_group, torch_group
from ..parallel.group import TensorParallel
from ..runtime.dtypes import by_torch_name
from ..runtime.engine_config import EngineConfig

_SHARED, _LOOPBACK = "shared:", "127.0.0.1"


OnMade = Callable[[TensorParallel], None]


def found(config: EngineConfig) -> tuple[str, Callable[[OnMade], TensorParallel]]:
    """Found a group; return its address, and what enters rank 0 in it. Raises ``unsupported``.

    The latter calls its argument with the group before it waits for the others.
    """
    if torch.device(config.device).type == "cpu" and not config.tp_joined:
        memory, path = host_group.found(config.tp)
        return _SHARED + path, lambda on_made: host_group.join(memory, 0, config.tp, on_made=on_made)
    host = _LOOPBACK if config.tp_address is None else urlsplit(config.tp_address).hostname
    store, address = torch_group.listen(host or _LOOPBACK, config.tp)
    return address, lambda on_made: _enter(store, config, 0, on_made)


def join(address: str, config: EngineConfig, rank: int) -> TensorParallel:
    if address.startswith(_SHARED):
        return host_group.join(address.removeprefix(_SHARED), rank, config.tp)
    return _enter(address, config, rank)


def _enter(
    store: Store | str, config: EngineConfig, rank: int, on_made: OnMade = lambda _: None
) -> TensorParallel:
    auto = config.dtype == "auto"
    dtype = load_model_config(config.model_path).dtype if auto else by_torch_name(config.dtype)
    return torch_group.join(store, rank, config.tp, torch.device(config.device), dtype, on_made=on_made)


def device_of(config: EngineConfig, rank: int) -> str:
    """Return a rank's device: rank 0's, or a next accelerator of the host; raises ``invalid_request``."""
    return (
        config.device if rank >= config.tp - config.tp_joined else device_at(config.device, rank, config.tp)
    )


def device_at(first: str, offset: int, tp: int) -> str:
    """Return the accelerator ``offset`` behind ``first`` on this host; raises ``invalid_request``."""
    kind, _, start = first.partition(":")
    if kind == "cpu":
        return first
    index, count = int(start or 0) + offset, torch.get_device_module(kind).device_count()
    if index >= count:
        reason = f"tp = {tp} from {first} on needs {kind}:{index}, and this host has {count} devices"
        raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="tp", value=tp)
    return f"{kind}:{index}"
