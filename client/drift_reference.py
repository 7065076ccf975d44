"""An engine's samples scored by transformers, which finds weights that are wrong in the engine itself.

The reference runs in a process of its own: neither the engine nor its client has its memory.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal

import msgspec

from ..io_struct import DriftReport
from .connection.blocking import SchedulerClient
from .exceptions import EpochBehind, InternalError, InvalidRequest, TimedOut, Unsupported, error_for

DEFAULT_TIMEOUT_S = 600.0
VERSION = "{version}"
_COMMAND = [sys.executable, "-P", "-m", f"{__package__}.trainer.reference"]


def reference_logprobs(
    folder: str | os.PathLike[str],
    samples: Sequence[Mapping[str, Any]],
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    timeout: float = DEFAULT_TIMEOUT_S,
    memory_bytes: int | None = None,
) -> list[list[float]]:
    """Return the log-probabilities of each sample's output by transformers, in a process of its own.

    ``samples`` are ``check_drift``'s without ``logprobs``; ``folder`` has the base weights alone.
    ``memory_bytes`` is the most that the process may allocate, by default what the host has left. Raises
    Unsupported without transformers, CheckpointError, TimedOut, and EngineOutOfMemory.
    """
    if find_spec("transformers") is None:
        raise Unsupported("a reference needs transformers: pip install 'caesura[transformers]'")
    if adapted := [each["adapter"] for each in samples if each.get("adapter") is not None]:
        raise InvalidRequest(f"a reference has no adapters, and a sample has {adapted[0]!r}", field="adapter")
    fields = ("token_ids", "prompt_len", "temperature")
    job = {
        "folder": os.fspath(folder),
        "samples": [{name: each[name] for name in fields if name in each} for each in samples],
        "dtype": dtype,
        "timeout_s": timeout,
        "memory_bytes": memory_bytes,
    }
    try:
        done = subprocess.run(  # noqa: S603 (this interpreter)
            _COMMAND, input=json.dumps(job), capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        raise TimedOut(f"the reference {folder} was not computed within {timeout:g} s") from None
    if done.returncode:
        told = done.stderr.strip().rpartition("\n")[2]
        raise InternalError(f"the reference's process ended with status {done.returncode}: {told}")
    answer = json.loads(done.stdout.rpartition("\n")[0].rpartition("\n")[2])
    if "code" in answer:
        raise error_for(answer["code"], answer["message"])
    logprobs: list[list[float]] = answer["logprobs"]
    return logprobs


def check_reference(
    client: SchedulerClient,
    folder: str | os.PathLike[str],
    *,
    samples: int = 16,
    reply_timeout: float | None = None,
    **reference: Any,
) -> DriftReport:
    """Compare the newest samples of an engine's self-check with a checkpoint of the same weights.

    ``{version}`` in ``folder`` is the engine's weight version, ``reply_timeout`` limits each call of the
    engine in seconds, and ``reference`` are keywords of :func:`reference_logprobs`. Raises EpochBehind if no
    sample of the weights is there yet, or they were updated meanwhile.
    """
    kept = client.drift_samples(samples, timeout=reply_timeout)
    chosen = [msgspec.to_builtins(each) for each in kept.samples if each.adapter is None]
    if not chosen:
        raise EpochBehind("the self-check has scored no sample of the present weights yet")
    version = kept.report.weight_version
    logprobs = reference_logprobs(os.fspath(folder).replace(VERSION, version), chosen, **reference)
    report = client.check_drift(
        [{**each, "logprobs": values} for each, values in zip(chosen, logprobs, strict=True)],
        timeout=reply_timeout,
    )
    if report.weights_epoch != kept.report.weights_epoch:
        raise EpochBehind(f"the weights were updated to {report.weight_version!r} while the reference scored")
    return report
