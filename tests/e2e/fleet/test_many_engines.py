"""A fleet of 50 engines without a model: some die in each phase of an update, while requests wait."""

import asyncio
import os
import resource
import threading
from collections import Counter

import pytest
import zmq
from campaigns import light_fleet
from support.light_engines import INITIAL, LightEngines
from support.raw_client import RawClient
from support.waiting import PATIENCE_S

from caesura.client import InvalidRequest, SamplingParams
from caesura.client.group import EngineAddress, Fleet
from caesura.client.group.fleet import OTHER_DESCRIPTORS
from caesura.io_struct import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    GetStatusReqInput,
    Request,
    UpdateWeightFromDiskReqInput,
)
from caesura.process.curve import key_file

ENGINES, REQUESTS = 50, 300
PARAMS = SamplingParams(max_new_tokens=6)
DEATHS: dict[int, type[Request]] = (
    dict.fromkeys((3, 17), BeginWeightUpdateReqInput)
    | dict.fromkeys((0, 21, 30, 49), UpdateWeightFromDiskReqInput)
    | dict.fromkeys((8, 9, 10, 40), EndWeightUpdateReqInput)
)
"""Messages of which engines die, by their numbers."""


def test_a_light_engine_answers_what_it_cannot_decode():
    with LightEngines(1) as engines, RawClient(engines.endpoints[0]) as client:
        assert client.call(b"no message").code == "malformed_message"
        assert client.call(GetStatusReqInput()).weight_version == INITIAL


def test_engines_that_die_in_an_update_lose_no_request(tmp_path):
    armed = threading.Event()

    def dies(number: int, request: Request) -> bool:
        return armed.is_set() and isinstance(request, DEATHS.get(number, ()))

    async def body(engines: LightEngines, fleet: Fleet) -> None:
        async with fleet.paused():
            handles = [
                await fleet.submit([number], PARAMS, routing_key=str(number) if number % 2 else None)
                for number in range(REQUESTS)
            ]
            armed.set()
            done = await fleet.update(model_path=tmp_path, weight_version="new")
            armed.clear()
            dead = {engines.endpoints[number] for number in DEATHS}
            assert set(done.fenced) == dead
            assert len(done.replies) == ENGINES - len(dead)
            assert {each.name for each in fleet.dispatcher.serving} == set(engines.endpoints) - dead
        outputs = await asyncio.gather(*(handle.result() for handle in handles))
        assert [list(output.output_ids) for output in outputs] == [list(range(6))] * REQUESTS
        spans = {(span.version, span.epoch) for output in outputs for span in output.weight_versions}
        assert spans == {("new", 1)}
        assert sum(engine.served for engine in engines.engines) == REQUESTS  # none was answered twice
        assert all(member.load == 0 and not member.attempts for member in fleet.members)

        engines.start(DEATHS)
        assert {engines.engines[number].label for number in DEATHS} == {INITIAL}
        healed: set[str] = set()
        while healed != dead:  # a lost connection may be noticed by the first call over it
            healed |= set(await fleet.heal())
        assert {engine.label for engine in engines.engines} == {"new"}
        handles = [await fleet.submit([number], PARAMS, min_weights_epoch=1) for number in range(2 * ENGINES)]
        for output in await asyncio.gather(*(handle.result() for handle in handles)):
            assert {(span.version, span.epoch) for span in output.weight_versions} == {("new", 1)}
        assert all(engine.served for engine in engines.engines)

    async def main() -> None:
        with LightEngines(ENGINES, dies=dies) as engines:
            async with (
                asyncio.timeout(PATIENCE_S),
                Fleet(engines.endpoints, look_interval_s=0, patience_s=None) as fleet,
            ):
                await body(engines, fleet)

    asyncio.run(main())


def test_engines_that_die_at_any_time_lose_nothing():
    found = asyncio.run(light_fleet.run(number=30, deaths=12, joining=3, rounds=4, seed=1))
    assert (found.harm, found.updates) == (0, 4)
    assert sum(found.deaths.values()) == len(found.heal_s) == 12
    assert len(found.join_s) == 3


def test_an_update_is_six_messages_to_each_engine(tmp_path):
    """Pause, begin, load, verify, commit and continue: its cost is that of the engines, one by one."""
    asked: Counter[int] = Counter()

    def count(number: int, _: Request) -> bool:
        asked[number] += 1
        return False

    async def main() -> None:
        with LightEngines(ENGINES, dies=count) as engines:
            async with (
                asyncio.timeout(PATIENCE_S),
                Fleet(engines.endpoints, look_interval_s=0, lease_s=None) as fleet,
            ):
                asked.clear()
                await fleet.update(model_path=tmp_path, weight_version="new")
                assert asked == dict.fromkeys(range(ENGINES), 6)

    asyncio.run(main())


def test_a_paused_fleet_has_two_descriptors_an_engine(tmp_path, monkeypatch):
    """One connection, and one more that renews leases; here half of the engines ask for keys."""
    monkeypatch.setattr("caesura.client.group.leases.RENEW_S", 0.05)
    (pair := tmp_path / "client.key_secret").touch(mode=0o600)
    public, secret = zmq.curve_keypair()
    pair.write_text(key_file(public, secret))

    async def main() -> list[int]:
        with LightEngines(ENGINES // 2) as plain, LightEngines(ENGINES // 2, curve=True) as keyed:
            locked = [
                EngineAddress(endpoint, key, pair)
                for endpoint, key in zip(keyed.endpoints, keyed.server_keys, strict=True)
            ]
            addresses = [each for both in zip(plain.endpoints, locked, strict=True) for each in both]
            counts = [len(os.listdir("/proc/self/fd"))]
            async with asyncio.timeout(PATIENCE_S), Fleet(addresses, look_interval_s=0) as fleet:
                counts.append(len(os.listdir("/proc/self/fd")))
                async with fleet.paused():
                    engines = [*plain.engines, *keyed.engines]
                    while not all(each.renewals for each in engines):  # noqa: ASYNC110 (nobody is told)
                        await asyncio.sleep(0.01)
                    counts.append(len(os.listdir("/proc/self/fd")))
            return counts

    before, opened, paused = asyncio.run(main())
    # The engines are in this process, too: each connection has its other end here.
    assert opened - before < 2 * ENGINES + OTHER_DESCRIPTORS // 2
    assert paused - opened < 2 * ENGINES + OTHER_DESCRIPTORS // 2


def test_too_few_descriptors_are_refused_with_the_remedy():
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, allowed[1]))
    try:
        with pytest.raises(InvalidRequest, match=r"`ulimit -n 164`"):
            asyncio.run(Fleet([f"tcp://127.0.0.1:{port}" for port in range(1, 51)]).open())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
