"""Keepalive messages go every two seconds to everybody who waits for the engine, and to nobody else."""

import pytest
from support.scripted import EngineDriver

from caesura.io_struct import (
    FlushCacheReqInput,
    GenerateReqInput,
    GetStatusReqInput,
    Keepalive,
    SamplingParams,
    decode_reply,
)

PROMPT = [5, 6, 7, 8]


@pytest.fixture
def driver(tiny_model):
    with EngineDriver(str(tiny_model)) as driver:
        yield driver


def next_is_keepalive(driver: EngineDriver, client: str) -> bool:
    socket = driver.client(client)
    return bool(socket.poll(5000)) and isinstance(decode_reply(socket.recv_multipart()[0]), Keepalive)


def test_clients_that_wait_for_a_command_or_a_generation_get_keepalives(driver):
    request = GenerateReqInput(input_ids=PROMPT, sampling_params=SamplingParams(max_new_tokens=50))
    driver.send(request, "generates")
    driver._turn()
    driver.send(FlushCacheReqInput(timeout_s=60.0), "commands")
    driver._turn()
    driver.send(request, "attached")
    driver.call(GetStatusReqInput(), "idle")
    for _ in range(2):
        driver.engine.housekeeping.next_keepalive = 0.0
        driver._turn()
        assert all(next_is_keepalive(driver, name) for name in ("generates", "commands", "attached"))
    assert not driver.client("idle").poll(0)
