"""Grammars of outputs: compiled beside the loop, and followed by each sample, token by token.

Invariants:
- The allowed tokens of a position depend on the grammar, the request and the tokens before it, on nothing
  else: what a retraction, a lost step or a restart of the prefill does to a sample is of no account here.
- A grammar is compiled in a thread, at most :data:`THREADS` at once and one more of at most :data:`SMALL`
  characters, which need not wait behind slow ones; its requests wait meanwhile. Before that a process tries
  it (``grammar_worker.py``), as no thread can be stopped. A grammar that does not compile, or not within
  :data:`COMPILE_CPU_S`, or that would end the process, ends its own requests.
- End-of-sequence ids are allowed where the grammar may end, whatever it says of them; so are
  ``stop_token_ids``. With ``ignore_eos`` the former never are.
- A sample ends where nothing may follow, if it has no stop token that could say so.
- From the first token of a replay that the grammar does not allow, it allows everything.
"""

import importlib.util
import os
import signal
import subprocess
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ...io_struct import CaesuraError, ErrorCode, GrammarStatus
from ...process.limited_processes import LimitedProcesses, ProcessEndedError
from ..runtime.background import Task
from .grammar_worker import GrammarError, in_deep_thread, new_matcher, read_tokenizer
from .request import Phase

if TYPE_CHECKING:
    from .request import Request

MAX_KEPT = 64
"""Compiled grammars that are kept for later requests, the last used ones."""
THREADS, SMALL = 2, 4096
COMPILE_CPU_S = 5
"""Maximum seconds of CPU time of a compilation."""
COMPILE_BYTES = 8 << 30
"""Address space of the process that tries grammars."""
MAX_DEPTH = 200
"""Most brackets within each other: parsers recurse, and those in Python stop there."""
_WORKER = Path(__file__).with_name("grammar_worker.py")
_MAX_REASON = 500


@dataclass(slots=True)
class Compiled:
    matcher: Any
    """llguidance's matcher before the first token, to be copied."""
    first: np.ndarray
    """int32 words of the mask of the first token, a bit per token."""
    accepts_nothing: bool


@dataclass(slots=True, eq=False)
class _Pending:
    text: str
    requests: "list[Request]" = field(default_factory=list)
    task: Task[Compiled] | None = None


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


class GrammarState:
    """Place of one sample in its grammar."""

    def __init__(self, grammars: "Grammars", text: str, stop_ids: tuple[int, ...], *, forced: bool) -> None:
        self.text = text
        self.compiled: Compiled | None = None
        """None until the grammar is there; then the sample may start."""
        self._grammars = grammars
        self._stop_ids = stop_ids
        self._forced = forced
        self._matcher: Any = None
        self._known = -1
        self._lost = False
        self.mask = np.empty(0, np.int32)
        """int32 [W]: allowed tokens after those that :meth:`follow` got, a bit each."""
        self.may_end = False
        self.must_end = False
        """True if no token but stop tokens may follow."""

    def follow(self, tokens: np.ndarray) -> None:
        """Stand behind ``tokens``, all that is known of the output."""
        if len(tokens) == self._known:
            return
        began = perf_counter()
        assert self.compiled is not None, "a sample starts when its grammar is there"
        if len(tokens) < self._known or self._matcher is None:
            self._matcher, self._known, self._lost = None, 0, False
        if len(tokens) and self._matcher is None:
            self._matcher = self.compiled.matcher.deep_copy()
        for token in tokens[self._known :].tolist() if not self._lost else ():
            if token in self._stop_ids or not self._takes(token):
                self._lost = True
                break
        self._known = len(tokens)
        self._look()
        self._grammars.note_mask(perf_counter() - began)

    def _takes(self, token: int) -> bool:
        spelled = self._grammars.spelled.get(token)
        if spelled is not None and not self._matcher.validate_tokens([token]):
            return bool(self._matcher.consume_tokens(spelled))
        return bool(self._matcher.consume_token(token))

    def _look(self) -> None:
        assert self.compiled is not None
        if self._lost:
            self.mask = np.full_like(self.compiled.first, -1 if self._forced else 0)
            self.may_end, self.must_end = self._forced, not self._forced
            return
        if self._matcher is None:
            self.mask, self.may_end = self.compiled.first.copy(), self.compiled.accepts_nothing
        else:
            self.mask, self.may_end = self._grammars.look(self._matcher)
        self.must_end = not self.mask.any()
        if self.may_end and self._stop_ids:
            self.mask |= self._grammars.mask_of(self._stop_ids)

    def end(self, *, may_stop: bool) -> str | None:
        """Return ``stop`` if the sample ends here without a token that says so, ``error`` if it cannot go on.

        ``may_stop``: stop tokens may be sampled at this position.
        """
        if not self.must_end:
            return None
        if not self.may_end:
            return "error"
        return None if may_stop and self._stop_ids else "stop"

    @property
    def reason(self) -> str:
        """Explain why nothing may follow where the grammar may not end."""
        said = self._matcher.get_error() if self._matcher is not None else ""
        return _short(said) or "no token of the vocabulary may follow, and it may not end here"


class Grammars:
    def __init__(
        self,
        folder: str,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        *,
        wake: Callable[[], None],
        finish: "Callable[[Request, str | None], None]",
    ) -> None:
        """``folder`` has the tokenizer; ``finish`` ends a request: for a reason, or as complete."""
        self._tokenizer_file = os.path.join(folder, "tokenizer.json")
        self._finish = finish
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._wake = wake
        self._words = -(-vocab_size // 32)
        self._tokenizer: Any = None
        self._own = np.empty(0, np.int32)
        """Bits that are the grammar's to set: not those of end-of-sequence ids, nor behind the vocabulary."""
        self._stops: dict[tuple[int, ...], np.ndarray] = {}
        self.spelled: dict[int, list[int]] = {}
        """Tokens of bytes for added ones that llguidance calls special, as they look like ``<mark>``: a mask
        allows them for their text, and then they are not taken for it."""
        self._kept: OrderedDict[str, Compiled] = OrderedDict()
        self._pending: dict[str, _Pending] = {}
        self._running: list[Task[Compiled]] = []
        start = {"path": self._tokenizer_file, "vocab_size": vocab_size, "eos_token_ids": self._eos_token_ids}
        self._trials = LimitedProcesses(
            _WORKER,
            lambda: {**start, "cpu_s": COMPILE_CPU_S, "memory_bytes": COMPILE_BYTES},
            environment={"MALLOC_ARENA_MAX": "2", "RAYON_NUM_THREADS": "1"},  # address space
            stderr=subprocess.DEVNULL,
        )
        self._arrived: list[Request] = []
        self._used = False
        self._compiled = self._failed = self._masks = 0
        self._wait_s = self._mask_s = 0.0

    @property
    def num_waiting(self) -> int:
        """Number of queued requests that cannot start yet."""
        if not (self._pending or self._arrived):
            return 0
        waiting = [*self._arrived, *(each for pending in self._pending.values() for each in pending.requests)]
        return sum(request.phase is Phase.WAITING for request in waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._pending or self._arrived)

    def check(self, text: str) -> None:
        """Refuse a grammar that no thread needs to look at."""
        if text in self._kept or text in self._pending:
            return
        if importlib.util.find_spec("llguidance") is None:
            reason = "grammars need llguidance, which is not installed: pip install 'caesura[grammar]'"
            raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field="sampling_params.grammar")
        if not os.path.isfile(self._tokenizer_file):
            folder = os.path.dirname(self._tokenizer_file)
            reason = f"grammars need the tokenizer of the model: {folder} has no tokenizer.json"
            raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field="sampling_params.grammar")
        depth = deepest(text)
        if depth > MAX_DEPTH:
            reason = f"grammar has {depth} brackets within each other; at most {MAX_DEPTH}"
            raise CaesuraError(
                ErrorCode.INVALID_REQUEST, reason, field="sampling_params.grammar", value=depth
            )

    def give(self, requests: "Iterable[Request]") -> None:
        """Let ``requests`` of one grammar wait for it."""
        for request in requests:
            if (text := request.params.grammar) is not None:
                self._used = True
                request.grammar = GrammarState(
                    self, text, request.stop_ids, forced=request.forced is not None
                )
                self._arrived.append(request)

    def advance(self) -> None:
        """Let requests start whose grammars are there; ``finish`` ends one: with a reason, or as complete."""
        arrived, self._arrived = self._arrived, []
        for request in arrived:
            assert request.grammar is not None
            if (compiled := self._kept.get(request.grammar.text)) is not None:
                self._begin(request, compiled)
            else:
                text = request.grammar.text
                self._pending.setdefault(text, _Pending(text)).requests.append(request)
        self._running = [task for task in self._running if not task.done]
        for pending in sorted(self._pending.values(), key=lambda each: len(each.text)):  # slow ones are long
            if pending.task is None and len(self._running) < THREADS + (len(pending.text) <= SMALL):
                pending.task = Task(partial(self._compile, pending.text), self._wake, submit=in_deep_thread)
                self._running.append(pending.task)
            if pending.task is not None and pending.task.done:
                self._ready(pending)
            elif not any(request.phase is Phase.WAITING for request in pending.requests):
                del self._pending[pending.text]

    def _ready(self, pending: _Pending) -> None:
        assert pending.task is not None
        del self._pending[pending.text]
        try:
            compiled = pending.task.result()
        except GrammarError as error:
            self._fail(pending, str(error))
            return
        except Exception as error:  # noqa: BLE001  a library in a thread: whatever it was, others go on
            self._fail(pending, f"{type(error).__name__}: {error}")
            return
        self._compiled += 1
        self._kept[pending.text] = compiled
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        for request in pending.requests:
            if request.phase is Phase.WAITING:
                self._begin(request, compiled)

    def _fail(self, pending: _Pending, reason: str) -> None:
        self._failed += 1
        for request in pending.requests:
            if request.phase is Phase.WAITING:
                self._finish(request, _short(reason))

    def _begin(self, request: "Request", compiled: Compiled) -> None:
        state = request.grammar
        assert state is not None
        self._kept.move_to_end(state.text)
        self._wait_s += monotonic() - request.arrival
        state.compiled = compiled
        if request.phase is not Phase.WAITING or request.forced is not None:
            return
        state.follow(request.prompt[len(request.prompt) - request.continued :])
        end = state.end(may_stop=request.params.min_new_tokens == 0)
        if end is not None:
            self._finish(request, state.reason if end == "error" else None)

    def look(self, matcher: Any) -> tuple[np.ndarray, bool]:
        """Return the mask of ``matcher``, int32 [W], without end-of-sequence ids, and whether it may end."""
        room = np.empty(-(-self._tokenizer.vocab_size // 32), np.int32)
        matcher.unsafe_compute_mask_ptr(room.ctypes.data, room.nbytes)
        mask = room[: self._words] & self._own
        if matcher.is_error():
            mask[:] = 0
            return mask, False
        return mask, matcher.is_accepting()

    def mask_of(self, stop_ids: tuple[int, ...]) -> np.ndarray:
        """Return the mask of stop tokens, int32 [W]."""
        if (found := self._stops.get(stop_ids)) is None:
            if len(self._stops) >= MAX_KEPT:
                self._stops.clear()
            found = self._stops[stop_ids] = _mask_of(stop_ids, self._words)
        return found

    def note_mask(self, seconds: float) -> None:
        self._masks += 1
        self._mask_s += seconds

    def status(self) -> GrammarStatus | None:
        if not self._used:
            return None
        return GrammarStatus(
            compiled=self._compiled,
            failed=self._failed,
            waiting=self.num_waiting,
            wait_s=self._wait_s,
            masks=self._masks,
            mask_s=self._mask_s,
        )

    def _compile(self, text: str) -> Compiled:
        """Compile a grammar, in a thread; raises GrammarError."""
        if self._tokenizer is None:
            self._trials.prepare()  # it reads the tokenizer, too
            self._tokenizer = self._read()
        try:
            answer = self._trials.ask(text.encode("utf-8", "surrogatepass"))
        except ProcessEndedError as ended:
            raise GrammarError(_why_ended(ended.status)) from ended
        if "error" in answer:
            raise GrammarError(answer["error"])
        matcher = new_matcher(self._tokenizer, answer["text"])
        return Compiled(matcher, *self.look(matcher))

    def _read(self) -> Any:
        path, ends = self._tokenizer_file, self._eos_token_ids
        try:
            tokenizer = read_tokenizer(path, self._vocab_size, ends)
            with open(path, "rb") as file:
                added = msgspec.json.decode(file.read(), type=_TokenizerFile).added_tokens
        except (OSError, ValueError, msgspec.DecodeError) as error:
            raise GrammarError(f"llguidance cannot read {path}: {error}") from error
        self.spelled = {
            each.id: tokenizer.greedy_tokenize(each.content)
            for each in added
            if not each.special and each.id < self._vocab_size and tokenizer.is_special_token(each.id)
        }
        unused = range(self._vocab_size, 32 * self._words)
        self._own = ~_mask_of([*(ends or [tokenizer.eos_token]), *unused], self._words)
        return tokenizer


def _why_ended(status: int) -> str:
    if status == -signal.SIGXCPU:
        return f"it takes more than {COMPILE_CPU_S} s of CPU time to compile"
    return f"it ends the process that compiles it, with status {status}"


def _mask_of(tokens: Sequence[int], words: int) -> np.ndarray:
    """Return int32 ``words`` with the bits of ``tokens``."""
    ids = np.asarray(tokens, np.int64)
    mask = np.zeros(words, np.uint32)
    np.bitwise_or.at(mask, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
    return mask.view(np.int32)


def deepest(text: str) -> int:
    """Return how many brackets of ``text`` are open at most, wherever they stand."""
    codes = np.frombuffer(text.encode(errors="surrogatepass"), np.uint8)
    change = np.isin(codes, list(b"([{")).astype(np.int32) - np.isin(codes, list(b")]}"))
    depth = np.cumsum(change)
    return int((depth - np.minimum.accumulate(np.minimum(depth, 0))).max(initial=0))


def _short(reason: str) -> str:
    return reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]}…"
