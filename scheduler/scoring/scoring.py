"""Scores sequences with a second checkpoint, the reference model, between the steps of the loop.

- The policy is neither read nor written: the reference has its own weights, KV pages and workspaces. A pause,
  an update or poisoned weights do not stop scoring; a release of the tag ``weights`` releases the reference,
  too.
- It is loaded before the policy, while the device is empty; unless it stays resident, it has left the device
  then.
- Every accepted message gets exactly one answer. Sequences are computed in the order of arrival, and at most
  the first one is partly computed, so a pool with pages for the longest sequence is enough.
- Scoring holds the loop for one layer, or for a few rows of the output head, at a time, at most
  :data:`SLICE_S`, and does not wait for an asynchronous device. Logits exist for a few rows at a time, in
  memory of fixed size.
"""

import logging
import re
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ... import io_struct as wire
from ...io_struct import CaesuraError, ErrorCode
from ...io_struct.generate import GREEDY_BELOW
from ..cache.allocator import PageAllocator
from ..execution.build import build_backend, load_model, longest_context, make_pool, require_deterministic
from ..execution.forward import ForwardBatch, StepLimits
from ..memory.device_memory import is_out_of_memory
from ..memory.device_module import device_module_for, streams_of
from ..memory.host_copy import exhaust
from ..memory.offload import ComponentOffloadStrategy, LayerwiseOffloadStrategy, ResidentStrategy, Strategy
from ..memory.workspace import Workspace
from ..models.causal_lm import CausalLM
from ..runtime.engine_config import PAGE_SIZE
from ..scheduling.chunking import ChunkSizer
from ..scheduling.waiting_queue import pages_for

if TYPE_CHECKING:
    from ..runtime.engine import Engine

logger = logging.getLogger(__name__)

SLICE_S = 0.025
"""Longest time that scoring runs before the loop receives messages again; one layer may take longer."""

WEIGHTS, PAGES = "reference", "reference_kv"
"""The components that a chunk uses, by the names under which they are registered."""

_ROWS = 16
"""The output head processes a multiple of this many rows; fewer are hardly faster."""
_ROW_BYTES_CPU = 10 << 20
_ROW_BYTES = 128 << 20
"""Bytes of float32 logits that exist at a time; :data:`_ROWS` rows are allowed even if they need more."""

_Ids = npt.NDArray[np.int64]
_LAYER = re.compile(r"layers\.(\d+)\.")
_STRATEGIES: dict[wire.Residency, tuple[Strategy, Strategy]] = {
    "resident": (ResidentStrategy(), ResidentStrategy(preserve=False)),
    "offload": (ComponentOffloadStrategy(), ComponentOffloadStrategy(preserve=False)),
    "layerwise": (LayerwiseOffloadStrategy(), ComponentOffloadStrategy(preserve=False)),
}


@dataclass(slots=True)
class _Message:
    id: str
    temperature: float
    logprobs: list[npt.NDArray[np.float32]]
    unfinished: int = 0


@dataclass(slots=True)
class _Sequence:
    message: _Message
    ids: _Ids
    start: int
    logprobs: npt.NDArray[np.float32]
    computed: int = 0
    pages: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def inputs(self) -> int:
        return len(self.ids) - 1


class Scoring:
    def __init__(self, engine: "Engine", model_path: str) -> None:
        """Load the reference model, which leaves the device unless it stays resident."""
        self._engine = engine
        config, residency = engine.config, engine.residency
        self._model_path = model_path
        weights, pages = _STRATEGIES[config.reference_residency]
        residency.register(WEIGHTS, weights, memory_intensive=True)
        residency.register(PAGES, pages)
        with residency.component(WEIGHTS):
            alone = replace(config, model_path=model_path, context_len=None, enable_lora=False)
            loaded = load_model(alone)
        if loaded.config.delta is not None:
            reason = (
                f"{loaded.config.architecture} cannot be the reference model: its linear attention keeps a "
                "state per sequence, which scoring does not have"
            )
            raise CaesuraError(ErrorCode.UNSUPPORTED_MODEL, reason, fields=["architectures"])
        residency.registered[WEIGHTS].divide(_layers(loaded.model))
        if config.deterministic:
            require_deterministic(loaded)
        self.model, self._device = loaded.model, loaded.device
        self._context_len = longest_context(config, loaded)
        num_pages = 1 + pages_for(config.reference_pool_tokens or self._context_len)  # page 0 is scratch
        with residency.component(PAGES):
            pool = make_pool(loaded, num_pages)
        chunk_tokens = config.sizes.chunk_tokens
        limits = StepLimits.of(
            max_rows=config.sizes.rows, chunk_tokens=chunk_tokens, context_len=self._context_len
        )
        self.max_rows = limits.rows
        self._backend = build_backend(config, loaded, pool, limits)
        for name in (WEIGHTS, PAGES):
            residency.use(name)
        exhaust(residency.leave([WEIGHTS, PAGES]))
        module = device_module_for(loaded.device)
        if hasattr(module, "synchronize"):  # loading used another stream than steps do
            module.synchronize()
        self.allocator = PageAllocator(num_pages)
        self._chunks = ChunkSizer(chunk_tokens, SLICE_S)
        self.workspace = Workspace()
        self._queue: deque[_Sequence] = deque()
        self._messages: dict[str, _Message] = {}
        self._work: Generator[None, None, None] | None = None
        self._answers: list[wire.ScoreReqOutput | wire.ErrorReply] = []
        self._scored_tokens = 0
        self.waits = False
        """True if scoring can go on only when the device has finished."""

    @property
    def has_work(self) -> bool:
        return bool(self._work is not None or self._queue or self._answers)

    def accept(self, message: wire.ScoreReqInput) -> None:
        """Queue all sequences of a message, or none."""
        self._engine.state.require_resident("weights")
        pending, limit = len(self._queue), self._engine.config.max_waiting_requests
        if pending and pending + len(message.input_ids) > limit:
            reason = f"{pending} sequences wait to be scored, the limit is {limit}"
            raise CaesuraError(ErrorCode.QUEUE_FULL, reason, waiting=pending, limit=limit)
        self._check(message)
        sequences = [np.asarray(ids, np.int64) for ids in message.input_ids]
        wanted = [
            np.empty(len(ids) - start, np.float32)
            for ids, start in zip(sequences, message.start, strict=True)
        ]
        job = _Message(message.id, message.temperature, wanted)
        for ids, start, logprobs in zip(sequences, message.start, wanted, strict=True):
            if len(logprobs):
                self._queue.append(_Sequence(job, ids, start, logprobs))
                job.unfinished += 1
        self._messages[message.id] = job
        self._answer_if_complete(job)

    def _check(self, message: wire.ScoreReqInput) -> None:
        if not 0.0 <= message.temperature <= 1e4:
            raise _invalid("temperature", repr(message.temperature), "must be finite and in [0, 10000]")
        if len(message.start) != len(message.input_ids):
            raise _invalid("start", len(message.start), f"one for each of {len(message.input_ids)} sequences")
        vocab_size, pool_pages = self.model.config.vocab_size, self.allocator.total
        for number, (ids, start) in enumerate(zip(message.input_ids, message.start, strict=True)):
            if not ids or max(ids) >= vocab_size:
                requirement = f"ids below {vocab_size}, at least one"
                raise _invalid(f"input_ids[{number}]", max(ids, default=None), requirement)
            if start > len(ids):
                raise _invalid(f"start[{number}]", start, f"at most the sequence's length, {len(ids)}")
            if len(ids) > self._context_len:
                raise CaesuraError(
                    ErrorCode.PROMPT_TOO_LONG,
                    f"sequence {number} of {len(ids)} tokens exceeds the context of {self._context_len}",
                    prompt_tokens=len(ids),
                    max_new_tokens=0,
                    limit=self._context_len,
                )
            if pages_for(len(ids) - 1) > pool_pages:
                needed, pool_tokens = len(ids) - 1, pool_pages * PAGE_SIZE
                raise CaesuraError(
                    ErrorCode.EXCEEDS_KV_POOL,
                    f"sequence {number} needs KV for {needed} tokens, "
                    f"the reference's pool holds {pool_tokens}",
                    needed_tokens=needed,
                    total_tokens=pool_tokens,
                )

    def advance(self) -> list[wire.ScoreReqOutput | wire.ErrorReply]:
        engine = self._engine
        started, self.waits = perf_counter(), False
        if "weights" in engine.state.released:
            self._fail_all(
                CaesuraError(ErrorCode.MEMORY_RELEASED, "the memory of the reference was released")
            )
        while self._work is not None or self._queue:
            if self._work is None:
                self._work = self._serve()
            failure = None
            try:
                with torch.inference_mode(), engine.runner.on_stream():
                    next(self._work)
            except StopIteration:
                self._work = None
            # An error between chunks leaves an unknown state: everything fails.
            except Exception as error:  # noqa: BLE001
                failure = _failure(error)
            if failure is not None:
                self._fail_all(failure)
                engine.device_cache.after_failure(failure.message)
            if self.waits or perf_counter() - started > SLICE_S:
                break
        answers, self._answers = self._answers, []
        return answers

    def end(self, message: str, code: ErrorCode) -> list[wire.ScoreReqOutput | wire.ErrorReply]:
        self._fail_all(CaesuraError(code, message))
        answers, self._answers = self._answers, []
        return answers

    def status(self) -> wire.ReferenceStatus:
        engine = self._engine
        return wire.ReferenceStatus(
            model_path=self._model_path,
            residency=engine.config.reference_residency,
            weights=engine.residency.nbytes(WEIGHTS),
            device_bytes=engine.residency.registered[WEIGHTS].device_bytes,
            pending_sequences=len(self._queue),
            scored_tokens=self._scored_tokens,
        )

    def _serve(self) -> Generator[None, None, None]:
        engine = self._engine
        while self._queue:
            chunk, failure = self._plan(), None
            try:
                yield from self._compute(chunk)
            # A chunk may fail in any way; its messages must be answered.
            except Exception as error:  # noqa: BLE001
                failure = _failure(error)
            if failure is not None:  # outside of the handler: no traceback keeps the chunk's tensors alive
                self._fail({span.sequence.message.id for span in chunk}, failure)
                engine.device_cache.after_failure(failure.message)
        try:
            yield from engine.residency.leave([WEIGHTS, PAGES])
        except (OSError, RuntimeError) as error:
            message = f"the reference could not leave the device: {error}"
            logger.error("the reference could not leave the device", exc_info=error)
        else:
            return
        engine.device_cache.after_failure(message)

    def _plan(self) -> list["_Span"]:
        chunk: list[_Span] = []
        budget = self._chunks.budget()
        for sequence in self._queue:
            if budget == 0 or len(chunk) == self.max_rows:
                break
            if not len(sequence.pages):
                pages = self.allocator.allocate(pages_for(sequence.inputs))
                if pages is None:
                    break
                sequence.pages = pages
            end = min(sequence.computed + budget, sequence.inputs)
            chunk.append(_Span(sequence, sequence.computed, end))
            budget -= end - sequence.computed
        return chunk

    def _compute(self, chunk: list["_Span"]) -> Generator[None, None, None]:
        engine = self._engine
        yield from engine.residency.bring([WEIGHTS, PAGES])
        at_layer, _ = engine.residency.use(WEIGHTS), engine.residency.use(PAGES)
        batch, targets = _batch(chunk, self._device)
        self._backend.plan(batch)
        steps = self.model.forward_by_layer(batch, self._backend)
        slowest = 0.0
        while True:
            started = perf_counter()
            try:
                layer = next(steps)
            except StopIteration as end:
                hidden: Tensor = end.value
                break
            finally:
                slowest = max(slowest, perf_counter() - started)
            at_layer(layer)
            yield
        self._chunks.observe(len(batch.input_ids), slowest)
        out = yield from self._logprobs(hidden, targets, _scales(chunk, self._device))
        yield from self._wait_for_device()
        self._record(chunk, out.cpu().numpy())

    def _logprobs(self, hidden: Tensor, targets: Tensor, scales: Tensor) -> Generator[None, None, Tensor]:
        """Yield log-probabilities of ``targets`` [S] behind ``hidden``; logits are divided by ``scales``."""
        model, device = self.model, self._device
        vocab_size = model.config.vocab_size
        out = torch.empty(len(targets), dtype=torch.float32, device=device)
        fitting = (_ROW_BYTES_CPU if device.type == "cpu" else _ROW_BYTES) // (4 * vocab_size)
        rows = max(1, fitting // _ROWS) * _ROWS
        for begin in range(0, len(targets), rows):
            rows_slice = slice(begin, begin + rows)
            logits = model.logits(hidden[rows_slice])
            assert logits is not None, "nothing is scored in a dummy run"
            scaled = self.workspace.take("scaled", (len(logits), vocab_size), torch.float32, device)
            torch.div(logits, scales[rows_slice, None], out=scaled)
            best = scaled.amax(1, keepdim=True)
            scaled -= best
            torch.gather(scaled, 1, targets[rows_slice, None], out=out[rows_slice, None])
            out[rows_slice] -= scaled.exp_().sum(1).log_()
            yield
        return out

    def _wait_for_device(self) -> Generator[None, None, None]:
        if (streams := streams_of(self._engine.device_module)) is not None:
            done = streams.current_stream().record_event()
            while not done.query():
                self.waits = True
                yield

    def _record(self, chunk: list["_Span"], logprobs: npt.NDArray[np.float32]) -> None:
        broken: set[str] = set()
        offset = 0
        for span in chunk:
            sequence, (begin, end) = span.sequence, span.scored
            values = logprobs[offset : offset + end - begin]
            offset += len(values)
            sequence.logprobs[begin - sequence.start + 1 : end - sequence.start + 1] = values
            sequence.computed = span.end
            if np.isnan(values).any():
                broken.add(sequence.message.id)
            if sequence.computed == sequence.inputs:
                self._queue.popleft()  # sequences finish in the order of the queue, so this one is its head
                self._release_pages(sequence)
                sequence.message.unfinished -= 1
        self._scored_tokens += offset
        if broken:
            self._fail(broken, CaesuraError(ErrorCode.INTERNAL, "the reference's logits are not finite"))
        for message in {span.sequence.message.id: span.sequence.message for span in chunk}.values():
            self._answer_if_complete(message)

    def _answer_if_complete(self, message: _Message) -> None:
        if message.unfinished == 0 and self._messages.pop(message.id, None) is not None:
            logprobs = [values.astype("<f4", copy=False).tobytes() for values in message.logprobs]
            self._answers.append(wire.ScoreReqOutput(id=message.id, logprobs=logprobs))

    def _fail(self, message_ids: set[str], error: CaesuraError) -> None:
        for sequence in self._queue:
            if sequence.message.id in message_ids:
                self._release_pages(sequence)
        self._queue = deque(s for s in self._queue if s.message.id not in message_ids)
        for message_id in message_ids:
            del self._messages[message_id]
            self._answers.append(error.to_reply(message_id))

    def _fail_all(self, error: CaesuraError) -> None:
        if self._work is not None:
            self._work.close()
            self._work = None
        self._fail(set(self._messages), error)

    def _release_pages(self, sequence: _Sequence) -> None:
        self.allocator.free(sequence.pages)
        sequence.pages = sequence.pages[:0]


@dataclass(frozen=True, slots=True)
class _Span:
    sequence: _Sequence
    begin: int
    end: int

    @property
    def scored(self) -> tuple[int, int]:
        """The tokens among them whose successors are scored, as ``(begin, end)``."""
        return max(self.begin, min(self.sequence.start - 1, self.end)), self.end


def _failure(error: Exception) -> CaesuraError:
    """Return the error to answer: a copy without the traceback, which would keep tensors alive."""
    logger.error("scoring failed", exc_info=error)
    if isinstance(error, CaesuraError):
        return CaesuraError(error.code, error.message, **error.detail)
    code = ErrorCode.OUT_OF_MEMORY if is_out_of_memory(error) else ErrorCode.INTERNAL
    return CaesuraError(code, f"scoring failed: {type(error).__name__}: {error}")


def _invalid(name: str, value: object, requirement: str) -> CaesuraError:
    reason = f"{name} = {value}: {requirement}"
    return CaesuraError(ErrorCode.INVALID_REQUEST, reason, field=name, value=value)


def _batch(chunk: Sequence[_Span], device: torch.device) -> tuple[ForwardBatch, Tensor]:
    sampled, targets, offset = [], [], 0
    for span in chunk:
        begin, end = span.scored
        sampled.append(np.arange(begin, end) - span.begin + offset)
        targets.append(span.sequence.ids[begin + 1 : end + 1])
        offset += span.end - span.begin
    ids = [span.sequence.ids[span.begin : span.end] for span in chunk]
    begins, pages = [span.begin for span in chunk], [span.sequence.pages for span in chunk]
    batch = ForwardBatch.of_rows(ids, begins, pages, np.concatenate(sampled), device)
    return batch, torch.from_numpy(np.concatenate(targets)).to(device)


def _scales(chunk: Sequence[_Span], device: torch.device) -> Tensor:
    temperatures = [span.sequence.message.temperature for span in chunk]
    scales = np.asarray([1.0 if t < GREEDY_BELOW else t for t in temperatures], np.float32)
    counts = [end - begin for begin, end in (span.scored for span in chunk)]
    return torch.from_numpy(np.repeat(scales, counts)).to(device)


def _layers(model: CausalLM) -> list[list[Tensor]]:
    layers: list[list[Tensor]] = [[] for _ in range(model.config.num_layers)]
    for name, tensor in model.named_storage():
        if (found := _LAYER.match(name)) is not None:
            layers[int(found[1])].append(tensor)
    return layers
