"""Cost of the HTTP server: the same requests to an engine through its socket and through the server.

256 requests are in flight all the time on the tiny shape. *Direct* is ``AsyncSchedulerClient`` in this
process, which waits for results or reads streams; the others go through ``caesura serve --endpoint`` of the
same engine: SGLang's ``/generate`` with token ids in, text, ids and log-probabilities out, undivided,
streamed, or streamed with a ``stream_interval`` of 8, OpenAI's ``/v1/completions``, and streamed chats,
Responses and Messages, one of them with tools, whose answers are parsed for calls. Figures are medians. The
load is made by this process, which has the cores in common with engine and server, as a trainer would. The
time of a core that each process takes for a token depends less than rates on what else the machine does.

A pause is timed under the same load, by the socket and by HTTP in turns. vLLM's server, given an interpreter
that has it, gets the same requests at ``/v1/completions``.

    python benchmarks/frontend.py --vllm-python /opt/peer-vllm/bin/python --json frontend.json
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from checkpoints import write_checkpoint
from harness import engines
from harness.http_load import Connection, flood
from harness.script import begin, parser, table, write_json
from harness.serving import serve
from harness.workload import WORKLOADS
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from caesura.client import AsyncSchedulerClient, SamplingParams, SchedulerClient, launch_scheduler

SHAPE = WORKLOADS["tiny"]
PROMPT_TOKENS, NEW_TOKENS = SHAPE.prompt_tokens, SHAPE.new_tokens
START_TIMEOUT_S = 600.0
_COMPLETE = rb'"(finish_reason|type)": ?"length"|"max_output_tokens"}|"stop_reason": ?"max_tokens"'
Prompts = list[list[list[int]]]
"""[connections][requests of one after the other][token ids]"""


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer of the model's size: each token beyond the bytes is a short word."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    merges = []
    for left in alphabet:
        for right in alphabet:
            if len(vocabulary) == SHAPE.vocab_size:
                break
            vocabulary[left + right] = len(vocabulary)
            merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config["chat_template"] = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_prompts(connections: int, each: int, seed: int) -> Prompts:
    rng = random.Random(seed)
    return [
        [[rng.randrange(SHAPE.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(each)]
        for _ in range(connections)
    ]


def native_body(prompt: list[int], *, stream: bool, interval: int = 1) -> bytes:
    sampling = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "stream_interval": interval}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "stream": stream}
    return json.dumps(body).encode()


def openai_body(prompt: list[int]) -> bytes:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": NEW_TOKENS,
        "temperature": 1.0,
        "ignore_eos": True,
    }
    return json.dumps(body).encode()


def chat_body(prompt: list[int], *, tools: bool = False) -> bytes:
    """Return a streamed chat in a form that all three fronts read, of about as many tokens as ``prompt``."""
    text = "".join(chr(97 + token % 26) for token in prompt for _ in range(2))
    body: dict[str, Any] = {"model": "tiny", "stream": True, "ignore_eos": True, "temperature": 1.0}
    body |= {"messages": [{"role": "user", "content": text}], "max_tokens": NEW_TOKENS}
    if tools:
        body["tools"] = [
            {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
        ]
    return json.dumps(body).encode()


def response_body(prompt: list[int]) -> bytes:
    body = json.loads(chat_body(prompt))
    renamed = {"input": body.pop("messages"), "max_output_tokens": body.pop("max_tokens")}
    return json.dumps({**body, **renamed}).encode()


def bodies(prompts: Prompts, make: Callable[[list[int]], bytes]) -> list[list[bytes]]:
    return [[make(prompt) for prompt in mine] for mine in prompts]


async def direct(client: AsyncSchedulerClient, prompts: Prompts, *, stream: bool = False) -> float:
    """Return the seconds for all prompts, as many at once as there are connections."""
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)

    async def work(mine: list[list[int]]) -> None:
        for prompt in mine:
            if stream:
                handle = await client.submit(prompt, params, stream=True, return_logprob=True)
                count = sum([len(delta.output_ids) async for delta in handle])
            else:
                count = len((await client.generate(prompt, params, return_logprob=True)).output_ids)
            assert count == NEW_TOKENS

    start = time.perf_counter()
    await asyncio.gather(*map(work, prompts))
    return time.perf_counter() - start


async def through(url: str, path: str, requests: Sequence[Sequence[bytes]]) -> float:
    """Return the seconds for all requests through a server; every answer is checked to be complete."""
    seconds, answers = await flood(url, path, requests)
    for answer in answers:
        assert re.search(_COMPLETE, answer), answer[-300:]
    return seconds


@contextlib.contextmanager
def serving_vllm(model: Path, options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Run vLLM's server; yield its address once it is healthy."""
    url, log = f"http://127.0.0.1:{options.port}", folder / "vllm.log"
    environment = engines.vllm(options.vllm_python, options.threads, "auto", folder).environment
    environment["VLLM_CPU_KVCACHE_SPACE"] = "2"
    given = {
        "model": model, "served-model-name": "tiny", "host": "127.0.0.1", "port": options.port,
        "dtype": "bfloat16", "max-num-seqs": 256, "max-model-len": SHAPE.context_len,
    }  # fmt: skip
    command = [options.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--no-enable-log-requests"]
    command += [text for name, value in given.items() for text in (f"--{name}", str(value))]
    with (
        log.open("wb") as file,
        subprocess.Popen(command, stdout=file, stderr=file, env=environment) as process,
    ):
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not _is_healthy(url):
                if time.monotonic() > deadline or process.poll() is not None:
                    raise SystemExit(f"no server at {url}:\n{log.read_text()[-3000:]}")
                time.sleep(0.2)
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _is_healthy(url: str) -> bool:
    with (
        contextlib.suppress(urllib.error.URLError, ConnectionError),
        urllib.request.urlopen(f"{url}/health", timeout=5),  # noqa: S310 (our own address)
    ):
        return True
    return False


async def throughput(
    client: AsyncSchedulerClient,
    url: str,
    pids: dict[str, int],
    options: argparse.Namespace,
    console: Console,
) -> tuple[dict[str, list[float]], dict[str, dict[str, list[float]]]]:
    """Return each round's tokens per second, and microseconds of a core per token by process, by way."""

    def posted(path: str, make: Callable[[list[int]], bytes]) -> Callable[[Prompts], Awaitable[float]]:
        return lambda prompts: through(url, path, bodies(prompts, make))

    ways: dict[str, Callable[[Prompts], Awaitable[float]]] = {
        "direct": partial(direct, client),
        "direct, streamed": partial(direct, client, stream=True),
        "/generate": posted("/generate", partial(native_body, stream=False)),
        "/generate, streamed": posted("/generate", partial(native_body, stream=True)),
        "/generate, streamed by 8": posted("/generate", partial(native_body, stream=True, interval=8)),
        "/v1/completions": posted("/v1/completions", openai_body),
        "chat, streamed": posted("/v1/chat/completions", chat_body),
        "chat with tools, streamed": posted("/v1/chat/completions", partial(chat_body, tools=True)),
        "/v1/responses, streamed": posted("/v1/responses", response_body),
        "/v1/messages, streamed": posted("/v1/messages", chat_body),
    }
    processes = {name: psutil.Process(pid) for name, pid in pids.items()}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    costs: dict[str, dict[str, list[float]]] = {way: {} for way in ways}
    tokens = options.connections * options.each * NEW_TOKENS
    for number in range(-1, options.rounds):
        for place, (way, run) in enumerate(ways.items()):
            prompts = make_prompts(options.connections, options.each, 100 * number + place)
            before = used(processes)
            seconds = await run(prompts)
            if number >= 0:  # the first round warms up
                rates[way].append(tokens / seconds)
                for name, total in used(processes).items():
                    costs[way].setdefault(name, []).append(1e6 * (total - before[name]) / tokens)
                console.print(f"  round {number + 1}: {way}: {tokens / seconds:,.0f} tok/s")
    return rates, costs


def used(processes: dict[str, psutil.Process]) -> dict[str, float]:
    """Return the seconds of a core that each process has taken, and the front end's in the kernel alone."""
    times = {name: process.cpu_times() for name, process in processes.items()}
    totals = {name: each.user + each.system for name, each in times.items()}
    return {**totals, "front end in the kernel": times["front end"].system}


async def pauses(
    client: AsyncSchedulerClient, url: str, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the milliseconds until a pause is answered under load, by socket and by HTTP in turns."""
    rng = random.Random(7)
    load = asyncio.ensure_future(direct(client, make_prompts(options.connections, 1000, 7)))
    control = await Connection.open(url)
    results: dict[str, list[float]] = {"direct": [], "HTTP": []}
    try:
        for number in range(2 * options.pauses):
            await asyncio.sleep(0.03 + rng.random() / 50)  # any phase of a step
            start = time.perf_counter()
            if number % 2:
                await control.post("/pause_generation", b'{"mode": "in_place"}')
            else:
                await client.pause("in_place")
            results["HTTP" if number % 2 else "direct"].append(1e3 * (time.perf_counter() - start))
            if number % 2:
                await control.post("/continue_generation", b'{"torch_empty_cache": false}')
            else:
                await client.continue_generation(torch_empty_cache=False)
    finally:
        control.close()
        load.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await load
        await client.abort(abort_all=True)
    return results


async def on_caesura(
    engine: SchedulerClient, url: str, server: int, options: argparse.Namespace, console: Console
) -> dict[str, Any]:
    async with AsyncSchedulerClient(engine.endpoint) as client:
        pids = {"engine": (await client.status()).pid, "front end": server, "load": os.getpid()}
        rates, costs = await throughput(client, url, pids, options, console)
        return {"tokens_per_s": rates, "us_per_token": costs, "pause_ms": await pauses(client, url, options)}


def on_vllm(url: str, options: argparse.Namespace, console: Console) -> list[float]:
    """Return the tokens per second of every round at vLLM's ``/v1/completions``."""
    tokens = options.connections * options.each * NEW_TOKENS
    rates = []
    for number in range(-1, options.rounds):
        prompts = make_prompts(options.connections, options.each, 100 * number)
        rate = tokens / asyncio.run(through(url, "/v1/completions", bodies(prompts, openai_body)))
        if number >= 0:
            rates.append(rate)
            console.print(f"  round {number + 1}: vLLM's /v1/completions: {rate:,.0f} tok/s")
    return rates


def report(results: dict[str, Any], options: argparse.Namespace) -> list[Table]:
    found: dict[str, list[float]] = results["tokens_per_s"]
    direct, rates, pauses = found["direct"], [], []
    for way, values in found.items():
        pairs = [a / b for a, b in zip(values, direct, strict=False)]
        rate = median(values)
        rates.append([way, f"{rate:,.0f}", f"{rate / median(direct):.0%}", f"{median(pairs):.0%}"])
    costs: dict[str, dict[str, list[float]]] = results["us_per_token"]
    names = list(next(iter(costs.values())))
    each = [[way, *(f"{median(found[name]):.0f}" for name in names)] for way, found in costs.items()]
    for way, times in results["pause_ms"].items():
        ordered = sorted(times)
        figures = (median(ordered), ordered[len(ordered) * 9 // 10], ordered[-1])
        pauses.append([way, *(f"{value:.1f}" for value in figures)])
    title = f"{options.connections} requests at once, {PROMPT_TOKENS} in, {NEW_TOKENS} out, tiny shape"
    return [
        table(title, ["way", "tok/s", "of direct", "pairwise"], rates),
        table("microseconds of a core per token", ["way", *names], each),
        table("pause acknowledged under this load, ms", ["way", "p50", "p90", "max"], pauses),
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--connections", type=int, default=256)
    made.add_argument("--each", type=int, default=2, help="requests per connection and round (default: 2)")
    made.add_argument("--rounds", type=int, default=5, help="of each way (default: 5)")
    made.add_argument("--pauses", type=int, default=100, help="of each way (default: 100)")
    cores = len(os.sched_getaffinity(0))
    made.add_argument("--threads", type=int, default=cores, help="the engine's (default: all cores)")
    made.add_argument("--port", type=int, default=31200, help="vLLM's")
    made.add_argument("--vllm-python", default=os.environ.get("CAESURA_BENCH_VLLM_PYTHON"))
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options, console = parse(argv), Console()
    facts = begin(console, threads=options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = write_checkpoint(folder / "tiny", "tiny", seed=0)
        write_tokenizer(model)
        launched = launch_scheduler(
            model,
            num_threads=options.threads,
            max_running_requests=options.connections,
            log_level="WARNING",
        )
        with (
            launched as engine,
            serve(engine.endpoint, "--served-model-name", "tiny", "--tool-call-parser", "hermes") as (
                url,
                pid,
            ),
        ):
            results = asyncio.run(on_caesura(engine, url, pid, options, console))
        if options.vllm_python:
            with serving_vllm(model, options, folder) as url:
                results["tokens_per_s"]["vLLM's /v1/completions"] = on_vllm(url, options, console)
    for each in report(results, options):
        console.print(each)
    write_json(options.json, {"machine": facts, "options": vars(options), **results})


if __name__ == "__main__":
    main()
