"""``caesura serve --replicas 2``: two engines behind one port are used and updated as one.

That holds whatever a stranger does on a replica's own socket.
"""

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save
from support.checkpoints import make_checkpoint
from support.http_serve import ServedEngine, WeightSyncClient, served
from support.lanes import quick
from support.plain_trainer import PlainTrainer, weights_of
from support.tokenizers import make_byte_level
from support.waiting import PATIENCE_S, eventually

from caesura.client import NoSession, SchedulerClient
from caesura.integrations.vllm import TrainerEngine, TrainerInitInfo

LONG = 1000
SAMPLED = {"temperature": 1.0, "sampling_seed": 5, "max_new_tokens": LONG, "ignore_eos": True}
SAMPLED["stream_interval"] = 50  # an event has all tokens so far
PREFIX = list(range(5, 105))
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
OCTETS = {"content-type": "application/octet-stream"}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[str]:
    root = tmp_path_factory.mktemp("replicas")
    for seed in (3, 4):
        make_checkpoint(
            root / str(seed), "qwen3", tied=True, seed=seed, vocab_size=400, max_position_embeddings=2048
        )
        make_byte_level(root / str(seed), vocab_size=400)
    return [str(root / "3"), str(root / "4")]


@pytest.fixture(scope="module")
def pair(models) -> Iterator[ServedEngine]:
    options = ("--replicas", "2", "--kv-pool-tokens", "16384", "--log-stats-interval-s", "0")
    with served("--model", models[0], *options) as engine:
        yield engine


@pytest.fixture(autouse=True)
def as_at_start(pair, models) -> Iterator[None]:
    yield
    pair.post("/end_weight_update", {"commit": False, "force": True})
    pair.ok("/update_weights_from_disk", {"model_path": models[0], "weight_version": "start"})
    pair.ok("/continue_generation")
    both_serve(pair)


def info(pair: ServedEngine) -> dict[str, Any]:
    return pair.get("/server_info").json()


def both_serve(pair: ServedEngine) -> None:
    eventually(lambda: {each["state"] for each in info(pair)["replicas"]} == {"serving"})


def states(pair: ServedEngine, field: str) -> list[Any]:
    return [each[field] for each in info(pair)["internal_states"]]


def engines_of(answer: dict[str, Any]) -> list[str]:
    return [span["incarnation"] for span in answer["meta_info"]["weight_versions"]]


def keys_of_both(pair: ServedEngine) -> list[str]:
    found: dict[str, str] = {}
    for number in range(64):
        (engine,) = engines_of(keyed(pair, str(number), [5, 6], 1))
        found.setdefault(engine, str(number))
        if len(found) == 2:
            return [found[engine] for engine in states(pair, "incarnation")]
    raise AssertionError("64 keys have one engine")


def keyed(pair: ServedEngine, key: str, ids: list[int], count: int = 8, **fields: Any) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, **fields}
    return pair.ok("/generate", body, headers={"X-SMG-Routing-Key": key})


@contextmanager
def in_flight(pair: ServedEngine, ids: list[int], *chosen: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the last events of long answers with the ``chosen`` keys, or with one of each replica."""
    keys = chosen or keys_of_both(pair)
    began = [threading.Event() for _ in keys]
    last: list[dict[str, Any]] = [{} for _ in keys]

    def follow(number: int, key: str) -> None:
        body = {"input_ids": [*ids, number], "sampling_params": SAMPLED, "stream": True}
        headers = {"X-SMG-Routing-Key": key}
        with pair.http.stream("POST", "/generate", json=body, headers=headers, timeout=PATIENCE_S) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    last[number] = json.loads(line[6:])
                    began[number].set()

    threads = [threading.Thread(target=follow, args=each) for each in enumerate(keys)]
    for thread in threads:
        thread.start()
    try:
        assert all(event.wait(PATIENCE_S) for event in began)
        yield last
    finally:
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def at_socket(pair: ServedEngine, number: int) -> SchedulerClient:
    return SchedulerClient(info(pair)["replicas"][number]["endpoint"])


@pytest.mark.parametrize("asks", [True, False])
def test_replicas_empty_their_device_caches_as_asked(pair, models, asks):
    def emptied(cause: str) -> list[bool]:
        last = []
        for number in range(2):
            with at_socket(pair, number) as engine:
                last.append([event for event in engine.memory_history().events if event.cause == cause][-1])
        return [event.returned is not None for event in last]

    pair.ok("/pause_generation", {"mode": "abort"})
    pair.ok("/continue_generation", {"torch_empty_cache": asks})
    assert emptied("continue") == [asks] * 2
    assert pair.post(f"/flush_cache?torch_empty_cache={str(asks).lower()}").status_code == 200
    assert emptied("flush") == [asks] * 2
    pair.ok("/update_weights_from_disk", {"model_path": models[1], "torch_empty_cache": asks})
    assert emptied("update_commit") == [asks] * 2
    assert emptied("continue") == [False] * 2, "the commit has done what was asked"


def test_the_server_lists_its_replicas(pair):
    found = info(pair)
    assert (found["dp_size"], found["tp_size"], len({*states(pair, "pid")})) == (2, 1, 2)
    assert [each["name"] for each in found["replicas"]] == ["replica-0", "replica-1"]
    assert found["max_total_num_tokens"] == sum(each["kv"]["total"] for each in found["internal_states"])
    loads = pair.get("/v1/loads").json()
    assert (loads["dp_rank_count"], [each["dp_rank"] for each in loads["loads"]]) == (2, [0, 1])
    assert [each["dp_rank"] for each in pair.get("/v1/loads?dp_rank=1").json()["loads"]] == [1]
    assert "2 replicas, from 0" in pair.get("/v1/loads?dp_rank=2").text
    assert [each["dp_rank"] for each in pair.get("/get_load").json()] == [0, 1]
    assert "2 replicas" in pair.announced
    assert "caesura:replica_up{model_name" in pair.get("/metrics").text
    shown = pair.get("/dashboard/data").json()
    assert [each["name"] for each in shown["replicas"]] == ["replica-0", "replica-1"]
    assert len(shown["ticks"][-1][7]) == 2, "the load of each"


def test_no_series_of_the_metrics_occurs_twice(pair):
    counted: dict[Any, float] = {}
    for killed in (False, True):
        if killed:
            os.kill(states(pair, "pid")[0], signal.SIGKILL)
            eventually(lambda: info(pair)["replicas"][0]["state"] != "serving")
            both_serve(pair)
        pair.generate([5, 6, 7])
        pair.ok("/pause_generation", {"mode": "retract"})
        pair.ok("/continue_generation")
        for accept, parse in (
            ("text/plain", text_string_to_metric_families),
            ("application/openmetrics-text;version=1.0.0", parse_openmetrics),
        ):
            text = pair.get("/metrics", headers={"accept": accept}).text
            families = list(parse(text))
            series = Counter(
                (each.name, *sorted(each.labels.items())) for one in families for each in one.samples
            )
            headings = Counter(tuple(line.split()[:3]) for line in text.splitlines() if line.startswith("# "))
            assert {*series.values()} == {*headings.values()} == {1}
            now = {
                (each.name, *sorted(each.labels.items())): each.value
                for one in families
                if one.type == "counter"
                for each in one.samples
            }
            assert counted.keys() <= now.keys()
            assert all(now[key] >= value for key, value in counted.items())
            counted = now


def test_keys_and_prefixes_stay_with_their_replica(pair):
    keys = keys_of_both(pair)
    homes = [{*engines_of(keyed(pair, key, [number, 2, 3]))} for key in keys for number in range(5, 8)]
    assert homes == [{engine} for engine in states(pair, "incarnation") for _ in range(3)]
    for field in ("session_id", "routing_key"):
        bodies = [pair.generate([number, 2, 3], **{field: keys[1]}) for number in range(5, 8)]
        assert {engine for each in bodies for engine in engines_of(each)} == homes[-1]

    first = pair.generate(PREFIX)
    later = [pair.generate([*PREFIX, number]) for number in range(5, 9)]
    assert {engine for each in later for engine in engines_of(each)} == {*engines_of(first)}
    assert all(each["meta_info"]["cached_tokens"] >= 96 for each in later)

    pair.ok("/pause_generation", {"mode": "retract"})
    threads = [threading.Thread(target=pair.generate, args=([number, 2],)) for number in range(5, 13)]
    for thread in threads:
        thread.start()
    eventually(lambda: sum(states(pair, "waiting_requests")) == len(threads))
    assert states(pair, "waiting_requests") == [4, 4]  # other prompts go to whoever has less to do
    pair.ok("/continue_generation")
    for thread in threads:
        thread.join(PATIENCE_S)


def test_both_replicas_score_a_trainers_samples(pair):
    asked = {"input_ids": PREFIX, "sampling_params": {"max_new_tokens": 6, "ignore_eos": True}}
    found = pair.ok("/generate", {**asked, "return_logprob": True})
    logprobs = [each[0] for each in found["meta_info"]["output_token_logprobs"]]
    sample = {"token_ids": [*PREFIX, *found["output_ids"]], "prompt_len": len(PREFIX), "logprobs": logprobs}
    report = pair.ok("/rollout/drift", {"samples": [sample]})
    assert (report["samples"], report["tokens"], report["state"]) == (2, 12, "ok")


def test_a_pause_holds_both_replicas(pair, models):
    with in_flight(pair, [7, 8]) as answers:
        paused = pair.ok("/pause_generation", {"mode": "in_place"})
        assert paused["held_requests"] == 2
        assert states(pair, "generation") == ["paused", "paused"]
        assert pair.get("/ready").status_code == 503
        body = {"model_path": models[1], "weight_version": "new", "flush_cache": False}
        updated = pair.ok("/update_weights_from_disk", body)
        assert (updated["committed"], updated["weight_version"]) == (True, "new")
        assert states(pair, "generation") == ["paused", "paused"]
        assert pair.ok("/continue_generation")["was_paused"]
    for answer in answers:
        spans = answer["meta_info"]["weight_versions"]
        assert [span["version"] for span in spans][-1] == "new"
        assert [span["epoch"] for span in spans] == [updated["weights_epoch"] - 1, updated["weights_epoch"]]
        assert len(answer["output_ids"]) == LONG
    assert states(pair, "weight_version") == ["new", "new"]
    label = pair.get("/get_weight_version").json()
    assert label == {"weight_version": "new", "weights_epoch": updated["weights_epoch"]}


def test_buckets_are_one_commit_on_both(pair, models):
    weights = weights_of(Path(models[1]))
    halves = [{name: weights[name] for name in part} for part in (list(weights)[::2], list(weights)[1::2])]
    for number, parts in enumerate((halves, halves[:1])):
        before, label = states(pair, "weight_version"), f"buckets-{number}"
        pair.ok("/pause_generation", {"mode": "retract"})
        for part in parts:
            assert states(pair, "weight_version") == before
            path = f"/update_weights_from_tensor?weight_version={label}"
            reply = pair.http.post(path, content=save(part), headers=OCTETS).json()
            assert reply["success"]
        assert reply["committed"] is (len(parts) == 2)
        assert states(pair, "weight_version") == ([label] * 2 if reply["committed"] else before)
        pair.ok("/continue_generation")
        assert states(pair, "weight_version") == [label] * 2
    assert pair.ok("/update_weight_version", {"new_version": "named"})["new_version"] == "named"
    assert states(pair, "weight_version") == ["named"] * 2


def test_an_update_after_a_lease_leaves_no_pause(pair, models):
    """The engines go on by themselves, and nobody has asked the server since."""
    with at_socket(pair, 0) as first, at_socket(pair, 1) as second:
        pair.ok("/pause_generation", {"mode": "retract", "lease_s": 0.1, "on_lease_expiry": "continue"})
        for engine in (first, second):
            eventually(lambda engine=engine: engine.status(owner="").generation == "running")
    updated = pair.ok("/update_weights_from_disk", {"model_path": models[1], "weight_version": "after"})
    assert updated["committed"]
    assert states(pair, "generation") == ["running", "running"]


def test_vllms_pauses_clear_the_kv_of_both(pair, models):
    with in_flight(pair, [8, 9]) as answers:
        assert pair.ok("/pause?mode=keep") == {"status": "paused"}
        assert states(pair, "pause_mode") == ["retract", "retract"]
        assert [(kv["held"], kv["cached"]) for kv in states(pair, "kv")] == [(0, 0), (0, 0)]
        assert pair.ok("/update_weights", {"weight_dir": models[1]}) == {"status": "ok"}
        assert pair.ok("/resume") == {"status": "resumed"}
    for answer in answers:
        assert not any(span["stale_kv"] for span in answer["meta_info"]["weight_versions"])
    with in_flight(pair, [9, 10]) as answers:
        assert pair.ok("/pause", {"mode": "wait"}, timeout=PATIENCE_S) == {"status": "paused"}
        assert pair.post("/v1/completions", {"prompt": [5]}).status_code == 503
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["length", "length"]
    assert pair.ok("/resume") == {"status": "resumed"}
    assert pair.ok("/v1/completions", {"prompt": [5], "max_tokens": 1})["choices"]


def test_an_update_that_one_refuses_leaves_both_labels(pair, models):
    """A session of somebody else's on one of them; then one that breaks after both have written."""
    whole, labels = pair.generate([5, 6, 7])["output_ids"], states(pair, "weight_version")
    body = {"model_path": models[1], "weight_version": "never"}
    with at_socket(pair, 1) as second:
        second.begin_weight_update()
        refused = pair.post("/update_weights_from_disk", body)
        assert (refused.status_code, refused.json()["code"]) == (400, "session_open")
        assert "replica-1" in refused.json()["message"]
        assert states(pair, "weight_version") == labels
        with suppress(NoSession):  # where the fleet has been first, which wants its replica back
            second.end_weight_update(commit=False)
        both_serve(pair)
        assert states(pair, "weights") == ["valid", "valid"]

        session = {"X-Caesura-Session": pair.ok("/begin_weight_update")["session_id"]}
        half = dict(list(weights_of(Path(models[1])).items())[::2])
        path = "/update_weights_from_tensor?weight_version=never"
        loaded = pair.http.post(path, content=save(half), headers={**OCTETS, **session}).json()
        assert (loaded["success"], loaded["committed"]) == (True, False)
        second.end_weight_update(commit=False, force=True)
        failed = pair.post("/end_weight_update", {}, headers=session)
        assert failed.status_code >= 400
        assert "replica-1" in failed.json()["message"]
    both_serve(pair)  # they were poisoned, and have read the folder of the weights that serve
    assert states(pair, "weight_version") == labels
    assert pair.get("/weight_version").json()["weight_version"] == labels[0]
    for key in keys_of_both(pair):
        assert keyed(pair, key, [5, 6, 7])["output_ids"] == whole


def test_a_group_has_the_ranks_of_both(pair, models):
    trainer = PlainTrainer(name="pair", world_size=1 + info(pair)["num_gpus"])
    weights = weights_of(Path(models[1]))
    group = {
        "master_address": "127.0.0.1",
        "master_port": trainer.port,
        "rank_offset": 1,
        "group_name": "pair",
    }
    small = pair.post("/init_weights_update_group", {**group, "world_size": 2, "backend": "gloo"})
    assert small.status_code == 400
    assert "need at least 3" in small.json()["message"]
    trainer.beside(trainer.join)
    group["world_size"] = trainer.world_size
    reply = pair.ok("/init_weights_update_group", {**group, "backend": "gloo"})
    trainer.finish()
    assert (reply["rank"], reply["world_size"]) == (1, 3)
    trainer.beside(lambda: trainer.broadcast_each(weights))
    described = {
        "names": list(weights),
        "dtypes": [str(each.dtype).removeprefix("torch.") for each in weights.values()],
        "shapes": [list(each.shape) for each in weights.values()],
        "group_name": "pair",
        "weight_version": "broadcast",
    }
    assert pair.ok("/update_weights_from_distributed", described)["committed"]
    trainer.finish()
    assert states(pair, "weight_version") == ["broadcast", "broadcast"]
    assert pair.ok("/weights_checker")["success"]  # which compares them
    pair.ok("/destroy_weights_update_group", {"group_name": "pair"})


def test_a_killed_replica_loses_no_request(pair, models):
    with in_flight(pair, [9, 10]) as answers:
        pair.ok("/pause_generation", {"mode": "in_place"})
        victim = states(pair, "pid")[0]
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: info(pair)["replicas"][0]["state"] == "gone")
        assert pair.get("/health").status_code == 200
        pair.ok("/continue_generation")
        body = {"model_path": models[1], "weight_version": "meanwhile"}
        assert pair.ok("/update_weights_from_disk", body)["committed"]
    assert [len(answer["output_ids"]) for answer in answers] == [LONG, LONG]
    assert len({*engines_of(answers[0])}) == 2, "it did not go on elsewhere"
    assert len({*engines_of(answers[1])}) == 1
    both_serve(pair)
    assert victim not in states(pair, "pid")
    assert states(pair, "weight_version") == ["meanwhile", "meanwhile"]
    assert {engine for key in keys_of_both(pair) for engine in engines_of(keyed(pair, key, [5]))} == {
        *states(pair, "incarnation")
    }


def test_a_session_outlives_the_replica_that_has_it(pair):
    said: list[dict[str, str]] = []
    known: list[int] = []
    homes = []
    for turn in range(1, 7):
        said.append({"role": "user", "content": f"question {turn}"})
        body = {"messages": said, "session_id": "outlives", "max_tokens": 8, "ignore_eos": True, "seed": turn}
        asked = {**body, "chat_template": CHAT, "return_token_ids": True}
        [choice] = pair.ok("/v1/chat/completions", asked)["choices"]
        assert choice["prompt_token_ids"][: len(known)] == known
        assert choice["session"] == choice["session"] | {"turn": turn, "branch": None}
        known = choice["prompt_token_ids"] + choice["token_ids"]
        said.append({"role": "assistant", "content": choice["message"]["content"]})
        homes.append(choice["weight_versions"][0]["incarnation"])
        if turn == 3:
            home = states(pair, "incarnation").index(homes[-1])
            os.kill(states(pair, "pid")[home], signal.SIGKILL)
        if turn == 4:
            both_serve(pair)
    assert len({*homes[:3]}) == 1, "turns of a session go to one replica"
    assert homes[3] != homes[2]
    [sample] = pair.get("/sessions/outlives").json()["samples"]
    assert sample["token_ids"] == known


@pytest.mark.parametrize("transport", ["gloo", "shared_memory"])
def test_vllm_updates_reach_all_replicas_or_none(pair, models, transport):
    tensors = list(weights_of(Path(models[1])).items())
    world_size = 1 + pair.get("/get_world_size").json()["world_size"]
    assert world_size == 3
    info = TrainerInitInfo(transport, rank=0, world_size=world_size, bucket_bytes=50_000)
    sender = TrainerEngine.trainer_init(info, client=WeightSyncClient(pair), source=tensors)
    try:
        pair.ok("/pause", params={"mode": "keep"})
        sender.send_weights("seven")
        pair.ok("/resume")
        assert states(pair, "weight_version") == ["seven", "seven"]
        checksums = pair.ok("/weight_checker", {"action": "checksum"})["checksums"]
        assert checksums
        tensors[-1] = (tensors[-1][0], torch.zeros(3))
        with pytest.raises(httpx.HTTPStatusError):
            sender.send_weights("eight")
    finally:
        sender.shutdown()
    assert pair.post("/finish_weight_update").status_code in (400, 503)
    assert set(states(pair, "weight_version")) == {"seven"}
    assert set(states(pair, "weights")) <= {"valid", "poisoned"}
    assert len(set(states(pair, "weights"))) == 1


# -- strangers -----------------------------------------------------------------------------------------------


def test_no_token_of_foreign_weights_is_served(pair, models):
    whole = pair.generate([5, 6, 7])["output_ids"]
    expected = pair.generate([7, 8, 0], sampling_params=SAMPLED)["output_ids"]
    label = pair.get("/weight_version").json()
    with in_flight(pair, [7, 8], keys_of_both(pair)[0]) as answers, at_socket(pair, 0) as stranger:
        stranger.update_weights_from_disk(models[1], flush_cache=False)  # its label stays the server's
    assert answers[0]["output_ids"] == expected
    epochs = {span["epoch"] for span in answers[0]["meta_info"]["weight_versions"]}
    assert epochs == {label["weights_epoch"]}
    both_serve(pair)
    assert pair.ok("/weights_checker")["success"]  # which compares them
    assert [keyed(pair, key, [5, 6, 7])["output_ids"] for key in keys_of_both(pair)] == [whole] * 2
    assert pair.get("/weight_version").json() == label


@pytest.mark.parametrize("transport", quick(["tensor", "disk"]))
def test_a_foreign_commit_is_noticed_and_told(pair, models, transport):
    whole = pair.generate([5, 6, 7])["output_ids"]
    pair.ok("/pause_generation", {"mode": "in_place"})
    with at_socket(pair, 0) as stranger:
        if transport == "disk":
            stranger.update_weights_from_disk(models[1], flush_cache=False)
        else:
            stranger.update_weights_from_tensor(weights_of(Path(models[1])), flush_cache=False)
    eventually(lambda: info(pair)["replicas"][0]["state"] == "fenced")
    assert "on its own socket" in info(pair)["replicas"][0]["reason"]
    told = pair.get("/ready").text
    assert "replica-0" in told
    assert "on its own socket" in told
    pair.ok("/continue_generation")
    both_serve(pair)
    assert [keyed(pair, key, [5, 6, 7])["output_ids"] for key in keys_of_both(pair)] == [whole] * 2


def test_a_foreign_pause_holds_no_request_up(pair):
    expected = pair.generate([7, 8, 0], sampling_params=SAMPLED)["output_ids"]
    with at_socket(pair, 0) as stranger:
        with in_flight(pair, [7, 8], keys_of_both(pair)[0]) as answers:
            stranger.pause("retract")  # and never continues
        assert answers[0]["output_ids"] == expected
        both_serve(pair)
        assert stranger.status().generation == "running"
