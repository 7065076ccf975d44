"""``caesura serve`` as a process, and a client of it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from .engine_template import CLI, CODE, Process


class ServedEngine:
    """A running ``caesura serve``: ``http`` is a client of it, ``url`` its address."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        command = [sys.executable, CODE, CLI, "serve", "--port", "0", *arguments]
        if not {"--endpoint", "--worker-urls"} & set(arguments):
            command += ["--num-threads", "1"]
        self.process = Process(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )
        assert self.process.stdout is not None
        self.announced = self.process.stdout.readline()
        if " on http" not in self.announced:
            output, error = self.process.communicate()
            raise RuntimeError(f"caesura serve did not start: {self.announced}{output}{error}")
        self.url = self.announced.split(" on ")[1].split()[0]
        self.http = httpx.Client(base_url=self.url, timeout=None)

    def post(self, path: str, body: object = None, **options: Any) -> httpx.Response:
        """Post JSON, or no body at all where it is None."""
        return self.http.post(path, content=None if body is None else json.dumps(body), **options)

    def ok(self, path: str, body: object = None, **options: Any) -> Any:
        """Return the JSON of a POST that must succeed."""
        response = self.post(path, {} if body is None else body, **options)
        assert response.status_code == 200, response.text
        return response.json()

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def generate(self, input_ids: list[int] | None = None, **fields: Any) -> Any:
        sampling = {
            "temperature": 0.0,
            "max_new_tokens": 8,
            "ignore_eos": True,
            **fields.pop("sampling_params", {}),
        }
        given = {"input_ids": input_ids} if input_ids is not None else {}
        return self.ok("/generate", {**given, "sampling_params": sampling, **fields})

    @property
    def engine_pid(self) -> int:
        return int(self.get("/server_info").json()["internal_states"][0]["pid"])

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        _, error = self.process.communicate()
        return self.process.returncode, error


class WeightSyncClient:
    """vLLM's ``VLLMWeightSyncClient`` over HTTP; ``tamper`` changes what is sent."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine
        self.tamper = lambda update_info: update_info

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._engine.http.post(
            "/init_weight_transfer_engine", json={"init_info": init_info}
        ).raise_for_status()

    def start_weight_update(self) -> None:
        self._engine.http.post("/start_weight_update").raise_for_status()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        body = {"update_info": self.tamper(update_info)}
        self._engine.http.post("/update_weights", json=body).raise_for_status()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        body = {} if weight_version is None else {"weight_version": weight_version}
        self._engine.http.post("/finish_weight_update", json=body).raise_for_status()


@contextmanager
def served(*arguments: str, **options: Any) -> Iterator[ServedEngine]:
    engine = ServedEngine(*arguments, **options)
    try:
        yield engine
    finally:
        if engine.process.stderr is not None and not engine.process.stderr.closed:  # else it was stopped
            engine.stop()


def make_text_model(path: Path, seed: int = 3) -> Path:
    """Write a tiny checkpoint with a byte-level tokenizer and a chat template."""
    from support.checkpoints import make_checkpoint
    from support.tokenizers import make_byte_level

    make_checkpoint(path, "qwen3", tied=True, seed=seed, vocab_size=400, max_position_embeddings=512)
    make_byte_level(path, vocab_size=400)
    return path
