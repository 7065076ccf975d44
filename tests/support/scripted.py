"""A real engine driven tick by tick, with a runner whose model is a hash of the KV that it reads through the
page table.

The scripted model stores, in the KV slot of position p, a number made of the token at p and the weights epoch
at that moment; the next token is a hash of all numbers of the row, in order. A page that is shared wrongly,
freed too early, written twice or kept across epochs therefore changes tokens, and :func:`expected_tokens`
says what they should be.
"""

import itertools
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Self

import numpy as np
import pytest
import torch
import zmq

from caesura.client.connection.results import read_floats
from caesura.io_struct import (
    AbortReq,
    BatchTokenOutput,
    BeginWeightUpdateReqInput,
    BeginWeightUpdateReqOutput,
    CheckerAction,
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    ErrorReply,
    FlushCacheReqInput,
    GenerateImagesReqOutput,
    GenerateReqInput,
    GenerateReqOutput,
    GetMemoryHistoryReqInput,
    GetStatusReqInput,
    GetStatusReqOutput,
    Keepalive,
    LogprobRows,
    MemoryEvent,
    MemoryTag,
    Message,
    PauseGenerationReqInput,
    PauseMode,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    SamplingParams,
    UpdateWeightFromDiskReqInput,
    WeightsCheckerReqInput,
    decode_reply,
    encode,
)
from caesura.scheduler.cache.pool import RoutingPool
from caesura.scheduler.execution.forward import ForwardBatch, HostOutput
from caesura.scheduler.execution.sampler import SamplerOutput
from caesura.scheduler.runtime.background import Task
from caesura.scheduler.runtime.engine import Engine
from caesura.scheduler.runtime.engine_config import PAGE_SIZE, EngineConfig
from caesura.scheduler.runtime.loop import Step

from .waiting import PATIENCE_S as _PATIENCE_S

_MULTIPLIER = np.uint64(6364136223846793005)
_INCREMENT = np.uint64(1442695040888963407)

_TORN = np.uint64(0xBAD57A7E)
"""A state that a step has begun to overwrite."""

_MARK = b"\0everything before this has been taken in"


def cell(token: int, epoch: int) -> np.uint64:
    return np.uint64(token * 1_000_003 + epoch * 7_919 + 1)


def next_token(cells: np.ndarray, vocab_size: int) -> int:
    """Return the scripted model's token from all KV of a row (uint64 [length])."""
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(len(cells), _MULTIPLIER, np.uint64), dtype=np.uint64)
        mixed = (cells * powers[::-1]).sum(dtype=np.uint64) * _MULTIPLIER + _INCREMENT
    return int(mixed >> np.uint64(33)) % (vocab_size - 3) + 3  # 0 to 2 are kept out: special ids


def expected_tokens(prompt: list[int], result: GenerateReqOutput, vocab_size: int) -> list[int]:
    tokens: list[int] = list(prompt)
    cells: list[np.uint64] = []
    for span in result.weight_versions:
        if not span.stale_kv:
            cells = []
        for _ in range(span.start, span.end):
            cells += [cell(token, span.epoch) for token in tokens[len(cells) :]]
            tokens.append(next_token(np.asarray(cells, np.uint64), vocab_size))
    return tokens[len(prompt) :]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [3 + (seed * 31 + i * 7) % 90 for i in range(length)]


def vocabulary_of(record: LogprobRows, vocab_size: int = 97) -> torch.Tensor:
    """Return top logprobs of the whole vocabulary as rows [tokens, V], in the order of ids."""
    ids = np.frombuffer(record.ids, "<i4").reshape(-1, vocab_size)
    values = np.frombuffer(record.logprobs, "<f4").reshape(-1, vocab_size)
    rows = np.empty_like(values)
    np.put_along_axis(rows, ids, values, axis=1)
    return torch.from_numpy(rows)


def expert_rows(
    tokens: np.ndarray, epochs: np.ndarray | int, positions: np.ndarray, layers: int, top_k: int
) -> np.ndarray:
    """Return the scripted router's ids [n, layers, top_k] of ``tokens`` at ``positions`` under ``epochs``."""
    seeds = np.asarray(tokens) * 5 + np.asarray(epochs) * 83 + np.asarray(positions) * 7
    return (seeds[:, None, None] + np.arange(layers)[:, None] * 31 + np.arange(top_k) * 3) % 251


def expected_experts(prompt: list[int], result: GenerateReqOutput, layers: int, top_k: int) -> np.ndarray:
    """Return the scripted router's choices when each position of ``result`` was first computed."""
    tokens = [*prompt, *tokens_of(result)]
    if len(tokens) == len(prompt):
        return np.empty((0, layers, top_k), np.uint8)
    epochs = [epoch for span in result.weight_versions for epoch in [span.epoch] * (span.end - span.start)]
    positions = np.arange(len(tokens) - 1)
    of_positions = np.asarray(epochs)[np.maximum(positions + 1 - len(prompt), 0)]
    rows = expert_rows(np.asarray(tokens[:-1]), of_positions, positions, layers, top_k)
    return rows[result.routed_experts.start :]


def fold(state: np.uint64, cells: np.ndarray) -> np.uint64:
    """Return the scripted state of a sequence after ``cells``, uint64 [n]."""
    with np.errstate(over="ignore"):
        for each in cells:
            state = state * _MULTIPLIER + each
    return state


def _sampled_logprobs(sampled: SamplerOutput | None, count: int) -> np.ndarray:
    if sampled is None or sampled.sampled_logprobs is None:
        return np.zeros(count, np.float32)
    return sampled.sampled_logprobs.numpy()


@dataclass
class _Launched:
    output: HostOutput
    fail: bool = False
    on_fetch: Callable[[], None] = lambda: None

    def fetch(self) -> HostOutput:
        if self.fail:
            raise RuntimeError("scripted failure of the device")
        self.on_fetch()
        return self.output


@dataclass
class ScriptedRunner:
    """Satisfies the Runner protocol; records what it was asked to do."""

    num_pages: int
    max_slots: int
    vocab_size: int
    routing: RoutingPool | None = None
    read_epoch: Callable[[], int] = lambda: 0
    fail_next: bool = False
    fail_on_fetch: bool = False
    non_finite_next: bool = False
    launches: list[tuple[int, list[int]]] = field(default_factory=list)
    """(decode rows, query lengths) per step."""
    before: Callable[[ForwardBatch], None] = lambda batch: None
    """Called with each step before anything is computed, ``after`` when everything is, ``on_fetch`` when it
    is asked for.
    """
    after: Callable[[ForwardBatch], None] = lambda batch: None
    on_fetch: Callable[[ForwardBatch], None] = lambda batch: None
    sample: Callable[[ForwardBatch, np.ndarray], SamplerOutput] | None = None
    """Sampler of the step's tokens, given the scripted model's (int64 [S]), or None to take these."""
    window_pages: int | None = None
    window: int = 0
    """Tokens of the window of layers that give pages back: in their storage every step must find what all
    layers have of its windows.
    """
    state_rows: int = 0
    """Number of rows of the layers' states per sequence. A state must say the same as all KV of its row. A
    step overwrites it at once, and what is there until the step has been computed is of no use.
    """

    def __post_init__(self) -> None:
        self.kv = np.zeros(self.num_pages * PAGE_SIZE, np.uint64)
        self.window_kv = np.zeros((self.window_pages or 0) * PAGE_SIZE, np.uint64)
        self.states = np.full(self.state_rows, _TORN)
        self.last = np.zeros(self.max_slots, np.int64)

    def execute(self, batch: ForwardBatch) -> _Launched:
        self.launches.append((batch.num_decode, list(batch.q_lens_host)))
        states_before = self._overwrite_states(batch)
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("scripted failure of a batch")
        self.before(batch)
        ids = batch.input_ids.numpy().copy()
        slots = batch.slots.numpy()
        decode = batch.num_decode
        ids[:decode] = self.last[slots[:decode]] if batch.known is None else batch.known.numpy()
        kv_slots = batch.kv_slots.numpy()
        assert len(set(kv_slots.tolist())) == len(kv_slots), "two tokens of a step share a KV slot"
        assert (kv_slots >= PAGE_SIZE).all(), "the scratch page was written"
        self.kv[kv_slots] = [cell(int(token), self.read_epoch()) for token in ids]
        if self.window_pages is not None:
            self._look_through_windows(batch)
        if batch.states is not None:
            self._go_on(batch, states_before)
        if self.routing is not None:
            shape = self.routing.num_layers, self.routing.top_k
            rows = expert_rows(ids, self.read_epoch(), batch.positions.numpy(), *shape)
            self.routing.store(batch.kv_slots, torch.from_numpy(rows).to(self.routing.dtype))
        row_ends = np.cumsum(batch.q_lens_host)
        tokens = []
        for sample in batch.sample_tokens.numpy():
            row = int(np.searchsorted(row_ends, sample, side="right"))
            length = batch.kv_lens_host[row]
            positions = np.arange(length)
            pages = batch.page_table[row].numpy()
            cells = self.kv[
                pages[positions // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + positions % PAGE_SIZE
            ]
            tokens.append(next_token(cells, self.vocab_size))
        sampled = None if self.sample is None else self.sample(batch, np.asarray(tokens, np.int64))
        token_ids = np.asarray(tokens if sampled is None else sampled.token_ids.numpy(), np.int32)
        if self.non_finite_next and len(token_ids):
            self.non_finite_next = False
            token_ids[0] = -1
        self.last[batch.sample_slots.numpy()] = np.maximum(token_ids, 0)
        self.after(batch)
        fail, self.fail_on_fetch = self.fail_on_fetch, False
        return _Launched(
            HostOutput(
                token_ids=token_ids,
                logprobs=(-token_ids).astype(np.float32) if sampled is None else sampled.logprobs.numpy(),
                raw_logprobs=(-2 * token_ids).astype(np.float32) if batch.sampling.want_raw else None,
                sampled_logprobs=_sampled_logprobs(sampled, len(tokens))
                if batch.sampling.want_sampled
                else None,
                further=None if sampled is None else sampled.further,
            ),
            fail,
            partial(self.on_fetch, batch),
        )

    def _overwrite_states(self, batch: ForwardBatch) -> np.ndarray:
        before = self.states.copy()
        if batch.states is not None:
            written = [*batch.states.rows.tolist(), *(segment.kept or 0 for segment in batch.states.segments)]
            if batch.states.kept is not None:
                written += batch.states.kept[1].tolist()
            assert 0 not in batch.states.rows, "a row of nobody"
            assert len({*written} - {0}) == np.count_nonzero(written), "a row of states is written twice"
            self.states[written] = _TORN
        return before

    def _go_on(self, batch: ForwardBatch, states: np.ndarray) -> None:
        """Advance each row's state to its next, which must be that of all its KV."""
        step, cells = batch.states, self.kv[batch.kv_slots.numpy()]
        assert step is not None
        rows = step.rows.tolist()
        sources = rows if step.sources is None else step.sources.tolist()
        for token, (source, row) in enumerate(zip(sources, rows[: batch.num_decode], strict=False)):
            states[row] = fold(states[source], cells[token : token + 1])
        for start, end, source, target, kept in step.segments:
            begin = np.uint64(0) if source is None else states[source]
            states[target] = fold(begin, cells[start:end])
            if kept is not None:
                states[kept] = states[target]
        if step.kept is not None:
            index, targets = (each.numpy() for each in step.kept)
            states[targets] = states[np.asarray(rows)[index]]
        for row, length, pages in zip(rows, batch.kv_lens_host, batch.page_table.numpy(), strict=True):
            seen = np.arange(length)
            known = self.kv[pages[seen // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + seen % PAGE_SIZE]
            assert states[row] == fold(np.uint64(0), known), "a state is not that of its sequence"
        self.states = states

    def _look_through_windows(self, batch: ForwardBatch) -> None:
        assert batch.window_slots is not None
        assert batch.window_table is not None
        slots = batch.window_slots.numpy()
        assert len(set(slots.tolist())) == len(slots), "two tokens of a step share a slot of windowed layers"
        assert (slots >= PAGE_SIZE).all(), "the scratch page of windowed layers was written"
        self.window_kv[slots] = self.kv[batch.kv_slots.numpy()]
        rows = zip(batch.q_lens_host, batch.kv_lens_host, batch.page_table, batch.window_table, strict=True)
        for q_len, kv_len, *tables in rows:
            seen = np.arange(max(0, kv_len - q_len + 1 - self.window), kv_len)
            found = [
                store[table.numpy()[seen // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + seen % PAGE_SIZE]
                for store, table in zip((self.kv, self.window_kv), tables, strict=True)
            ]
            assert np.array_equal(*found), "windowed layers have lost what a token sees"

    def set_last_tokens(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        self.last[slots] = tokens

    def synchronize(self) -> None:
        """Do nothing: no work is asynchronous here."""

    def on_stream(self) -> AbstractContextManager[None]:
        return nullcontext()


class _Inbox:
    """Takes messages off the engine's socket when they are sent."""

    def __init__(self, engine: Engine) -> None:
        self._socket = engine.router.socket
        self._receive = engine.router.receive
        self.poller = engine.scheduler._poller
        """The loop's own."""
        self._waiting: deque[tuple[bytes, bytes, list[memoryview]]] = deque()
        self.would_block = False
        """The loop had nothing to do when it last looked, and would have slept."""
        engine.router.receive = self.receive  # type: ignore[method-assign]
        engine.scheduler._poller = self  # type: ignore[assignment]

    def await_one_more(self) -> None:
        before = len(self._waiting)
        while len(self._waiting) == before:
            assert self._socket.poll(_PATIENCE_S * 1000), "the message did not arrive"
            self._waiting.extend(self._receive())

    def receive(self) -> Iterator[tuple[bytes, bytes, list[memoryview]]]:
        while self._waiting:
            yield self._waiting.popleft()
        yield from self._receive()

    def poll(self, timeout: int | None = None) -> list[tuple[zmq.Socket, int]]:
        """Stand in for the loop's poller: there is always something to look at."""
        self.would_block = timeout != 0
        return [(self._socket, zmq.POLLIN)]


class _Replies(dict[str, Message]):
    """Replies by message id; popping one takes in what is on its way, without a tick."""

    def __init__(self, collect: Callable[[], None]) -> None:
        super().__init__()
        self._collect = collect

    def pop(self, message_id: str, *default: Any) -> Any:
        if not default and message_id not in self:
            self._collect()
        return super().pop(message_id, *default)


def open_checkpoints_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read checkpoints without a thread, whose speed would decide how many steps run meanwhile."""
    monkeypatch.setattr(
        "caesura.scheduler.control.weight_updates.Task", partial(Task, submit=lambda run: run())
    )


def compile_grammars_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without a thread, whose speed would decide how many ticks pass meanwhile."""
    monkeypatch.setattr("caesura.scheduler.scheduling.grammars.in_deep_thread", lambda run: run())


def one_piece_per_slice(monkeypatch: pytest.MonkeyPatch, *, writes: bool = False) -> None:
    """Let the loop turn after every piece of an operation's work, and with ``writes`` after every write."""
    if writes:
        monkeypatch.setattr("caesura.scheduler.weights.loader.WRITE_S", 0.0)
    monkeypatch.setattr("caesura.scheduler.messaging.command_queue.slice_s", lambda tick_s: 0.0)
    monkeypatch.setattr("caesura.scheduler.control.memory_occupation.SLICE_S", 0.0)


class EngineDriver:
    """An engine in this process, its clients' sockets, and the power over when it ticks."""

    def __init__(self, model_path: str, *, scripted: bool = True, **options: Any) -> None:
        # Not by the name of an engine's own: another one that starts would take it for a dead one's while it
        # is empty.
        self._dir = tempfile.TemporaryDirectory(prefix="test-of-caesura-")
        defaults: dict[str, Any] = {
            "endpoint": f"ipc://{self._dir.name}/s.sock",
            "dtype": "float32",
            "device": "cpu",
            "kv_pool_tokens": 1024,
            "check_ledger": True,
            "load_bucket_bytes": 4096,
            "result_bytes": 1 << 20,  # all of it is written to at the start
            # Neither chunks nor what the engine does by itself must depend on how fast this machine is.
            "target_step_s": float("inf"),
            "idle_empty_s": 3600.0,
            "log_stats_interval_s": 0.0,
        }
        self.config = EngineConfig(model_path=model_path, **{**defaults, **options}).resolve()
        self.runner: ScriptedRunner | None = None
        try:
            self.engine = Engine(self.config, make_runner=self._make_runner if scripted else None)
        except BaseException:
            self._dir.cleanup()
            raise
        if self.runner is not None:
            self.runner.read_epoch = lambda: self.engine.state.stamp.epoch
        self._inbox = _Inbox(self.engine)
        self.ongoing: Step | None = None
        self._context = zmq.Context()
        self.clients: dict[str, zmq.Socket] = {}
        self._connections = itertools.count()
        self.replies = _Replies(self.collect)
        self.results: dict[tuple[str, int], list[GenerateReqOutput]] = {}
        self.images: dict[tuple[str, int], list[GenerateImagesReqOutput]] = {}
        self.outputs: list[tuple[str, BatchTokenOutput]] = []
        self.prompts: dict[str, list[int]] = {}
        """Prompt of every generation that was sent, by its id."""
        self.client("main")

    def _make_runner(self, config, loaded, pool, routing):
        self.runner = ScriptedRunner(
            pool.num_pages,
            config.sizes.rows,
            loaded.config.vocab_size,
            routing,
            window_pages=pool.window_pages,
            window=max(form.window or 0 for form in loaded.model.forms),
            state_rows=0 if pool.states is None else pool.states.num_rows,
        )
        pool.by_page.append(torch.from_numpy(self.runner.kv.view(np.int64).reshape(-1, PAGE_SIZE)))
        return self.runner

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for socket in self.clients.values():
            socket.close(0)
        self._context.term()
        self.engine.close()
        self._dir.cleanup()

    def client(self, name: str) -> zmq.Socket:
        if name not in self.clients:
            socket = self._context.socket(zmq.DEALER)
            # Never the name of one that left: the router may not have noticed yet, and would ignore the
            # second.
            socket.setsockopt(zmq.ROUTING_ID, f"{name} {next(self._connections)}".encode())
            socket.connect(self.config.endpoint)
            self.clients[name] = socket
        return self.clients[name]

    def send(
        self, message: Message | bytes, client: str = "main", buffers: Sequence[bytes | memoryview] = ()
    ) -> str:
        """Send and wait until it lies in the engine's inbox; returns the message id."""
        header = message if isinstance(message, bytes) else encode(message)
        if isinstance(message, GenerateReqInput):
            self.prompts[message.rid or message.id] = message.input_ids
        self.client(client).send_multipart([header, *buffers])
        self._inbox.await_one_more()
        return "" if isinstance(message, bytes) else message.id

    def submit(self, message: Message, client: str = "main") -> str:
        """Send a message and have the loop take it: it has arrived, and no step is launched."""
        self.send(message, client)
        self.hear()
        return message.id

    def tick(self, times: int = 1) -> None:
        """Turn the loop, never blocking; take in what it sent."""
        for _ in range(times):
            self._turn()
        self.collect()

    def hear(self) -> None:
        """Have the engine take in what it has been sent, without a step."""
        self.engine.scheduler.receive(0)

    def sleep_s(self, ongoing: Any = None) -> float | None:
        """Return the seconds for which the loop would sleep now, or None for until a message comes."""
        return self.engine.scheduler._timeout(ongoing)

    def _turn(self) -> None:
        self.ongoing = self.engine.scheduler.tick(self.ongoing)

    def collect(self) -> None:
        """Take in all that the engine has handed to its socket so far: a mark, sent behind it, comes last."""
        for name in list(self.clients):
            if self._mark(self.clients[name]):
                while self._take(name, _PATIENCE_S):
                    pass
        self._take_what_is_here()

    def _mark(self, socket: zmq.Socket) -> bool:
        try:
            self.engine.router.socket.send_multipart([socket.routing_id, _MARK], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            assert error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN), error
            return False
        return True

    def _take_what_is_here(self) -> None:
        for name in self.clients:
            while self._take(name, 0):
                pass

    def _take(self, name: str, patience_s: float) -> bool:
        socket = self.clients[name]
        if not socket.poll(patience_s * 1000):
            assert not patience_s, "the engine has sent this, and it did not arrive"
            return False
        frame, *buffers = socket.recv_multipart()
        if frame == _MARK:
            return False
        message = decode_reply(frame)
        if isinstance(message, BatchTokenOutput):
            self.outputs.append((name, message))
            for result in message.finished:
                self.results.setdefault((result.rid, result.index), []).append(result)
        elif isinstance(message, GenerateImagesReqOutput):
            self.images.setdefault((message.rid, message.index), []).append(message.with_buffers(buffers))
        elif not isinstance(message, Keepalive):
            assert message.id not in self.replies, f"two answers to {message.id}"
            self.replies[message.id] = message
        return True

    def call(
        self,
        message: Message,
        client: str = "main",
        max_ticks: int = 500,
        buffers: Sequence[bytes | memoryview] = (),
    ) -> Any:
        """Send, then tick until it is answered; ticks in which the loop would have slept do not count."""
        message_id = self.send(message, client, buffers)
        ticks, deadline = 0, monotonic() + _PATIENCE_S
        while ticks < max_ticks and monotonic() < deadline:
            self.tick()
            if message_id in self.replies:
                return self.replies.pop(message_id)
            if self.awaited_others():
                continue
            if self._inbox.would_block:
                self.client(client).poll(1)
            else:
                ticks += 1
        raise AssertionError(f"{message} was not answered in {max_ticks} ticks")

    def awaited_others(self) -> bool:
        """Wait for the thread or rank beside the loop that a command waits for, if it waits for one."""
        commands = self.engine.commands
        if commands.wants_tick or commands.has_stepped_aside or not commands.is_busy:
            return False
        poller = zmq.Poller()
        for each in (self.engine.wakeup.fd, *self.engine.executor.heard):
            poller.register(each, zmq.POLLIN)
        poller.poll(250)
        return True

    def begin(self, client: str = "main", **fields: Any) -> str:
        reply = self.call(BeginWeightUpdateReqInput(**fields), client)
        assert isinstance(reply, BeginWeightUpdateReqOutput), reply
        return reply.session_id

    def status(self) -> GetStatusReqOutput:
        """Return the status, without a step in between: the engine answers it before it launches one."""
        reply = self.call(GetStatusReqInput())
        assert isinstance(reply, GetStatusReqOutput), reply
        return reply

    def pause(self, mode: PauseMode = "abort", client: str = "main", **fields: Any) -> Any:
        return self.call(PauseGenerationReqInput(mode=mode, **fields), client)

    def go_on(self, client: str = "main", **fields: Any) -> Any:
        return self.call(ContinueGenerationReqInput(**fields), client)

    def flush(self, client: str = "main", **fields: Any) -> Any:
        return self.call(FlushCacheReqInput(**fields), client)

    def update(self, path: str | Path, client: str = "main", **fields: Any) -> Any:
        message = UpdateWeightFromDiskReqInput(model_path=str(path), **fields)
        return self.call(message, client, max_ticks=100_000)

    def end(self, client: str = "main", **fields: Any) -> Any:
        return self.call(EndWeightUpdateReqInput(**fields), client)

    def abort(self, rid: str | None = None, client: str = "main", **fields: Any) -> Any:
        return self.call(AbortReq(rid=rid, **fields), client)

    def release(self, *tags: MemoryTag, **fields: Any) -> Any:
        return self.call(ReleaseMemoryOccupationReqInput(**{"tags": list(tags) or None, **fields}))

    def resume(self, *tags: MemoryTag, **fields: Any) -> Any:
        return self.call(ResumeMemoryOccupationReqInput(**{"tags": list(tags) or None, **fields}))

    def check_weights(self, action: CheckerAction = "checksum") -> Any:
        return self.call(WeightsCheckerReqInput(action=action))

    def checksum(self) -> str:
        return ok(self.check_weights()).total

    def last_event(self, cause: str) -> MemoryEvent:
        """Return the last event of this cause in the history of memory."""
        events = self.call(GetMemoryHistoryReqInput()).events
        return [event for event in events if event.cause == cause][-1]

    def assert_status(self, **expected: Any) -> None:
        status = self.status()
        assert {name: getattr(status, name) for name in expected} == expected

    def generate(
        self, prompt: list[int], max_new_tokens: int = 8, client: str = "main", **fields: Any
    ) -> str:
        """Send a request, by default a greedy one, with ``seed`` at temperature 1; return its id."""
        seed = fields.pop("seed", None)
        params = fields.pop("sampling_params", None) or SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=0.0 if seed is None else 1.0,
            seed=seed,
            ignore_eos=True,
            n=fields.pop("n", 1),
        )
        message = GenerateReqInput(input_ids=prompt, sampling_params=params, **fields)
        message_id = self.send(message, client)
        return message_id if message.rid is None else message.rid

    def complete(self, prompt: list[int], max_new_tokens: int = 8, **fields: Any) -> GenerateReqOutput:
        """Generate, run until the engine is idle, and return the (first) result, checked if it can be."""
        rid = self.generate(prompt, max_new_tokens, **fields)
        self.run_until_idle()
        return self.result(rid) if self.runner is None or self.runner.sample else self.check(rid)

    def check(self, rid: str, index: int = 0) -> GenerateReqOutput:
        """Return a result whose tokens are the scripted model's, and those of its weights."""
        result = self.result(rid, index)
        assert self.runner is not None
        assert tokens_of(result) == expected_tokens(self.prompts[rid], result, self.runner.vocab_size)
        return result

    def run_until_idle(self, max_ticks: int = 20000) -> None:
        """Tick until no request is live (or nothing moves because the engine is paused)."""
        live = self.engine.live
        for _ in range(max_ticks):
            self._turn()
            self._take_what_is_here()
            if not live and self.ongoing is None:
                self.tick()  # in which the loop finds that it is idle
                return
        raise AssertionError(f"{len(live)} requests still live after {max_ticks} ticks")

    def run(self, *messages: Message) -> None:
        """Send requests, and run until they and all others have ended."""
        for message in messages:
            self.send(message)
        self.run_until_idle()

    def result(self, rid: str, index: int = 0) -> GenerateReqOutput:
        if (rid, index) not in self.results:
            self.collect()
        found = self.results.get((rid, index), [])
        assert len(found) == 1, f"{rid}/{index} has {len(found)} terminal results"
        return found[0]

    def finish(self, rids: Iterable[str]) -> list[tuple[list[int], list[float]]]:
        """Run until idle; return the tokens of each request and their logprobs."""
        self.run_until_idle()
        results = [self.result(rid) for rid in rids]
        return [(tokens_of(result), read_floats(result.output_logprobs)) for result in results]


def tokens_of(result: GenerateReqOutput) -> list[int]:
    return np.frombuffer(result.output_ids, "<i4").tolist()


def ok(reply: Any) -> Any:
    """Return a reply that is no refusal."""
    assert not isinstance(reply, ErrorReply), reply
    return reply


def assert_error(reply: Message, code: str) -> ErrorReply:
    assert isinstance(reply, ErrorReply), reply
    assert reply.code == code, reply
    return reply
