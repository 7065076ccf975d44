"""Parts of a sample from several engines against the whole from one: an engine's model cuts it anywhere."""

import math
import struct
from dataclasses import replace
from itertools import accumulate, chain

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from support.fake_scheduler import finished, floats

from caesura.client.connection.results import (
    GenerateOutput,
    TokenDelta,
    TokenDetails,
    TokenLogprobs,
    decode_output,
)
from caesura.client.group.continuation import Part, continuation, joined
from caesura.io_struct import DeltaWeights, GenerateReqInput, SamplingMask, SamplingParams, WeightVersionSpan

PROMPT = [11, 12, 13]
TOP = 2


def weights_at(token: int) -> DeltaWeights:
    return DeltaWeights(
        version=f"v{token // 5}",
        epoch=100 + token // 5,
        incarnation="e",
        stale_kv=token > 5,
        adapter="a",
        adapter_epoch=7 + token // 5,
    )


def group_epoch(epoch: int) -> int:
    return epoch - 100


def request(count: int, *, minimum: int | None = None, first_input: int = 1) -> GenerateReqInput:
    return GenerateReqInput(
        rid="r",
        input_ids=PROMPT,
        sampling_params=SamplingParams(max_new_tokens=count, min_new_tokens=2, seed=7, n=4),
        return_logprob=True,
        return_raw_logprob=True,
        return_sampling_mask=True,
        logprob_start_len=first_input,
        top_logprobs_num=TOP,
        min_weights_epoch=minimum,
    )


def rows(start: int, end: int) -> TokenLogprobs:
    cells = [10 * token + column for token in range(start, end) for column in range(TOP)]
    return TokenLogprobs(k=TOP, ids=cells, logprobs=[-float(cell) for cell in cells])


def masks(start: int, end: int) -> SamplingMask:
    positions = [list(range(token, token + 1 + token % 3)) for token in range(start, end)]
    offsets = [0, *accumulate(map(len, positions))]
    return SamplingMask(
        ids=struct.pack(f"<{offsets[-1]}i", *chain.from_iterable(positions)),
        offsets=struct.pack(f"<{len(offsets)}i", *offsets),
    )


def delta(base: int, start: int, end: int) -> TokenDelta:
    """The tokens [start, end) of the whole, from an engine that began at ``base``."""
    return TokenDelta(
        index=2,
        start=start,
        output_ids=list(range(start, end)),
        output_logprobs=[-float(token) for token in range(start, end)],
        output_top_logprobs=rows(start, end),
        details=TokenDetails(
            weights=[weights_at(token) for token in range(start, end)],
            raw_logprobs=[-token - 0.5 for token in range(start, end)],
            sampled_logprobs=None,
            sampling_mask=masks(start, end),
        ),
    )


def answer(asked: GenerateReqInput, start: int, end: int) -> GenerateOutput:
    """Return the answer of an engine that samples the tokens [start, end) of the whole."""
    spans: list[WeightVersionSpan] = []
    for token in range(start, end):
        by = msgspec.structs.asdict(weights_at(token))
        if spans and (spans[-1].version, spans[-1].stale_kv) == (by["version"], by["stale_kv"]):
            spans[-1] = msgspec.structs.replace(spans[-1], end=token + 1 - start)
        else:
            spans.append(WeightVersionSpan(**by, start=token - start, end=token + 1 - start))
    inputs = len(asked.input_ids) - asked.logprob_start_len
    wire = finished(
        asked.rid,
        list(range(start, end)),
        2,
        output_logprobs=floats(-float(token) for token in range(start, end)),
        raw_logprobs=floats(-token - 0.5 for token in range(start, end)),
        input_logprobs=floats([math.nan, *(-float(position) for position in range(1, inputs))]),
        weight_versions=spans,
        prompt_tokens=len(asked.input_ids),
        cached_tokens=2,
    )
    return replace(
        decode_output(wire),
        output_top_logprobs=rows(start, end),
        sampling_mask=masks(start, end),
        input_top_logprobs=rows(0, inputs - 1),
    )


@given(st.integers(1, 24), st.data())
def test_joined_parts_equal_the_answer_of_one_engine(count, data):
    asked = request(count)
    whole = joined(asked, Part(), answer(asked, 0, count), group_epoch, rid="r")
    assert covered(whole) == [(f"v{token // 5}", token // 5, token > 5) for token in range(count)]
    part, done, rest = Part(), 0, asked
    for _ in range(data.draw(st.integers(0, 3))):  # engines that were lost
        for _ in range(data.draw(st.integers(0, 3))):
            end = data.draw(st.integers(done, count - 1))
            if end > done:
                part.add(delta(done, done, end), group_epoch)
            done = end
        rest = continuation(asked, 2, part, rid="other", message_id="m")
        assert rest.input_ids == [*PROMPT, *range(done)]
        assert (rest.continued_tokens, rest.first_sample) == (done, 2)
        params = rest.sampling_params
        assert (params.n, params.seed, params.max_new_tokens) == (1, 7, count - done)
        assert params.min_new_tokens == max(0, 2 - done)
        assert rest.min_weights_epoch == (None if not done else (done - 1) // 5)
        assert part.newest_adapter_epoch == (0 if not done else 7 + (done - 1) // 5)
    found = joined(asked, part, answer(rest, done, count), group_epoch, rid="r")
    assert replace(found, weight_versions=[]) == replace(whole, weight_versions=[])
    assert covered(found) == covered(whole)
    assert Part.of(found).spans() == whole.weight_versions


def covered(output: GenerateOutput) -> list[tuple[str, int, bool]]:
    at = 0
    found = []
    for span in output.weight_versions:
        assert span.start == at < span.end
        found += [(span.version, span.epoch, span.stale_kv)] * (span.end - span.start)
        at = span.end
    assert at == len(output.output_ids)
    return found


def test_a_promised_epoch_is_kept_and_never_lowered():
    part = Part()
    part.add(delta(0, 0, 6), group_epoch)
    for minimum, expected in ((None, 1), (0, 1), (3, 3)):
        rest = continuation(request(24, minimum=minimum), 2, part, rid="o", message_id="m")
        assert rest.min_weights_epoch == expected


def test_a_continued_replay_has_the_rest_of_its_ids():
    asked = request(24)
    asked.sampling_params = SamplingParams(max_new_tokens=4, n=1, forced_output_ids=list(range(9)))
    part = Part()
    part.add(delta(0, 0, 6), group_epoch)
    rest = continuation(asked, 2, part, rid="o", message_id="m").sampling_params
    assert (rest.forced_output_ids, rest.max_new_tokens, rest.problems()) == ([6, 7, 8], 4, [])


def test_a_continuation_asks_for_no_logprobs_of_the_prompt():
    """A position at the prompt's end asks for none; in the longer prompt it would ask for the output's."""
    part = Part()
    part.add(delta(0, 0, 6), group_epoch)
    rest = continuation(request(24, first_input=len(PROMPT)), 2, part, rid="o", message_id="m")
    assert rest.logprob_start_len == -1
