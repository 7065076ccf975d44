"""Weights on their way into a model, and what it holds of them, byte by byte."""

from typing import Any

import pytest
import torch
from torch import Tensor

from caesura.io_struct import CaesuraError, ErrorCode, TensorSpec
from caesura.scheduler.models.causal_lm import CausalLM
from caesura.scheduler.runtime.dtypes import NAMES
from caesura.scheduler.weights.loader import WeightLoader
from caesura.scheduler.weights.source import WeightPiece


def storage(model: CausalLM) -> dict[str, bytes]:
    return {name: bytes(t.reshape(-1).view(torch.uint8).numpy()) for name, t in model.named_storage()}


def specs(tensors: dict[str, Tensor]) -> list[TensorSpec]:
    return [
        TensorSpec(name=name, dtype=NAMES[value.dtype], shape=list(value.shape), nbytes=value.nbytes)
        for name, value in tensors.items()
    ]


def send(loader: WeightLoader, name: str, value: Tensor, rows: int = 1 << 20) -> None:
    """Write a tensor in pieces of ``rows``."""
    for start in range(0, value.shape[0], rows):
        piece = WeightPiece(name, tuple(value.shape), value.dtype, start, value[start : start + rows])
        loader.write(piece)


def mismatch(call: Any, *arguments: Any, **keywords: Any) -> dict[str, Any]:
    """Return the detail of the mismatch that ``call`` must end with."""
    with pytest.raises(CaesuraError) as caught:
        call(*arguments, **keywords)
    assert caught.value.code == ErrorCode.WEIGHT_MISMATCH
    return caught.value.detail
