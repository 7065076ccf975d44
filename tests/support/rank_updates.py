"""An engine of several ranks takes new weights, by each transport; driven tick by tick."""

from pathlib import Path
from typing import Any

from caesura.client.trainer import SharedTensors
from caesura.io_struct import DestroyWeightsUpdateGroupReqInput, UpdateWeightsFromIPCReqInput

from .buckets_by_hand import Sender
from .plain_trainer import PlainTrainer, update_message, weights_of
from .scripted import EngineDriver


def checksums(driver: EngineDriver) -> dict[str, str]:
    return driver.check_weights().checksums


def by_disk(driver: EngineDriver, path: str | Path) -> Any:
    return driver.update(path)


def by_tensor(driver: EngineDriver, path: str | Path) -> Any:
    driver.pause("abort")
    return Sender(driver, path).send_all()[-1]


def by_ipc(driver: EngineDriver, path: str | Path) -> Any:
    with SharedTensors(list(weights_of(path).items())) as shared:
        return driver.call(UpdateWeightsFromIPCReqInput(specs=shared.specs, handle=shared.memory.handle))


def by_broadcast(driver: EngineDriver, path: str | Path) -> Any:
    """Update from a trainer that is rank 0; the engine's ranks come behind it, as in SGLang."""
    world_size = 1 + driver.config.tp
    trainer = PlainTrainer(world_size=world_size)
    trainer.beside(trainer.join)
    reply = driver.call(trainer.init_message(), max_ticks=100_000)
    trainer.finish()
    assert (reply.rank, reply.world_size) == (1, world_size)
    weights = weights_of(path)
    trainer.beside(lambda: trainer.broadcast_each(weights))
    reply = driver.call(update_message(weights), max_ticks=100_000)
    trainer.finish()
    driver.call(DestroyWeightsUpdateGroupReqInput(), max_ticks=100_000)
    trainer.close()
    return reply


UPDATES = (by_disk, by_tensor, by_ipc, by_broadcast)
