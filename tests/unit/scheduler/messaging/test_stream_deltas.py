"""Stream deltas: merged for a slow reader, and their further log-probabilities as the client reads them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.properties import examples
from support.raw_client import rows

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


@settings(max_examples=examples(150))
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(SAMPLES), st.integers(0, 3), st.booleans()), max_size=4),
        min_size=1,
        max_size=8,
    ),
    st.sets(st.sampled_from(SAMPLES), max_size=2),
)
def test_merging_keeps_tokens_and_their_logprobs(steps, ended):
    position = dict.fromkeys(SAMPLES, 0)
    deltas, expected = [], set()
    for step in steps:
        table = []
        for sample, count, lost in step:
            start = position[sample]
            position[sample] += count
            if not lost:
                table.append((sample, start, count))
                expected |= {(sample, at) for at in range(start, start + count) if sample not in ended}
        deltas.append(delta_of(table))
    merged = merge(deltas, ended)
    found, last = set(), dict.fromkeys(SAMPLES, -1)
    if merged is not None:
        assert merged.token_ids is None
        further = further_logprobs(merged.top, read_ints(merged.counts))
        for (rid, index, start, tokens, logprobs), more in zip(rows(merged), further, strict=True):
            sample = (rid, index)
            assert logprobs == [-float(token) for token in tokens]
            assert start >= last[sample], "a sample's rows come in order"
            last[sample] = start
            assert (more is None) == (WIDTHS[sample] == 0)
            for at, token in enumerate(tokens):
                found.add((sample, start + at))
                assert token == value(sample, start + at, 9)
                cells = [value(sample, start + at, column) for column in range(WIDTHS[sample])]
                assert more is None or more.at(at) == [(-float(cell), cell) for cell in cells]
    assert found == expected


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
