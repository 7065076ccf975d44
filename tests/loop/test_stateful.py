"""Any sequence of commands and accidents: what no order of them may break.

After every rule the KV ledger is walked and status is compared with a small model of the lifecycle. At the
end the engine is brought back to running, and every accepted sample must have ended exactly once, for
everybody who asked for it, with the tokens that the scripted model gives under the weights that its spans
name.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.lanes import quick
from support.properties import examples
from support.scripted import EngineDriver, assert_error, expected_tokens, ok, tokens_of

from caesura.io_struct import (
    BatchTokenOutput,
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    ErrorReply,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GenerateReqInput,
    GenerateReqOutput,
    Message,
    PauseGenerationReqInput,
    SamplingParams,
    UpdateWeightFromDiskReqInput,
    WeightsCheckerReqInput,
    WeightUpdateReqOutput,
)
from caesura.scheduler.messaging.status import status as engine_status

VOCAB, CONTEXT, POOL_TOKENS = 97, 256, 160
MODES = st.sampled_from(["retract", "in_place", "in_place", "retract", "abort"])
RARELY = st.sampled_from([False] * 7 + [True])
LENGTHS = st.one_of(st.integers(1, 70), st.sampled_from([15, 16, 17, 32, 48, 64, 140, 170, 250]))
NEW_TOKENS = st.one_of(st.integers(1, 24), st.sampled_from([1, 2, 16, 60]))


@dataclass(frozen=True)
class Ask:
    """Parameters of a generate request."""

    length: int
    new_tokens: int
    n: int
    text: int
    salt: str
    stop: list[int]
    stream: bool
    logprobs: bool
    raw: bool
    client: int


ASKS = st.builds(
    Ask,
    length=LENGTHS,
    new_tokens=NEW_TOKENS,
    n=st.integers(1, 3),
    text=st.integers(0, 2),
    salt=st.sampled_from(["", "", "salt"]),
    stop=st.lists(st.integers(3, VOCAB - 1), max_size=2),
    stream=st.booleans(),
    logprobs=st.booleans(),
    raw=st.booleans(),
    client=st.integers(0, 2),
)


class EngineMachine(RuleBasedStateMachine):
    """Rules over one engine. ``settle`` comes first in every rule that needs to know where the last command
    led.
    """

    def __init__(self, model: str, other: str, depth: int, **options: Any) -> None:
        super().__init__()
        self.driver = EngineDriver(
            model,
            pipeline_depth=depth,
            kv_pool_tokens=POOL_TOKENS,
            chunked_prefill_size=24,
            max_running_requests=5,
            weights_cpu_backup=True,
            **options,
        )
        self.paths = [model, other]
        self.model = Lifecycle()
        self.submitted: dict[str, Submitted] = {}
        self.errors_injected = self.resets = self.vain_ends = 0
        self.session_id: str | None = None
        self.posted: tuple[Message, str, bool] | None = None
        """A command that was sent and not waited for, and what its answer has to be."""
        self.parked: list[str] = []
        self.guests = ["guest-0", "guest-1"]
        self.num_guests = 2

    # -- the engine as seen from outside ---------------------------------------------------------------------

    @property
    def live(self) -> set[str]:
        return {request.rid for request in self.driver.engine.live}

    def status(self):
        """Return the status as a request would find it now, without the tick that sending one takes."""
        return engine_status(self.driver.engine, "probe")

    def answer_to(self, message_id: str) -> Message:
        ticks = 0
        while ticks < 500:
            if message_id in self.driver.replies:
                return self.driver.replies.pop(message_id)
            ticks += not self.driver.awaited_others()
            self.driver.tick()
        raise AssertionError(f"no answer to {message_id}")

    def command(self, message: Message, expected: str, wait: bool) -> None:
        """Send a control command whose answer must be ``expected``: "ok" or an error code."""
        self.settle()
        message_id = self.driver.send(message)
        self.posted = (message, expected, wait)
        assert message_id == message.id
        self.driver.tick()
        if wait:
            self.settle()

    def settle(self) -> None:
        if self.posted is None:
            return
        message, expected, waited = self.posted
        reply = self.answer_to(message.id)
        self.posted = None
        if expected != "ok":
            assert_error(reply, expected)
            return
        assert not isinstance(reply, ErrorReply), (message, reply)
        self.apply(message, reply)
        if waited and isinstance(message, PauseGenerationReqInput):
            self.check_pause(message.mode, reply)

    def apply(self, message: Message, reply: Message) -> None:
        model = self.model
        if isinstance(message, PauseGenerationReqInput):
            model.mode = message.mode
        elif isinstance(message, ContinueGenerationReqInput):
            assert reply.was_paused == (model.mode is not None)
            model.mode = None
        elif isinstance(message, BeginWeightUpdateReqInput):
            model.session, self.session_id = True, reply.session_id
        elif isinstance(message, WeightsCheckerReqInput):
            model.weights = "poisoned"
        elif isinstance(message, EndWeightUpdateReqInput) and not message.commit:
            model.weights = "poisoned" if model.weights == "updating" else model.weights
            model.close_session()
            self.session_id = None
        elif isinstance(message, EndWeightUpdateReqInput):
            model.commit(model.session_label, model.session_flush)
            self.session_id = None
        elif isinstance(message, UpdateWeightFromDiskReqInput):
            self.apply_update(message, reply)

    def apply_update(self, message: UpdateWeightFromDiskReqInput, reply: WeightUpdateReqOutput) -> None:
        model = self.model
        assert reply.committed is not model.session
        label = message.weight_version
        if not model.session:
            model.commit(label, message.flush_cache)
            return
        model.session_label = label if label is not None else model.session_label
        model.session_flush |= message.flush_cache
        if model.weights == "valid":
            model.weights = "updating"

    def check_pause(self, mode: str, reply) -> None:
        assert self.driver.ongoing is None
        status = self.status()
        assert (reply.step, reply.held_tokens) == (status.step, status.kv.held)
        if mode != "in_place":
            assert (reply.held_requests, reply.held_tokens) == (0, 0)
        if mode == "abort":
            assert not self.live

    def may_be_aborted(self) -> None:
        for submitted in self.submitted.values():
            submitted.aborted |= submitted.message.id in self.live

    # -- rules -----------------------------------------------------------------------------------------------

    @initialize(asks=st.lists(ASKS, min_size=1, max_size=4))
    def begin_with_work(self, asks):
        for ask in asks:
            self.send_request(ask)

    @rule(ask=ASKS)
    def submit(self, ask):
        self.send_request(ask)
        self.driver.tick()

    @rule(asks=st.lists(ASKS, min_size=2, max_size=5), times=st.integers(0, 6))
    def submit_several(self, asks, times):
        for ask in asks:
            self.send_request(ask)
        self.driver.tick(times)

    def send_request(self, ask: Ask) -> None:
        self.settle()
        params = SamplingParams(
            max_new_tokens=ask.new_tokens, temperature=0.0, ignore_eos=True, n=ask.n, stop_token_ids=ask.stop
        )
        message = GenerateReqInput(
            input_ids=[3 + (ask.text * 31 + i * 7) % 90 for i in range(ask.length)],
            sampling_params=params,
            cache_salt=ask.salt,
            stream=ask.stream,
            return_logprob=ask.logprobs,
            return_raw_logprob=ask.raw,
        )
        name = ["main", *self.guests][ask.client]
        self.driver.submit(message, name)
        refusal = self.refusal_of(ask.length, ask.new_tokens)
        if refusal is None:
            self.submitted[message.id] = Submitted(message, [name])
        else:
            assert_error(self.answer_to(message.id), refusal)

    def refusal_of(self, length: int, new_tokens: int) -> str | None:
        if self.model.weights == "poisoned":
            return "weights_poisoned"
        if length + new_tokens > CONTEXT:
            return "prompt_too_long"
        return "exceeds_kv_pool" if length + new_tokens - 1 > POOL_TOKENS else None

    @precondition(lambda self: self.submitted)
    @rule(data=st.data(), client=st.integers(0, 1))
    def repeat(self, data, client):
        submitted = self.submitted[data.draw(st.sampled_from(list(self.submitted)))]
        name = self.guests[client]
        if name in submitted.waiters or submitted.vanished:
            return
        submitted.waiters.append(name)
        self.driver.send(submitted.message, name)
        self.driver.tick()

    @precondition(lambda self: self.model.mode is not None)
    @rule(tags=st.sampled_from([["kv_cache"], ["kv_cache", "weights"], ["weights"]]), goes_on=st.booleans())
    def release_and_resume(self, tags, goes_on):
        self.settle()
        busy = self.model.session or self.model.weights == "updating"
        busy = busy or ("kv_cache" in tags and self.status().kv.held)
        reply = self.driver.release(*tags)
        if busy:
            assert isinstance(reply, ErrorReply), reply
            return
        assert reply.released_tags == tags
        if "kv_cache" in tags:
            self.driver.runner.kv[:] = 0
        if goes_on and self.model.weights == "valid":
            ok(self.driver.go_on(torch_empty_cache=False))
            self.model.mode = None
        launched = len(self.driver.runner.launches)
        self.driver.tick(3)
        assert len(self.driver.runner.launches) == launched, "a step ran without its memory"
        assert self.driver.resume(*tags).released_tags == []

    @rule(times=st.integers(1, 10))
    def tick(self, times):
        self.driver.tick(times)

    @rule(mode=MODES, wait=st.booleans())
    def pause(self, mode, wait):
        self.settle()
        if mode == "abort":
            self.may_be_aborted()
        self.command(PauseGenerationReqInput(mode=mode), "ok", wait)

    @rule(empty=RARELY)
    def resume(self, empty):
        self.settle()
        expected = "ok"
        if self.model.mode is not None:
            expected = "weights_poisoned" if self.model.weights == "poisoned" else expected
            expected = "session_open" if self.model.session else expected
        self.command(ContinueGenerationReqInput(torch_empty_cache=empty), expected, True)

    @precondition(lambda self: self.submitted)
    @rule(data=st.data(), everything=st.sampled_from([False, False, False, True]))
    def abort(self, data, everything):
        if everything:
            self.may_be_aborted()
            samples = len(self.driver.engine.live)
            assert self.driver.abort(abort_all=True).aborted == samples
            assert not self.live
            return
        rid = data.draw(st.sampled_from(list(self.submitted)))
        samples = len(self.driver.engine.live.samples(rid))
        self.submitted[rid].aborted |= samples > 0
        assert self.driver.abort(rid).aborted == samples
        assert rid not in self.live

    @rule()
    def flush(self):
        self.settle()
        status = self.status()
        idle = status.kv.held == 0 and self.driver.ongoing is None
        if self.model.mode is None:
            idle = idle and not self.live
        reply = self.driver.flush(torch_empty_cache=False)
        if not idle:
            assert_error(reply, "not_idle")
            return
        assert reply.freed_tokens == status.kv.cached or self.parked  # which may have come first
        if self.model.mode is not None or not self.live:
            assert self.status().kv.free == POOL_TOKENS

    @rule()
    def flush_when_idle(self):
        self.parked.append(self.driver.send(FlushCacheReqInput(torch_empty_cache=False, timeout_s=600)))
        self.driver.tick()

    @rule(
        path=st.integers(0, 1),
        flush=st.booleans(),
        label=st.sampled_from([None, "a", "b"]),
        abort=RARELY,
        wait=st.booleans(),
    )
    def update(self, path, flush, label, abort, wait):
        self.settle()
        frozen = self.model.mode is not None and self.status().kv.held > 0
        expected = "not_idle" if flush and frozen and not abort else "ok"
        if abort:
            self.may_be_aborted()
        message = UpdateWeightFromDiskReqInput(
            model_path=self.paths[path],
            flush_cache=flush,
            weight_version=label,
            abort_all_requests=abort,
            session_id=self.session_id,
        )
        self.command(message, expected, wait)

    @rule(
        asks=st.lists(ASKS, min_size=1, max_size=3),
        times=st.integers(0, 12),
        mode=st.one_of(st.none(), MODES),
        flush=st.booleans(),
    )
    def train(self, asks, times, mode, flush):
        for ask in asks:
            self.send_request(ask)
        self.driver.tick(times)
        if mode is not None:
            self.pause(mode, True)
        self.update(1, flush, None, False, True)
        self.resume(False)
        self.driver.tick(times)

    @rule(wait=st.booleans())
    def begin(self, wait):
        self.settle()
        self.command(BeginWeightUpdateReqInput(), "session_open" if self.model.session else "ok", wait)

    @precondition(lambda self: self.model.session or self.vain_ends < 2)
    @rule(commit=st.booleans(), wait=st.booleans())
    def end(self, commit, wait):
        self.settle()
        self.vain_ends += not self.model.session
        expected = "ok" if self.model.session else "no_session"
        if self.model.session and commit:
            # What was written since the weights broke is not complete unless an update came after that.
            expected = "weight_mismatch" if self.model.weights == "poisoned" and not self.whole else expected
        self.command(EndWeightUpdateReqInput(commit=commit, session_id=self.session_id), expected, wait)

    @property
    def whole(self) -> bool:
        """Everything has been written since the weights were poisoned."""
        loader = self.driver.engine.loader
        return not loader.missing(loader.written)

    @precondition(lambda self: self.resets == 0 and len(self.submitted) > 4)
    @rule()
    def reset_tensors(self):
        """Poison the weights; once, since little runs afterwards."""
        self.resets += 1
        self.command(WeightsCheckerReqInput(action="reset_tensors"), "ok", True)

    @rule(client=st.integers(0, 1))
    def vanish(self, client):
        name = self.guests[client]
        if name not in self.driver.clients:
            return
        self.driver.collect()
        self.driver.clients.pop(name).close(0)
        alone = set()
        for rid, submitted in self.submitted.items():
            if name in submitted.waiters:
                submitted.waiters.remove(name)
                submitted.vanished = True
                if not submitted.waiters:
                    alone.add(rid)
        while alone & self.live:
            self.driver.engine.housekeeping.next_keepalive = 0.0
            self.driver.tick()
        self.guests[client] = f"guest-{self.num_guests}"
        self.num_guests += 1

    @rule(kind=st.sampled_from(["fail_next", "fail_on_fetch", "non_finite_next"]))
    def break_a_step(self, kind):
        setattr(self.driver.runner, kind, True)
        self.errors_injected += 1

    @rule(where=st.sampled_from(["before", "after", "on_fetch"]))
    def run_out_of_memory(self, where):
        def refuse(batch: object) -> None:
            setattr(self.driver.runner, where, lambda batch: None)
            raise MemoryError

        setattr(self.driver.runner, where, refuse)
        self.errors_injected += 1

    # -- what must always hold -------------------------------------------------------------------------------

    @invariant()
    def ledger(self):
        self.driver.engine.cache.check()
        kv = self.status().kv
        assert kv.free + kv.cached + kv.held == kv.total == POOL_TOKENS

    @invariant()
    def status_is_the_model(self):
        if self.posted is not None:
            return
        status, model = self.status(), self.model
        assert (status.generation == "paused") == (model.mode is not None)
        assert (status.pause_mode, status.weights) == (model.mode, model.weights)
        assert (status.weights_epoch, status.weight_version) == (model.epoch, model.labels[model.epoch])
        assert (status.session is not None) == model.session

    # -- the end ---------------------------------------------------------------------------------------------

    def teardown(self):
        try:
            self.bring_back()
            self.check_everybody_was_answered()
        finally:
            self.driver.__exit__()

    def bring_back(self) -> None:
        runner = self.driver.runner
        runner.fail_next = runner.fail_on_fetch = runner.non_finite_next = False
        runner.before = runner.after = runner.on_fetch = lambda batch: None
        self.settle()
        if self.model.weights == "poisoned":
            # Also inside a session: its end then has everything.
            self.command(
                UpdateWeightFromDiskReqInput(
                    model_path=self.paths[0], flush_cache=False, session_id=self.session_id
                ),
                "ok",
                True,
            )
        if self.model.session:
            self.command(EndWeightUpdateReqInput(session_id=self.session_id), "ok", True)
        self.command(ContinueGenerationReqInput(torch_empty_cache=False), "ok", True)
        self.driver.run_until_idle(max_ticks=20_000)
        for message_id in self.parked:
            assert isinstance(self.answer_to(message_id), FlushCacheReqOutput)
        status = self.status()
        assert (status.kv.held, status.waiting_requests, status.running_requests) == (0, 0, 0)
        self.status_is_the_model()
        self.ledger()

    def check_everybody_was_answered(self) -> None:
        assert not self.driver.replies, "an accepted request is answered by its result and nothing else"
        found: dict[tuple[str, str, int], list[GenerateReqOutput]] = {}
        for client, output in self.driver.outputs:
            for result in output.finished:
                found.setdefault((client, result.rid, result.index), []).append(result)
        for submitted in self.submitted.values():
            for rid, index in submitted.keys:
                results = [found.pop((client, rid, index), []) for client in submitted.waiters]
                assert all(len(result) == 1 for result in results), f"{rid}/{index}: {results}"
                for (result,) in results:
                    check_result(submitted, result, VOCAB)
                    check_spans(result, self.model)
                    assert result.finish_reason.type != "error" or self.errors_injected
                if submitted.message.stream and not submitted.vanished:
                    check_stream(self.driver.outputs, submitted.waiters[0], results[0][0])
        left = {client for client, _, _ in found} & set(self.driver.clients)
        assert not left, f"results that nobody asked for: {found}"


@pytest.mark.timeout(600)  # a failure is shrunk for up to five minutes
@pytest.mark.parametrize(("depth", "tier_bytes"), quick([(1, 0), (0, 0), (1, 60_000), (0, 60_000)]))
def test_no_sequence_of_commands_breaks_the_engine(tiny_model, other_model, tmp_path, depth, tier_bytes):
    tier = {"kv_tier_bytes": tier_bytes, "kv_tier_folder": str(tmp_path), "kv_tier_folder_bytes": 60_000}
    run_state_machine_as_test(
        partial(EngineMachine, str(tiny_model), str(other_model), depth, **(tier if tier_bytes else {})),
        settings=settings(
            max_examples=examples(60),
            stateful_step_count=40,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


@dataclass
class Submitted:
    """An accepted generate request, and who waits for its samples."""

    message: GenerateReqInput
    waiters: list[str]
    """Clients that must get every sample: the sender, and whoever repeated the message."""
    aborted: bool = False
    """True if somebody or something may have aborted it."""
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
    """Check that tokens are the scripted model's, all beside them is as long, and the reason is true."""
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
    """Check spans: contiguous, in the order of commits, with their labels, none stale once flushed."""
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
    """Check that deltas are contiguous from 0 and agree with the result, which alone has the last token."""
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
