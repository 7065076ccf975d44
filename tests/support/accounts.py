"""What a test has asked of an engine, and what the answers must look like."""

from dataclasses import dataclass, field

import numpy as np
from support.scripted import expected_tokens, tokens_of

from caesura.io_struct import BatchTokenOutput, GenerateReqInput, GenerateReqOutput


@dataclass
class Submitted:
    """An accepted generate request, and who waits for its samples."""

    message: GenerateReqInput
    waiters: list[str]
    """Clients that must get every sample: the sender, and whoever repeated the message."""
    aborted: bool = False
    """Somebody or something may have aborted it."""
    vanished: bool = False
    """A waiter has left: stream deltas may have gone to either."""

    @property
    def keys(self) -> list[tuple[str, int]]:
        return [(self.message.id, index) for index in range(self.message.sampling_params.n)]


@dataclass
class Lifecycle:
    """The reference: what status must say when no command is under way."""

    mode: str | None = None
    weights: str = "valid"
    epoch: int = 0
    labels: dict[int, str] = field(default_factory=lambda: {0: "default"})
    flushed_epochs: set[int] = field(default_factory=set)
    session: bool = False
    session_label: str | None = None
    session_flush: bool = False

    def commit(self, label: str | None, flush: bool) -> None:
        self.epoch += 1
        self.labels[self.epoch] = label if label is not None else self.labels[self.epoch - 1]
        if flush:
            self.flushed_epochs.add(self.epoch)
        self.weights = "valid"
        self.close_session()

    def close_session(self) -> None:
        self.session, self.session_label, self.session_flush = False, None, False


def check_result(submitted: Submitted, result: GenerateReqOutput, vocab_size: int) -> None:
    """Tokens are the scripted model's, everything beside them is as long, and the reason for the end is true."""
    message, tokens = submitted.message, tokens_of(result)
    params, reason = message.sampling_params, result.finish_reason
    assert tokens == expected_tokens(message.input_ids, result, vocab_size)
    assert result.prompt_tokens == len(message.input_ids)
    stops = [i for i, token in enumerate(tokens) if token in params.stop_token_ids]
    if reason.type == "stop":
        assert stops == [len(tokens) - 1]
        assert reason.matched == tokens[-1]
    else:
        assert not stops
    if reason.type == "length":
        assert len(tokens) == params.max_new_tokens
    assert reason.type != "abort" or submitted.aborted
    for wanted, data, factor in (
        (message.return_logprob, result.output_logprobs, -1),
        (message.return_raw_logprob, result.raw_logprobs, -2),
    ):
        assert (data is not None) == wanted
        if data is not None:
            assert np.frombuffer(data, "<f4").tolist() == [factor * token for token in tokens]


def check_spans(result: GenerateReqOutput, lifecycle: Lifecycle) -> None:
    """Contiguous, in the order of commits, under the labels of then; no stale KV where a commit flushed."""
    end, epoch, before = 0, -1, None
    for span in result.weight_versions:
        assert span.start == end < span.end
        assert span.epoch >= epoch
        assert (span.epoch, span.stale_kv) != before, "one span where nothing changed"
        assert span.version == lifecycle.labels[span.epoch]
        assert not (span.stale_kv and span.epoch in lifecycle.flushed_epochs)
        end, epoch, before = span.end, span.epoch, (span.epoch, span.stale_kv)
    assert end == len(tokens_of(result))


def check_stream(outputs: list[tuple[str, BatchTokenOutput]], client: str, result: GenerateReqOutput) -> None:
    """Deltas are contiguous from 0 and agree with the result, which alone carries the last token."""
    streamed: list[int] = []
    for name, output in outputs:
        delta = output.delta
        if delta is None or name != client:
            continue
        counts = np.frombuffer(delta.counts, "<i4")
        starts, ends = np.frombuffer(delta.starts, "<i4"), np.cumsum(counts)
        rows = zip(delta.rids, np.frombuffer(delta.indices, "<i4"), strict=True)
        for row, key in enumerate(rows):
            if key == (result.rid, result.index):
                assert starts[row] == len(streamed)
                streamed += np.frombuffer(delta.tokens, "<i4")[ends[row] - counts[row] : ends[row]].tolist()
    tokens = tokens_of(result)
    assert streamed == tokens[: len(streamed)]
    assert len(streamed) >= len(tokens) - 1
