"""The examples of the HTTP front end, run as they are."""

import os
import shutil
import subprocess
from pathlib import Path
from runpy import run_path

import pytest
from support.http_serve import make_text_model, served
from support.lora import make_adapter

pytestmark = pytest.mark.slow  # its engines take seconds to start

EXAMPLES = Path(__file__).parents[3] / "examples"
# They need a trainer or a parameter server at the other end; tests/e2e/http/test_http_control.py has those
ELSEWHERE = {
    "/init_weights_update_group", "/destroy_weights_update_group", "/update_weights_from_distributed",
    "/update_weights_from_ipc", "/load_lora_adapter_from_tensors", "/load_lora_adapter_from_distributed",
}  # fmt: skip


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_for_each_route(tmp_path):
    model = make_text_model(tmp_path / "text")
    folders = {"MODEL": str(model), "ADAPTER": str(make_adapter(model, tmp_path / "adapter", ["q_proj"]))}
    keys = {"CAESURA_API_KEY": "k1", "CAESURA_ADMIN_KEY": "k2"}
    options = "--enable-memory-saver", "--enable-lora", "--speculation", "suffix"
    with served("--model", str(model), *options, env=keys) as engine:
        done = subprocess.run(
            ["bash", str(EXAMPLES / "curl.sh")],
            capture_output=True,
            text=True,
            env={**os.environ, "URL": engine.url, "KEY": "k1", "ADMIN_KEY": "k2", **folders},
        )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr
    assert done.stdout.endswith("all done\n")
    script = (EXAMPLES / "curl.sh").read_text()
    for path in ELSEWHERE:
        assert path in script


def test_a_trainer_over_http_learns(tmp_path):
    model = make_text_model(tmp_path / "text", seed=5)
    with served("--model", str(model)) as engine:
        rewards = run_path(str(EXAMPLES / "http_trainer.py"))["main"](engine.url, str(model), steps=15)
        assert engine.get("/weight_version").json()["weight_version"] == "15"
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.3, rewards
