"""A trainer's buckets, sent to a driven engine one call at a time."""

from pathlib import Path

from safetensors.torch import load_file
from support.scripted import EngineDriver
from support.waiting import eventually

from caesura.client.trainer.buckets import as_frames, buckets
from caesura.io_struct import Message, UpdateWeightsFromTensorReqInput, WeightUpdateReqOutput


class Sender:
    """The tensors of a checkpoint folder in buckets of at most ``bucket_bytes``, sent with ``fields``."""

    def __init__(
        self,
        driver: EngineDriver,
        path: Path,
        bucket_bytes: int = 20_000,
        *,
        client: str = "main",
        **fields: object,
    ) -> None:
        self.driver, self.client, self.fields = driver, client, fields
        self.parts = list(buckets(load_file(path / "model.safetensors").items(), bucket_bytes))

    def send(self, number: int, frames: list[memoryview] | None = None, **fields: object) -> Message:
        """Send bucket ``number`` with these fields, and ``frames`` in place of its own; return the answer."""
        specs, real = as_frames(self.parts[number])
        message = UpdateWeightsFromTensorReqInput(specs=specs, **{**self.fields, **fields})
        self.driver.send(message, self.client, buffers=real if frames is None else frames)
        # Not by a number of ticks: another rank's process writes, too, whenever it has a core.
        eventually(lambda: (self.driver.tick(), message.id in self.driver.replies)[1])
        return self.driver.replies.pop(message.id)

    def send_all(self, first: int = 0, **fields: object) -> list[WeightUpdateReqOutput]:
        return [self.send(number, **fields) for number in range(first, len(self.parts))]
