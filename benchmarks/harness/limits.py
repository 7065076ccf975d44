"""Speed of a device, measured, and the least time of a decoder's steps on it.

A decode step must read every weight but the embedding table and experts that no row chose, the KV of every
row, and its states, which it writes as well. A prefill must compute its products at the measured peak.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from architectures import LatentShape
from checkpoints import Shape

from .workload import Workload

Synchronize = Callable[[], None]
AnyShape = Shape | LatentShape


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates of one device, measured in this run."""

    read_bytes_per_s: float
    """Rate of a sum over a large tensor."""
    copy_bytes_per_s: float
    """Rate of a large copy, bytes read and written."""
    flops: float
    """Rate of a large square product, in bfloat16, or on a CPU in float32 if that is faster."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second: the better of the two, so that no limit is too low."""
        return max(self.read_bytes_per_s, self.copy_bytes_per_s)

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def synchronizer(device: torch.device) -> Synchronize:
    """Return a call that waits until ``device`` has done everything; on the CPU nothing is pending."""
    return torch.get_device_module(device).synchronize if device.type != "cpu" else lambda: None


def measure_ceilings(device: torch.device, buffer_bytes: int, product_size: int) -> Ceilings:
    """
    Args:
        buffer_bytes: several times the caches.
        product_size: rows and columns of the matrices.
    """
    synchronize = synchronizer(device)
    read, copy = _bandwidth(device, buffer_bytes, synchronize)  # its buffers go before the matrices come

    def product(size: int, dtype: torch.dtype) -> float:
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(left)
        return seconds_of(lambda: torch.mm(left, right, out=out), synchronize)

    dtype = torch.bfloat16
    if device.type == "cpu":  # without instructions for it the large product takes minutes
        dtype = min((dtype, torch.float32), key=lambda each: product(product_size // 8, each))
    return Ceilings(read, copy, 2 * product_size**3 / product(product_size, dtype))


def _bandwidth(device: torch.device, buffer_bytes: int, synchronize: Synchronize) -> tuple[float, float]:
    """Return the rates of a sum and of a copy."""
    source = torch.ones(buffer_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    read = source.nbytes / seconds_of(lambda: source.sum(), synchronize)
    return read, 2 * source.nbytes / seconds_of(lambda: target.copy_(source), synchronize)


def seconds_of(work: Callable[[], object], synchronize: Synchronize, repeats: int = 10) -> float:
    """Return the mean seconds of ``repeats`` in a row, the best of three such rounds."""
    for _ in range(3):
        work()
    rounds = []
    for _ in range(3):
        synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        synchronize()
        rounds.append((time.perf_counter() - start) / repeats)
    return min(rounds)


def streamed_weight_bytes(shape: AnyShape, itemsize: int, rows: int = 1) -> float:
    """Return the bytes of weights that a decode step of ``rows`` rows reads, of chosen experts only."""
    sizes = {
        name: torch.Size(size).numel() * shape.used_by(name, rows)
        for name, size in shape.tensor_shapes().items()
    }
    if not shape.tie_word_embeddings:
        sizes.pop("model.embed_tokens.weight")
    return itemsize * sum(sizes.values())


def kv_bytes_per_token(shape: AnyShape, itemsize: int) -> int:
    """Return the bytes of K and V of one token over all layers."""
    return shape.num_hidden_layers * shape.cached_width * itemsize


def prefill_flops(shape: AnyShape, prompts: int, length: int) -> float:
    """Return the operations of ``prompts`` prompts: products, causal attention, a head for each prompt."""
    head = shape.vocab_size * shape.hidden_size
    tables = {"model.embed_tokens.weight", "lm_head.weight"}
    weights = sum(
        torch.Size(size).numel() * shape.used_by(name, 1)
        for name, size in shape.tensor_shapes().items()
        if len(size) == 2 and name not in tables
    )
    attention = 2 * shape.attended_width * shape.num_hidden_layers * length * (length + 1) / 2
    return prompts * (2.0 * weights * length + attention + 2.0 * head)


def least_seconds(workload: Workload, shape: AnyShape, ceilings: Ceilings, itemsize: int = 2) -> float:
    """Return the seconds of the prompts' products, then of each step the longer of reading and products."""
    rows = workload.requests * workload.samples
    seconds = prefill_flops(shape, workload.requests, workload.prompt_tokens) / ceilings.flops
    weights, computed = (streamed_weight_bytes(shape, itemsize, count) for count in (rows, 1))
    per_token = kv_bytes_per_token(shape, itemsize)
    states = 2 * rows * shape.state_bytes
    scores = 2 * shape.attended_width * shape.num_hidden_layers
    for step in range(1, workload.new_tokens):  # the first token is the prompt's
        kv = per_token * (workload.requests * workload.prompt_tokens + rows * step)
        flops = rows * (2.0 * computed / itemsize + scores * (workload.prompt_tokens + step))
        seconds += max((weights + kv + states) / ceilings.bandwidth, flops / ceilings.flops)
    return seconds
