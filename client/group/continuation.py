"""Parts of one sample that different engines have sampled, and the request that continues it.

Invariants:
- The last token of a part did not end the sample: the one that does comes in the terminal result only.
- Every list about tokens has one entry per token; spans of a joined output cover all tokens without a gap.
- The continuation samples token ``t`` of sample ``i`` with the noise of (seed, ``i``, absolute position), as
  the first engine would have: the position counts prompt and output.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import msgspec

from ... import io_struct as wire
from ..connection.results import GenerateOutput, TokenDelta, cut, joined_masks, joined_rows

EpochOf = Callable[[int], int]
"""Maps an engine's weights epoch to the group's."""
_OF_DELTA = ("output_ids", "output_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
_OF_DETAILS = ("raw_logprobs", "sampled_logprobs", "sampling_mask")
_COLUMNS = (*_OF_DELTA, *_OF_DETAILS)
_JOIN: dict[str, Callable[[list[Any]], Any]] = {
    **dict.fromkeys(("output_top_logprobs", "output_token_ids_logprobs"), joined_rows),
    "sampling_mask": joined_masks,
}
"""Functions for columns whose entries are blocks of tokens; the others have one entry per token."""


@dataclass(slots=True)
class Part:
    """Tokens of one sample that have arrived so far."""

    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in _COLUMNS})
    """Fields of :class:`GenerateOutput` about tokens; what was not requested is empty."""
    weights: list[wire.DeltaWeights] = field(default_factory=list)
    """Weights that sampled each token; epochs are the group's."""

    def __len__(self) -> int:
        return len(self.weights)

    def add(self, delta: TokenDelta, epoch_of: EpochOf) -> None:
        """Append the tokens of a delta, which must have details and begin where this part ends."""
        assert delta.details is not None and delta.start == len(self)
        for each in delta.details.weights:
            self.weights.append(msgspec.structs.replace(each, epoch=epoch_of(each.epoch)))
        self._append(delta, _OF_DELTA)
        self._append(delta.details, _OF_DETAILS)

    def _append(self, source: object, names: Iterable[str]) -> None:
        for name in names:
            value = getattr(source, name)
            if value is not None:
                self.columns[name] += value if isinstance(value, list) else [value]

    def copy(self) -> "Part":
        return Part({name: list(column) for name, column in self.columns.items()}, list(self.weights))

    @staticmethod
    def of(output: GenerateOutput) -> "Part":
        """Return all tokens of ``output``, whose epochs are the group's."""
        part = Part()
        part._append(output, _COLUMNS)
        for span in output.weight_versions:
            by = wire.DeltaWeights(
                version=span.version,
                epoch=span.epoch,
                incarnation=span.incarnation,
                stale_kv=span.stale_kv,
                adapter=span.adapter,
                adapter_epoch=span.adapter_epoch,
                digest=span.digest,
                adapter_digest=span.adapter_digest,
            )
            part.weights += [by] * (span.end - span.start)
        return part

    @property
    def newest_epoch(self) -> int | None:
        """The group's epoch of the newest weights that sampled a token, or None without tokens."""
        return max((each.epoch for each in self.weights), default=None)

    @property
    def newest_adapter_epoch(self) -> int:
        """The newest version of the adapter that sampled a token, or 0."""
        return max((each.adapter_epoch for each in self.weights), default=0)

    def spans(self) -> list[wire.WeightVersionSpan]:
        found: list[wire.WeightVersionSpan] = []
        for by, group in groupby(self.weights):
            start = found[-1].end if found else 0
            end = start + sum(1 for _ in group)
            found.append(wire.WeightVersionSpan(**msgspec.structs.asdict(by), start=start, end=end))
        return found


def continuation(
    request: wire.GenerateReqInput, index: int, part: Part, *, rid: str, message_id: str
) -> wire.GenerateReqInput:
    """Return the request for the rest of sample ``index`` behind ``part``; ``request`` must have a seed."""
    params, done = request.sampling_params, len(part)
    prompt_len = len(request.input_ids)
    left, forced = params.max_new_tokens, params.forced_output_ids
    if left is not None and forced is None:
        left -= done
    rest = msgspec.structs.replace(
        params,
        n=1,
        max_new_tokens=left,
        min_new_tokens=max(0, params.min_new_tokens - done),
        forced_output_ids=None if forced is None else forced[done:],
    )
    floor = part.newest_epoch
    minimum = max((each for each in (request.min_weights_epoch, floor) if each is not None), default=None)
    return msgspec.structs.replace(
        request,
        id=message_id,
        rid=rid,
        input_ids=[*request.input_ids, *part.columns["output_ids"]],
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
        **{name: _column(name, part, last) for name in _COLUMNS},
        input_logprobs=None if last.input_logprobs is None else last.input_logprobs[:inputs],
        input_top_logprobs=cut(last.input_top_logprobs, 0, inputs - 1),
        input_token_ids_logprobs=cut(last.input_token_ids_logprobs, 0, inputs - 1),
        routed_experts=routed if complete or done == 0 else None,
        finish_reason=_later(last.finish_reason, done),
        weight_versions=[*part.spans(), *spans],
        prompt_tokens=prompt_len,
        cached_tokens=min(last.cached_tokens, prompt_len),
    )


def _column(name: str, part: Part, last: GenerateOutput) -> Any:
    earlier, later = part.columns[name], getattr(last, name)
    if name in _JOIN:
        return _JOIN[name]([*earlier, later])
    return None if later is None else [*earlier, *later]


def ended_here(
    request: wire.GenerateReqInput, index: int, part: Part, reason: wire.FinishReason, *, rid: str
) -> GenerateOutput:
    """Return the output of a sample that no engine continues: ``part`` is all of it."""
    nothing = GenerateOutput(
        rid=rid,
        index=index,
        output_ids=[],
        output_logprobs=[] if request.return_logprob else None,
        raw_logprobs=[] if request.return_raw_logprob else None,
        sampled_logprobs=[] if request.return_sampled_logprob else None,
        routed_experts=None,
        finish_reason=reason,
        weight_versions=[],
        prompt_tokens=len(request.input_ids),
        cached_tokens=0,
        seed=request.sampling_params.seed or 0,
        num_retractions=0,
        queue_time=0.0,
        e2e_latency=0.0,
    )
    return joined(request, part, nothing, int, rid=rid)


def _later(reason: wire.FinishReason, done: int) -> wire.FinishReason:
    if reason.length is None:
        return reason
    return msgspec.structs.replace(reason, length=reason.length + done)
