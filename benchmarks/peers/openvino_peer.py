"""OpenVINO GenAI's side of the rollout benchmark: its continuous batching, driven over stdin and stdout.

``start`` first converts the checkpoint, so a cold start is one with an empty cache of conversions. Products,
attention and KV are bfloat16 where OpenVINO has that for the processor, else float32, as ``settings`` say.
There is no pause, and weights stay as they are.
"""

import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from json_lines import claim_stdout, serve

Prompt = list[int]
NO_EOS = 2
"""Has to be named, and is ignored."""


class OpenVinoPeer:
    """The operations ``start`` and ``rollout``."""

    def __init__(self) -> None:
        self._pipeline: Any = None

    def start(
        self,
        model: str,
        threads: int,
        prompt: Prompt,
        kv_tokens: int,
        kv_bytes_per_token: int,
        quantization: str = "auto",
        **_not_applicable: Any,
    ) -> dict[str, Any]:
        """Convert the model, load it and generate the first token."""
        import openvino
        import openvino_genai as genai
        from optimum.intel import OVModelForCausalLM

        with tempfile.TemporaryDirectory() as folder:
            # Above a billion parameters the default would be int8. It brings quantised activations with it.
            converted = OVModelForCausalLM.from_pretrained(
                model, export=True, compile=False, load_in_8bit=quantization == "int8"
            )
            converted.save_pretrained(folder)
            scheduler = genai.SchedulerConfig()
            scheduler.cache_size = max(1, -(-kv_tokens * kv_bytes_per_token >> 30))
            scheduler.max_num_seqs = 256
            scheduler.max_num_batched_tokens = 4096
            scheduler.enable_prefix_caching = True
            has_bf16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
            precision = "bf16" if has_bf16 else "f32"
            properties = {
                "INFERENCE_PRECISION_HINT": precision,
                "KV_CACHE_PRECISION": precision,
                "INFERENCE_NUM_THREADS": threads,
            }
            self._pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
        self._generate([prompt], 1)
        names = ("openvino", "openvino-genai", "optimum-intel", "torch")
        return {"versions": {name: version(name) for name in names}, "settings": {"precision": precision}}

    def rollout(self, prompts: Sequence[Prompt], max_new_tokens: int, samples: int) -> dict[str, Any]:
        start = time.perf_counter()
        tokens = self._generate([prompt for prompt in prompts for _ in range(samples)], max_new_tokens)
        return {"seconds": time.perf_counter() - start, "tokens": tokens}

    def _generate(self, prompts: Sequence[Prompt], max_new_tokens: int) -> int:
        import numpy as np
        import openvino
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.max_new_tokens = max_new_tokens
        config.ignore_eos = True
        config.eos_token_id = NO_EOS
        config.stop_token_ids = {NO_EOS}
        config.do_sample = True
        config.temperature = 1.0
        config.logprobs = 1
        config.apply_chat_template = False
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = self._pipeline.generate(inputs, [config] * len(inputs))
        return sum(len(ids) for result in results for ids in result.m_generation_ids)


def main() -> None:
    channel = claim_stdout()
    peer = OpenVinoPeer()
    serve(channel, {"start": peer.start, "rollout": peer.rollout})


if __name__ == "__main__":
    main()
