"""Why a generation that timed out had to wait, as far as the engine's status tells."""

from ...io_struct import GetStatusReqOutput
from ..exceptions import TimedOut

ASK_S = 0.5
"""Longest wait for the status; an engine answers within a tenth of a second, also during updates."""


def time_to_ask(error: TimedOut) -> float:
    """Return the seconds that may be spent on the reason: not more than the timeout itself."""
    timeout = error.detail.get("timeout")
    return min(timeout, ASK_S) if isinstance(timeout, int | float) else 0.0


def explained(error: TimedOut, status: GetStatusReqOutput) -> TimedOut:
    """Return ``error`` with what keeps an engine in this state from generating, if anything does."""
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
