"""transformers' side of the rollout benchmark: ``model.generate`` on one batch, or its continuous batching,
driven over stdin and stdout.

There is no server here, hence nothing to pause, to resume or to update under load; the driver prints a dash.
"""

import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from json_lines import claim_stdout, serve

Prompt = list[int]
PAGE_TOKENS = 256


class TransformersPeer:
    """The operations ``start`` and ``rollout``. Prompts of one call have one length, so nothing is padded."""

    def __init__(self) -> None:
        self._model: Any = None
        self._batching: Any = None

    def start(
        self,
        model: str,
        threads: int,
        prompt: Prompt,
        kv_tokens: int,
        continuous_batching: bool,
        **_not_applicable: Any,
    ) -> dict[str, Any]:
        """Load the model and generate the first token."""
        import torch
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig

        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
        if continuous_batching:
            pages = -(-kv_tokens // PAGE_TOKENS)
            self._batching = ContinuousBatchingConfig(
                page_size=PAGE_TOKENS, num_blocks=pages, max_batch_tokens=4096, return_logprobs=True
            )
        self._generate([prompt], 1)
        return {"versions": {name: version(name) for name in ("transformers", "torch")}}

    def rollout(self, prompts: Sequence[Prompt], max_new_tokens: int, samples: int) -> dict[str, Any]:
        start = time.perf_counter()
        tokens = self._generate(prompts, max_new_tokens, samples)
        return {"seconds": time.perf_counter() - start, "tokens": tokens}

    def _generate(self, prompts: Sequence[Prompt], max_new_tokens: int, samples: int = 1) -> int:
        import torch
        from transformers import GenerationConfig

        config = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_new_tokens,
            num_return_sequences=1 if self._batching else samples,  # a manager keeps its first
            eos_token_id=-1 if self._batching else None,  # ignore_eos
            pad_token_id=0,
        )
        if self._batching:
            repeated = [prompt for prompt in prompts for _ in range(samples)]
            results = self._model.generate_batch(
                repeated, config, continuous_batching_config=self._batching, persistent_manager=True
            )
            return sum(len(result.generated_tokens) for result in results.values())
        inputs = torch.tensor(prompts)
        with torch.inference_mode():
            outputs = self._model.generate(
                input_ids=inputs, attention_mask=torch.ones_like(inputs), generation_config=config
            )
        return int(outputs.shape[0] * (outputs.shape[1] - inputs.shape[1]))


def main() -> None:
    channel = claim_stdout()
    peer = TransformersPeer()
    serve(channel, {"start": peer.start, "rollout": peer.rollout})


if __name__ == "__main__":
    main()
