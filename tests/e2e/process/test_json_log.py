"""Log lines of every process under ``--log-format json``: objects with time, level and replica."""

import json
import os
import re
import signal

import pytest
from support.http_serve import served
from support.supervised import PATIENCE, supervised
from support.waiting import eventually

pytestmark = pytest.mark.long  # its engines take seconds to start


def parsed(lines: list[str]) -> list[dict]:
    found = [json.loads(line) for line in lines]
    assert all({"time", "level", "process", "replica", "message"} <= set(line) for line in found)
    return found


def test_engines_and_their_server_log_objects_that_name_the_replica(tiny_model):
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
