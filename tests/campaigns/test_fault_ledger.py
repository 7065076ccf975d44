"""The ledger of the fault campaign must notice what an engine loses, doubles, tears or leaks."""

from dataclasses import replace

import numpy as np
import pytest
from campaigns.faults.__main__ import again, parse, table
from campaigns.faults.campaign import Campaign, Outcome
from campaigns.faults.footprint import Footprint
from campaigns.faults.kinds import KINDS
from campaigns.faults.known import VOCAB, Version, make_versions, successors
from campaigns.faults.ledger import Ledger, Problem, check_tokens
from campaigns.faults.scene import SpanFacts
from campaigns.faults.witness import Witness
from safetensors.torch import load_file
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


def test_a_refusal_is_quoted():
    ledger = asked()
    ledger.refused(refusal("r"))
    (problem,) = ledger.close(alive=0)
    assert (problem.harm, "why" in problem.text) == ("failed", True)


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


def test_versions_differ_in_every_tensor_and_every_successor(tmp_path):
    one, other = make_versions(tmp_path, count=2)
    first, second = (load_file(version.folder / "model.safetensors") for version in (one, other))
    assert all(not first[name].equal(second[name]) for name in first)
    assert len(set(one.after(5, VOCAB - 2))) == VOCAB - 2, "one cycle: no token is reached twice on the way"
    assert sum(a != b for a, b in zip(one.successor, other.successor, strict=True)) > VOCAB * 0.9


def test_a_fault_is_drawn_from_seed_and_number_alone():
    campaign = Campaign([], seed=3)
    kinds = [campaign.draw(number)[0] for number in range(2000)]
    assert kinds[1234] == Campaign([], seed=3).draw(1234)[0]
    assert kinds != [Campaign([], seed=4).draw(number)[0] for number in range(2000)]
    assert set(kinds) == set(KINDS), "every kind is drawn"
    assert campaign.draw(5)[1].random() == Campaign([], seed=3).draw(5)[1].random()


def test_harms_are_counted_and_a_fault_can_be_repeated():
    outcomes = [
        Outcome(0, "client-kill", recovery=0.5),
        Outcome(1, "client-kill", recovery=1.5, problems=[Problem("lost", "r"), Problem("torn", "r")]),
        Outcome(2, "disk-full", recovery=0.1, problems=[Problem("leaked", "x")]),
    ]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(outcomes).splitlines()]
    assert rows[0][:8] == ["kind", "count", "lost", "doubled", "stuck", "torn", "leaked", "failed"]
    assert rows[2][:8] == ["client-kill", "2", "1", "0", "0", "1", "0", "0"]
    assert rows[-1][:8] == ["all", "3", "1", "0", "0", "1", "1", "0"]
    options = parse(["--seed", "9", "--only", "client-kill"])
    assert again(options, outcomes[1]).endswith('--seed 9 --first 1 --faults 1 --only client-kill"')
