"""Every road by which weights reach an engine in this process, each cut into pieces and in an order of its
own.

Invariant: whatever the road, the engine is paused, gets all tensors of one folder, and answers that they are
committed.
"""

import random
from collections.abc import Callable
from itertools import chain
from pathlib import Path

from support.parameter_server import ParameterServer
from support.plain_trainer import PlainTrainer, Weights, update_message, weights_of
from support.scripted import EngineDriver

from caesura.client.trainer import Bucket, SharedBucket, SharedTensors, as_frames, buckets, manifest
from caesura.io_struct import (
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    Message,
    PauseGenerationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromCheckpointEngineReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)

from .waiting import PATIENCE_S as _PATIENCE_S


class Roads:
    """Sends checkpoints to one driven engine."""

    def __init__(self, driver: EngineDriver, trainer: PlainTrainer, bucket_bytes: int = 20_000) -> None:
        self._driver, self._trainer, self._bucket_bytes = driver, trainer, bucket_bytes
        self.names: dict[str, Callable[[Path, Weights], Message]] = {
            "disk": lambda folder, weights: self._disk(folder),
            "tensor": lambda folder, weights: self._in_buckets(weights, self._tensor),
            "ipc": lambda folder, weights: self._in_buckets(weights, self._ipc),
            "distributed": lambda folder, weights: self._distributed(weights),
            "shared": lambda folder, weights: self._shared(weights),
            "parameter server": lambda folder, weights: self._parameter_server(weights),
            "session": lambda folder, weights: self._session(weights),
        }

    def send(self, road: str, folder: Path, seed: int = 0) -> Message:
        """All tensors of ``folder``, in the order that ``seed`` says; the answer that committed them."""
        weights = weights_of(folder)
        names = sorted(weights)
        random.Random(seed).shuffle(names)
        self._driver.call(PauseGenerationReqInput(mode="retract"))
        reply = self.names[road](folder, {name: weights[name] for name in names})
        assert getattr(reply, "committed", False), (road, reply)
        self._driver.call(ContinueGenerationReqInput(torch_empty_cache=False))
        return reply

    def _disk(self, folder: Path) -> Message:
        return self._driver.call(UpdateWeightFromDiskReqInput(model_path=str(folder)), max_ticks=100_000)

    def _in_buckets(self, weights: Weights, send: Callable[[Bucket, str | None], Message]) -> Message:
        replies = [send(bucket, None) for bucket in buckets(weights.items(), self._bucket_bytes)]
        assert not any(getattr(reply, "committed", True) for reply in replies[:-1]), replies
        return replies[-1]

    def _tensor(self, bucket: Bucket, session_id: str | None) -> Message:
        specs, frames = as_frames(bucket)
        message = UpdateWeightsFromTensorReqInput(specs=specs, session_id=session_id)
        return self._driver.call(message, buffers=frames)

    def _ipc(self, bucket: Bucket, session_id: str | None) -> Message:
        with SharedBucket(bucket.nbytes) as memory:
            specs = memory.fill(bucket)
            message = UpdateWeightsFromIPCReqInput(handle=memory.handle, specs=specs, session_id=session_id)
            return self._driver.call(message)

    def _shared(self, weights: Weights) -> Message:
        with SharedTensors(weights.items()) as shared:
            memory = shared.memory
            return self._driver.call(UpdateWeightsFromIPCReqInput(handle=memory.handle, specs=shared.specs))

    def _parameter_server(self, weights: Weights) -> Message:
        answers: list[str] = []
        largest = max(tensor.nbytes for tensor in weights.values())
        with ParameterServer(max(self._bucket_bytes, largest)) as server:

            def push() -> None:
                messages = chain([server.handle], server.buckets(weights), [None, None])
                answers.extend(server.ask(message) for message in messages)

            self._trainer.beside(push)
            reply = self._driver.call(
                UpdateWeightsFromCheckpointEngineReqInput(
                    zmq_handles={"cpu": server.address}, timeout_s=_PATIENCE_S
                )
            )
            self._trainer.finish()
        assert len(answers) > 3, answers
        assert not any(answers), answers
        return reply

    def _distributed(self, weights: Weights) -> Message:
        trainer, driver = self._trainer, self._driver
        if trainer.group is None:
            trainer.beside(trainer.join)
            driver.call(trainer.init_message())
            trainer.finish()
        names = list(weights)
        for half in (names[: len(names) // 2], names[len(names) // 2 :]):
            part = {name: weights[name] for name in half}
            trainer.beside(lambda part=part: trainer.broadcast_each(part))
            reply = driver.call(update_message(part))
            trainer.finish()
        return reply

    def _session(self, weights: Weights) -> Message:
        session_id = self._driver.begin(manifest=manifest(weights.items()))
        for number, bucket in enumerate(buckets(weights.items(), self._bucket_bytes)):
            (self._ipc if number % 2 else self._tensor)(bucket, session_id)
        return self._driver.call(EndWeightUpdateReqInput(session_id=session_id))
