"""What a commit would take if it derived into fresh tensors, as engines do that rebuild after every load.

One walk over a checkpoint's tensors: the experts of a layer stacked into the two tensors that a grouped
product reads, ``kv_b_proj`` split into the two halves of absorbed latent attention, dequantised where it has
block scales. As in such an engine the old ones live until the new ones are all there, so everything derived
is held at once.
"""

import ctypes
import gc
import os
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from .process_memory import read_memory, reset_peak

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_BLOCK = 128


def fresh_derivation_bytes(tensors: Mapping[str, Tensor], heads: int | None, nope: int | None) -> int:
    """Return by how many bytes this process's resident memory rises while it derives from ``tensors``.

    Args:
        heads, nope: of latent attention: its heads, and the size of a head's keys that are not rotated. None:
            no such.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what was freed before is used again, and nothing rises
    pid = os.getpid()
    reset_peak(pid)
    before = read_memory(pid).resident
    derived = stacked_experts(tensors)
    if heads is not None and nope is not None:
        derived += absorbed_halves(tensors, heads, nope)
    after = read_memory(pid).peak
    del derived
    return after - before


def stacked_experts(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return per layer ``[experts, 2 * intermediate, hidden]`` and ``[experts, hidden, intermediate]``."""
    layers: dict[str, dict[str, list[Tensor]]] = {}
    for name in sorted(tensors, key=_expert_number):
        if match := _EXPERT.fullmatch(name):
            kinds = layers.setdefault(match[1], {"gate": [], "up": [], "down": []})
            kinds[match[3]].append(tensors[name])
    found = []
    for kinds in layers.values():
        both = zip(kinds["gate"], kinds["up"], strict=True)
        found.append(torch.stack([torch.cat(pair) for pair in both]))
        found.append(torch.stack(kinds["down"]))
    return found


def absorbed_halves(tensors: Mapping[str, Tensor], heads: int, nope: int) -> list[Tensor]:
    """Return per layer ``w_kc`` [heads, nope, rank] and ``w_vc`` [heads, values, rank], contiguous, in
    bfloat16.
    """
    found = []
    for name, weight in tensors.items():
        if not name.endswith(".kv_b_proj.weight"):
            continue
        if (scale := tensors.get(f"{name}_scale_inv")) is not None:
            rows, columns = weight.shape
            wide = scale.repeat_interleave(_BLOCK, 0)[:rows].repeat_interleave(_BLOCK, 1)[:, :columns]
            weight = (weight.float() * wide).bfloat16()
        by_head = weight.view(heads, -1, weight.shape[1])
        found += [by_head[:, :nope].clone(), by_head[:, nope:].clone()]
    return found


def _expert_number(name: str) -> int:
    match = _EXPERT.fullmatch(name)
    return int(match[2]) if match else -1
