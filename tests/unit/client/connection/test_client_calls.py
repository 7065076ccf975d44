"""Calls of both clients to a ROUTER that speaks the wire; the asyncio one is driven by a thread."""

import asyncio
import inspect
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import msgspec
import numpy as np
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
    status_reply,
)
from support.waiting import PATIENCE_S as PATIENCE

from caesura.client import (
    AsyncControlClient,
    AsyncGenerationHandle,
    AsyncSchedulerClient,
    ControlClient,
    EngineDied,
    GenerationHandle,
    InternalError,
    InvalidRequest,
    QueueFull,
    SamplingParams,
    SchedulerClient,
    TimedOut,
)
from caesura.client.connection import async_channel
from caesura.client.connection.status_figures import PREFIX, figures
from caesura.io_struct import (
    AbortReq,
    AbortReqOutput,
    BeginWeightUpdateReqInput,
    Distribution,
    EndWeightUpdateReqInput,
    EngineTotals,
    ErrorCode,
    ErrorReply,
    FinishReason,
    GenerateReqInput,
    GetStatusReqInput,
    KVUsage,
    PauseGenerationReqInput,
    PauseTotal,
    StageStatus,
    UpdateTotal,
    UpdateWeightsFromIPCReqInput,
)


def test_a_prompt_gives_an_output_and_a_list_a_list(endpoint, connect):
    with FakeScheduler(endpoint) as fake, connect(endpoint) as client:
        one = client.generate([1, 2], return_logprob=True, timeout=PATIENCE)
        assert one.output_ids == [2, 1, 0]
        assert one.output_logprobs == [-2.0, -1.0, 0.0]
        many = client.generate([[1, 2], [3]], timeout=PATIENCE)
        assert [output.output_ids for output in many] == [[2, 1, 0], [3, 0]]
        assert many[0].output_logprobs is None
        assert client.generate([[4]], timeout=PATIENCE)[0].prompt_tokens == 1
        assert fake.next_request().return_logprob


def test_samples_come_prompt_by_prompt(endpoint, connect):
    with FakeScheduler(endpoint) as fake, connect(endpoint) as client:
        alone = client.generate([1], SamplingParams(n=2), timeout=PATIENCE)
        assert [output.output_ids for output in alone] == [[1, 0], [1, 1]]
        fake.next_request()
        params = [SamplingParams(n=2), SamplingParams()]
        flat = client.generate([[1], [2]], params, rid="job", message_id="try", timeout=PATIENCE)
        assert [output.output_ids for output in flat] == [[1, 0], [1, 1], [2, 0]]
        assert [output.rid for output in flat] == ["job-0", "job-0", "job-1"]
        assert [fake.next_request().id, fake.next_request().id] == ["try-0", "try-1"]
        client.generate([[1], [2]], rid=["a", "b"], timeout=PATIENCE)
        assert [fake.next_request().rid, fake.next_request().rid] == ["a", "b"]


def test_options_go_on_the_wire_and_what_is_none_is_refused(endpoint, connect):
    with FakeScheduler(endpoint) as fake, connect(endpoint) as client:
        with pytest.raises(InvalidRequest) as caught:
            client.submit([1], token_ids_logprob=["x"])
        assert caught.value.detail["field"] == "token_ids_logprob"
        client.generate([[1]], cache_salt="s", token_ids_logprob=(7,), timeout=PATIENCE)
        client.submit([1], min_weights_epoch=0, routed_experts_start_len=2).result(PATIENCE)
        first, second = fake.next_request(), fake.next_request()
        assert (first.cache_salt, first.token_ids_logprob) == ("s", [7])
        assert (second.min_weights_epoch, second.routed_experts_start_len) == (0, 2)
        assert (second.logprob_start_len, second.stream) == (-1, False)


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


def test_without_stream_a_handle_yields_all_at_the_end(endpoint, connect):
    with FakeScheduler(endpoint), connect(endpoint) as client:
        handle = client.submit([1], SamplingParams(n=2), return_logprob=True)
        first, second = handle.deltas(PATIENCE)
        assert (first.output_ids, first.output_logprobs, second.index) == ([1, 0], [-1.0, 0.0], 1)
        with pytest.raises(ValueError, match="results"):
            handle.result()


def test_a_failed_stream_raises_after_its_tokens(endpoint, connect):
    def fails(request):
        reason = FinishReason(type="error", code="internal", message="boom")
        return [delta((request.rid, 0, 0, [5])), results(finished(request.rid, [5, 6], finish_reason=reason))]

    with FakeScheduler(endpoint, fails), connect(endpoint) as client:
        stream = client.submit([1], rid="r", stream=True).deltas(PATIENCE)
        assert [next(stream).output_ids, next(stream).output_ids] == [[5], [6]]
        with pytest.raises(Exception, match="boom") as caught:
            next(stream)
        assert caught.value.output.output_ids == [5, 6]


def test_a_session_block_commits_or_is_aborted(endpoint, connect):
    with FakeScheduler(endpoint) as fake, connect(endpoint) as client:
        with client.weight_update(weight_version="2", timeout=PATIENCE) as session:
            assert session.opened.weights_epoch == 0
            assert session.result is None
        assert session.result.committed
        end = fake.next_request(EndWeightUpdateReqInput)
        assert (end.commit, end.weight_version) == (True, "2")
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
        handles = [client.submit([number]) for number in range(1100)]  # nobody is listening yet
        with FakeScheduler(endpoint):
            assert all(handle.result(PATIENCE).prompt_tokens == 1 for handle in handles)


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


def test_without_an_engine_a_request_is_dropped(endpoint, connect):
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


def test_closing_fails_waiters_and_later_calls(endpoint, connect):
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


@asynccontextmanager
async def asyncio_client(endpoint, handler=answer):
    with FakeScheduler(endpoint, handler) as fake:
        async with AsyncSchedulerClient(endpoint) as client:
            yield client, fake


def public(cls):
    return {
        name: [(each.name, each.kind, each.default) for each in inspect.signature(member).parameters.values()]
        for name, member in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_")
    }


def test_both_clients_have_the_same_methods_and_arguments():
    launcher_only = {"expect_exit", "engine_exited"}
    blocking = {name: each for name, each in public(SchedulerClient).items() if name not in launcher_only}
    assert public(AsyncSchedulerClient) == blocking
    assert public(AsyncGenerationHandle) == public(GenerationHandle)


async def test_work_of_an_update_does_not_stop_the_loop():
    turned = threading.Event()
    asyncio.get_running_loop().call_soon(turned.set)
    assert await async_channel.run(lambda: turned.wait(PATIENCE))


async def test_a_cancelled_generate_is_aborted(endpoint):
    async with asyncio_client(endpoint, silent) as (client, fake):
        task = asyncio.create_task(client.generate([1], rid="r"))
        await asyncio.to_thread(fake.next_request, GenerateReqInput)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await asyncio.to_thread(fake.next_request, AbortReq)).rid == "r"


async def test_a_generation_whose_sink_raises_is_aborted(endpoint):
    class Broken:
        def on_tokens(self, delta):
            raise ValueError("no")

    def one_token(request):
        return [delta((request.rid, 0, 0, [1]))] if isinstance(request, GenerateReqInput) else answer(request)

    async with asyncio_client(endpoint, one_token) as (client, fake):
        request = GenerateReqInput(input_ids=[9], sampling_params=SamplingParams(), rid="r", stream=True)
        broken = client.channel.start_generation(request, Broken())
        with pytest.raises(InternalError, match="sink"):
            await broken.waiter
        assert (await client.status(timeout=PATIENCE)).incarnation == "fake"
        assert (await asyncio.to_thread(fake.next_request, AbortReq)).rid == "r"


async def test_a_dropped_session_block_is_aborted(endpoint):
    async with asyncio_client(
        endpoint, lambda request: [] if isinstance(request, EndWeightUpdateReqInput) else answer(request)
    ) as (client, fake):

        async def generator():
            async with client.weight_update():
                yield

        opened = generator()
        await anext(opened)
        await opened.aclose()
        end = await asyncio.to_thread(fake.next_request, EndWeightUpdateReqInput)
        assert not end.commit


class Hasty(asyncio.SelectorEventLoop):
    """An event loop whose timers fire when half of their time is over."""

    def call_later(self, delay, callback, *args, context=None):  # type: ignore[override]
        return super().call_later(delay / 2, callback, *args, context=context)


def test_a_timer_that_fires_early_is_set_again(endpoint):
    async def use():
        async with AsyncSchedulerClient(endpoint, connect_timeout=1.0) as client:
            with pytest.raises(EngineDied, match="there is no such socket file"):
                await client.status()

    with asyncio.Runner(loop_factory=Hasty) as runner:
        runner.run(use())


def test_a_client_belongs_to_one_loop(endpoint):
    with FakeScheduler(endpoint):
        client = AsyncSchedulerClient(endpoint)

        async def first():
            await client.status(timeout=PATIENCE)

        async def second():
            with pytest.raises(RuntimeError, match="another event loop"):
                await client.status()

        with asyncio.Runner() as runner:
            runner.run(first())
            asyncio.run(second())
            runner.run(client.close())


async def test_a_flood_of_messages_is_never_stuck_in_the_socket(endpoint):
    def flood(request):
        steps = [delta((rid_of(request), 0, step, [step])) for step in range(300)]
        return [*steps, results(finished(rid_of(request), list(range(300))))]

    async with asyncio_client(endpoint, flood) as (client, _):
        outputs = await asyncio.gather(*(client.generate([i], timeout=PATIENCE) for i in range(20)))
        assert all(output.output_ids == list(range(300)) for output in outputs)


NO_TIME = [float("nan"), "5", True, [1]]
PAST = [float("-inf"), 0, np.float32(-1)]
FOR_EVER = [float("inf"), 10**400, None, np.float64(1e300)]


def uses(client):
    tensors = [("w", torch.ones(2))]
    return [
        lambda timeout: client.status(timeout=timeout),
        lambda timeout: client.generate([1], timeout=timeout),
        lambda timeout: client.update_weights_from_tensor(tensors, timeout=timeout),
    ]


@pytest.mark.parametrize("timeout", NO_TIME)
def test_invalid_times_are_refused_before_sending(endpoint, timeout, connect):
    with FakeScheduler(endpoint) as fake, connect(endpoint) as client:
        for use in uses(client):
            with pytest.raises(InvalidRequest, match=r"timeout = .* must be a number of seconds, or None"):
                use(timeout)
        client.status(timeout=PATIENCE)
        assert isinstance(fake.next_request(), GetStatusReqInput)
        assert fake.requests.empty()
        handle = client.submit([1], stream=True)
        for wait in (handle.result, handle.abort, lambda timeout: list(handle.deltas(timeout))):
            with pytest.raises(InvalidRequest, match="timeout"):
                wait(timeout)


@pytest.mark.parametrize("timeout", PAST)
def test_past_deadlines_mean_no_waiting_and_end_nothing(endpoint, timeout, connect):
    with FakeScheduler(endpoint, silent) as fake, connect(endpoint) as client:
        for use in uses(client)[:2]:
            with pytest.raises(TimedOut):
                use(timeout)
        handle = client.submit([1], stream=True)
        for wait in (handle.result, handle.abort, lambda timeout: list(handle.deltas(timeout))):
            with pytest.raises(TimedOut):
                wait(timeout)
        while rid_of(fake.next_request(GenerateReqInput)) != handle.rid:
            pass
        fake.push(results(finished(handle.rid, [4])))
        assert handle.result(PATIENCE).output_ids == [4]


@pytest.mark.parametrize("timeout", FOR_EVER)
def test_uncountable_times_mean_for_ever(endpoint, timeout, connect):
    times = {"connect_timeout": timeout, "keepalive_timeout": timeout}
    with FakeScheduler(endpoint), connect(endpoint, **times) as client:
        assert client.status(timeout=timeout).step == 12
        assert client.generate([1], timeout=timeout).output_ids == [1, 0]
        handle = client.submit([1], stream=True)
        assert handle.result(timeout).output_ids == [1, 0]
        assert [delta.output_ids for delta in handle.deltas(timeout)] == [[1, 0]]


@pytest.mark.parametrize("kind", [SchedulerClient, AsyncSchedulerClient, ControlClient, AsyncControlClient])
def test_a_clients_own_options_are_checked(endpoint, kind):
    for option in ("connect_timeout", "keepalive_timeout"):
        with pytest.raises(InvalidRequest, match=f"{option} = nan must be"):
            kind(endpoint, **{option: float("nan")})
    with pytest.raises(TypeError, match="connect_timout"):
        kind(endpoint, connect_timout=1.0)


TIMEOUT = 0.4
"""Long enough for the status of a fake engine."""


def engine_in(**state):
    def handle(request):
        if isinstance(request, GenerateReqInput):
            return []
        if not isinstance(request, GetStatusReqInput):
            return answer(request)
        reply = status_reply(request)
        for name, value in state.items():
            setattr(reply, name, value)
        return [reply]

    return handle


def errors_of(endpoint):
    with SchedulerClient(endpoint, owner="mine") as client:
        streaming, whole = client.submit([1], stream=True), client.submit([1])

        def error_of(wait):
            with pytest.raises(TimedOut) as caught:
                wait()
            return caught.value

        waits = (
            lambda: client.generate([1], timeout=TIMEOUT),
            lambda: client.generate([[1], [2]], timeout=TIMEOUT),
            lambda: whole.result(TIMEOUT),
            lambda: list(streaming.deltas(TIMEOUT)),
        )
        with ThreadPoolExecutor(len(waits)) as threads:
            return list(threads.map(error_of, waits))


PAUSED = "the engine was paused (in_place) by 'trainer', 1.5 s ago, and waits for continue_generation"


def test_a_pause_is_told_with_its_owner_and_its_age(endpoint):
    with FakeScheduler(endpoint, engine_in(pause_owner="trainer")) as fake:
        for error in errors_of(endpoint):
            assert re.fullmatch(
                rf"no answer within {TIMEOUT} s to message \w+: {re.escape(PAUSED)}", error.message
            )
            assert error.detail["paused"] == {"mode": "in_place", "owner": "trainer", "age_s": 1.5}
            assert error.message_id
        heard = [fake.requests.get() for _ in range(fake.requests.qsize())]
        asked = [request for request in heard if isinstance(request, GetStatusReqInput)]
        assert asked
        assert {request.owner for request in asked} == {""}, "no lease is renewed by it"


RUNNING = {"generation": "running", "pause_mode": None}


@pytest.mark.parametrize(
    "state,sentence",
    [
        ({}, "the engine was paused (in_place) by a client that gave no owner, 1.5 s ago"),
        ({**RUNNING, "weights": "updating"}, "its weights are being updated"),
        (
            {"weights": "poisoned"},
            "_generation; its weights are poisoned, and it waits for a complete update",
        ),
        (
            {**RUNNING, "released_tags": ["kv_cache"]},
            "its memory is released, and it waits for resume_memory(['kv_cache'])",
        ),
    ],
)
def test_other_reasons_for_waiting_are_told(endpoint, state, sentence):
    with FakeScheduler(endpoint, engine_in(**state)):
        assert all(sentence in error.message for error in errors_of(endpoint))


@pytest.mark.parametrize(
    "handler", [engine_in(generation="running", pause_mode=None), silent], ids=["runs", "silent"]
)
def test_an_engine_that_runs_or_says_nothing_is_not_blamed(endpoint, handler):
    with FakeScheduler(endpoint, handler):
        for error in errors_of(endpoint):
            assert re.fullmatch(rf"no answer within {TIMEOUT} s to message \w+", error.message)
            assert "paused" not in error.detail


def test_status_commands_change_nothing(endpoint):
    with FakeScheduler(endpoint, engine_in()) as fake, SchedulerClient(endpoint) as client:
        handle = client.submit([1])
        for timeout in (0, -1, 0.0):
            with pytest.raises(TimedOut):
                handle.result(timeout)
        client.pause()
        heard = [fake.next_request(), fake.next_request()]
        assert list(map(type, heard)) == [GenerateReqInput, PauseGenerationReqInput]


def test_metrics_are_flat_and_renew_no_lease(tmp_path):
    with FakeScheduler(f"ipc://{tmp_path}/s.sock", answer) as engine:
        with SchedulerClient(engine.endpoint, owner="trainer") as client:
            blocking = client.metrics()
        asked = [engine.requests.get() for _ in range(engine.requests.qsize())]
    assert all(name.startswith(PREFIX) and type(value) is float for name, value in blocking.items())
    assert (blocking["caesura/paused"], blocking["caesura/pause_age_s"]) == (1.0, 1.5)
    assert [each.owner for each in asked if isinstance(each, GetStatusReqInput)] == [""]


def test_counters_are_summed_histograms_are_percentiles():
    totals = EngineTotals(
        prompt_tokens=200,
        cached_tokens=50,
        finished_requests={"stop": 5},
        pauses=[PauseTotal(mode=mode, count=2, seconds=1.5) for mode in ("abort", "in_place")],
        updates=[UpdateTotal(source="disk", committed=3, failed=1)],
        staleness=Distribution(counts=[3, 1, *[0] * 8], sum=1.0),
    )
    stage = StageStatus(name="update.copy", count=1, total_s=0.5, median_s=0.5, longest_s=0.5)
    status = msgspec.structs.replace(status_reply(GetStatusReqInput()), totals=totals, stages=[stage])
    found = {name.removeprefix(PREFIX): value for name, value in figures(status).items()}
    expected = {
        "pauses": 4, "pause_s": 3.0, "updates": 3, "failed_updates": 1, "prefix_hit_share": 0.25,
        "samples/stop": 5,
        "stage_s/update.copy": 0.5, "staleness_epochs/mean": 0.25, "staleness_epochs/p50": 0.0,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert not any(name.startswith("queue_time") for name in found), "an older engine does not count it"


def test_inapplicable_series_are_absent():
    kv = KVUsage(free=0, cached=0, held=0, total=0, page_size=16, bytes_per_token=0)
    found = figures(msgspec.structs.replace(status_reply(GetStatusReqInput()), kv=kv))
    assert not {"caesura/kv_held_share", "caesura/prefix_hit_share"} & set(found)
