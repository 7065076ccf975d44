"""The ledger of the fault campaign must notice what an engine loses, doubles, tears or leaks."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import zmq
from campaigns.faults.__main__ import again, parse, table
from campaigns.faults.campaign import Campaign, Outcome
from campaigns.faults.footprint import Footprint
from campaigns.faults.kinds import KINDS
from campaigns.faults.known import VOCAB, Version, make_versions, successors
from campaigns.faults.ledger import Ledger, Problem, check_tokens
from campaigns.faults.scene import SpanFacts
from campaigns.faults.witness import Witness

from caesura.io_struct import (
    BatchTokenOutput,
    ErrorReply,
    FinishReason,
    GenerateReqInput,
    GenerateReqOutput,
    StreamDelta,
    WeightVersionSpan,
    decode_request,
    encode,
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


def test_a_request_that_ends_once_with_its_versions_tokens_is_no_problem():
    ledger = asked()
    assert ledger.open() == ["r"]
    ledger.ended(whole())
    assert ledger.open() == []
    assert ledger.close(alive=0) == []


def test_a_request_without_an_end_is_lost_or_stuck():
    assert harms(asked().close(alive=0)) == ["lost"]
    assert harms(asked().close(alive=1)) == ["stuck"]


def test_each_sample_must_end():
    ledger = asked(samples=3)
    ledger.ended(whole())
    assert ledger.open() == ["r"]
    assert harms(ledger.close(alive=0)) == ["lost", "lost"]


def test_a_second_end_is_doubled_at_once_and_after_the_books_are_closed():
    ledger = asked()
    ledger.ended(whole())
    ledger.ended(whole())
    assert harms(ledger.close(alive=0)) == ["doubled"]
    ledger.ended(whole())
    assert harms(ledger.close(alive=0)) == ["doubled"]


def test_a_result_after_an_error_is_doubled():
    ledger = asked()
    ledger.refused(ErrorReply(id="r", code="busy", message=""), allowed=["busy"])
    ledger.ended(whole())
    assert harms(ledger.close(alive=0)) == ["doubled"]


def test_an_unexpected_refusal_is_reported_and_one_of_something_else_is_not():
    ledger = asked()
    ledger.refused(ErrorReply(id="other", code="internal", message=""))
    ledger.refused(ErrorReply(id="r", code="internal", message="why"))
    (problem,) = ledger.close(alive=0)
    assert (problem.harm, "why" in problem.text) == ("failed", True)


def test_a_generation_that_ended_with_an_error_or_early_is_reported():
    for reason in (FinishReason(type="error", message="x"), FinishReason(type="length", length=9)):
        ledger = asked(count=9)
        ledger.ended(result("r", A.after(9, 5), [("A", 0, 5)], finish_reason=reason))
        assert harms(ledger.close(alive=0)) == ["failed"]
    ledger = asked(count=9)
    ledger.ended(result("r", A.after(9, 5), [("A", 0, 5)], finish_reason=FinishReason(type="abort")))
    assert ledger.close(alive=0) == []


def test_an_engine_that_was_killed_owes_nothing_but_may_not_have_doubled():
    ledger = asked()
    ledger.forget()
    assert ledger.close(alive=0) == []
    ledger = asked()
    ledger.ended(whole())
    ledger.ended(whole())
    ledger.forget()
    assert harms(ledger.close(alive=0)) == ["doubled"]


def test_an_update_in_the_midst_of_a_request_is_followed_token_by_token():
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


def delta(rid: str, start: int, tokens: list[int]) -> StreamDelta:
    ints = {"indices": [0], "starts": [start], "counts": [len(tokens)], "tokens": tokens}
    columns = {name: np.array(values, "<i4").tobytes() for name, values in ints.items()}
    return StreamDelta(rids=[rid], logprobs=np.full(len(tokens), np.nan, "<f4").tobytes(), **columns)


def test_a_stream_may_have_gaps_but_not_contradict_the_result():
    tokens = A.after(9, 5)
    ledger = asked()
    ledger.streamed(delta("r", 0, tokens[:1]))
    ledger.streamed(delta("r", 3, tokens[3:4]))
    ledger.ended(whole())
    assert ledger.close(alive=0) == []
    ledger = asked()
    ledger.streamed(delta("r", 2, [tokens[2] + 1]))
    ledger.ended(whole())
    assert harms(ledger.close(alive=0)) == ["torn"]
    ledger = asked()
    ledger.streamed(delta("r", 5, [3]))
    ledger.ended(whole())
    assert harms(ledger.close(alive=0)) == ["torn"]


BEHAVIOURS = {
    "loses": "lost",
    "answers twice": "doubled",
    "serves the wrong version": "torn",
    "is honest": None,
}


def answers(behaviour: str, request: GenerateReqInput) -> list[GenerateReqOutput]:
    count = request.sampling_params.max_new_tokens
    wrong = behaviour == "serves the wrong version"
    tokens = (B if wrong else A).after(request.input_ids[-1], count)
    good = result(request.rid, tokens, [("A", 0, count)])
    return {"loses": [], "answers twice": [good, good]}.get(behaviour, [good])


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_the_witness_of_a_faulty_engine_tells(tmp_path, behaviour):
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{tmp_path}/s")

    def serve() -> None:
        identity, frame = router.recv_multipart()
        for answer in answers(behaviour, decode_request(frame)):
            router.send_multipart([identity, encode(BatchTokenOutput(step=1, finished=[answer]))])
        router.send_multipart([identity, encode(ErrorReply(id="last", code="busy", message=""))])

    thread = threading.Thread(target=serve)
    thread.start()
    with Witness(f"ipc://{tmp_path}/s", Ledger(VERSIONS)) as witness:
        witness.generate("r", PROMPT, 4)
        while witness.take_reply("last") is None:
            assert witness.pump(20.0)
        found = harms(witness.ledger.close(alive=0))
    thread.join()
    context.destroy(linger=0)
    assert found == ([BEHAVIOURS[behaviour]] if BEHAVIOURS[behaviour] else [])


def test_a_process_that_holds_more_than_before_leaks():
    before = Footprint(descriptors=9, threads=4, children=0, shared=0, resident=200 << 20)
    assert before.over(before) == []
    assert replace(before, descriptors=3, resident=210 << 20).over(before) == []
    for name, more in (
        ("descriptors", 10),
        ("threads", 5),
        ("children", 1),
        ("shared", 1),
        ("resident", 1 << 30),
    ):
        (text,) = replace(before, **{name: more}).over(before)
        assert text.startswith(name)


def test_versions_differ_in_every_tensor_and_every_successor(tmp_path):
    from safetensors.torch import load_file

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


def test_the_table_counts_harms_by_kind_and_a_failure_says_how_to_repeat_it():
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
