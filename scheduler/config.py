"""Engine configuration: one frozen value, checked once, passed explicitly.

Invariants: nothing mutates a configuration; :meth:`EngineConfig.resolve` returns a new value in which every "None:
decide for me" has been decided; an impossible value is refused by field name before anything is allocated.
"""

import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch

from ..io_struct import CaesuraError, ErrorCode, Residency, private_directory

DtypeName = Literal["auto", "float32", "bfloat16"]
PAGE_SIZE = 16
"""Tokens per KV page; the measured layout is [page, kv head, 16, head size]."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything an engine is told at start. Field docstrings are the CLI's help."""

    model_path: str
    """Hugging Face folder: config.json and *.safetensors."""
    endpoint: str | None = None
    """ipc:// path or tcp:// address, beyond loopback only with keys. None: a fresh ipc:// socket in a private directory."""
    curve_secret_key_file: str | None = None
    """The engine's key pair, as caesura keygen writes it: only clients with authorized keys are heard, encrypted. None: all are."""
    curve_authorized_clients: str | None = None
    """Public keys of these clients: a file, or a folder of *.key files, read afresh at each connect."""
    dtype: DtypeName = "auto"
    """Compute dtype; auto takes the checkpoint's."""
    device: str = "auto"
    """cpu, cuda, …; auto takes the accelerator where there is one."""
    num_threads: int | None = None
    """Intra-op CPU threads. None: torch's default."""
    context_len: int | None = None
    """Longest prompt plus output, in tokens. None: the model's."""
    kv_pool_tokens: int | None = None
    """Size of the KV pool in tokens. None: kv_memory_fraction of what is free after loading."""
    kv_memory_fraction: float = 0.5
    """Share of the free device memory that the KV pool takes when kv_pool_tokens is None."""
    max_running_requests: int = 256
    """Samples that hold KV at the same time."""
    max_waiting_requests: int = 16384
    """Samples queued without KV; more are refused."""
    chunked_prefill_size: int = 512
    """Prompt tokens per step, at most."""
    target_step_s: float = 0.2
    """Prompts are cut so that a step, and hence a pause, takes about this many seconds; inf: as chunked_prefill_size says."""
    prefix_cache: bool = True
    """Share KV of equal prefixes under equal weights."""
    pipeline_depth: int | None = None
    """Steps in flight while the next is prepared. None: 0 on the CPU, 1 on accelerators."""
    attention_backend: Literal["auto", "flashinfer", "triton", "sdpa"] = "auto"
    """What computes attention; auto: compiled kernels on the CPU, on CUDA the first of flashinfer and triton that is there, else torch."""
    cuda_graphs: bool = True
    """Capture decode steps as graphs where device and attention can (flashinfer or triton, on CUDA)."""
    autotune: bool = True
    """Run the model for nobody at start: kernels are chosen; threads, workspaces and the first KV pages are there before the first request."""
    autotune_lm_head_rows: int = 64
    """Rows of the output head and the sampler in that run, at most; 0 leaves both untuned."""
    autotune_cache: str | None = None
    """JSON file that keeps what FlashInfer's tuner found for the next start. None: it measures at every start."""
    requests_while_paused: Literal["queue", "refuse"] = "queue"
    """What happens to generate requests that arrive during a pause."""
    idle_empty_s: float = 5.0
    """Return the allocator's unused blocks once after this long without work."""
    result_ttl_s: float = 60.0
    """How long answers can be had again, within bounds of bytes: by messages sent again, and terminal results of a client that
    could not be reached by fetching."""
    state_file: str | None = None
    """JSON file that says which weights were committed last; a start with it goes on from there. None: a start knows of none before it."""
    on_lost_weights: Literal["refuse", "serve_initial"] = "refuse"
    """When the weights that state_file names cannot be had again: serve nothing until a complete update, or serve those of model_path."""
    session_deadline_s: float = 600.0
    """A weight session older than this is aborted, unless it set its own deadline."""
    session_orphan_s: float = 10.0
    """A weight session whose client is gone is aborted after this long, unless a message of it arrives."""
    load_bucket_bytes: int = 8 << 20
    """Bytes read between two looks at the inbox while weights load."""
    group_interface: str | None = None
    """Network interface (eth0, say) on which weight update groups listen. None: loopback where the master is there, else the address of the host's name."""
    allow_legacy_pickle: bool = False
    """Accept checkpoint-engine's pickled messages, parsed into plain fields and never executed."""
    deterministic: bool = False
    """Start only where a request's tokens and logprobs are the same bits whatever runs beside it and however it is paused."""
    reference_model_path: str | None = None
    """Hugging Face folder of a second checkpoint that score requests use. None: there is none."""
    reference_residency: Residency = "resident"
    """Where its weights are: on the device, there while something is scored (offload), or there layer by layer."""
    reference_pool_tokens: int | None = None
    """Size of its own KV pool in tokens. None: one sequence of full length."""
    check_ledger: bool = False
    """Check free + cached + held = total after every control message; for tests."""
    log_stages: bool = False
    """Log where each stage of a step, pause, update and release begins and ends; at log level DEBUG with the memory then."""
    log_level: str = "INFO"
    """Least severe log records to print."""
    shutdown_mode: Literal["abort", "drain"] = "abort"
    """What a signal or a shutdown message does to live requests: end them at once, or let them go on for a while."""
    drain_timeout_s: float = 30.0
    """How long they may go on, in seconds; then they end as aborted."""
    watchdog_timeout_s: float = 300.0
    """A loop that has not ticked for so many seconds, though it should, ends the process with exit status 70. 0: never."""

    def __post_init__(self) -> None:
        positive = (
            "max_running_requests",
            "max_waiting_requests",
            "chunked_prefill_size",
            "load_bucket_bytes",
        )
        optional = ("num_threads", "context_len", "kv_pool_tokens", "reference_pool_tokens")
        for name in (*positive, *optional):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise _invalid(name, value, "must be at least 1")
        if not 0.0 < self.kv_memory_fraction < 1.0:
            raise _invalid("kv_memory_fraction", self.kv_memory_fraction, "must be between 0 and 1")
        for name in (
            "autotune_lm_head_rows",
            "idle_empty_s",
            "result_ttl_s",
            "session_deadline_s",
            "session_orphan_s",
            "target_step_s",
            "drain_timeout_s",
            "watchdog_timeout_s",
        ):
            if not getattr(self, name) >= 0:  # NaN fails, too
                raise _invalid(name, getattr(self, name), "must be at least 0")
        if self.group_interface is not None and self.group_interface not in _interfaces():
            raise _invalid("group_interface", self.group_interface, f"must be one of {sorted(_interfaces())}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise _invalid(name, getattr(self, name), f"must be {_listed(choices)}")
        if self.deterministic and self.attention_backend != "auto":
            raise _invalid("attention_backend", self.attention_backend, "must be auto with deterministic")

    def resolve(self) -> "EngineConfig":
        """A copy in which device, endpoint, depth and threads are decided; creates the endpoint's directory."""
        device = self.device
        if device == "auto":
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            device = accelerator.type if accelerator is not None else "cpu"
        endpoint = self.endpoint
        if endpoint is None:
            endpoint = f"ipc://{private_directory.make()}/{private_directory.SOCKET}"
        reference = self.reference_model_path
        depth = self.pipeline_depth if self.pipeline_depth is not None else int(device != "cpu")
        return replace(
            self,
            device=device,
            endpoint=endpoint,
            pipeline_depth=depth,
            num_threads=self.num_threads or torch.get_num_threads(),
            model_path=str(Path(os.path.expanduser(self.model_path))),
            state_file=self.state_file and os.path.abspath(os.path.expanduser(self.state_file)),
            reference_model_path=reference and str(Path(os.path.expanduser(reference))),
        )


def _interfaces() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


_CHOICES: dict[str, tuple[object, ...]] = {
    "pipeline_depth": (None, 0, 1),
    "shutdown_mode": ("abort", "drain"),
    "on_lost_weights": ("refuse", "serve_initial"),
    "dtype": get_args(DtypeName),
    "attention_backend": ("auto", "flashinfer", "triton", "sdpa"),
    "reference_residency": get_args(Residency),
}


def _listed(choices: tuple[object, ...]) -> str:
    *others, last = (str(choice) for choice in choices if choice is not None)
    return f"{', '.join(others)} or {last}"


def _invalid(field: str, value: object, requirement: str) -> CaesuraError:
    return CaesuraError(
        ErrorCode.INVALID_REQUEST, f"{field} = {value!r} {requirement}", field=field, value=value
    )
