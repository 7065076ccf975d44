"""A supervised scheduler, killed, stopped and refused, with real processes and clients that try again."""

import json
import os
import queue
import re
import signal
import socket
import threading

import httpx
import psutil
import pytest
from click.testing import CliRunner
from safetensors.torch import load_file
from support.http_serve import served
from support.lanes import quick
from support.lora import ATTENTION, make_adapter
from support.supervised import PATIENCE, Supervised, supervised
from support.waiting import eventually

from caesura.client import EngineError, SamplingParams, SchedulerClient, UnknownAdapter
from caesura.client.cli import cli

pytestmark = pytest.mark.long  # its engines take seconds to start

GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)


def again(call, *arguments, **options):
    while True:
        try:
            return call(*arguments, timeout=PATIENCE, **options)
        except EngineError as error:
            assert error.retryable, error


def kill(running: Supervised, client: SchedulerClient) -> None:
    os.kill(client.status(timeout=PATIENCE).pid, signal.SIGKILL)
    running.wait_for("restart ")


def test_clients_that_retry_survive_a_kill_under_load(tiny_model):
    with supervised("--model", str(tiny_model)) as running, running.client() as client:
        first = client.status(timeout=PATIENCE)
        outputs, begun = [], threading.Barrier(5)

        def rollouts(seed: int) -> None:
            begun.wait(PATIENCE)
            prompts = ([5, 6, 7 + seed, number] for number in range(12))
            outputs.extend(again(client.generate, prompt, GREEDY) for prompt in prompts)

        threads = [threading.Thread(target=rollouts, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        begun.wait(PATIENCE)
        eventually(lambda: len(outputs) >= 4)
        os.kill(first.pid, signal.SIGKILL)
        for thread in threads:
            thread.join(PATIENCE)
        assert len(outputs) == 48
        assert all(len(each.output_ids) == 24 for each in outputs)
        spans = {(span.incarnation, span.epoch) for each in outputs for span in each.weight_versions}
        second = client.status(timeout=PATIENCE)
        assert spans == {(first.incarnation, 0), (second.incarnation, 1)}
        assert running.end() == 0
    restarts = [line for line in running.told if "restart " in line]
    assert len(restarts) == 1
    assert "killed by signal 9" in restarts[0]


def test_disk_updates_are_served_again_after_a_restart(tiny_model, other_model):
    with supervised("--model", str(tiny_model)) as running, running.client() as client:
        client.update_weights_from_disk(other_model, weight_version="step-17", timeout=PATIENCE)
        record = json.loads((running.folder / "weights.json").read_bytes())
        assert (record["source"], running.folder.stat().st_mode & 0o777) == (str(other_model), 0o700)
        before = client.generate([5, 6, 7], GREEDY, timeout=PATIENCE)
        kill(running, client)
        status = again(client.status)
        assert (status.weights, status.weight_version, status.weights_epoch) == ("valid", "step-17", 2)
        after = again(client.generate, [5, 6, 7], GREEDY, min_weights_epoch=1)
        assert after.output_ids == before.output_ids
        assert {span.version for span in after.weight_versions} == {"step-17"}


def test_adapters_of_folders_are_served_again_after_a_restart(tiny_model, tmp_path):
    path = make_adapter(tiny_model, tmp_path / "a", ATTENTION)
    with supervised("--model", str(tiny_model), "--enable-lora") as running, running.client() as client:
        loaded = client.load_adapter("a", path, timeout=PATIENCE)
        tensors = load_file(path / "adapter_model.safetensors")
        config = json.loads((path / "adapter_config.json").read_text())
        client.load_adapter("sent", tensors=tensors, config=config, timeout=PATIENCE)
        before = client.generate([5, 6, 7], GREEDY, adapter="a", timeout=PATIENCE)
        kill(running, client)
        after = again(client.generate, [5, 6, 7], GREEDY, adapter="a")
        assert after.output_ids == before.output_ids
        assert {each.adapter_epoch for each in after.weight_versions} == {loaded.adapter_epoch}
        with pytest.raises(UnknownAdapter, match="adapter 'sent' was lost in a restart"):
            client.generate([5, 6, 7], GREEDY, adapter="sent", timeout=PATIENCE)
    assert any("adapter 'sent' of before the restart is lost" in line for line in running.told)


def test_a_state_file_that_cannot_be_written_is_waited_for(tiny_model, other_model, tmp_path):
    arguments = ("--model", str(tiny_model), "--max-restarts", "1")
    arguments += ("--state-file", str(tmp_path / "weights.json"))
    in_the_way = tmp_path / ".weights.json.new"
    with supervised(*arguments) as running, running.client() as client:
        client.update_weights_from_disk(other_model, weight_version="step-17", timeout=PATIENCE)
        in_the_way.mkdir()
        os.kill(client.status(timeout=PATIENCE).pid, signal.SIGKILL)
        for _ in range(3):  # more often than the policy allows crashes
            assert "state_file_error" in running.wait_for("refused to start")
        in_the_way.rmdir()
        status = again(client.status)
        assert (status.weights, status.weight_version) == ("valid", "step-17")
        assert running.end() == 0


@pytest.mark.parametrize("number", quick([signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
def test_a_signal_ends_both_in_order(tiny_model, number):
    with supervised("--model", str(tiny_model)) as running, running.client() as client:
        pid = client.status(timeout=PATIENCE).pid
        client.pause("in_place", timeout=PATIENCE)
        handle = client.submit([5], GREEDY)
        eventually(lambda: client.status(timeout=PATIENCE).waiting_requests == 1)
        assert running.end(number) == 0
        assert handle.result(PATIENCE).finish_reason.type == "abort"
    assert not psutil.pid_exists(pid)
    assert not running.folder.exists()
    assert not any("restart " in line for line in running.told)
    assert any("the engine ends: signal SIGTERM (exit status 0)" in line for line in running.told)
    assert running.told[-1].endswith("INFO supervise: the scheduler ended with status 0\n")


def test_a_killed_supervisor_leaves_no_scheduler(tiny_model, tmp_path):
    env = {"TMPDIR": str(tmp_path)}
    with supervised("--model", str(tiny_model), env=env) as running:
        with running.client() as client:
            pid = client.status(timeout=PATIENCE).pid
        running.end(signal.SIGKILL)
        eventually(lambda: not psutil.pid_exists(pid))
    assert running.folder.exists()
    with supervised("--model", str(tiny_model), env=env) as second:
        assert list(tmp_path.glob("caesura-*")) == [second.folder]


# -- over HTTP -----------------------------------------------------------------------------------------------


def test_http_errors_are_retryable_during_a_restart(tiny_model, other_model):
    root = ("--weights-root", str(other_model.parent))
    with served("--model", str(tiny_model), "--restart", *root) as engine:
        before = engine.get("/server_info").json()
        assert before["weights_epoch"] == 0
        updated = {"model_path": str(other_model), "weight_version": "step-17"}
        assert engine.ok("/update_weights_from_disk", updated)["committed"]
        tokens = engine.generate([5, 6, 7])["output_ids"]
        os.kill(before["internal_states"][0]["pid"], signal.SIGKILL)
        refusal = eventually(lambda: until_refused(engine))
        assert refusal.status_code == 503
        assert refusal.json()["error"]["code"] == "engine_restarting"
        assert refusal.json()["error"]["retryable"] is True
        assert int(refusal.headers["retry-after"]) >= 1
        assert "killed by signal 9" in refusal.json()["error"]["message"]
        eventually(lambda: engine.get("/health").status_code == 200)
        after = engine.get("/server_info").json()
        assert after["incarnation"] != before["incarnation"]
        assert (after["weights_epoch"], after["weight_version"]) == (2, "step-17")
        assert engine.get("/model_info").json()["incarnation"] == after["incarnation"]
        answer = engine.generate([5, 6, 7])
        assert answer["output_ids"] == tokens
        assert answer["meta_info"]["weight_versions"][0]["incarnation"] == after["incarnation"]
        assert engine.stop()[0] == 0


def until_refused(engine) -> httpx.Response | None:
    answer = engine.get("/health")
    return answer if "engine_restarting" in answer.text else None


def test_a_server_ends_with_an_engine_that_is_given_up(tiny_model):
    with served("--model", str(tiny_model), "--restart", "--max-restarts", "0") as engine:
        os.kill(engine.engine_pid, signal.SIGKILL)
        engine.http.close()
        _, error = engine.process.communicate(timeout=PATIENCE)
    assert engine.process.returncode == 3
    assert "giving up" in error


def test_a_server_ends_with_an_engine_that_was_told_to(tiny_model):
    with served("--model", str(tiny_model), "--restart") as engine:
        with SchedulerClient("ipc://" + engine.announced.split("ipc://")[1].rstrip(")\n")) as client:
            client.shutdown(timeout=PATIENCE)
        engine.http.close()
        _, error = engine.process.communicate(timeout=PATIENCE)
    assert engine.process.returncode == 0
    assert "was told to end" in error


# -- in JSON -------------------------------------------------------------------------------------------------


def parsed(lines: list[str]) -> list[dict]:
    found = [json.loads(line) for line in lines]
    assert all({"time", "level", "process", "replica", "message"} <= set(line) for line in found)
    return found


def test_json_logs_of_replicas_name_the_replica(tiny_model):
    arguments = ["--model", str(tiny_model), "--replicas", "2", "--log-format", "json"]
    with served(*arguments) as server:
        os.kill(server.engine_pid, signal.SIGKILL)
        restarted = re.compile(r"caesura:engine_restarts_total\{.*\} 1.0")
        eventually(lambda: restarted.search(server.get("/metrics").text))
        _, error = server.stop()
    lines = parsed(error.splitlines())
    assert {(line["process"], line["replica"]) for line in lines} >= {
        ("scheduler", "replica-0"), ("scheduler", "replica-1")
    }  # fmt: skip
    assert any("restart 1 of" in line["message"] and line["replica"] for line in lines)


def test_a_supervisor_and_its_scheduler_log_objects(tiny_model):
    with supervised("--model", str(tiny_model), "--log-format", "json") as running:
        with running.client() as client:
            os.kill(client.status(timeout=PATIENCE).pid, signal.SIGKILL)
            running.wait_for("restart ")
        running.wait_for("serving ")
        status = running.end()
    lines = parsed(running.told)
    assert status == 0
    assert {line["process"] for line in lines} == {"supervise", "scheduler"}


# -- as a service --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["supervise", "serve"])
def test_the_service_manager_hears_of_start_and_end(tiny_model, tmp_path, command):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(PATIENCE)
        heard: queue.Queue[str] = queue.Queue()

        def listen() -> None:
            while (message := manager.recv(4096)) != b"over":
                heard.put(message.decode())

        reader = threading.Thread(target=listen)
        reader.start()
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "300000"}
        start = supervised if command == "supervise" else served
        with start("--model", str(tiny_model), env=environment) as running:
            assert wait_until(heard, "READY=1").startswith("READY=1\nSTATUS=serving")
            if command == "supervise":
                assert wait_until(heard, "WATCHDOG=1") == "WATCHDOG=1"
                running.end()
            else:
                running.stop()
            assert wait_until(heard, "STOPPING=1") == "STOPPING=1"
        manager.sendto(b"over", str(tmp_path / "notify"))
        reader.join(PATIENCE)


def wait_until(heard: queue.Queue[str], text: str) -> str:
    while True:
        message = heard.get(timeout=PATIENCE)
        if text in message:
            return message


def test_a_scheduler_with_keys_is_asked_with_keys(tiny_model, tmp_path):
    assert CliRunner().invoke(cli, ["keygen", str(tmp_path)]).exit_code == 0
    own = {
        "curve_server_key": tmp_path / "server.key",
        "curve_client_key_file": tmp_path / "client.key_secret",
    }
    door = ("--curve-secret-key-file", str(tmp_path / "server.key_secret"))
    door += ("--curve-authorized-clients", str(tmp_path / "clients"))
    refused = CliRunner().invoke(cli, ["supervise", "--model", str(tiny_model), *door])
    assert refused.exit_code == 2
    assert "--curve-server-key" in refused.output
    flags = [each for name, path in own.items() for each in (f"--{name.replace('_', '-')}", str(path))]
    with supervised("--model", str(tiny_model), *door, *flags, "--hang-timeout", "4") as running:
        with SchedulerClient(running.endpoint, connect_timeout=PATIENCE, **own) as client:
            pid = client.status(timeout=PATIENCE).pid
            eventually(lambda: client.status(timeout=PATIENCE).uptime_s > 8)
            assert client.status(timeout=PATIENCE).pid == pid
        assert running.end() == 0
