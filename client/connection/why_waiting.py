"""Why a generation that timed out had to wait, as far as the engine's status tells.

Invariant: asking for it is bounded: it takes no longer than the timeout itself, and :data:`ASK_S` at most.
"""

from ...io_struct import GetStatusReqOutput
from ..exceptions import TimedOut

ASK_S = 0.5
"""Longest wait for the status; an engine answers it within a tenth of a second, also during updates."""


def time_to_ask(error: TimedOut) -> float:
    """Seconds that may be spent on the reason; 0 for a caller that only looked."""
    timeout = error.detail.get("timeout")
    return min(timeout, ASK_S) if isinstance(timeout, int | float) else 0.0


def explained(error: TimedOut, status: GetStatusReqOutput) -> TimedOut:
    """``error`` with what keeps an engine in this state from generating; as it was, if nothing does."""
    reasons = [reason for reason in (_pause(status), _weights(status), _memory(status)) if reason is not None]
    if not reasons:
        return error
    detail = dict(error.detail)
    if status.generation != "running":
        detail["paused"] = {
            "mode": status.pause_mode, "owner": status.pause_owner, "age_s": status.pause_age_s
        }  # fmt: skip
    return TimedOut(f"{error.message}: {'; '.join(reasons)}", **detail)


def _pause(status: GetStatusReqOutput) -> str | None:
    if status.generation == "running":
        return None
    owner = "a client that gave no owner" if status.pause_owner is None else f"{status.pause_owner!r}"
    since = "" if status.pause_age_s is None else f", {status.pause_age_s:.1f} s ago"
    return f"the engine was paused ({status.pause_mode}) by {owner}{since}, and waits for continue_generation"


def _weights(status: GetStatusReqOutput) -> str | None:
    if status.weights == "valid":
        return None
    if status.weights == "updating":
        return "its weights are being updated"
    return f"its weights are {status.weights}, and it waits for a complete update"


def _memory(status: GetStatusReqOutput) -> str | None:
    if not status.released_tags:
        return None
    return f"its memory is released, and it waits for resume_memory({status.released_tags})"
