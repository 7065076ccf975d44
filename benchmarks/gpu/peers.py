"""Sections about other engines on the same card and checkpoint, each in a process of its own."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu.run import Run

SCRIPT = Path(__file__).resolve().parents[1] / "harness" / "gpu_peer.py"
INSTALLED = ("vllm", "sglang")


def transformers(run: Run) -> dict[str, Any]:
    """Measure ``generate`` of transformers, and its continuous batching."""
    return {kind: _peer(run, kind) for kind in ("eager", "continuous")}


def servers(run: Run) -> dict[str, Any]:
    """Measure the rollout of vLLM and SGLang, where they are installed."""
    return {
        name: _peer(run, name) if run.on_card and find_spec(name) else {"left_out": "not installed"}
        for name in INSTALLED
    }


def _peer(run: Run, kind: str) -> dict[str, Any]:
    plan = run.plan
    options = {
        "kind": kind, "model": str(run.large()), "device": run.device.type, "batches": plan.batches,
        "prompt_tokens": plan.prompt_tokens, "steps": min(plan.steps, 32), "requests": plan.requests,
        "new_tokens": plan.new_tokens, "vocab_size": plan.shape.vocab_size, "pool": plan.peer_pool,
        "context_len": plan.context_len,
    }  # fmt: skip
    try:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), json.dumps(options)],
            capture_output=True, text=True, timeout=run.peer_timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {run.peer_timeout_s:.0f} s"}
    lines = done.stdout.strip().splitlines() or [""]
    reason = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
    found: dict[str, Any] = json.loads(lines[-1]) if lines[-1].startswith("{") else {"error": reason[0]}
    return found
