"""Mismatch of log-probabilities: engines beside transformers, under the same weights, over a training run.

A small policy learns a language of its own by transformers in float32. After each update engines get the
weights, rounded to bfloat16, and sample; transformers scores these samples in bfloat16 and in float32 under
the rounded weights. With ``--vllm``, an interpreter that has vLLM, vLLM scores the bfloat16 engine's samples
at every ``--every``-th update, too. Printed are gaps over all tokens: mean, 99th percentile, maximum, and k3,
the mean of ``r - 1 - log r`` with r the ratio of the trainer's to the engine's probability.

    python benchmarks/mismatch.py --updates 100 --vllm V/bin/python --json mismatch.json
"""

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.engines import OP_TIMEOUT_S, PEERS, START_TIMEOUT_S, vllm
from harness.peer_process import PeerProcess
from harness.script import begin, parser, table, write_json
from rich.console import Console
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from caesura.client import SamplingParams, SchedulerClient, launch_scheduler

VOCAB, CONTEXT, PROMPT, NEW_TOKENS = 1024, 128, 16, 48
ROWS = 16
"""Sequences of a training batch, and prompts of each engine after an update."""
STEPS = 4
"""Optimizer steps of an update."""
SUCCESSORS = 8
"""Tokens that can follow each pair of tokens in the language."""
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
ENGINES: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, deterministic": {"dtype": "bfloat16", "deterministic": True},
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
    "FP8 weights": {"dtype": "bfloat16"},
    "int8 weights": {"dtype": "bfloat16", "quantization": "int8"},
    "int4 weights": {"dtype": "bfloat16", "quantization": "int4"},
    "MXFP4 weights": {"dtype": "bfloat16", "quantization": "mxfp4"},
}
KV_TOKENS = 1 << 14


class Language:
    """Sentences in which one of a few tokens follows each pair, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._next = self._rng.integers(3, VOCAB, size=(64, 64, SUCCESSORS))
        weights = self._rng.dirichlet(np.full(SUCCESSORS, 0.5), size=(64, 64))
        self._limits = weights.cumsum(-1)

    def sentences(self, count: int, length: int) -> torch.Tensor:
        """Return int64 [count, length]."""
        found = self._rng.integers(3, VOCAB, size=(count, length))
        for i in range(2, length):
            a, b = found[:, i - 2] % 64, found[:, i - 1] % 64
            drawn = (self._limits[a, b] < self._rng.random((count, 1))).sum(1).clip(max=SUCCESSORS - 1)
            found[:, i] = self._next[a, b, drawn]
        return torch.from_numpy(found)


class Trainer:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
        )
        self.model = Qwen3ForCausalLM(config)
        self.language = Language(seed)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.loss = float("nan")

    def step(self) -> None:
        tokens = self.language.sentences(ROWS, CONTEXT)
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.loss = float(loss.detach())

    def rounded(self) -> dict[str, torch.Tensor]:
        return {name: tensor.bfloat16() for name, tensor in self.model.state_dict().items()}

    def save(self, folder: Path, **config: Any) -> Path:
        self.model.to(torch.bfloat16).save_pretrained(folder)
        self.model.float()
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config), encoding="utf-8")
        return folder


@torch.inference_mode()
def scored(model: Any, rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the log-probabilities [rows * NEW_TOKENS] of what follows each prompt."""
    tokens = torch.tensor(rows)
    logits = model(input_ids=tokens[:, :-1]).logits[:, PROMPT - 1 :].float()
    found = torch.log_softmax(logits, -1).gather(2, tokens[:, PROMPT:, None])
    return found.reshape(-1).numpy()


def sampled(
    client: SchedulerClient, prompts: list[list[int]], seed: int
) -> tuple[list[list[int]], np.ndarray]:
    params = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=1.0, seed=seed, ignore_eos=True)
    outputs = client.generate(prompts, params, return_logprob=True)
    rows = [[*prompt, *output.output_ids] for prompt, output in zip(prompts, outputs, strict=True)]
    return rows, np.concatenate([np.asarray(output.output_logprobs) for output in outputs])


class Gaps:
    """Differences of log-probabilities by pair of engine and reference."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], list[np.ndarray]] = defaultdict(list)

    def note(self, engine: str, own: np.ndarray, references: dict[str, np.ndarray]) -> None:
        for name, theirs in references.items():
            self.found[engine, name].append(theirs.astype(np.float64) - own)

    def rows(self) -> list[dict[str, Any]]:
        made = []
        for (engine, reference), parts in self.found.items():
            ratio = np.concatenate(parts)
            gap = np.abs(ratio)
            figures = {
                "tokens": len(gap),
                "mean": float(gap.mean()),
                "p99": float(np.quantile(gap, 0.99)),
                "max": float(gap.max()),
                "k3": float((np.expm1(ratio) - ratio).mean()),
            }
            made.append({"engine": engine, "reference": reference, **figures})
        return made


def start_vllm(stack: ExitStack, base: Path, options: argparse.Namespace) -> PeerProcess:
    engine = vllm(options.vllm, options.threads, "auto", base.parent / "cache")
    command = [engine.python, str(PEERS / engine.script)]
    peer = stack.enter_context(PeerProcess(command, engine.environment, base.parent / "vllm.log"))
    asked = {"context_len": CONTEXT, "kv_tokens": KV_TOKENS, "kv_bytes_per_token": 2 * 2 * 2 * 64 * 4}
    peer.call("start", START_TIMEOUT_S, prompt=[3, 4, 5], model=str(base), threads=options.threads, **asked)
    return peer


def measure(
    trainer: Trainer, folder: Path, options: argparse.Namespace, console: Console
) -> list[dict[str, Any]]:
    gaps = Gaps()
    base = trainer.save(folder / "base")
    fp8 = trainer.save(folder / "fp8", quantization_config=FP8)
    with ExitStack() as stack:
        shared: dict[str, Any] = {
            "num_threads": options.threads,
            "kv_pool_tokens": KV_TOKENS,
            "log_level": "ERROR",
        }
        engines = {
            name: stack.enter_context(launch_scheduler(fp8 if "FP8" in name else base, **how, **shared))
            for name, how in ENGINES.items()
        }
        peer = None if options.vllm is None else start_vllm(stack, base, options)
        for update in range(options.updates + 1):
            for _ in range(STEPS if update else 0):
                trainer.step()
            weights = trainer.rounded()
            references = {}
            for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
                references[name] = AutoModelForCausalLM.from_config(trainer.model.config).to(dtype).eval()
                references[name].load_state_dict(weights)
            prompts = trainer.language.sentences(ROWS, PROMPT).tolist()
            for name, client in engines.items():
                client.update_weights_from_tensor(weights, weight_version=str(update))
                rows, own = sampled(client, prompts, update)
                found = {reference: scored(model, rows) for reference, model in references.items()}
                gaps.note(name, own, found)
                if name == "bfloat16":
                    gaps.note("transformers, bfloat16", found["bfloat16"], {"float32": found["float32"]})
                    if peer is not None and update % options.every == 0:
                        path = str(trainer.save(folder / f"version-{update}"))
                        peer.call("update", OP_TIMEOUT_S, path=path)
                        theirs = peer.call("score", OP_TIMEOUT_S, rows=rows, start=PROMPT)["logprobs"]
                        gaps.note("vLLM, bfloat16", np.asarray(theirs).reshape(-1), found)
            if update % options.every == 0:
                console.print(f"update {update}: loss {trainer.loss:.3f}")
    return gaps.rows()


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--updates", type=int, default=100)
    made.add_argument("--every", type=int, default=25, help="updates between two measurements of vLLM")
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--vllm", help="interpreter that has vLLM")
    options = made.parse_args()
    console = Console()
    facts = begin(console, vocabulary=VOCAB, updates=options.updates)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Trainer(options.seed), Path(folder), options, console)
    headings = ["engine", "transformers in", "tokens", "mean", "p99", "max", "k3"]
    cells = [
        (row["engine"], row["reference"], f"{row['tokens']:,}", *(f"{row[key]:.1e}" for key in headings[3:]))
        for row in results
    ]
    console.print(table("Gaps of log-probabilities", headings, cells, words=2))
    write_json(options.json, {**facts, **vars(options), "results": results})


if __name__ == "__main__":
    main()
