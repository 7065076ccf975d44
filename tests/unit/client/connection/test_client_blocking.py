"""Both clients against a ROUTER that speaks the wire; the asyncio one is driven by a thread."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch
import zmq
from support.fake_scheduler import (
    FakeScheduler,
    VanishError,
    answer,
    delta,
    echo,
    finished,
    results,
    rid_of,
    silent,
)
from support.waiting import PATIENCE_S as PATIENCE

from caesura.client import (
    EngineDied,
    InternalError,
    InvalidRequest,
    NotIdle,
    QueueFull,
    SamplingParams,
    SchedulerClient,
    TimedOut,
)
from caesura.io_struct import (
    AbortReq,
    AbortReqOutput,
    BatchTokenOutput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    ErrorCode,
    ErrorReply,
    FinishReason,
    FlushCacheReqInput,
    GenerateReqInput,
    GetStatusReqInput,
    PauseGenerationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromIPCReqInput,
)


def test_one_prompt_gives_one_output_and_a_list_gives_a_list(endpoint, connect):
    with FakeScheduler(endpoint) as fake, connect(endpoint) as client:
        one = client.generate([1, 2], return_logprob=True, timeout=PATIENCE)
        assert one.output_ids == [2, 1, 0]
        assert one.output_logprobs == [-2.0, -1.0, 0.0]
        many = client.generate([[1, 2], [3]], timeout=PATIENCE)
        assert [output.output_ids for output in many] == [[2, 1, 0], [3, 0]]
        assert many[0].output_logprobs is None
        assert client.generate([[4]], timeout=PATIENCE)[0].prompt_tokens == 1
        assert fake.next_request().return_logprob


def test_n_samples_come_prompt_by_prompt(endpoint, connect):
    with FakeScheduler(endpoint), connect(endpoint) as client:
        alone = client.generate([1], SamplingParams(n=2), timeout=PATIENCE)
        assert [output.output_ids for output in alone] == [[1, 0], [1, 1]]
        flat = client.generate([[1], [2]], [SamplingParams(n=2), SamplingParams()], timeout=PATIENCE)
        assert [output.output_ids for output in flat] == [[1, 0], [1, 1], [2, 0]]


def test_ids_of_a_list_follow_from_the_callers(endpoint, connect):
    with FakeScheduler(endpoint) as fake, connect(endpoint) as client:
        outputs = client.generate([[1], [2]], rid="job", message_id="try", timeout=PATIENCE)
        assert [output.rid for output in outputs] == ["job-0", "job-1"]
        assert [fake.next_request().id, fake.next_request().id] == ["try-0", "try-1"]
        client.generate([[1], [2]], rid=["a", "b"], timeout=PATIENCE)
        assert [fake.next_request().rid, fake.next_request().rid] == ["a", "b"]


@pytest.mark.parametrize("prompt", [["a"], [1.5], ["ab", "cd"], [[1, "x"]], [None]])
def test_token_ids_that_are_no_integers_are_refused_here(endpoint, prompt, connect):
    with connect(endpoint) as client, pytest.raises(InvalidRequest) as caught:
        client.generate(prompt)
    assert caught.value.detail["field"] == "input_ids"


def test_options_go_on_the_wire_and_what_is_none_is_refused(endpoint, connect):
    with FakeScheduler(endpoint) as fake, connect(endpoint) as client:
        with pytest.raises(TypeError, match="unknown generation option stream"):
            client.generate([1], stream=True)
        with pytest.raises(TypeError, match="unknown generation option id; options are"):
            client.submit([1], id="x", timeout=1.0)
        with pytest.raises(InvalidRequest) as caught:
            client.submit([1], token_ids_logprob=["x"])
        assert caught.value.detail["field"] == "token_ids_logprob"
        client.generate([[1]], cache_salt="s", token_ids_logprob=(7,), timeout=PATIENCE)
        client.submit([1], min_weights_epoch=0, routed_experts_start_len=2).result(PATIENCE)
        first, second = fake.next_request(), fake.next_request()
        assert (first.cache_salt, first.token_ids_logprob) == ("s", [7])
        assert (second.min_weights_epoch, second.routed_experts_start_len) == (0, 2)
        assert (second.logprob_start_len, second.stream) == (-1, False)


def test_a_list_of_params_must_match_the_prompts(endpoint, connect):
    with connect(endpoint) as client, pytest.raises(InvalidRequest, match="2 sampling_params for 1"):
        client.generate([[1]], [SamplingParams(), SamplingParams()])


@pytest.mark.parametrize("address", ["tmp/x", "http://x", "ipc://", "ipc://" + "x" * 108])
def test_an_impossible_endpoint_is_refused_by_name(address):
    with pytest.raises(InvalidRequest, match="endpoint"):
        SchedulerClient(address)


def test_replies_out_of_order_find_their_callers(endpoint, connect):
    held = []

    def backwards(request):
        held.append(request)
        if len(held) < 3:
            return []
        return [reply for each in reversed(held) for reply in answer(each)]

    with FakeScheduler(endpoint, backwards), connect(endpoint) as client:
        handles = [client.submit([token]) for token in (1, 2)]
        assert client.status(timeout=PATIENCE).step == 12
        assert [handle.result(PATIENCE).output_ids for handle in handles] == [[1, 0], [2, 0]]


def test_a_refusal_raises_its_class_with_its_numbers(endpoint, connect):
    def busy(request):
        return [ErrorReply(id=request.id, code=ErrorCode.NOT_IDLE, message="busy", detail={"running": 2})]

    with (
        FakeScheduler(endpoint, busy),
        connect(endpoint) as client,
        pytest.raises(NotIdle) as caught,
    ):
        client.flush_cache(timeout=PATIENCE)
    assert caught.value.detail == {"running": 2}


def test_one_bad_prompt_aborts_the_rest_of_its_list(endpoint, connect):
    def second_is_refused(request):
        if isinstance(request, GenerateReqInput) and request.input_ids == [2]:
            return [ErrorReply(id=request.id, code=ErrorCode.QUEUE_FULL, message="full")]
        return [] if isinstance(request, GenerateReqInput) else answer(request)

    with FakeScheduler(endpoint, second_is_refused) as fake, connect(endpoint) as client:
        with pytest.raises(QueueFull) as caught:
            client.generate([[1], [2]], rid="job", timeout=PATIENCE)
        assert caught.value.__notes__ == ["prompt 1 of 2"]
        assert fake.next_request(AbortReq).rid == "job-0"


def test_a_timeout_names_the_message_and_a_retry_attaches(endpoint, connect):
    answered = threading.Event()

    def slow(request):
        return answer(request) if answered.is_set() else []

    with FakeScheduler(endpoint, slow) as fake, connect(endpoint) as client:
        with pytest.raises(TimedOut) as caught:
            client.pause("retract", timeout=0.05)
        first = fake.next_request()
        assert caught.value.message_id == first.id
        answered.set()
        assert client.pause("retract", message_id=first.id, timeout=PATIENCE).mode == "retract"
        again = fake.next_request()
        assert (again.id, again.mode) == (first.id, "retract")


def test_a_timed_out_generate_goes_on_and_can_be_collected(endpoint, connect):
    with FakeScheduler(endpoint, silent) as fake, connect(endpoint) as client:
        with pytest.raises(TimedOut) as caught:
            client.generate([[1], [2]], timeout=0.05)
        requests = [fake.next_request(), fake.next_request()]
        assert isinstance(fake.next_request(), GetStatusReqInput)  # why they wait
        assert fake.requests.empty()  # nothing was aborted
        for request in requests:
            fake.push(echo(request))
        with ThreadPoolExecutor(1) as pool:
            retry = pool.submit(
                client.generate, [[1], [2]], message_id=caught.value.message_id, timeout=PATIENCE
            )
            for _ in requests:
                fake.push(echo(fake.next_request()))
            assert [output.output_ids for output in retry.result()] == [[1, 0], [2, 0]]


def test_a_handle_streams_aborts_and_keeps_its_result(endpoint, connect):
    def partial(request):
        if isinstance(request, GenerateReqInput):
            return [delta((request.rid, 0, 0, [5])), delta((request.rid, 0, 1, [6]))]
        done = finished("r", [5, 6], finish_reason=FinishReason(type="abort"))
        return [results(done), AbortReqOutput(id=request.id, aborted=1)]

    with FakeScheduler(endpoint, partial), connect(endpoint) as client:
        handle = client.submit([1], rid="r", stream=True)
        stream = handle.deltas(PATIENCE)
        assert next(stream).output_ids == [5]
        assert next(stream).output_ids == [6]
        assert not handle.done()
        assert handle.abort(PATIENCE).aborted == 1
        assert list(stream) == []
        assert list(handle) == []  # a second look does not hang
        assert handle.done()
        assert handle.result().output_ids == [5, 6]


def test_a_handle_without_stream_yields_everything_at_the_end(endpoint, connect):
    with FakeScheduler(endpoint), connect(endpoint) as client:
        handle = client.submit([1], SamplingParams(n=2), return_logprob=True)
        first, second = handle.deltas(PATIENCE)
        assert (first.output_ids, first.output_logprobs, second.index) == ([1, 0], [-1.0, 0.0], 1)
        with pytest.raises(ValueError, match="results"):
            handle.result()


def test_waiting_on_a_handle_times_out_without_ending_it(endpoint, connect):
    with FakeScheduler(endpoint, silent) as fake, connect(endpoint) as client:
        handle = client.submit([1], rid="r", stream=True)
        with pytest.raises(TimedOut):
            handle.result(0.01)
        with pytest.raises(TimedOut):
            next(handle.deltas(0.01))
        fake.next_request()
        fake.push(results(finished("r", [4])))
        assert handle.result(PATIENCE).output_ids == [4]


def test_a_failed_stream_raises_after_its_tokens(endpoint, connect):
    def fails(request):
        reason = FinishReason(type="error", code="internal", message="boom")
        return [
            delta((request.rid, 0, 0, [5])),
            results(finished(request.rid, [5, 6], finish_reason=reason)),
        ]

    with FakeScheduler(endpoint, fails), connect(endpoint) as client:
        stream = client.submit([1], rid="r", stream=True).deltas(PATIENCE)
        assert [next(stream).output_ids, next(stream).output_ids] == [[5], [6]]
        with pytest.raises(Exception, match="boom") as caught:
            next(stream)
        assert caught.value.output.output_ids == [5, 6]


def test_every_control_verb_sends_its_message(endpoint, connect):
    with FakeScheduler(endpoint) as fake, connect(endpoint) as client:
        assert client.pause("in_place", owner="me", timeout=PATIENCE).mode == "in_place"
        assert client.continue_generation(owner="me", timeout=PATIENCE).freed == 1 << 20
        assert client.flush_cache(timeout_s=2, timeout=PATIENCE).freed_tokens == 16
        reply = client.update_weights_from_disk("/new", weight_version="7", timeout=PATIENCE)
        assert reply.weight_version == "7"
        assert client.check_weights("snapshot", timeout=PATIENCE).total == "00"
        assert client.abort("r", timeout=PATIENCE).aborted == 1
        pause = fake.next_request(PauseGenerationReqInput)
        assert (pause.mode, pause.owner, pause.lease_s) == ("in_place", "me", None)
        assert fake.next_request(FlushCacheReqInput).timeout_s == 2
        assert fake.next_request(UpdateWeightFromDiskReqInput).model_path == "/new"


def test_a_weight_session_commits_at_its_end(endpoint, connect):
    with FakeScheduler(endpoint) as fake, connect(endpoint) as client:
        with client.weight_update(weight_version="2", timeout=PATIENCE) as session:
            assert session.opened.weights_epoch == 0
            assert session.result is None
        assert session.result.committed
        end = fake.next_request(EndWeightUpdateReqInput)
        assert (end.commit, end.weight_version) == (True, "2")


def test_a_weight_session_that_raises_is_aborted(endpoint, connect):
    with FakeScheduler(endpoint) as fake, connect(endpoint) as client:
        with pytest.raises(KeyError, match="mine"), client.weight_update(timeout=PATIENCE):
            raise KeyError("mine")
        assert not fake.next_request(EndWeightUpdateReqInput).commit


@pytest.mark.parametrize("at", [BeginWeightUpdateReqInput, UpdateWeightsFromIPCReqInput])
def test_an_interrupted_update_aborts_its_session(endpoint, at):
    pressed = []

    def interrupt(request):
        if isinstance(request, at):
            if not pressed:  # both slots may have been sent; a second Ctrl-C would interrupt the abort itself
                pressed.append(request)
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            return []
        return [] if isinstance(request, EndWeightUpdateReqInput) else answer(request)

    tensors = [(name, torch.ones(16, 16)) for name in "abc"]
    with FakeScheduler(endpoint, interrupt) as fake, SchedulerClient(endpoint) as client:
        with pytest.raises(KeyboardInterrupt):
            client.update_weights_from_ipc(tensors, bucket_bytes=1024, timeout=PATIENCE)
        assert not fake.next_request(EndWeightUpdateReqInput).commit


def test_many_threads_share_one_client(endpoint):
    with FakeScheduler(endpoint), SchedulerClient(endpoint) as client:

        def work(number):
            prompts = [[number, step] for step in range(20)]
            outputs = [client.generate(prompt, timeout=PATIENCE).output_ids for prompt in prompts]
            return outputs == [[step, number, 0] for step in range(20)]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(8)))


def test_more_requests_than_a_default_socket_queue_holds(endpoint, connect):
    with connect(endpoint, connect_timeout=PATIENCE) as client:
        handles = [client.submit([number]) for number in range(3000)]  # nobody is listening yet
        with FakeScheduler(endpoint):
            assert all(handle.result(PATIENCE).prompt_tokens == 1 for handle in handles)


def test_an_engine_that_vanishes_fails_everything_pending(endpoint, connect):
    def vanish(request):
        if isinstance(request, GetStatusReqInput):
            raise VanishError
        return []

    with FakeScheduler(endpoint, vanish) as fake, connect(endpoint) as client:
        handle = client.submit([1], stream=True)
        fake.next_request()
        with pytest.raises(EngineDied, match="lost"):
            client.status(timeout=PATIENCE)
        with pytest.raises(EngineDied):
            handle.result(PATIENCE)
        with pytest.raises(EngineDied):
            list(handle.deltas(PATIENCE))


def test_last_messages_are_delivered_before_the_loss(endpoint, connect):
    def reply_then_vanish(request):
        if isinstance(request, GetStatusReqInput):
            raise VanishError
        return [echo(request)]

    with FakeScheduler(endpoint, reply_then_vanish), connect(endpoint) as client:
        handles = [client.submit([number]) for number in range(200)]
        with pytest.raises(EngineDied):
            client.status(timeout=PATIENCE)
        assert all(handle.result(0).output_ids[-1] == 0 for handle in handles)


def test_nothing_meant_for_a_lost_engine_reaches_the_next(endpoint, connect):
    with connect(endpoint) as client:
        with FakeScheduler(endpoint, silent) as first:
            lost = client.submit([1], rid="old")
            first.next_request()
        with pytest.raises(EngineDied):
            lost.result(PATIENCE)
        with FakeScheduler(endpoint) as second:
            assert client.generate([2], rid="old", timeout=PATIENCE).output_ids == [2, 0]
            assert second.next_request().input_ids == [2]
            assert second.requests.empty()


def test_missing_engine_is_an_error_and_the_request_is_dropped(endpoint, connect):
    with connect(endpoint, connect_timeout=0.05) as client:
        with pytest.raises(EngineDied, match="there is no such socket file"):
            client.pause()
        with FakeScheduler(endpoint) as fake:
            # finding it may take longer than the short timeout; each failed try leaves nothing behind
            while True:
                try:
                    client.status(timeout=PATIENCE)
                    break
                except EngineDied:
                    continue
            heard = [fake.requests.get() for _ in range(fake.requests.qsize())]
            assert {type(request) for request in heard} == {GetStatusReqInput}


def test_a_foreign_peer_is_not_mistaken_for_an_engine(endpoint):
    context = zmq.Context()
    stream = context.socket(zmq.STREAM)  # accepts connections and never speaks ZMTP
    stream.bind("tcp://127.0.0.1:*")
    address = stream.getsockopt_string(zmq.LAST_ENDPOINT)
    with SchedulerClient(address, connect_timeout=0.2) as client, pytest.raises(EngineDied, match="answered"):
        client.status()
    context.destroy(linger=0)


def test_closing_fails_whoever_still_waits_and_every_later_call(endpoint, connect):
    with FakeScheduler(endpoint, silent) as fake:
        client = connect(endpoint)
        handle = client.submit([1])
        fake.next_request()
        client.close()
        client.close()
        with pytest.raises(EngineDied, match="closed"):
            handle.result(PATIENCE)
        with pytest.raises(EngineDied, match="closed"):
            client.status()


def test_a_broken_reply_fails_its_caller_and_nobody_else(endpoint, connect):
    def broken(request):
        if isinstance(request, GetStatusReqInput):
            return [msgspec.msgpack.encode({"type": "GetStatusReqOutput", "id": request.id, "kv": "none"})]
        return []

    with FakeScheduler(endpoint, broken) as fake, connect(endpoint) as client:
        other = client.submit([1])
        with pytest.raises(InternalError, match="cannot read"):
            client.status(timeout=PATIENCE)
        fake.push(results(finished(other.rid, [5])))
        assert other.result(PATIENCE).output_ids == [5]


def test_the_result_of_a_long_stream_is_whole(endpoint, connect):
    def stream(request):
        steps = [delta((rid_of(request), 0, step, [step])) for step in range(500)]
        return [*steps, BatchTokenOutput(step=9, finished=[finished(rid_of(request), list(range(500)))])]

    with FakeScheduler(endpoint, stream), connect(endpoint) as client:
        handle = client.submit([1], stream=True)
        tokens = [token for each in handle.deltas(PATIENCE) for token in each.output_ids]
        assert tokens == list(range(500)) == handle.result().output_ids
