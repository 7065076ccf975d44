"""Requests for small images, and what a driven engine answers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from support.scripted import EngineDriver

from caesura.io_struct import (
    GenerateImagesReqInput,
    GenerateImagesReqOutput,
    Request,
    SdeParams,
    TensorSpec,
    UpdateWeightsFromTensorReqInput,
)

STEPS, TEXT = 5, 12
"""Denoising steps, and tokens of T5, of :func:`request`."""


def request(**fields: Any) -> GenerateImagesReqInput:
    defaults = {
        "prompt": "a red",
        "width": 16,
        "height": 16,
        "num_inference_steps": STEPS,
        "seed": 11,
        "return_steps": None,
        "max_sequence_length": TEXT,
        "sde": SdeParams(type="ode"),
    }
    return GenerateImagesReqInput(**{**defaults, **fields})


def spec(name: str, shape: list[int], buffer: int = 0, dtype: str = "F32") -> TensorSpec:
    size = {"F32": 4, "F64": 8, "I32": 4, "I64": 8}[dtype]
    return TensorSpec(name=name, dtype=dtype, shape=shape, nbytes=size * math.prod(shape), buffer=buffer)


def specs_of(arrays: Mapping[str, np.ndarray]) -> tuple[list[TensorSpec], list[bytes]]:
    """Describe these arrays as the tensors of a message, one frame each."""
    kinds = {"float32": "F32", "int64": "I64"}
    specs = [
        spec(name, [*each.shape], number, kinds[str(each.dtype)])
        for number, (name, each) in enumerate(arrays.items())
    ]
    return specs, [np.ascontiguousarray(each).tobytes() for each in arrays.values()]


def send_tensors(driver: EngineDriver, tensors: Mapping[str, Any], **fields: Any) -> Any:
    """Update weights by torch tensors in one message."""
    specs, buffers = specs_of({name: tensor.numpy() for name, tensor in tensors.items()})
    message = UpdateWeightsFromTensorReqInput(specs=specs, **fields)
    return driver.call(message, buffers=buffers, max_ticks=100_000)


def image(driver: EngineDriver, rid: str, index: int = 0) -> GenerateImagesReqOutput:
    (result,) = driver.images[rid, index]
    return result


def run(
    driver: EngineDriver, message: GenerateImagesReqInput, buffers: Sequence[bytes] = ()
) -> list[GenerateImagesReqOutput]:
    rid = driver.send(message, buffers=buffers)
    driver.run_until_idle()
    assert rid not in driver.replies, driver.replies.get(rid)
    return [image(driver, rid, index) for index in range(message.n)]


def refusal(driver: EngineDriver, message: Request, buffers: Sequence[bytes] = ()) -> Any:
    driver.send(message, buffers=buffers)
    driver.tick()
    return driver.replies.pop(message.id)
