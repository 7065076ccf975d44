"""Log-probabilities of a rollout by transformers, under the weights that its spans name.

A token's logits come from the forward of the token before it, on KV that earlier forwards left. After a
retraction all KV is of the span's own weights; a span marked ``stale_kv`` goes on with the KV of the spans
before it. So a fresh cache is computed for each span that is not stale, and a stale one continues on the
cache at hand.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

Span = Mapping[str, Any]
"""``version``, ``start``, ``end`` (output tokens) and ``stale_kv``."""


class Rescorer:
    """Models of checkpoints by label."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        logging.disable_progress_bar()
        self._models = {
            label: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            for label, folder in folders.items()
        }

    @torch.inference_mode()
    def logprobs(self, prompt: Sequence[int], output: Sequence[int], spans: Sequence[Span]) -> list[float]:
        """Return the log-probability of each output token; ``spans`` cover them all, in order."""
        tokens = [*prompt, *output]
        found: list[float] = []
        cache, computed = DynamicCache(), 0
        for span in spans:
            assert span["start"] == len(found), "spans are contiguous"
            if not span["stale_kv"]:
                cache, computed = DynamicCache(), 0
            end = len(prompt) + span["end"]
            model = self._models[span["version"]]
            logits = model(
                input_ids=torch.tensor([tokens[computed : end - 1]]), past_key_values=cache, use_cache=True
            ).logits[0, len(prompt) + span["start"] - 1 - computed :]
            chosen = torch.tensor(output[span["start"] : span["end"]])[:, None]
            found += torch.log_softmax(logits, dim=-1).gather(1, chosen).squeeze(1).tolist()
            computed = end - 1
        return found
