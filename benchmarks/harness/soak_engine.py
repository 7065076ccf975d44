"""A scheduler process like any other, but for two things that the memory soak needs inside it.

Invariants:
- The engine is not changed: a model class with a derivation of its own stands in for the architecture's, and
  the one function that empties the device cache is timed. Everything else is ``python -m caesura.scheduler``.
- Scratch memory never leaks: between two derivations at most ``SURVIVORS`` tensors of ``SURVIVOR_BYTES`` are
  alive. What grows beyond that is fragmentation.

    python benchmarks/harness/soak_engine.py --emptyings FILE [--fragment] <options of caesura scheduler>
"""

import argparse
import random
import time
from pathlib import Path
from typing import IO, Any

# Before torch: it sets what torch's libraries read when they are loaded.
from caesura.scheduler.__main__ import main as run_scheduler

import torch  # isort: skip

from caesura.scheduler.memory import device_memory
from caesura.scheduler.memory.device_memory import empty_device_cache
from caesura.scheduler.models import qwen3

SCRATCH_TENSORS = 32
SCRATCH_BYTES = (64 << 10, 8 << 20)
"""Smallest and largest; glibc treats blocks below and above 128 KB differently."""
SURVIVORS, SURVIVOR_BYTES = 128, 64 << 10
SURVIVORS_REPLACED = 16
"""Survivors that each derivation replaces: one outlives eight derivations, on average."""


class Scratch:
    """Transient tensors of all sizes, freed in another order, and small results that outlive them."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device = device
        self._random = random.Random(seed)
        self._survivors = [self._survivor() for _ in range(SURVIVORS)]

    def churn(self) -> None:
        """Allocate as one derivation does; all but the survivors is free again afterwards."""
        smallest, largest = SCRATCH_BYTES
        transient: list[torch.Tensor] = []
        for number in range(SCRATCH_TENSORS):
            transient.append(self._filled(int(smallest * (largest / smallest) ** self._random.random())))
            if number % (SCRATCH_TENSORS // SURVIVORS_REPLACED) == 0:
                self._survivors[self._random.randrange(SURVIVORS)] = self._survivor()
            if self._random.random() < 0.5:
                del transient[self._random.randrange(len(transient))]

    def _survivor(self) -> torch.Tensor:
        return self._filled(self._random.randrange(SURVIVOR_BYTES // 8, SURVIVOR_BYTES))

    def _filled(self, nbytes: int) -> torch.Tensor:
        return torch.ones(nbytes, dtype=torch.uint8, device=self._device)  # written: its pages are there


class FragmentingQwen3(qwen3.Qwen3ForCausalLM):
    """Derives nothing, and allocates for it."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        _, first = next(self.named_storage())
        self._scratch = Scratch(first.device, seed=0)

    def finalize_weights(self) -> None:
        """Finalize the weights, and allocate scratch memory as a derivation of tensors does."""
        super().finalize_weights()
        self._scratch.churn()


def time_emptyings(file: IO[bytes]) -> None:
    """Have every emptying of the device cache write its seconds into ``file``, a line each."""

    def timed(device_module: Any = None) -> bool:
        started = time.perf_counter()
        found = empty_device_cache(device_module)
        file.write(f"{time.perf_counter() - started!r}\n".encode())
        return found

    setattr(device_memory, empty_device_cache.__name__, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--emptyings", type=Path, required=True)
    parser.add_argument("--fragment", action="store_true")
    options, arguments = parser.parse_known_args()
    if options.fragment:
        # The registry looks a class up by the architecture's name.
        setattr(qwen3, qwen3.Qwen3ForCausalLM.__name__, FragmentingQwen3)
    with options.emptyings.open("wb", buffering=0) as file:
        time_emptyings(file)
        run_scheduler(arguments)


if __name__ == "__main__":
    main()
