"""Further log-probabilities of streams: merged for a slow reader, and read by the client, token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.properties import examples

from caesura.client import InternalError
from caesura.client.connection.results import further_logprobs, read_ints
from caesura.io_struct import DeltaLogprobs, FinishReason, GenerateReqOutput, LogprobRows, StreamDelta
from caesura.scheduler.messaging.send_queues import merge, result_bytes

SAMPLES = [("a", 0), ("a", 1), ("b", 0), ("c", 2)]
WIDTHS = {("a", 0): 2, ("a", 1): 2, ("b", 0): 0, ("c", 2): 3}
"""Number of tokens whose logprobs each sample wants at every position."""


def value(sample: tuple[str, int], at: int, column: int) -> int:
    return 1000 * SAMPLES.index(sample) + 10 * at + column


def delta_of(rows: list[tuple[tuple[str, int], int, int]]) -> StreamDelta:
    def ints(values: list[int]) -> bytes:
        return np.asarray(values, "<i4").tobytes()

    tokens = [value(sample, at, 9) for sample, start, count in rows for at in range(start, start + count)]
    cells = [
        value(sample, at, column)
        for sample, start, count in rows
        for at in range(start, start + count)
        for column in range(WIDTHS[sample])
    ]
    further = DeltaLogprobs(
        ks=ints([WIDTHS[sample] for sample, *_ in rows]),
        ids=ints(cells),
        logprobs=(-np.asarray(cells, "<f4")).tobytes(),
    )
    asked = any(WIDTHS[sample] for sample, *_ in rows)
    return StreamDelta(
        rids=[sample[0] for sample, *_ in rows],
        indices=ints([sample[1] for sample, *_ in rows]),
        starts=ints([start for _, start, _ in rows]),
        counts=ints([count for *_, count in rows]),
        tokens=ints(tokens),
        logprobs=(-np.asarray(tokens, "<f4")).tobytes(),
        top=further if asked else None,
        token_ids=None,
    )


@settings(max_examples=examples(100))
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(SAMPLES), st.integers(0, 3)), min_size=1, max_size=4),
        min_size=1,
        max_size=6,
    ),
    st.sets(st.sampled_from(SAMPLES), max_size=2),
)
def test_each_token_keeps_its_own(steps, ended):
    position = dict.fromkeys(SAMPLES, 0)
    deltas = []
    for step in steps:
        rows = []
        for sample, count in step:
            rows.append((sample, position[sample], count))
            position[sample] += count
        deltas.append(delta_of(rows))
    merged = merge(deltas, ended)
    if merged is None:
        return
    assert merged.token_ids is None
    counts, starts = read_ints(merged.counts), read_ints(merged.starts)
    samples = list(zip(merged.rids, read_ints(merged.indices), strict=True))
    found = further_logprobs(merged.top, counts)
    for sample, start, count, further in zip(samples, starts, counts, found, strict=True):
        assert (further is None) == (WIDTHS[sample] == 0 or merged.top is None)
        if further is not None:
            assert len(further) == count
            for at in range(count):
                cells = [value(sample, start + at, column) for column in range(WIDTHS[sample])]
                assert further.at(at) == [(-float(cell), cell) for cell in cells]
    if any(WIDTHS[sample] for sample in samples):
        assert merged.top is not None


def test_result_bytes_count_all_logprobs():
    rows = LogprobRows(k=2, ids=bytes(800), logprobs=bytes(800))
    common = {
        "rid": "r",
        "output_ids": b"",
        "finish_reason": FinishReason(type="abort"),
        "weight_versions": [],
    }
    plain = GenerateReqOutput(**common, prompt_tokens=1, cached_tokens=0, seed=0)
    for field in ("output_top_logprobs", "output_token_ids_logprobs", "input_top_logprobs"):
        heavy = GenerateReqOutput(**common, prompt_tokens=1, cached_tokens=0, seed=0, **{field: rows})
        assert result_bytes(heavy) == result_bytes(plain) + 1600


@pytest.mark.parametrize("broken", ["ks", "ids", "logprobs"])
def test_columns_of_different_lengths_are_refused(broken):
    columns = {"ks": b"\x02\0\0\0", "ids": bytes(8), "logprobs": bytes(8)}
    columns[broken] += bytes(4)
    with pytest.raises(InternalError, match="different lengths"):
        further_logprobs(DeltaLogprobs(**columns), [1])
