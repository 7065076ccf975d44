"""The process that scores samples with transformers: ``python -m caesura.client.trainer.reference``.

It reads a job of :func:`..drift_reference.reference_logprobs` from stdin, and its last line on stdout is the
answer. It allocates no more than ``memory_bytes``, and ends after ``timeout_s`` also without a parent.
"""

import json
import math
import os
import re
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from ...io_struct import CaesuraError
from ..exceptions import CheckpointError, EngineOutOfMemory, InternalError


def score(folder: str, samples: Sequence[dict[str, Any]], dtype: str) -> list[list[float]]:
    """Return the log-probabilities of each sample's output tokens, after its temperature."""
    try:
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            use_safetensors=True,  # nothing is unpickled
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"transformers cannot load {folder}: {error}", path=folder) from error
    if lost := [*found["missing_keys"], *found["mismatched_keys"]]:
        raise CheckpointError(f"{folder} has not the weights of its config.json: {lost[:8]}", path=folder)
    model.eval()
    scores = []
    with torch.inference_mode():
        for each in samples:
            ids = torch.tensor([each["token_ids"]])
            output = ids[0, each["prompt_len"] :]
            logits = model(ids, use_cache=False, logits_to_keep=len(output) + 1).logits[
                0, -len(output) - 1 : -1
            ]
            temperature = each.get("temperature", 1.0)
            logits = logits.float() / (temperature if temperature >= 1e-6 else 1.0)
            scores.append(torch.log_softmax(logits, -1).gather(1, output[:, None])[:, 0].tolist())
    return scores


def available_bytes() -> int:
    """Return the bytes that the host has left."""
    found = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) << 10 if found else resource.RLIM_INFINITY


def main() -> None:
    job = json.load(sys.stdin)
    signal.alarm(math.ceil(job["timeout_s"]))
    os.nice(10)  # rollouts go first
    limit = job["memory_bytes"] or available_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        answer: dict[str, Any] = {"logprobs": score(job["folder"], job["samples"], job["dtype"])}
    except CaesuraError as error:
        answer = {"code": error.code, "message": error.message}
    except Exception as error:  # noqa: BLE001 (the process's edge: transformers raises what it likes)
        is_memory = isinstance(error, MemoryError) or "alloc" in str(error)
        kind = EngineOutOfMemory if is_memory else InternalError
        reason = f"the reference {job['folder']} was not computed"
        limits = f" with {limit >> 20} MiB" if is_memory else ""
        answer = {"code": kind.error_code, "message": f"{reason}{limits}: {type(error).__name__}: {error}"}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    main()
