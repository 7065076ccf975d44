"""Engine configuration: one frozen value, checked once, passed explicitly.

Invariants: :meth:`EngineConfig.resolve` returns a new value in which everything is decided; an impossible
value is refused by field name before anything is allocated.
"""

import os
import socket
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import torch

from ...io_struct import CaesuraError, ErrorCode
from ...process import private_directory
from ...process.engine_options import EngineOptions
from .files import is_pipeline

PAGE_SIZE = 16
"""Tokens per KV page; the measured layout is [page, kv head, 16, head size]."""
RESULT_BYTES = 16 << 20
"""Default ``result_bytes``: about 1,000 results of 2,000 tokens with logprobs."""
PIPELINE_RESULT_BYTES = 64 << 20
"""Default of image pipelines: the latents of 28 steps of one image of 1024 x 1024 pixels take 30 MB."""


@dataclass(frozen=True, slots=True)
class Sizes:
    rows: int
    chunk_tokens: int
    kv_fraction: float


_NOT_SERVED = ("mps",)
"""Kinds of devices whose modules in torch lack what a step needs."""
_PIPELINE_SIZES = Sizes(16, 512, 0.5)
_CPU_SIZES = Sizes(256, 512, 0.5)
_ACCELERATOR_SIZES = (
    (60, Sizes(1024, 8192, 0.85)),
    (30, Sizes(512, 4096, 0.85)),
    (0, Sizes(256, 2048, 0.8)),
)
"""Sizes by least memory in GB: reading weights limits a large card, memory for logits a small one."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineOptions):
    model_path: str
    """Hugging Face model folder with config.json and *.safetensors."""
    curve_secret_key_file: str | None = None
    curve_authorized_clients: str | None = None
    state_file: str | None = None
    kv_tier_folder: str | None = None
    reference_model_path: str | None = None
    profile_dir: str | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:  # NaN fails, too
                raise _invalid(name, value, f"must be at least {least}")
        for name, choices in _choices().items():
            if getattr(self, name) not in choices:
                *others, last = (str(choice) for choice in choices if choice is not None)
                reason = f"must be {', '.join(others)} or {last}"
                raise _invalid(name, getattr(self, name), reason)
        if (fraction := self.kv_memory_fraction) is not None and not 0.0 < fraction < 1.0:
            raise _invalid("kv_memory_fraction", fraction, "must be between 0 and 1")
        interfaces = sorted(name for _, name in socket.if_nameindex())
        if self.group_interface not in (None, *interfaces):
            raise _invalid("group_interface", self.group_interface, f"must be one of {interfaces}")
        if self.max_loaded_loras is not None and self.max_loaded_loras < self.max_loras:
            reason = f"must be at least max_loras = {self.max_loras}"
            raise _invalid("max_loaded_loras", self.max_loaded_loras, reason)
        self._check_ranks()
        self._check_together()

    def _check_ranks(self) -> None:
        if not 0 <= self.tp_joined < self.tp:
            raise _invalid("tp_joined", self.tp_joined, f"must be at least 0 and below tp = {self.tp}")
        if self.tp_joined and self.tp_address is None:
            raise _invalid("tp_address", None, "must say where the workers of other hosts join")
        if self.tp % self.ep:
            raise _invalid("ep", self.ep, f"must divide tp = {self.tp}")
        if self.dp_attention not in (1, self.tp):
            raise _invalid("dp_attention", self.dp_attention, f"must be 1 or tp = {self.tp}")
        for name in ("kv_tier_bytes", "enable_lora"):
            if self.dp_attention > 1 and (value := getattr(self, name)):
                raise _invalid(name, value, "does not go with dp_attention")

    def _check_together(self) -> None:
        if self.quantization_skipped and self.quantization == "auto":
            raise _invalid("quantization_skipped", self.quantization_skipped, "needs quantization")
        if self.quantization_originals and self.quantization == "auto":
            raise _invalid("quantization_originals", self.quantization_originals, "needs quantization")
        for name, unused in (("quantization", "auto"), ("speculation", "none"), ("kv_tier_bytes", 0)):
            if (value := getattr(self, name)) != unused and is_pipeline(self.model_path):
                raise _invalid(name, value, "is for language models")
        if self.speculation != "none" and self.pipeline_depth:
            raise _invalid("pipeline_depth", self.pipeline_depth, "must be 0 with speculation")
        if self.kv_tier_bytes and not self.prefix_cache:
            raise _invalid("kv_tier_bytes", self.kv_tier_bytes, "needs prefix_cache")
        if self.kv_tier_folder and not (self.kv_tier_bytes and self.kv_tier_folder_bytes):
            requirement = "needs kv_tier_bytes and kv_tier_folder_bytes"
            raise _invalid("kv_tier_folder", self.kv_tier_folder, requirement)
        if self.kv_tier_folder_bytes and not self.kv_tier_folder:
            raise _invalid("kv_tier_folder_bytes", self.kv_tier_folder_bytes, "needs kv_tier_folder")
        if self.deterministic and self.attention_backend != "auto":
            raise _invalid("attention_backend", self.attention_backend, "must be auto with deterministic")
        if self.deterministic and self.model_backend == "transformers":
            raise _invalid("model_backend", self.model_backend, "must be auto or native with deterministic")

    @property
    def sizes(self) -> Sizes:
        rows, chunk, fraction = self.max_running_requests, self.chunked_prefill_size, self.kv_memory_fraction
        if rows is not None and chunk is not None and fraction is not None:
            return Sizes(rows, chunk, fraction)
        usual = _PIPELINE_SIZES if is_pipeline(self.model_path) else _usual_sizes(self.device)
        return Sizes(rows or usual.rows, chunk or usual.chunk_tokens, fraction or usual.kv_fraction)

    @property
    def graph_rows(self) -> int:
        """Rows of the largest captured decode step, or 0 where none is captured."""
        if not self.cuda_graphs or self.dp_attention > 1:
            return 0
        return min(self.sizes.rows, self.cuda_graph_max_bs or self.sizes.rows)

    def resolve(self) -> "EngineConfig":
        device = self.device
        if device == "auto":
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            kind = "cpu" if accelerator is None else accelerator.type
            device = "cpu" if kind in _NOT_SERVED else kind
        if torch.device(device).type in _NOT_SERVED:
            raise _invalid("device", device, "is not served: its first step fails; use cpu")
        device = _with_index(device)
        sizes = replace(self, device=device).sizes
        result_bytes = PIPELINE_RESULT_BYTES if is_pipeline(self.model_path) else RESULT_BYTES
        reference = self.reference_model_path
        return replace(
            self,
            device=device,
            endpoint=self.endpoint or f"ipc://{private_directory.make()}/{private_directory.SOCKET}",
            pipeline_depth=self.pipeline_depth
            if self.pipeline_depth is not None
            else int(device != "cpu" and self.speculation == "none"),
            max_running_requests=sizes.rows,
            chunked_prefill_size=sizes.chunk_tokens,
            kv_memory_fraction=sizes.kv_fraction,
            result_bytes=result_bytes if self.result_bytes is None else self.result_bytes,
            num_threads=self.num_threads or max(1, torch.get_num_threads() // (self.tp - self.tp_joined)),
            model_path=str(Path(os.path.expanduser(self.model_path))),
            state_file=self.state_file and os.path.abspath(os.path.expanduser(self.state_file)),
            kv_tier_folder=self.kv_tier_folder and os.path.abspath(os.path.expanduser(self.kv_tier_folder)),
            profile_dir=self.profile_dir and os.path.abspath(os.path.expanduser(self.profile_dir)),
            reference_model_path=reference and str(Path(os.path.expanduser(reference))),
        )


def _with_index(device: str) -> str:
    """Return ``cuda`` with the current index: streams and process groups belong to one device."""
    kind = torch.device(device)
    current = getattr(torch.get_device_module(kind), "current_device", None)
    if kind.type == "cpu" or ":" in device or current is None:
        return device
    return f"{kind.type}:{current()}"


def _usual_sizes(device: str) -> Sizes:
    if torch.device(device).type == "cpu":
        return _CPU_SIZES
    memory = getattr(torch.get_device_module(torch.device(device)), "mem_get_info", None)
    gigabytes = 0 if memory is None else memory(torch.device(device))[1] / 1e9
    return next(sizes for least, sizes in _ACCELERATOR_SIZES if gigabytes >= least)


_LEAST = {
    **dict.fromkeys(("tp", "ep", "num_threads", "context_len", "kv_pool_tokens", "reference_pool_tokens"), 1),
    **dict.fromkeys(("max_running_requests", "max_waiting_requests", "chunked_prefill_size"), 1),
    **dict.fromkeys(("cuda_graph_max_bs", "dp_attention"), 1),
    **dict.fromkeys(("load_bucket_bytes", "max_loras", "max_lora_rank"), 1),
    **dict.fromkeys(("autotune_lm_head_rows", "prompt_cache_bytes", "result_bytes", "result_ttl_s"), 0),
    **dict.fromkeys(("idle_empty_s", "log_stats_interval_s", "session_deadline_s", "session_orphan_s"), 0),
    **dict.fromkeys(("kv_tier_bytes", "kv_tier_folder_bytes"), 0),
    **dict.fromkeys(("drift_share", "drift_samples", "drift_warn", "drift_limit"), 0),
    **dict.fromkeys(("target_step_s", "drain_timeout_s", "watchdog_timeout_s", "join_timeout_s"), 0),
}


@cache
def _choices() -> dict[str, tuple[object, ...]]:
    hints = get_type_hints(EngineConfig).items()
    literals = {name: get_args(hint) for name, hint in hints if get_origin(hint) is Literal}
    return literals | {"pipeline_depth": (None, 0, 1)}


def _invalid(field: str, value: object, requirement: str) -> CaesuraError:
    reason = f"{field} = {value!r} {requirement}"
    return CaesuraError(ErrorCode.INVALID_REQUEST, reason, field=field, value=value)
