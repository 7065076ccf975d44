"""Warm-up: what is chosen, compiled or touched for the first time is so before the engine is ready.

Invariants:
- The decoder runs a decode step of as many rows as there will ever be, the output head and the sampler a bounded number of
  them (:class:`WarmUp`). So no temporary has rows times vocabulary, and the peak of a warm-up is not above a step's.
- Rows read and write the scratch page only. No page, no slot's last token, no seed and no statistic changes.
- Running out of memory here is a warning: a warm-up is never the reason why an engine does not start.
- What FlashInfer's tuner finds is kept in a file of our own, one entry per device, model and versions. FlashInfer gets a
  private copy of its entry: a damaged file would stop it, and one of other versions would stay as it is for ever.
"""

import inspect
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import torch

from ..forward import ForwardBatch, SamplingBatch
from ..memory.device_module import DeviceModule, name_of
from .graphs import scratch_prefill

logger = logging.getLogger(__name__)

_TOP_K, _TOP_P = 20, 0.9
"""Of the row that is filtered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """What runs before the first request."""

    rows: int
    """Of the decode step: the size of the request pool, or fewer where nothing is chosen by size."""
    lm_head_rows: int
    """Of the output head and the sampler, at most ``rows``; 0 leaves both cold."""
    tuning: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What libraries tune their kernels in; both runs are inside."""


def dummy_decode(rows: int, vocab_size: int) -> ForwardBatch:
    """A decode step on the scratch page, of slot 0 in every row, each row sampled; on the host."""
    return replace(
        scratch_prefill([1] * rows),
        num_decode=rows,
        sample_tokens=torch.arange(rows),
        sample_slots=torch.zeros(rows, dtype=torch.int64),
        sampling=_dummy_sampling(rows, vocab_size),
    )


def _dummy_sampling(rows: int, vocab_size: int) -> SamplingBatch:
    """Sampled rows, the first of which is filtered, so that both ways of the sampler are taken."""
    top_k, top_p = torch.full((rows,), vocab_size), torch.ones(rows)
    top_k[:1], top_p[:1] = min(_TOP_K, vocab_size), _TOP_P
    return replace(
        scratch_prefill([]).sampling,
        temperature=torch.ones(rows),
        greedy=torch.zeros(rows, dtype=torch.bool),
        top_k=top_k,
        top_p=top_p,
        uniforms=torch.full((rows,), 0.5, dtype=torch.float64),
        any_sampled=True,
        any_filtered=True,
    )


class TuningCache:
    """A JSON file of what a tuner found, one object per key; other keys in it are left as they are."""

    def __init__(self, path: str | os.PathLike[str], key: str) -> None:
        self._path = Path(os.path.expanduser(path))
        self._key = key

    def read(self) -> dict[str, Any] | None:
        """What was written under this key. None: nothing, or the file is damaged, which is logged."""
        return self._entries().get(self._key)

    def write(self, found: dict[str, Any]) -> None:
        """Keep ``found``. Whoever reads meanwhile sees the old file or the new one; a failure is logged."""
        entries = {**self._entries(), self._key: found}
        folder = self._path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=f".{self._path.name}.") as beside:
                new = Path(beside) / "new"  # on the same file system, where a rename is atomic
                new.write_text(json.dumps(entries, indent=1, sort_keys=True), encoding="utf-8")
                new.replace(self._path)
        except OSError as error:
            logger.warning("autotune_cache %s cannot be written: %s", self._path, error)

    def _entries(self) -> dict[str, dict[str, Any]]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, dict[str, Any]])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            logger.warning("autotune_cache %s is ignored: %s", self._path, error)
            return {}


def tuning_key(device_module: DeviceModule, model: object, **also: object) -> str:
    """One key per device name, ``model`` (its ``repr`` tells), versions of the libraries, and ``also``."""
    facts = {
        "device": name_of(device_module),
        "model": sha256(repr(model).encode()).hexdigest()[:16],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "flashinfer": _version("flashinfer-python"),
        **also,
    }
    return json.dumps(facts, sort_keys=True)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@contextmanager
def flashinfer_tuning(cache: TuningCache | None, autotuner: Any = None) -> Iterator[None]:
    """FlashInfer measures its kernels for what is run inside, but for what ``cache`` knows already.

    Args:
        cache: None, or a FlashInfer whose tuner takes no file: everything is measured at every start.
        autotuner: the module ``flashinfer.autotuner``. None: the installed one; without one nothing is measured.
    """
    module = _installed_autotuner() if autotuner is None else autotuner
    if module is None:
        yield
        return
    if cache is None or "cache" not in inspect.signature(module.autotune).parameters:
        with module.autotune(True):
            yield
        return
    with tempfile.TemporaryDirectory(prefix="caesura-autotune-") as folder:
        file = Path(folder) / "flashinfer.json"
        known = cache.read()
        if known is not None:
            file.write_text(json.dumps(known), encoding="utf-8")
        with module.autotune(True, cache=str(file)):
            yield
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    if found is not None and found != known:
        cache.write(found)


def _installed_autotuner() -> Any:
    try:
        return import_module("flashinfer.autotuner")
    except ImportError as error:
        logger.info("FlashInfer's kernels are not tuned: %s", error)
        return None
