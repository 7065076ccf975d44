"""Several engines behind one port (``caesura serve --replicas``), with the methods that the run uses of one.

Invariant: nothing but HTTP passes here, as for any trainer that knows SGLang's routes. Each generation has a
thread that waits for its answer.
"""

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from caesura.client import EngineDied, GenerateOutput, SamplingParams, TimedOut
from caesura.client.exceptions import error_for
from caesura.io_struct import (
    AbortReqOutput,
    ContinueGenerationReqOutput,
    FinishReason,
    GetStatusReqOutput,
    PauseGenerationReqOutput,
    PauseMode,
    WeightVersionSpan,
)

from . import task
from .settings import Settings

ANSWER_S = 600.0
STOP_S = 20.0


class Server:
    """A process of ``caesura serve`` on the CPU, with further ``options``; ``url`` is its address."""

    def __init__(self, options: Mapping[str, Any], log: Path) -> None:
        given = {"--port": 0, "--dtype": "float32", "--device": "cpu", **options}
        command = [sys.executable, "-P", "-c", "from caesura.client.cli import main; main()", "serve"]
        words = [str(word) for option in given.items() for word in option]
        with open(log, "w") as stream:
            self._process = subprocess.Popen(  # noqa: S603 (our own interpreter)
                [*command, *words], stdout=subprocess.PIPE, stderr=stream, text=True, process_group=0
            )
        assert self._process.stdout is not None
        announced = self._process.stdout.readline()
        if " on http" not in announced:
            self._process.wait()
            lines = log.read_text().strip().splitlines()
            raise EngineDied(f"the server did not start: {lines[-1] if lines else announced}")
        self.url = announced.split(" on ")[1].split()[0]

    def close(self) -> None:
        """End the process, and its engines."""
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Served:
    """Starts the server; as a context manager it also ends it."""

    def __init__(self, settings: Settings, model: str, log: Path) -> None:
        options = {
            "--model": model,
            "--replicas": settings.replicas,
            "--tokenizer": "none",
            "--weights-root": Path(model).parent,
            "--num-threads": settings.engine_threads,
            "--context-len": task.CONTEXT_LEN,
            "--kv-pool-tokens": settings.kv_pool_tokens,
            "--max-running-requests": settings.max_running_requests,
        }
        self._server = Server(options, log)
        self.endpoint = self._server.url
        self._threads = ThreadPoolExecutor(2 * settings.groups_in_flight, thread_name_prefix="demo-http")

    def submit(
        self,
        input_ids: Sequence[int],
        sampling_params: SamplingParams,
        /,
        *,
        return_logprob: bool,
        adapter: str | None = None,
    ) -> "Answer":
        """Start a generation."""
        sampling = {
            "n": sampling_params.n,
            "temperature": sampling_params.temperature,
            "max_new_tokens": sampling_params.max_new_tokens,
        }
        body = {
            "input_ids": list(input_ids),
            "sampling_params": sampling,
            "return_logprob": return_logprob,
            "lora_path": adapter,
        }
        return Answer(self._threads.submit(post, f"{self.endpoint}/generate", body, ANSWER_S))

    def status(self, *, timeout: float | None = None) -> GetStatusReqOutput:
        """Return the engines' state; counts and memory are those of all."""
        info = get(f"{self.endpoint}/server_info", timeout)
        states = msgspec.convert(info["internal_states"], list[GetStatusReqOutput])
        memory = msgspec.structs.replace(
            states[0].device_memory, reserved=sum(each.device_memory.reserved for each in states)
        )
        tokens = sum(each.generated_tokens for each in states)
        return msgspec.structs.replace(states[0], generated_tokens=tokens, device_memory=memory)

    def pause(self, mode: PauseMode, /, *, timeout: float | None = None) -> PauseGenerationReqOutput:
        """Pause all of them."""
        reply = post(f"{self.endpoint}/pause_generation", {"mode": mode}, timeout)
        return msgspec.convert({**reply, "id": ""}, PauseGenerationReqOutput)

    def continue_generation(self, *, timeout: float | None = None) -> ContinueGenerationReqOutput:
        """Continue all of them."""
        reply = post(f"{self.endpoint}/continue_generation", {}, timeout)
        return msgspec.convert({**reply, "id": ""}, ContinueGenerationReqOutput)

    def abort(self, *, abort_all: bool, timeout: float | None = None) -> AbortReqOutput:
        """Abort everything in flight."""
        post(f"{self.endpoint}/abort_request", {"abort_all": abort_all}, timeout)
        return AbortReqOutput(id="", aborted=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self._threads.shutdown(cancel_futures=True)


class Answer:
    """One generation in flight."""

    def __init__(self, future: "Future[Any]") -> None:
        self._future = future

    def done(self) -> bool:
        """Return True if the answer is there."""
        return self._future.done()

    def results(self, timeout: float | None = None) -> list[GenerateOutput]:
        """Return all samples.

        Raises:
            TimedOut: they are not there after ``timeout`` seconds. EngineError: what the server said instead.
        """
        try:
            found = self._future.result(timeout)
        except TimeoutError:
            raise TimedOut(f"no answer within {timeout} s") from None
        samples = found if isinstance(found, list) else [found]
        return [_output(index, sample) for index, sample in enumerate(samples)]


def post(url: str, body: Any, timeout: float | None = None, kind: str = "application/json") -> Any:
    """Return the JSON of a POST; ``body`` is sent unchanged if it is bytes.

    Raises:
        EngineError: what the server answered, or that it is not there.
    """
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return _sent(urllib.request.Request(url, data, {"Content-Type": kind}), timeout)  # noqa: S310


def get(url: str, timeout: float | None = None) -> Any:
    """Return the JSON of a GET. Raises as :func:`post`."""
    return _sent(urllib.request.Request(url), timeout)  # noqa: S310


def _sent(request: urllib.request.Request, timeout: float | None) -> Any:
    try:
        with urllib.request.urlopen(request, timeout=timeout or ANSWER_S) as reply:  # noqa: S310
            text = reply.read()
    except urllib.error.HTTPError as refusal:
        said = json.loads(refusal.read())
        error = said.get("error", said)
        raise error_for(str(error.get("code")), str(error.get("message"))) from None
    except OSError as error:
        raise EngineDied(f"the server at {request.full_url} does not answer: {error}") from error
    return json.loads(text) if text else None


def _output(index: int, sample: dict[str, Any]) -> GenerateOutput:
    meta = sample["meta_info"]
    logprobs = meta.get("output_token_logprobs")
    reason = meta["finish_reason"]
    return GenerateOutput(
        rid=meta["id"],
        index=index,
        output_ids=sample["output_ids"],
        output_logprobs=None if logprobs is None else [value for value, *_ in logprobs],
        raw_logprobs=None,
        sampled_logprobs=None,
        routed_experts=None,
        finish_reason=FinishReason(type=reason["type"]),
        weight_versions=msgspec.convert(meta["weight_versions"], list[WeightVersionSpan]),
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta["cached_tokens"],
        seed=meta["seed"],
        num_retractions=meta["num_retractions"],
        queue_time=meta["queue_time"],
        e2e_latency=meta["e2e_latency"],
    )
