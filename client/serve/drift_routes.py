"""``/rollout/drift``: a trainer's log-probabilities against the engine's, and the self-check's report."""

from typing import Annotated, Any

import msgspec

from ...io_struct import DriftReport
from ...io_struct.generate import MAX_INT32, TokenId
from .bodies import Label, Strict
from .commands import Form, command
from .context import FrontEnd
from .sglang.control import EITHER


class DriftSampleBody(Strict, kw_only=True):
    token_ids: list[TokenId]
    prompt_len: Annotated[int, msgspec.Meta(ge=1, le=MAX_INT32)]
    logprobs: list[float]
    temperature: float = 1.0
    adapter: Label | None = None
    rid: Label = ""


class DriftBody(Strict, kw_only=True):
    samples: Annotated[list[DriftSampleBody], msgspec.Meta(min_length=1)] | None = None
    """Null, and GET: the report of the last self-check."""


def _told(_: DriftBody, report: DriftReport) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(report)
    return told


@command("/rollout/drift", Form(_told), *EITHER, size="prompts")
async def rollout_drift(front: FrontEnd, body: DriftBody) -> DriftReport:
    """Score the samples with the engine's weights; without any, return the last self-check."""
    samples = None if body.samples is None else [msgspec.structs.asdict(each) for each in body.samples]
    report: DriftReport = await front.client.check_drift(samples)
    return report
