"""Addresses where workers may join, without keys."""

import pytest
from support.plain_trainer import free_port

from caesura.io_struct import CaesuraError
from caesura.scheduler.executor.worker_socket import WorkerSocket
from caesura.scheduler.runtime.config import EngineConfig


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("tcp://192.0.2.1:5", "is open to others"),
        ("tcp://0.0.0.0:5", "is open to others"),
        ("tcp://engine.example:5", "is open to others"),
        ("tcp://localhost.example:5", "is open to others"),
        ("tcp://127.0.0.1", "is no address"),
        ("ipc:///tmp/workers.sock", "is no address"),
    ],
)
def test_an_address_beyond_loopback_needs_keys(address, problem):
    with pytest.raises(CaesuraError, match=problem):
        WorkerSocket(EngineConfig(model_path="", tp=2, tp_joined=1, tp_address=address), print)


@pytest.mark.parametrize("host", ["127.1.2.3", "localhost"])
def test_loopback_needs_none(host):
    config = EngineConfig(model_path="", tp=2, tp_joined=1, tp_address=f"tcp://{host}:{free_port()}")
    WorkerSocket(config, print).close()
