"""Two readings of an engine's status: figures for a trainer's log, and why a generation had to wait."""

from ...io_struct import Distribution, GetStatusReqOutput
from ...io_struct.distribution import EPOCHS, SECONDS, Histogram
from ..exceptions import TimedOut

PREFIX = "caesura/"


def figures(status: GetStatusReqOutput) -> dict[str, float]:
    """Return figures by name; counters are since the engine's start, and what is not known is absent."""
    totals, kv, memory = status.totals, status.kv, status.device_memory
    found: dict[str, float | None] = {
        "paused": status.generation == "paused",
        "pause_age_s": status.pause_age_s or 0.0,
        "pauses": sum(each.count for each in totals.pauses),
        "pause_s": sum(each.seconds for each in totals.pauses),
        "weights_valid": status.weights == "valid",
        "weights_epoch": status.weights_epoch,
        "updates": sum(each.committed for each in totals.updates),
        "failed_updates": sum(each.failed for each in totals.updates),
        "running_requests": status.running_requests + status.prefilling_requests,
        "waiting_requests": status.waiting_requests,
        "generated_tokens": status.generated_tokens,
        "tokens_per_s": status.gen_throughput,
        "retractions": status.num_retractions,
        "steps": status.step,
        "failed_steps": status.step_failures.failed,
        "kv_held_share": kv.held / kv.total if kv.total else None,
        "prefix_hit_share": totals.cached_tokens / totals.prompt_tokens if totals.prompt_tokens else None,
        "memory_reserved_bytes": memory.reserved,
        "memory_allocated_bytes": memory.allocated,
        "memory_available_bytes": memory.available,
        "uptime_s": status.uptime_s,
    }
    found |= {f"samples/{reason}": count for reason, count in totals.finished_requests.items()}
    found |= {f"stage_s/{stage.name}": stage.total_s for stage in status.stages}
    if (drift := status.drift) is not None:
        found |= {
            f"drift/{name}": getattr(drift, name)
            for name in ("mean_abs", "p99", "max_abs", "k1", "k3", "ess")
        }
        found["drift/update_k3"] = None if drift.update is None else drift.update.k3
    found |= _summary("queue_time", totals.queue_time, SECONDS)
    found |= _summary("latency_s", totals.latency_s, SECONDS)
    found |= _summary("staleness_epochs", totals.staleness, EPOCHS)
    return {f"{PREFIX}{name}": float(value) for name, value in found.items() if value is not None}


def _summary(name: str, counted: Distribution, bounds: tuple[float, ...]) -> dict[str, float | None]:
    count = sum(counted.counts)
    if not count:
        return {}
    histogram = Histogram(bounds, counted)
    parts = {f"{name}/p{100 * share:.0f}": histogram.quantile(share) for share in (0.5, 0.9, 0.99)}
    return {f"{name}/mean": counted.sum / count, **parts}


ASK_S = 0.5
"""Longest wait for the status; an engine answers within a tenth of a second, also during updates."""


def time_to_ask(error: TimedOut) -> float:
    """Return the seconds that may be spent on the reason: not more than the timeout itself."""
    timeout = error.detail.get("timeout")
    return min(timeout, ASK_S) if isinstance(timeout, int | float) else 0.0


def explained(error: TimedOut, status: GetStatusReqOutput) -> TimedOut:
    """Return ``error`` with what keeps an engine in this state from generating, if anything does."""
    detail, reasons = dict(error.detail), []
    if status.generation != "running":
        owner = "a client that gave no owner" if status.pause_owner is None else f"{status.pause_owner!r}"
        since = "" if status.pause_age_s is None else f", {status.pause_age_s:.1f} s ago"
        paused = f"the engine was paused ({status.pause_mode}) by {owner}{since}"
        reasons.append(f"{paused}, and waits for continue_generation")
        detail["paused"] = {
            "mode": status.pause_mode, "owner": status.pause_owner, "age_s": status.pause_age_s
        }  # fmt: skip
    if status.weights == "updating":
        reasons.append("its weights are being updated")
    elif status.weights != "valid":
        reasons.append(f"its weights are {status.weights}, and it waits for a complete update")
    if status.released_tags:
        reasons.append(f"its memory is released, and it waits for resume_memory({status.released_tags})")
    return TimedOut(f"{error.message}: {'; '.join(reasons)}", **detail) if reasons else error
