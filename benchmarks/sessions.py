"""Agents of several turns over HTTP, with and without sessions: cached part of prompts, time to first token.

Each agent asks, is answered, and adds the result of a tool to the conversation that it sends with its next
turn; all agents are at the same turn at once. What is answered is given (``trace_decode_token_ids``), and
spelt as samplers do: ``--odd`` is the share of answers that are not how the tokenizer would encode their
text. ``--others`` prompts that belong to no agent come between turns, and compete for the cache of
``--kv-tokens`` tokens. Both ways take turns, on conversations of the same lengths that share no prefix.

    python benchmarks/sessions.py --shape 0.6b --repeats 3 --json sessions.json
"""

import argparse
import asyncio
import json
import os
import random
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import httpx
from checkpoints import CHAT_TEMPLATE, SHAPES, write_checkpoint
from harness.script import begin, in_turns, parser, table, write_json
from harness.serving import serve
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from caesura.client import launch_scheduler

WORDS = ["".join(random.Random(seed).choices("aeiklmnorstu", k=2 + seed % 7)) for seed in range(800)]
PATIENCE_S = 600.0
Row = tuple[int, int, float]
"""Tokens of a prompt, those that were cached, and seconds until the first event."""


def make_tokenizer(folder: Path, size: int) -> Tokenizer:
    """Write a tokenizer of common words, and a chat template; return it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    learn = trainers.BpeTrainer(vocab_size=min(size, 1200), initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, learn)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


class Agent:
    def __init__(
        self, tokenizer: Tokenizer, options: argparse.Namespace, name: str, *, session: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._random = random.Random(name)
        self._headers = {"x-session-id": name} if session else {}
        self._messages = [self._message("user")]

    def _message(self, role: str) -> dict[str, str]:
        return {"role": role, "content": " ".join(self._random.choices(WORDS, k=self._options.words))}

    def _answer(self) -> tuple[str, list[int]]:
        text = " " + " ".join(self._random.choices(WORDS, k=self._options.words // 2))
        cut = len(text) // 2 if self._random.random() < self._options.odd else len(text)
        parts = [text[:cut], text[cut:]] if text[cut : cut + 1] != " " else [text[: cut - 1], text[cut - 1 :]]
        return text, [token for part in parts for token in self._tokenizer.encode(part).ids]

    async def turn(self, client: httpx.AsyncClient) -> Row:
        text, ids = self._answer()
        body = {"model": "default", "messages": self._messages, "trace_decode_token_ids": ids, "stream": True}
        body |= {"stream_options": {"include_usage": True}, "ignore_eos": True}
        began, first = perf_counter(), 0.0
        usage: dict[str, Any] = {}
        call = client.stream("POST", "/v1/chat/completions", json=body, headers=self._headers)
        async with call as answer:
            async for line in answer.aiter_lines():
                first = first or perf_counter() - began
                if line.startswith("data: {"):
                    usage = json.loads(line[6:]).get("usage") or usage
        self._messages += [{"role": "assistant", "content": text}, self._message("tool")]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], first


async def episodes(
    url: str, tokenizer: Tokenizer, options: argparse.Namespace, seed: int, *, sessions: bool
) -> list[list[Row]]:
    """Return the rows of every turn of all agents."""
    name = f"{seed}-{sessions}"
    agents = [
        Agent(tokenizer, options, f"{name}-{number}", session=sessions) for number in range(options.agents)
    ]
    other = random.Random(name)
    turns = []
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        for _ in range(options.turns):
            turns.append(await asyncio.gather(*(agent.turn(client) for agent in agents)))
            for _ in range(options.others):
                text = " ".join(other.choices(WORDS, k=4 * options.words))
                await client.post("/generate", json={"text": text, "sampling_params": {"max_new_tokens": 1}})
    return turns


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--shape", choices=tuple(SHAPES), default="tiny")
    made.add_argument("--agents", type=int, default=8)
    made.add_argument("--turns", type=int, default=6)
    made.add_argument("--words", type=int, default=40, help="words of a message; an answer has half as many")
    made.add_argument("--odd", type=float, default=0.25)
    made.add_argument("--others", type=int, default=4)
    made.add_argument("--kv-tokens", type=int, default=1 << 13)
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--repeats", type=int, default=3)
    options = made.parse_args()
    console = Console()
    facts = begin(console, shape=options.shape)
    sizes: dict[str, Any] = {"max_running_requests": options.agents, "kv_pool_tokens": options.kv_tokens}
    with tempfile.TemporaryDirectory() as folder:
        base = write_checkpoint(Path(folder) / "base", SHAPES[options.shape])
        tokenizer = make_tokenizer(base, SHAPES[options.shape].vocab_size)
        with (
            launch_scheduler(base, num_threads=options.threads, log_level="WARNING", **sizes) as engine,
            serve(engine.endpoint) as (url, _),
        ):

            def run(seed: int, *, sessions: bool) -> list[list[Row]]:
                return asyncio.run(episodes(url, tokenizer, options, seed, sessions=sessions))

            ways = {name: partial(run, sessions=name == "sessions") for name in ("without", "sessions")}
            found = in_turns(ways, options.repeats)
    rows = []
    for turn in range(options.turns):
        cells = [str(turn + 1), str(median(row[0] for one in found["sessions"] for row in one[turn]))]
        for name in ways:
            seen = [row for one in found[name] for row in one[turn]]
            hits = sum(cached for _, cached, _ in seen) / sum(prompt for prompt, _, _ in seen)
            cells += [f"{hits:.0%}", f"{1e3 * median(first for _, _, first in seen):,.0f}"]
        rows.append(cells)
    headings = ["turn", "prompt", "cached without", "ms to first", "cached in sessions", "ms to first"]
    console.print(table(None, headings, rows))
    write_json(options.json, {**facts, **vars(options), "turns": found, "rows": rows})


if __name__ == "__main__":
    main()
