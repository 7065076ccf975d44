"""Other engines on the card: transformers, vLLM, SGLang. A process of its own, to free the card.

    python benchmarks/harness/gpu_peer.py '{"kind": "eager", "model": …, "device": "cuda", …}'

Prints one JSON object on the last line: what was measured, or ``error``.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch

WARM_TOKENS = 4


def prompts_of(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


class Eager:
    """``model.generate``, all prompts of one length, sampled at temperature 1."""

    def __init__(self, options: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM

        self.options = options
        self.device = torch.device(options["device"])
        model: Any = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.bfloat16)
        self.model = model.to(self.device).eval()

    def seconds(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Return the seconds of one whole call."""
        ids = torch.tensor(prompts, device=self.device)
        start = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=new_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert out.tolist()  # waits for the device
        return time.perf_counter() - start

    def measure(self) -> dict[str, Any]:
        """Measure decode steps by batch, and the rollout."""
        options = self.options
        steps = {}
        for batch in options["batches"]:
            prompts = prompts_of(batch, options["prompt_tokens"], options["vocab_size"], batch)
            self.seconds(prompts, WARM_TOKENS)
            short = self.seconds(prompts, WARM_TOKENS)
            longer = self.seconds(prompts, WARM_TOKENS + options["steps"])
            steps[str(batch)] = (longer - short) / options["steps"]
        prompts = prompts_of(options["requests"], options["prompt_tokens"], options["vocab_size"], 1)
        seconds = self.seconds(prompts, options["new_tokens"])
        return {"step_s": steps, "rollout_tokens_per_s": len(prompts) * options["new_tokens"] / seconds}


class Continuous:
    """``model.generate_batch``: paged KV and a scheduler."""

    def __init__(self, options: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM

        self.options = options
        model: Any = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.bfloat16)
        self.model = model.to(torch.device(options["device"])).eval()

    def measure(self) -> dict[str, Any]:
        """Measure the rollout, after one that is not counted."""
        from transformers import GenerationConfig

        options, sizes = self.options, {}
        if options["pool"]:  # its own defaults otherwise, which fill the memory
            from transformers import ContinuousBatchingConfig

            sizes["continuous_batching_config"] = ContinuousBatchingConfig(**options["pool"])
        config = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=options["new_tokens"],
            eos_token_id=-1,
            pad_token_id=0,
        )
        seconds = 0.0
        tokens = 0
        for seed in (1, 2):
            prompts = prompts_of(options["requests"], options["prompt_tokens"], options["vocab_size"], seed)
            start = time.perf_counter()
            found = self.model.generate_batch(
                inputs=prompts, generation_config=config, progress_bar=False, **sizes
            )
            seconds = time.perf_counter() - start
            tokens = sum(len(output.generated_tokens) for output in found.values())
        if tokens != options["requests"] * options["new_tokens"]:
            raise RuntimeError(f"{tokens} tokens came back of {options['requests'] * options['new_tokens']}")
        return {"rollout_tokens_per_s": tokens / seconds}


Generate = Callable[[list[list[int]]], int]
"""Runs all prompts at once and returns the number of tokens."""


def vllm(options: dict[str, Any]) -> Generate:
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


def measure_rollout(options: dict[str, Any]) -> dict[str, Any]:
    generate, seconds, tokens = SERVERS[options["kind"]](options), 0.0, 0
    for seed in (1, 2):
        prompts = prompts_of(options["requests"], options["prompt_tokens"], options["vocab_size"], seed)
        start = time.perf_counter()
        tokens = generate(prompts)
        seconds = time.perf_counter() - start
    if tokens != options["requests"] * options["new_tokens"]:
        raise RuntimeError(f"{tokens} tokens came back of {options['requests'] * options['new_tokens']}")
    return {"rollout_tokens_per_s": tokens / seconds}


SERVERS: dict[str, Callable[[dict[str, Any]], Generate]] = {"vllm": vllm, "sglang": sglang}
TRANSFORMERS: dict[str, type[Eager | Continuous]] = {"eager": Eager, "continuous": Continuous}


def main() -> None:
    options = json.loads(sys.argv[1])
    try:
        if options["kind"] in SERVERS:
            found = measure_rollout(options) | {"version": version(options["kind"])}
        else:
            found = TRANSFORMERS[options["kind"]](options).measure() | {
                "transformers": version("transformers")
            }
    except Exception as error:  # noqa: BLE001  whatever it is, the report says it and the benchmark goes on
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
