"""The ledger of the fault campaign must notice what an engine loses, doubles, tears or leaks."""

from dataclasses import replace

import numpy as np
import pytest
from campaigns.faults.footprint import Footprint
from campaigns.faults.known import Version, successors
from campaigns.faults.ledger import Ledger, Problem, check_tokens
from campaigns.faults.scene import SpanFacts
from campaigns.faults.witness import Witness
from support.fake_scheduler import FakeScheduler

from caesura.io_struct import (
    BatchTokenOutput,
    ErrorReply,
    FinishReason,
    GenerateReqOutput,
    StreamDelta,
    WeightVersionSpan,
)

A, B = (Version(label, None, successors(seed)) for label, seed in (("A", 0), ("B", 1)))
VERSIONS = {"A": A, "B": B}
PROMPT = [7, 9]


def result(rid: str, tokens: list[int], spans: list[tuple[str, int, int]], **fields) -> GenerateReqOutput:
    values = {
        "finish_reason": FinishReason(type="length", length=len(tokens)),
        "prompt_tokens": len(PROMPT),
        "cached_tokens": 0,
        "seed": 0,
        **fields,
    }
    return GenerateReqOutput(
        rid=rid,
        output_ids=np.array(tokens, "<i4").tobytes(),
        weight_versions=[
            WeightVersionSpan(version=label, epoch=0, start=start, end=end) for label, start, end in spans
        ],
        **values,
    )


def whole(rid: str = "r", count: int = 5) -> GenerateReqOutput:
    return result(rid, A.after(PROMPT[-1], count), [("A", 0, count)])


def asked(count: int = 5, samples: int = 1) -> Ledger:
    ledger = Ledger(VERSIONS)
    ledger.asked("r", PROMPT, count, samples)
    return ledger


def harms(problems: list[Problem]) -> list[str]:
    return [problem.harm for problem in problems]


def closed(*events: object, count: int = 5, samples: int = 1, alive: int = 0) -> list[str]:
    """Return the harms of a request to which these answers came."""
    ledger = asked(count, samples)
    for event in events:
        if isinstance(event, ErrorReply):
            ledger.refused(event)
        elif isinstance(event, StreamDelta):
            ledger.streamed(event)
        else:
            ledger.ended(event)
    return harms(ledger.close(alive=alive))


def early(reason: FinishReason) -> GenerateReqOutput:
    return result("r", A.after(9, 5), [("A", 0, 5)], finish_reason=reason)


def refusal(rid: str) -> ErrorReply:
    return ErrorReply(id=rid, code="internal", message="why")


def delta(start: int, tokens: list[int]) -> StreamDelta:
    ints = {"indices": [0], "starts": [start], "counts": [len(tokens)], "tokens": tokens}
    columns = {name: np.array(values, "<i4").tobytes() for name, values in ints.items()}
    return StreamDelta(rids=["r"], logprobs=np.full(len(tokens), np.nan, "<f4").tobytes(), **columns)


TOKENS = A.after(PROMPT[-1], 5)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(closed(whole()), [], id="one end with the version's tokens"),
        pytest.param(closed(), ["lost"], id="no end, and nothing alive"),
        pytest.param(closed(alive=1), ["stuck"], id="no end, and something alive"),
        pytest.param(closed(whole(), samples=3), ["lost", "lost"], id="each sample must end"),
        pytest.param(closed(whole(), whole()), ["doubled"], id="a second end"),
        pytest.param(closed(refusal("r"), whole()), ["failed", "doubled"], id="a result after an error"),
        pytest.param(closed(refusal("other"), whole()), [], id="a refusal of something else"),
        pytest.param(closed(early(FinishReason(type="error", message="x")), count=9), ["failed"], id="error"),
        pytest.param(closed(early(FinishReason(type="length", length=9)), count=9), ["failed"], id="short"),
        pytest.param(closed(early(FinishReason(type="abort")), count=9), [], id="abort"),
        pytest.param(
            closed(delta(0, TOKENS[:1]), delta(3, TOKENS[3:4]), whole()), [], id="a stream may have gaps"
        ),
        pytest.param(closed(delta(2, [TOKENS[2] + 1]), whole()), ["torn"], id="a stream of another token"),
        pytest.param(closed(delta(5, [3]), whole()), ["torn"], id="a stream beyond the result"),
    ],
)
def test_harms_of_a_request(found, expected):
    assert found == expected


def test_an_end_after_the_books_are_closed_is_doubled():
    ledger = asked()
    assert ledger.open() == ["r"]
    ledger.ended(whole())
    assert ledger.open() == []
    assert ledger.close(alive=0) == []
    ledger.ended(whole())
    assert harms(ledger.close(alive=0)) == ["doubled"]


@pytest.mark.parametrize(("ends", "expected"), [(0, []), (2, ["doubled"])])
def test_a_killed_engine_may_not_have_doubled(ends, expected):
    ledger = asked()
    for _ in range(ends):
        ledger.ended(whole())
    ledger.forget()
    assert harms(ledger.close(alive=0)) == expected


def test_an_update_amid_a_request_is_followed_by_token():
    first = A.after(9, 3)
    tokens = first + B.after(first[-1], 4)
    spans = [SpanFacts("A", 0, 3), SpanFacts("B", 3, 7)]
    assert check_tokens("r", 9, tokens, spans, VERSIONS) == []
    late = [SpanFacts("A", 0, 4), SpanFacts("B", 4, 7)]
    assert harms(check_tokens("r", 9, tokens, late, VERSIONS)) == ["torn"]


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [SpanFacts("A", 0, 2)],
        [SpanFacts("A", 0, 2), SpanFacts("A", 3, 4)],
        [SpanFacts("A", 1, 4)],
        [SpanFacts("A", 0, 5)],
        [SpanFacts("C", 0, 4)],
        [SpanFacts("B", 0, 4)],
    ],
)
def test_spans_that_do_not_explain_the_tokens_are_torn(spans):
    assert harms(check_tokens("r", 9, A.after(9, 4), spans, VERSIONS)) == ["torn"]


GOOD, WRONG = (result("r", version.after(PROMPT[-1], 4), [("A", 0, 4)]) for version in (A, B))


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        pytest.param([], ["lost"], id="loses"),
        pytest.param([GOOD, GOOD], ["doubled"], id="answers twice"),
        pytest.param([WRONG], ["torn"], id="serves the wrong version"),
        pytest.param([GOOD], [], id="is honest"),
    ],
)
def test_the_witness_of_a_faulty_engine_tells(tmp_path, answers, expected):
    def handler(request):
        ends = [BatchTokenOutput(step=1, finished=[each]) for each in answers]
        return [*ends, ErrorReply(id="last", code="busy", message="")]

    endpoint = f"ipc://{tmp_path}/s"
    with FakeScheduler(endpoint, handler), Witness(endpoint, Ledger(VERSIONS)) as witness:
        witness.generate("r", PROMPT, 4)
        while witness.arrived <= len(answers):
            witness.pump(1.0)
        assert harms(witness.ledger.close(alive=0)) == expected


def test_a_process_that_holds_more_than_before_leaks():
    before = Footprint(descriptors=9, threads=4, children=0, shared=0, resident=200 << 20)
    assert before.over(before) == []
    assert replace(before, descriptors=3, resident=210 << 20).over(before) == []
    more = {"descriptors": 10, "threads": 5, "children": 1, "shared": 1, "resident": 1 << 30}
    for name, value in more.items():
        (text,) = replace(before, **{name: value}).over(before)
        assert text.startswith(name)
