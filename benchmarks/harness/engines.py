"""The engines that take part, the start of each one's process, and the measurements of one start.

Every engine gets the same checkpoint, prompts, context length, KV capacity and thread count, in a process of
its own. Thread and allocator variables of the caller's environment are removed first, so that what decides is
set here.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .machine import busy_share
from .peer_process import PeerError, PeerProcess
from .workload import Workload

PEERS = Path(__file__).resolve().parent.parent / "peers"
START_TIMEOUT_S = 900.0
OP_TIMEOUT_S = 900.0
IMPORT_TIMEOUT_S = 300.0

_DECIDED_HERE = ("OMP_", "KMP_", "GOMP_", "MKL_", "VLLM_", "LD_PRELOAD", "PYTHONPATH", "TORCHINDUCTOR_")
_TCMALLOC_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")


@dataclass(frozen=True, kw_only=True)
class Engine:
    name: str
    python: str
    script: str
    """File name in ``benchmarks/peers``."""
    module: str
    """Modules that the interpreter must be able to import."""
    environment: dict[str, str]
    start: dict[str, Any] = field(default_factory=dict)
    """Arguments of the peer's ``start`` beside those of every engine."""
    no_pause_reason: str = ""
    """Reason why pauses and updates cannot be measured, or empty."""

    def why_missing(self) -> str | None:
        """Return None if the interpreter imports it; this also brings its files into the page cache."""
        try:
            check = subprocess.run(
                [self.python, "-c", f"import {self.module}"],
                env=self.environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=IMPORT_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if check.returncode == 0:
            return None
        return (check.stderr.strip().splitlines() or [f"exit status {check.returncode}"])[-1]


def caesura(threads: int, quantization: str = "auto") -> Engine:
    return Engine(
        name="Caesura" if quantization == "auto" else f"Caesura, {quantization}",
        start={"quantization": quantization},
        python=sys.executable,
        script="caesura_peer.py",
        module="torch, caesura.client",
        environment=_environment(OMP_NUM_THREADS=str(threads)),
    )


_TRANSFORMERS = ("transformers_peer.py", "torch, transformers")
_OPENVINO = ("openvino_peer.py", "openvino_genai, optimum.intel")
_LLAMA_CPP = ("llama_cpp_peer.py", "gguf, llama_cpp, safetensors")
_ROLLOUTS_ALONE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "transformers": (*_TRANSFORMERS, {"continuous_batching": False}),
    "transformers, batching": (*_TRANSFORMERS, {"continuous_batching": True}),
    "OpenVINO": (*_OPENVINO, {}),
    "OpenVINO, int8": (*_OPENVINO, {"quantization": "int8"}),
    "llama.cpp": (*_LLAMA_CPP, {}),
    "llama.cpp, int8": (*_LLAMA_CPP, {"quantization": "int8"}),
}
"""Scripts, modules and ``start`` of engines that have no pauses and updates, by name."""


def rollouts_alone(name: str, python: str, threads: int) -> Engine:
    script, module, start = _ROLLOUTS_ALONE[name]
    return Engine(
        name=name,
        python=python,
        script=script,
        module=module,
        start=start,
        environment=_environment(OMP_NUM_THREADS=str(threads), HF_HUB_OFFLINE="1"),
        no_pause_reason=f"{name} has nothing to pause, resume or update under load",
    )


def vllm(python: str, threads: int, bind: str, cache: Path) -> Engine:
    """Return vLLM with the libraries its own documentation asks to preload, where they exist.

    Args:
        bind: ``VLLM_CPU_OMP_THREADS_BIND``. ``auto`` keeps one core for vLLM's scheduler process.
        cache: Folder for compile caches. Empty at the first start of a run, so that start is really cold.
    """
    preload = [path for path in (_tcmalloc(), _intel_openmp(python)) if path]
    environment = _environment(
        OMP_NUM_THREADS=str(threads),
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_CPU_OMP_THREADS_BIND=bind,
        VLLM_CACHE_ROOT=str(cache / "vllm"),
        TORCHINDUCTOR_CACHE_DIR=str(cache / "inductor"),
    )
    if preload:
        environment["LD_PRELOAD"] = ":".join(preload)
    return Engine(name="vLLM", python=python, script="vllm_peer.py", module="vllm", environment=environment)


def measure(
    engine: Engine,
    workload: Workload,
    checkpoints: Sequence[Path],
    *,
    threads: int,
    repeat: int,
    log: Path,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Start the engine, measure everything once, end it.

    Returns:
        ``engine``, ``repeat``, ``no_pause_reason``, ``busy_before`` (share of the cores that others used just
        before); ``cold_start_s`` from just before the process starts to its first token; ``facts``;
        ``rollouts`` (seconds, tokens); ``pauses`` and ``updates`` as in ``peers/measure.py``, absent where
        the engine has no such thing; ``error``, text or None. After an error the keys measured until then are
        there.
    """
    current, other = map(str, checkpoints)
    run: dict[str, Any] = {"engine": engine.name, "repeat": repeat, "rollouts": [], "error": None}
    run["busy_before"] = busy_share()
    run["no_pause_reason"] = engine.no_pause_reason
    command = [engine.python, str(PEERS / engine.script)]
    seed = 1000 * (repeat + 1)
    warm, load, *measured = (workload.prompts(seed + number) for number in range(2 + workload.rollouts))
    try:
        with PeerProcess(command, engine.environment, log) as peer:
            progress("starting")
            run["facts"] = peer.call(
                "start",
                START_TIMEOUT_S,
                prompt=warm[0],
                model=current,
                threads=threads,
                context_len=workload.context_len,
                kv_tokens=workload.kv_tokens,
                kv_bytes_per_token=workload.kv_bytes_per_token,
                **engine.start,
            )
            run["cold_start_s"] = time.perf_counter() - peer.started
            progress("rollout")
            ask = {"samples": workload.samples}
            peer.call(
                "rollout", OP_TIMEOUT_S, prompts=warm, max_new_tokens=max(8, workload.new_tokens // 8), **ask
            )
            for prompts in measured:
                run["rollouts"].append(
                    peer.call(
                        "rollout", OP_TIMEOUT_S, prompts=prompts, max_new_tokens=workload.new_tokens, **ask
                    )
                )
            if workload.pause_cycles and not engine.no_pause_reason:
                under = {"prompts": load, "max_new_tokens": workload.load_new_tokens}
                progress("pause and resume")
                cycles = workload.pause_cycles
                run["pauses"] = peer.call("pauses", OP_TIMEOUT_S, cycles=cycles, seed=seed, **under)
                progress("disk update")
                paths = {"current": current, "other": other, "repeats": workload.updates}
                run["updates"] = peer.call("updates", OP_TIMEOUT_S, **paths, **under)
    except PeerError as error:
        run["error"] = str(error)
    return run


def _environment(**decided: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_DECIDED_HERE)}
    return kept | {"PYTHONUNBUFFERED": "1"} | decided


def _tcmalloc() -> str | None:
    found = (Path(folder) / "libtcmalloc_minimal.so.4" for folder in _TCMALLOC_FOLDERS)
    return next((str(path) for path in found if path.exists()), None)


def _intel_openmp(python: str) -> str | None:
    """Find what ``pip install intel-openmp`` puts into the environment's ``lib`` folder."""
    path = Path(python).parent.parent / "lib" / "libiomp5.so"
    return str(path) if path.exists() else None
