"""The status of an engine as rows of a table, for people; an engine that makes images has other rows."""

from collections.abc import Iterable
from time import localtime, strftime, time

from ..io_struct import GetStatusReqOutput

MIB = 1 << 20


def status_rows(status: GetStatusReqOutput) -> Iterable[tuple[str, str]]:
    pause = "" if status.pause_mode is None else f" ({_pause(status)})"
    weights = f"{status.weights}, version {status.weight_version}, epoch {status.weights_epoch}"
    if status.weights_detail is not None:
        weights += f": {status.weights_detail}"
    yield "generation", status.generation + pause
    yield "weights", weights
    if status.session is not None:
        yield (
            "session",
            f"{status.session.kind}, {status.session.age_s:.1f} s, {status.session.written_tensors} tensors",
        )
    if status.update is not None:
        done = f"{status.update.written_bytes / MIB:.0f} of {status.update.total_bytes / MIB:.0f} MiB"
        yield "update", f"{status.update.source}, {done}, {status.update.age_s:.1f} s"
    tags = ", ".join(status.released_tags)
    released = f" ({tags}): nothing is generated before resume_memory" if tags else ""
    yield "memory", status.memory + released
    yield "requests", _requests(status)
    age = "none yet" if status.last_step_age_s is None else f"last {status.last_step_age_s:.1f} s ago"
    unit = "tokens" if status.images is None else "denoise steps"
    yield "throughput", f"{status.gen_throughput:.1f} {unit}/s in the last seconds"
    yield (
        "steps",
        f"{status.step} ({age}), {status.generated_tokens} {unit}, {status.num_retractions} retractions",
    )
    failures = status.step_failures
    if failures.failed:
        of = "tokens" if status.images is None else "samples"
        limit = "" if failures.token_limit is None else f", at most {failures.token_limit} {of} for now"
        yield (
            "failures",
            f"{failures.failed} steps, {failures.retried} computed again, {failures.splits} splits{limit}",
        )
    kv = status.kv
    if status.images is None:
        yield "KV tokens", f"{kv.free} free + {kv.cached} cached + {kv.held} held = {kv.total}"
    memory = status.device_memory
    available = "unknown" if memory.available is None else f"{memory.available / MIB:.1f}"
    yield (
        "device",
        (
            f"{status.device}: {memory.reserved / MIB:.1f} MiB reserved, "
            f"{memory.allocated / MIB:.1f} allocated, "
            f"{available} available; weights {memory.weights / MIB:.1f}"
            + ("" if status.images is not None else f", KV {memory.kv_cache / MIB:.1f}")
        ),
    )
    for part in status.components:
        there, size = part.device_bytes / MIB, part.nbytes / MIB
        yield part.name, f"{part.residency}, {there:.1f} of {size:.1f} MiB on the device"
    yield "kernels", _kernels(status)
    limits = f", context {status.context_len}, vocabulary {status.vocab_size}"
    yield "model", f"{status.model_path} ({status.dtype}{limits if status.images is None else ''})"
    yield "process", f"pid {status.pid}, up {status.uptime_s:.0f} s, version {status.version}"


def _requests(status: GetStatusReqOutput) -> str:
    load = status.images
    if load is None:
        running = f"{status.running_requests} running, {status.prefilling_requests} prefilling"
    else:
        running = f"{load.encoding} encoding, {load.denoising} denoising, {load.decoding} decoding"
    return f"{running}, {status.waiting_requests} waiting (limit {status.max_running_requests})"


def _pause(status: GetStatusReqOutput) -> str:
    age = status.pause_age_s or 0.0
    since = strftime("%Y-%m-%d %H:%M:%S", localtime(time() - age))
    owner = "no owner" if status.pause_owner is None else f"owner {status.pause_owner}"
    lease = "no lease" if status.lease_left_s is None else f"lease ends in {status.lease_left_s:.1f} s"
    return f"{status.pause_mode}, for {age:.1f} s, since {since}, {owner}, {lease}"


def _kernels(status: GetStatusReqOutput) -> str:
    operations: dict[str, list[str]] = {}
    for operation, name in status.kernels.items():
        operations.setdefault(name, []).append(operation)
    text = "; ".join(f"{name}: {', '.join(served)}" for name, served in operations.items()) or "unknown"
    return text if status.kernels_reason is None else f"{text} ({status.kernels_reason})"
