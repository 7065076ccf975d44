"""Parts of one sample that different engines have sampled, and the request that continues it.

Invariants:
- The last token of a part did not end the sample: the one that does comes in the terminal result only.
- Every list about tokens has one entry per token; spans of a joined output cover all tokens without a gap.
- The continuation samples token ``t`` of sample ``i`` with the noise of (seed, ``i``, absolute position), as
  the first engine would have: the position counts prompt and output.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from itertools import groupby

import msgspec

from ... import io_struct as wire
from ..connection.results import GenerateOutput, TokenDelta, TokenLogprobs, cut, joined_masks, joined_rows

EpochOf = Callable[[int], int]
"""Maps an engine's weights epoch to the group's."""


@dataclass(slots=True)
class Part:
    """Tokens of one sample that have arrived so far; what was not requested is empty."""

    tokens: list[int] = field(default_factory=list)
    weights: list[wire.DeltaWeights] = field(default_factory=list)
    """Weights that sampled each token; epochs are the group's."""
    logprobs: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    sampled: list[float] = field(default_factory=list)
    top: list[TokenLogprobs] = field(default_factory=list)
    token_ids: list[TokenLogprobs] = field(default_factory=list)
    masks: list[wire.SamplingMask] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, delta: TokenDelta, epoch_of: EpochOf) -> None:
        """Append the tokens of a delta, which must have details and begin where this part ends."""
        assert delta.details is not None and delta.start == len(self.tokens)
        self.tokens += delta.output_ids
        self.weights += [
            msgspec.structs.replace(each, epoch=epoch_of(each.epoch)) for each in delta.details.weights
        ]
        self.logprobs += delta.output_logprobs or ()
        self.raw += delta.details.raw_logprobs or ()
        self.sampled += delta.details.sampled_logprobs or ()
        if delta.output_top_logprobs is not None:
            self.top.append(delta.output_top_logprobs)
        if delta.output_token_ids_logprobs is not None:
            self.token_ids.append(delta.output_token_ids_logprobs)
        if delta.details.sampling_mask is not None:
            self.masks.append(delta.details.sampling_mask)

    def copy(self) -> "Part":
        return Part(**{each.name: list(getattr(self, each.name)) for each in fields(self)})

    @staticmethod
    def of(output: GenerateOutput) -> "Part":
        """Return all tokens of ``output``, whose epochs are the group's."""
        weights = [
            wire.DeltaWeights(
                version=span.version, epoch=span.epoch, incarnation=span.incarnation, stale_kv=span.stale_kv
            )
            for span in output.weight_versions
            for _ in range(span.start, span.end)
        ]
        return Part(
            list(output.output_ids),
            weights,
            list(output.output_logprobs or ()),
            list(output.raw_logprobs or ()),
            list(output.sampled_logprobs or ()),
            [] if output.output_top_logprobs is None else [output.output_top_logprobs],
            [] if output.output_token_ids_logprobs is None else [output.output_token_ids_logprobs],
            [] if output.sampling_mask is None else [output.sampling_mask],
        )

    @property
    def newest_epoch(self) -> int | None:
        """The group's epoch of the newest weights that sampled a token, or None without tokens."""
        return max((each.epoch for each in self.weights), default=None)

    def spans(self) -> list[wire.WeightVersionSpan]:
        found: list[wire.WeightVersionSpan] = []
        for by, group in groupby(self.weights):
            start = found[-1].end if found else 0
            found.append(
                wire.WeightVersionSpan(
                    version=by.version,
                    epoch=by.epoch,
                    incarnation=by.incarnation,
                    stale_kv=by.stale_kv,
                    start=start,
                    end=start + sum(1 for _ in group),
                )
            )
        return found


def continuation(
    request: wire.GenerateReqInput, index: int, part: Part, *, rid: str, message_id: str
) -> wire.GenerateReqInput:
    """Return the request for the rest of sample ``index`` behind ``part``; ``request`` must have a seed."""
    params, done = request.sampling_params, len(part)
    prompt_len = len(request.input_ids)
    left = None if params.max_new_tokens is None else params.max_new_tokens - done
    rest = msgspec.structs.replace(
        params, n=1, max_new_tokens=left, min_new_tokens=max(0, params.min_new_tokens - done)
    )
    floor = part.newest_epoch
    minimum = max((each for each in (request.min_weights_epoch, floor) if each is not None), default=None)
    return msgspec.structs.replace(
        request,
        id=message_id,
        rid=rid,
        input_ids=[*request.input_ids, *part.tokens],
        sampling_params=rest,
        first_sample=index,
        continued_tokens=request.continued_tokens + done,
        logprob_start_len=request.logprob_start_len if request.logprob_start_len < prompt_len else -1,
        min_weights_epoch=minimum,
    )


def joined(
    request: wire.GenerateReqInput, part: Part, last: GenerateOutput, epoch_of: EpochOf, *, rid: str
) -> GenerateOutput:
    """Return ``part`` and its :func:`continuation` as one; prompt logprobs and experts are the latter's."""
    prompt_len, done = len(request.input_ids), len(part)
    spans = [
        msgspec.structs.replace(
            span, epoch=epoch_of(span.epoch), start=span.start + done, end=span.end + done
        )
        for span in last.weight_versions
    ]
    inputs = prompt_len - request.logprob_start_len
    routed, count = last.routed_experts, done + len(last.output_ids)
    complete = routed is not None and routed.shape[0] == prompt_len + count - 1 - routed.start
    return replace(
        last,
        rid=rid,
        output_ids=[*part.tokens, *last.output_ids],
        output_logprobs=_behind(part.logprobs, last.output_logprobs),
        raw_logprobs=_behind(part.raw, last.raw_logprobs),
        sampled_logprobs=_behind(part.sampled, last.sampled_logprobs),
        output_top_logprobs=joined_rows([*part.top, last.output_top_logprobs]),
        output_token_ids_logprobs=joined_rows([*part.token_ids, last.output_token_ids_logprobs]),
        sampling_mask=joined_masks([*part.masks, last.sampling_mask]),
        input_logprobs=None if last.input_logprobs is None else last.input_logprobs[:inputs],
        input_top_logprobs=cut(last.input_top_logprobs, 0, inputs - 1),
        input_token_ids_logprobs=cut(last.input_token_ids_logprobs, 0, inputs - 1),
        routed_experts=routed if complete or done == 0 else None,
        finish_reason=_later(last.finish_reason, done),
        weight_versions=[*part.spans(), *spans],
        prompt_tokens=prompt_len,
        cached_tokens=min(last.cached_tokens, prompt_len),
    )


def ended_here(
    request: wire.GenerateReqInput, index: int, part: Part, reason: wire.FinishReason, *, rid: str
) -> GenerateOutput:
    """Return the output of a sample that no engine continues: ``part`` is all of it."""
    return GenerateOutput(
        rid=rid,
        index=index,
        output_ids=list(part.tokens),
        output_logprobs=list(part.logprobs) if request.return_logprob else None,
        raw_logprobs=list(part.raw) if request.return_raw_logprob else None,
        sampled_logprobs=list(part.sampled) if request.return_sampled_logprob else None,
        output_top_logprobs=joined_rows(part.top),
        output_token_ids_logprobs=joined_rows(part.token_ids),
        sampling_mask=joined_masks(part.masks),
        routed_experts=None,
        finish_reason=reason,
        weight_versions=part.spans(),
        prompt_tokens=len(request.input_ids),
        cached_tokens=0,
        seed=request.sampling_params.seed or 0,
        num_retractions=0,
        queue_time=0.0,
        e2e_latency=0.0,
    )


def _behind(earlier: list[float], later: list[float] | None) -> list[float] | None:
    return None if later is None else [*earlier, *later]


def _later(reason: wire.FinishReason, done: int) -> wire.FinishReason:
    if reason.length is None:
        return reason
    return msgspec.structs.replace(reason, length=reason.length + done)
