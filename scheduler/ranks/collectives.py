"""How the ranks of an engine meet to compute together, and on which devices.

Invariants: rank 0 founds the group and says where; every rank, rank 0 included, enters it before it builds anything that computes.
"""

import torch

from ...io_struct import CaesuraError, ErrorCode
from ..config import EngineConfig
from ..parallel import shared_memory
from ..parallel.group import TensorParallel


class Founded:
    """A group that rank 0 has founded and not entered yet."""

    def __init__(self, config: EngineConfig) -> None:
        """
        Raises:
            CaesuraError: ``unsupported``, ranks of this device or on these hosts cannot compute together.
        """
        if torch.device(config.device).type != "cpu" or config.tp_joined:
            raise CaesuraError(
                ErrorCode.UNSUPPORTED,
                f"tp = {config.tp} on {config.device}: only ranks on the CPU of one host compute together",
                field="tp",
                value=config.tp,
            )
        self._size = config.tp
        self._fd, self.address = shared_memory.found(config.tp)

    def join(self) -> TensorParallel:
        """Rank 0's place, when all have come."""
        return shared_memory.join(self._fd, 0, self._size)


def join(address: str, config: EngineConfig, rank: int) -> TensorParallel:
    """The place of another rank, at an address that :class:`Founded` has given out."""
    return shared_memory.join(address, rank, config.tp)


def device_of(config: EngineConfig, rank: int) -> str:
    """The device of a rank of this host: rank 0's, or on accelerators the next ones.

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
            f"tp = {config.tp} needs a device for each rank: this host has {count} from {kind}:0 on",
            field="tp",
            value=config.tp,
        )
    return f"{kind}:{index}"
