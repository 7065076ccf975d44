"""``/workers``: engines behind one server that are added and taken out while it serves."""

import pytest
import zmq
from support.http_serve import served
from support.light_engines import INITIAL, LightEngines

from caesura.process.curve import key_file


@pytest.fixture
def engines():
    with LightEngines(4, curve=True) as started:
        yield started


@pytest.fixture
def keys(tmp_path, engines) -> list[str]:
    """Options with this client's keys, and the key of the first engine."""
    pair = tmp_path / "client"
    public, secret = zmq.curve_keypair()
    pair.touch(mode=0o600)
    pair.write_text(key_file(public, secret))
    return ["--curve-client-key-file", str(pair), "--curve-server-key", engines.server_keys[0]]


def test_workers_come_and_go_while_a_server_runs(engines, keys, tmp_path):
    urls = engines.endpoints
    with served(
        "--worker-urls", urls[0], "--tokenizer", "none", "--weights-root", str(tmp_path), *keys
    ) as server:

        def states() -> dict[str, bool]:
            listed = server.get("/workers").json()
            assert listed["total"] == len(listed["workers"])
            return {each["url"]: each["is_healthy"] for each in listed["workers"]}

        def add(number: int) -> dict:
            return server.ok(
                "/workers", {"url": urls[number], "curve_server_key": engines.server_keys[number]}
            )

        assert states() == {urls[0]: True}
        added = add(1)
        assert added["is_healthy"]
        assert added["joined_s"] > 0
        assert server.get(f"/workers/{added['id']}").json()["url"] == urls[1]
        label = {"model_path": str(tmp_path), "weight_version": "new"}
        assert server.ok("/update_weights_from_disk", label)["weights_epoch"] == 1
        assert [engine.label for engine in engines.engines] == ["new", "new", INITIAL, INITIAL]
        add(2)
        assert engines.engines[2].label == "new"
        assert states() == dict.fromkeys(urls[:3], True)

        for _ in range(3):
            assert server.generate([1, 2, 3])["meta_info"]["weight_version"] == "new"
        before = [engine.served for engine in engines.engines]
        assert sum(before) == 3
        gone = server.http.delete(f"/workers/{added['id']}")
        assert gone.status_code == 200
        assert states() == dict.fromkeys([urls[0], urls[2]], True)
        for _ in range(4):
            server.generate([1, 2, 3])
        assert engines.engines[1].served == before[1]

        assert "already" in server.post("/workers", {"url": urls[0]}).json()["error"]["message"]
        wrong = {"url": urls[3], "curve_server_key": engines.server_keys[0]}
        assert server.post("/workers", wrong).status_code in (400, 503)
        assert server.post("/workers", {"url": "http://127.0.0.1:1"}).status_code == 400
        assert server.http.delete("/workers/nobody").status_code == 400
        assert states() == dict.fromkeys([urls[0], urls[2]], True)
    assert all(engine.paused is None for engine in engines.engines)


def test_a_server_of_one_engine_has_no_workers():
    with (
        LightEngines(1) as engines,
        served("--endpoint", *engines.endpoints, "--tokenizer", "none") as server,
    ):
        refused = server.get("/workers")
        assert (refused.status_code, "--worker-urls" in refused.text) == (400, True)
