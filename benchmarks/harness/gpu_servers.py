"""vLLM or SGLang on the card, as libraries: the rollout. A process of its own, to free the card.

    python benchmarks/harness/gpu_servers.py '{"kind": "vllm", "model": …}'

Prints one JSON object on the last line: what was measured, or ``error``.
"""

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.gpu_transformers import prompts_of

Generate = Callable[[list[list[int]]], int]
"""Runs all prompts at once and returns the number of tokens."""


def vllm(options: dict[str, Any]) -> Generate:
    """Run ``LLM.generate`` over token ids."""
    package = import_module("vllm")
    engine = package.LLM(
        options["model"], skip_tokenizer_init=True, max_model_len=options["context_len"], dtype="bfloat16"
    )
    params = package.SamplingParams(
        max_tokens=options["new_tokens"], temperature=1.0, ignore_eos=True, detokenize=False
    )

    def generate(prompts: list[list[int]]) -> int:
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


def sglang(options: dict[str, Any]) -> Generate:
    """Run ``Engine.generate`` over token ids."""
    package = import_module("sglang")
    engine = package.Engine(
        model_path=options["model"],
        skip_tokenizer_init=True,
        context_length=options["context_len"],
        dtype="bfloat16",
    )
    params = {"max_new_tokens": options["new_tokens"], "temperature": 1.0, "ignore_eos": True}

    def generate(prompts: list[list[int]]) -> int:
        return sum(
            len(output["output_ids"]) for output in engine.generate(input_ids=prompts, sampling_params=params)
        )

    return generate


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Measure the second of two rollouts."""
    generate, seconds, tokens = ENGINES[options["kind"]](options), 0.0, 0
    for seed in (1, 2):
        prompts = prompts_of(options["requests"], options["prompt_tokens"], options["vocab_size"], seed)
        start = time.perf_counter()
        tokens = generate(prompts)
        seconds = time.perf_counter() - start
    if tokens != options["requests"] * options["new_tokens"]:
        raise RuntimeError(f"{tokens} tokens came back of {options['requests'] * options['new_tokens']}")
    return {"rollout_tokens_per_s": tokens / seconds, "version": version(options["kind"])}


ENGINES: dict[str, Callable[[dict[str, Any]], Generate]] = {"vllm": vllm, "sglang": sglang}


def main() -> None:
    options = json.loads(sys.argv[1])
    try:
        found = measure(options)
    except Exception as error:  # noqa: BLE001  whatever it is, the report says it and the benchmark goes on
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
