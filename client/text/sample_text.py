"""Text and stop strings of one sample as its tokens arrive; and results cut at a stop string.

Invariants:
- Returned text is final: no stop string can begin in it and no character in it is incomplete. All of it
  together is the text of the sample.
- A stop string ends the output after the token that completes it: the first token with which the decoded
  output contains the stop string. The result does not depend on how the tokens were divided into messages.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from msgspec import structs

from ...io_struct import HiddenStates, RoutedExperts
from ..connection.results import GenerateOutput, cut
from .detokenizer import detokenizer
from .stop_strings import StopMatcher, StopStrings
from .tokenizer import TextTokenizer


class SampleText:
    """Text of one sample, as its tokens arrive.

    ``length`` counts tokens up to a stop string's last, or is None; ``settled`` those whose text is known.
    """

    __slots__ = (
        "_before",
        "_checkpoint",
        "_detokenizer",
        "_matcher",
        "_skip",
        "_text",
        "_unsettled",
        "length",
        "settled",
    )

    def __init__(
        self,
        tokenizer: TextTokenizer,
        prompt_ids: Sequence[int],
        stops: StopStrings | None = None,
        *,
        skip_special_tokens: bool = True,
        min_new_tokens: int = 0,
    ) -> None:
        """Stop strings do not count in the text of the first ``min_new_tokens`` tokens."""
        self._detokenizer = detokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)
        self._matcher = None if stops is None else StopMatcher(stops)
        self._skip = min_new_tokens
        # A match is traced back to its token from the state after the last settled token.
        self._checkpoint = self._detokenizer if stops is None else self._detokenizer.copy()
        self._before = 0  # characters up to the checkpoint
        self._unsettled: list[int] = []
        self._text = ""
        self.settled = 0
        self.length: int | None = None

    @property
    def stop(self) -> str | None:
        match = None if self._matcher is None else self._matcher.match
        return None if match is None else match.stop

    def feed(self, ids: Sequence[int]) -> str:
        """Add ids; return the text that is certain now. Text after a stop string is ignored."""
        if self._matcher is None:
            self.settled += len(ids)
            return self._detokenizer.feed(ids)
        if self.length is not None:
            return ""
        if self._skip:
            early, ids = ids[: self._skip], ids[self._skip :]
            self._skip -= len(early)
            text = self._detokenizer.feed(early)
            self._note(early, text)
            return self._matcher.skip(text) + (self.feed(ids) if ids else "")
        text = self._detokenizer.feed(ids)
        shown = self._matcher.feed(text)
        self._note(ids, text)
        return shown

    def finish(self, last: Sequence[int] = ()) -> str:
        """Return the rest of the text; that of ``last``, such as a kept stop token, is not searched."""
        if self.length is not None:
            return ""
        if self._matcher is None:
            return self._detokenizer.feed(last) + self._detokenizer.flush()
        tail = self._detokenizer.peek()
        shown = self._matcher.feed(tail)
        self._note((), tail)
        if self.stop is not None:
            return shown
        shown += self._matcher.flush()
        return shown[: len(shown) - len(tail)] + self._detokenizer.feed(last) + self._detokenizer.flush()

    def _note(self, ids: Sequence[int], text: str) -> None:
        self._unsettled += ids
        self._text += text
        if self.stop is not None:
            self.length = self.settled = self.settled + self._trace()
        elif self._detokenizer.settled:
            self._checkpoint = self._detokenizer.copy()
            self.settled += len(self._unsettled)
            self._before += len(self._text)
            self._unsettled = []
            self._text = ""

    def _trace(self) -> int:
        """Return the number of tokens after the checkpoint that complete the match."""
        assert self._matcher is not None
        assert self._matcher.match is not None
        wanted = self._text[: self._matcher.match.end - self._before]
        text = ""
        for count, token in enumerate(self._unsettled, 1):
            text += self._checkpoint.feed([token])
            so_far = text + self._checkpoint.peek()
            if len(so_far) >= len(wanted) and so_far.startswith(wanted):
                return count
        return len(self._unsettled)


def shortened(output: GenerateOutput, length: int) -> GenerateOutput:
    """Return the output with only its first ``length`` tokens: every list over output tokens is cut."""
    if length >= len(output.output_ids):
        return output
    spans = [span for span in output.weight_versions if span.start < length]
    if spans:
        spans[-1] = structs.replace(spans[-1], end=min(spans[-1].end, length))
    return replace(
        output,
        output_ids=output.output_ids[:length],
        output_logprobs=cut(output.output_logprobs, 0, length),
        raw_logprobs=cut(output.raw_logprobs, 0, length),
        sampled_logprobs=cut(output.sampled_logprobs, 0, length),
        output_top_logprobs=cut(output.output_top_logprobs, 0, length),
        output_token_ids_logprobs=cut(output.output_token_ids_logprobs, 0, length),
        sampling_mask=cut(output.sampling_mask, 0, length),
        routed_experts=_first_rows(output.routed_experts, output.prompt_tokens + length - 1 if length else 0),
        hidden_states=_first_rows(output.hidden_states, output.prompt_tokens + length - 1 if length else 0),
        weight_versions=spans,
    )


RowsT = TypeVar("RowsT", RoutedExperts, HiddenStates)


def _first_rows(values: RowsT | None, end: int) -> RowsT | None:
    if values is None:
        return None
    count, *row = values.shape
    rows = min(max(0, end - values.start), count)
    size = rows * (len(values.data) // max(count, 1))
    return structs.replace(values, data=values.data[:size], shape=[rows, *row])
