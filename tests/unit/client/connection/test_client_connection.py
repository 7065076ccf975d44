"""The bookkeeping between request and answer, without a socket."""

import asyncio
import queue
from concurrent.futures import Future

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_scheduler import delta, finished, floats, results, status_reply
from support.properties import examples

from caesura.client import (
    DuplicateRid,
    EngineDied,
    EngineError,
    IdConflict,
    InternalError,
    InvalidRequest,
    PromptTooLong,
    TimedOut,
    raise_for,
)
from caesura.client.connection.connection import Connection
from caesura.client.exceptions import error_for
from caesura.io_struct import (
    ErrorCode,
    ErrorReply,
    FinishReason,
    GenerateReqInput,
    GetStatusReqInput,
    GetStatusReqOutput,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    SamplingParams,
    WeightVersionSpan,
    encode,
)


@pytest.fixture
def connection():
    return Connection(Future, queue.SimpleQueue)


def request(rid="r", n=1, stream=False, prompt=(1, 2, 3)):
    return GenerateReqInput(
        id=f"m-{rid}", rid=rid, input_ids=list(prompt), sampling_params=SamplingParams(n=n), stream=stream
    )


def drain(deltas):
    items = []
    while not deltas.empty():
        items.append(deltas.get())
    return items


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_has_its_own_exception(code):
    with pytest.raises(EngineError) as caught:
        raise_for(ErrorReply(id="1", code=code, message="why", detail={"number": 3}))
    assert caught.value.code is code is type(caught.value).error_code
    assert caught.value.detail == {"number": 3}
    assert str(caught.value) == f"why [{code}]"


def test_an_unknown_code_is_an_internal_error():
    error = error_for("from_the_future", "?")
    assert isinstance(error, InternalError)
    assert error.code == "from_the_future"
    assert str(error) == "? [from_the_future]"
    assert error_for("", "?").code is ErrorCode.INTERNAL


def test_timed_out_is_a_timeout_error_and_names_the_message():
    error = TimedOut("late", id="m1")
    assert isinstance(error, TimeoutError)
    assert error.message_id == "m1"
    assert str(error) == "late [timed_out]"


def test_samples_are_grouped_in_order_and_counted_once(connection):
    generation, _ = connection.start_generation(request(n=3))
    connection.receive([encode(results(finished("r", [5], 2), finished("r", [3], 0), finished("r", [9], 0)))])
    assert not generation.waiter.done()
    connection.receive([encode(results(finished("r", [4], 1)))])
    assert [output.output_ids for output in generation.waiter.result(0)] == [[3], [4], [5]]
    assert connection.pending == 0


def test_an_error_reply_ends_only_its_own_request(connection):
    refused, _ = connection.start_generation(request("a"))
    other, _ = connection.start_generation(request("b"))
    connection.receive(
        [encode(ErrorReply(id="m-a", code=ErrorCode.PROMPT_TOO_LONG, message="long", detail={"limit": 8}))]
    )
    error = refused.waiter.exception(0)
    assert isinstance(error, PromptTooLong)
    assert error.detail == {"limit": 8}
    assert not other.waiter.done()
    connection.start_generation(request("a"))  # the rid is free again


def test_a_failed_sample_raises_with_its_output(connection):
    generation, _ = connection.start_generation(request(n=2))
    reason = FinishReason(type="error", code="out_of_memory", message="no room")
    connection.receive(
        [encode(results(finished("r", [3, 4], 1, finish_reason=reason), finished("r", [5], 0)))]
    )
    error = generation.waiter.exception(0)
    assert error.code is ErrorCode.OUT_OF_MEMORY
    assert error.output.output_ids == [3, 4]
    assert [output.output_ids for output in error.outputs] == [[5], [3, 4]]


@pytest.mark.parametrize(
    "fields",
    [
        {"output_logprobs": floats([-1.0])},
        {"raw_logprobs": floats([-1.0, -1.0, -1.0])},
        {"sampled_logprobs": b""},
        {"weight_versions": []},
        {"weight_versions": [WeightVersionSpan(version="v", epoch=0, start=0, end=1)]},
        {"weight_versions": [WeightVersionSpan(version="v", epoch=0, start=1, end=2)]},
        {"output_ids": b"\0\0\0"},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_lengths_that_disagree_are_refused(connection, fields):
    generation, _ = connection.start_generation(request())
    connection.receive([encode(results(finished("r", [3, 4], **fields)))])
    assert isinstance(generation.waiter.exception(0), InternalError)
    assert connection.pending == 0


def newer(message, **changes):
    return msgspec.msgpack.encode(msgspec.to_builtins(message, builtin_types=(bytes,)) | changes)


def begin(connection):
    generation, _ = connection.start_generation(request(stream=True))
    pause, _ = connection.start_call(PauseGenerationReqInput(id="p"), PauseGenerationReqOutput)
    status, _ = connection.start_call(GetStatusReqInput(id="s"), GetStatusReqOutput)
    return generation, pause, status


@pytest.mark.parametrize(
    "answer",
    [
        {"type": "PauseGenerationReqOutput", "id": "p", "mode": "sideways"},
        {"type": "SomethingNewReqOutput", "id": "p"},
        {"type": "ErrorReply", "id": "p", "code": 7, "message": "?"},
        {"type": "ErrorReply", "id": "p", "code": "from_the_future", "message": "?"},
        {"id": "p"},
        msgspec.to_builtins(status_reply(GetStatusReqInput(id="p"))),
    ],
    ids=["value", "message", "error", "code", "untyped", "other type"],
)
def test_an_unreadable_answer_fails_its_own_call(connection, answer):
    generation, pause, status = begin(connection)
    connection.receive([msgspec.msgpack.encode(answer)])
    assert isinstance(pause.exception(0), InternalError)
    assert not generation.waiter.done()
    assert not status.done()


@pytest.mark.parametrize(
    "frame",
    [b"", b"\xc1 garbage", b"\x91" * 100_000, msgspec.msgpack.encode({"type": "LoadReport", "load": 0.5})],
)
def test_replies_without_a_recipient_are_logged_and_dropped(connection, frame, caplog):
    begin(connection)
    connection.receive([frame])
    assert connection.pending == 3
    assert "cannot read" in caplog.text


def test_an_unreadable_result_fails_its_own_generation(connection):
    mine, _ = connection.start_generation(request("mine"))
    other, _ = connection.start_generation(request("other"))
    batch = msgspec.to_builtins(
        results(finished("mine", [1]), finished("other", [2])), builtin_types=(bytes,)
    )
    batch["finished"][0]["finish_reason"]["type"] = "bored"
    connection.receive([msgspec.msgpack.encode(batch)])
    assert isinstance(mine.waiter.exception(0), InternalError)
    assert other.waiter.result(0)[0].output_ids == [2]
    assert connection.pending == 0


def test_a_delta_that_cannot_be_read_costs_no_token(connection):
    generation, _ = connection.start_generation(request(stream=True))
    connection.receive([newer(delta(("r", 0, 0, [1, 2])), delta={"columns": "other"})])
    connection.receive([newer(results(finished("r", [1, 2, 3])), delta={"columns": "other"})])
    assert generation.waiter.result(0)[0].output_ids == [1, 2, 3]
    assert [each.output_ids for each in drain(generation.deltas)[:-1]] == [[1, 2, 3]]


def test_a_delta_whose_counts_do_not_add_up_is_dropped(connection):
    generation, _ = connection.start_generation(request(stream=True))
    message = delta(("r", 0, 0, [1, 2]))
    broken = encode(message).replace(b"\xa6counts\xc4\x04\x02", b"\xa6counts\xc4\x04\x03")
    assert broken != encode(message)
    connection.receive([broken])
    assert connection.pending == 1
    connection.receive([encode(results(finished("r", [1, 2])))])
    assert [each.output_ids for each in drain(generation.deltas)[:-1]] == [[1, 2]]


def test_late_and_unknown_answers_are_dropped(connection):
    call, _ = connection.start_call(GetStatusReqInput(id="s"), GetStatusReqOutput)
    connection.receive([encode(results(finished("nobody", [1])))])
    connection.receive([encode(delta(("nobody", 0, 0, [1])))])
    connection.receive([encode(status_reply(GetStatusReqInput(id="other")))])
    assert not call.done()


def test_a_retry_of_a_pending_message_shares_its_answer(connection):
    first, frame = connection.start_call(PauseGenerationReqInput(id="p"), PauseGenerationReqOutput)
    second, again = connection.start_call(PauseGenerationReqInput(id="p"), PauseGenerationReqOutput)
    assert second is first
    assert again == frame
    one, _ = connection.start_generation(request())
    two, _ = connection.start_generation(request())
    assert one is two


def test_a_pending_id_with_another_body_is_refused(connection):
    connection.start_call(PauseGenerationReqInput(id="p"), PauseGenerationReqOutput)
    with pytest.raises(IdConflict):
        connection.start_call(PauseGenerationReqInput(id="p", mode="retract"), PauseGenerationReqOutput)
    with pytest.raises(IdConflict):
        connection.start_generation(GenerateReqInput(id="p", input_ids=[1]))
    connection.start_generation(request())
    with pytest.raises(IdConflict):
        connection.start_generation(request(prompt=(9,)))


def test_a_live_rid_is_refused(connection):
    connection.start_generation(request())
    with pytest.raises(DuplicateRid) as caught:
        connection.start_generation(GenerateReqInput(id="other", rid="r", input_ids=[1]))
    assert caught.value.detail == {"rid": "r"}
    assert connection.pending == 1


def test_unencodable_answers_are_refused_and_forgotten(connection):
    with pytest.raises(InvalidRequest):
        connection.start_generation(GenerateReqInput(input_ids=[1 << 80]))
    assert connection.pending == 0


def test_losing_the_engine_resolves_every_waiter(connection):
    generation, _ = connection.start_generation(request(n=2, stream=True))
    connection.receive([encode(results(finished("r", [3], 0)))])
    call, _ = connection.start_call(GetStatusReqInput(), GetStatusReqOutput)
    connection.fail_all(EngineDied("gone"))
    assert isinstance(call.exception(0), EngineDied)
    error = generation.waiter.exception(0)
    assert isinstance(error, EngineDied)
    assert [output.output_ids for output in error.outputs] == [[3]]
    assert connection.pending == 0
    connection.failure = EngineDied("gone for good")
    with pytest.raises(EngineDied, match="for good"):
        connection.start_call(GetStatusReqInput(), GetStatusReqOutput)


class Sink:
    """Keeps what it gets; raises at the first tokens, or at the first result."""

    def __init__(self, raises_at: str) -> None:
        self.raises_at = raises_at
        self.got = []

    def on_tokens(self, delta):
        self.got.append(delta)
        if self.raises_at == "tokens":
            raise ValueError("no")

    def on_finished(self, output):
        self.got.append(output)
        if self.raises_at == "result":
            raise ValueError("no")


@pytest.mark.parametrize("raises_at", ["tokens", "result"])
@pytest.mark.parametrize("new_waiter", [Future, asyncio.Future], ids=["blocking", "asyncio"])
async def test_a_sink_that_raises_ends_only_its_own_generation(new_waiter, raises_at):
    connection = Connection(new_waiter, queue.SimpleQueue)
    sinks = {"broken": Sink(raises_at), "whole": Sink("")}
    asked = {
        rid: connection.start_generation(request(rid, stream=True), sink)[0] for rid, sink in sinks.items()
    }
    connection.receive([encode(delta(("broken", 0, 0, [1]), ("whole", 0, 0, [1])))])
    answers = results(finished("broken", [1, 2, 3]), finished("whole", [1, 2, 3]))
    connection.receive([encode(answers)])
    with pytest.raises(InternalError, match="the sink of generation 'broken' raised") as caught:
        raise asked["broken"].waiter.exception()
    assert isinstance(caught.value.__cause__, ValueError)
    assert [output.output_ids for output in asked["whole"].waiter.result()] == [[1, 2, 3]]
    assert [type(each).__name__ for each in sinks["whole"].got] == ["TokenDelta"] * 2 + ["GenerateOutput"]
    assert len(sinks["broken"].got) == (1 if raises_at == "tokens" else 3)
    assert connection.pending == 0


def test_deltas_carry_logprobs_if_asked_for(connection):
    generation, _ = connection.start_generation(request(stream=True))
    connection.receive([encode(delta(("r", 0, 0, [1]), logprob=-0.5))])
    connection.receive([encode(delta(("r", 0, 1, [2]), logprob=float("nan")))])
    first, second = drain(generation.deltas)
    assert first.output_logprobs == [-0.5]
    assert second.output_logprobs is None


@st.composite
def deliveries(draw):
    outputs = [list(range(10 * s, 10 * s + draw(st.integers(0, 8)))) for s in range(2)]
    rows = []
    for _ in range(draw(st.integers(0, 12))):
        sample = draw(st.integers(0, 1))
        start = draw(st.integers(0, len(outputs[sample])))
        end = draw(st.integers(start, len(outputs[sample])))
        rows.append((sample, start, end))
    return outputs, rows, draw(st.permutations([0, 1]))


@settings(max_examples=examples(200))
@given(deliveries())
def test_a_stream_is_every_token_once_and_in_order(delivery):
    outputs, rows, order = delivery
    connection = Connection(Future, queue.SimpleQueue)
    generation, _ = connection.start_generation(request(n=2, stream=True))
    for sample, start, end in rows:
        connection.receive([encode(delta(("r", sample, start, outputs[sample][start:end])))])
    for sample in order:
        connection.receive([encode(results(finished("r", outputs[sample], sample)))])
    *deltas, end = drain(generation.deltas)
    assert end is None
    streamed: dict[int, list[int]] = {0: [], 1: []}
    for each in deltas:
        assert each.start == len(streamed[each.index])
        assert each.output_ids
        streamed[each.index] += each.output_ids
    assert [streamed[0], streamed[1]] == outputs
