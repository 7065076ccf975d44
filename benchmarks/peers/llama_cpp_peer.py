"""llama.cpp's side of the rollout benchmark: its C API in this process, driven over stdin and stdout.

``start`` first writes the checkpoint as GGUF without a vocabulary, as bfloat16 or Q8_0; KV is bfloat16. Every
sequence has llama.cpp's own sampler, which returns no log-probabilities. There is no pause, and weights stay
as they are.
"""

import json
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from json_lines import claim_stdout, serve
from safetensors import deserialize

Prompt = list[int]
BATCH_TOKENS = 4096
MOST_SEQUENCES = 256
"""A limit of llama.cpp."""


class LlamaCppPeer:
    """The operations ``start`` and ``rollout``."""

    def __init__(self) -> None:
        self._context: Any = None
        self._batch: Any = None
        self._samplers: list[Any] = []

    def start(
        self,
        model: str,
        threads: int,
        prompt: Prompt,
        context_len: int,
        kv_tokens: int,
        quantization: str = "auto",
        **_not_applicable: Any,
    ) -> dict[str, Any]:
        """Convert the model, load it and generate the first token."""
        llama_cpp.llama_backend_init()
        kind = gguf.GGMLQuantizationType.Q8_0 if quantization == "int8" else gguf.GGMLQuantizationType.BF16
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.gguf")
            convert(Path(model), path, kind)
            loaded = llama_cpp.llama_model_load_from_file(bytes(path), llama_cpp.llama_model_default_params())
        if not loaded:
            raise RuntimeError("llama.cpp did not load the checkpoint")
        sequences = min(kv_tokens // context_len, MOST_SEQUENCES)
        settings = llama_cpp.llama_context_default_params()
        settings.n_seq_max = sequences
        settings.n_ctx = sequences * -(-context_len // 256) * 256
        settings.n_batch = BATCH_TOKENS
        settings.n_threads = settings.n_threads_batch = threads
        settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        settings.type_k = settings.type_v = gguf.GGMLQuantizationType.BF16
        # Faster where sequences share no long prefix; shared ones are copied.
        settings.kv_unified = False
        self._context = llama_cpp.llama_init_from_model(loaded, settings)
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        for seed in range(sequences):
            chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
            llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_dist(seed))
            self._samplers.append(chain)
        self.rollout([prompt], 1, 1)
        features = "+".join(re.findall(r"(\w+) = 1", llama_cpp.llama_print_system_info().decode()))
        versions = {name: version(name) for name in ("llama_cpp_python", "gguf")}
        return {"versions": versions, "settings": {"weights": kind.name, "features": features}}

    def rollout(self, prompts: Sequence[Prompt], max_new_tokens: int, samples: int) -> dict[str, Any]:
        start = time.perf_counter()
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_clear(memory, False)
        length = len(prompts[0])
        last = [0] * (len(prompts) * samples)
        for first in range(0, len(prompts), BATCH_TOKENS // length):
            some = prompts[first : first + BATCH_TOKENS // length]
            self._decode(
                (token, position, (first + number) * samples, position == length - 1)
                for number, prompt in enumerate(some)
                for position, token in enumerate(prompt)
            )
            for number in range(len(some)):
                leader = (first + number) * samples
                for sequence in range(leader, leader + samples):
                    if sequence != leader:
                        llama_cpp.llama_memory_seq_cp(memory, leader, sequence, -1, -1)
                    last[sequence] = self._sample(sequence, (number + 1) * length - 1)
        for position in range(length, length + max_new_tokens - 1):
            self._decode((token, position, sequence, True) for sequence, token in enumerate(last))
            last = [self._sample(sequence, sequence) for sequence in range(len(last))]
        return {"seconds": time.perf_counter() - start, "tokens": len(last) * max_new_tokens}

    def _decode(self, rows: Iterator[tuple[int, int, int, bool]]) -> None:
        """Compute rows of token, position, sequence and the need of logits.

        Raises:
            RuntimeError: llama.cpp refused the batch.
        """
        batch = self._batch
        count = 0
        for token, position, sequence, wanted in rows:
            batch.token[count], batch.pos[count] = token, position
            batch.n_seq_id[count], batch.seq_id[count][0] = 1, sequence
            batch.logits[count] = wanted
            count += 1
        batch.n_tokens = count
        if failed := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode: {failed}")

    def _sample(self, sequence: int, row: int) -> int:
        token: int = llama_cpp.llama_sampler_sample(self._samplers[sequence], self._context, row)
        return token


def convert(folder: Path, path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Write a Qwen3 checkpoint in bfloat16 as GGUF; matrices are of ``kind``, vectors float32."""
    config = json.loads((folder / "config.json").read_text())
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.QWEN3])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(layers)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, layers)
    for name, entry in deserialize((folder / "model.safetensors").read_bytes()):
        halves = np.frombuffer(entry["data"], np.uint16).reshape(entry["shape"])  # numpy has no bfloat16
        values = (halves.astype(np.uint32) << 16).view(np.float32)
        form = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        target = names.get_name(name, (".weight",))
        writer.add_tensor(target, gguf.quantize(values, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    channel = claim_stdout()
    peer = LlamaCppPeer()
    serve(channel, {"start": peer.start, "rollout": peer.rollout})


if __name__ == "__main__":
    main()
