"""Grammars of outputs: compiled beside the loop, and followed by each sample, token by token.

Invariants:
- The allowed tokens of a position depend on the grammar, the request and the tokens before it, on nothing
  else: what a retraction, a lost step or a restart of the prefill does to a sample is of no account here.
- A grammar is compiled in a thread, at most :data:`THREADS` at once, and its requests wait meanwhile. One
  that does not compile, or not within :data:`COMPILE_S`, ends its own requests.
- End-of-sequence ids are allowed where the grammar may end, whatever it says of them; so are
  ``stop_token_ids``. With ``ignore_eos`` the former never are.
- A sample ends where nothing may follow, if it has no stop token that could say so.
- From the first token of a replay that the grammar does not allow, it allows everything.
"""

import importlib.util
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ...io_struct import CaesuraError, ErrorCode, GrammarStatus
from ..runtime.background import Task
from .request import Phase

if TYPE_CHECKING:
    from .request import Request

MAX_KEPT = 64
"""Compiled grammars that are kept for later requests, the last used ones."""
THREADS = 2
COMPILE_S = 30.0
MAX_STUCK = 4
"""Threads that may go on with a grammar that nobody waits for any more; with more, no other is begun."""
MAX_DEPTH = 200
"""Most brackets within each other: parsers recurse, and those in Python stop there."""
MAX_GBNF = 64 << 10
"""Most characters of a grammar in GBNF, whose translation is Python's work, and quadratic."""
STACK_BYTES = 1 << 30
"""Stack of a compiling thread, in address space: llguidance recurses along chains of rules, and overflows
the usual one with 5,000 of them, which would end the process."""
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
    since: float = field(default_factory=monotonic)


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


class _Grammars(msgspec.Struct, forbid_unknown_fields=True):
    grammars: list[dict[str, Any]]


class GrammarError(ValueError):
    """A grammar that llguidance does not take."""


class GrammarState:
    """Place of one sample in its grammar."""

    def __init__(self, grammars: "Grammars", text: str, stop_ids: tuple[int, ...], *, forced: bool) -> None:
        self.text = text
        self.compiled: Compiled | None = None
        """None until the grammar is there; then the sample may start."""
        self._grammars = grammars
        self._stop_ids = np.asarray(stop_ids, np.int64)
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
        if self.may_end and len(self._stop_ids):
            np.bitwise_or.at(self.mask.view(np.uint32), *_bits(self._stop_ids))

    def end(self, *, may_stop: bool) -> str | None:
        """Return ``stop`` if the sample ends here without a token that says so, ``error`` if it cannot go on.

        ``may_stop``: stop tokens may be sampled at this position.
        """
        if not self.must_end:
            return None
        if not self.may_end:
            return "error"
        return None if may_stop and len(self._stop_ids) else "stop"

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
        self._folder = folder
        self._finish = finish
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._wake = wake
        self._words = -(-vocab_size // 32)
        self._tokenizer: Any = None
        self._never = np.empty(0, np.int64)
        """Bits that are not the grammar's to set: those of end-of-sequence ids, and behind the vocabulary."""
        self.spelled: dict[int, list[int]] = {}
        """Tokens of bytes for added ones that llguidance calls special, as they look like ``<mark>``: a mask
        allows them for their text, and then they are not taken for it."""
        self._kept: OrderedDict[str, Compiled] = OrderedDict()
        self._pending: dict[str, _Pending] = {}
        self._running: list[Task[Compiled]] = []
        self._stuck: list[Task[Compiled]] = []
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
        if not os.path.isfile(os.path.join(self._folder, "tokenizer.json")):
            reason = f"grammars need the tokenizer of the model: {self._folder} has no tokenizer.json"
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
        self._stuck = [task for task in self._stuck if not task.done]
        for pending in list(self._pending.values()):
            if pending.task is None and len(self._running) < THREADS and len(self._stuck) < MAX_STUCK:
                pending.task = Task(partial(self._compile, pending.text), self._wake, submit=_in_deep_thread)
                self._running.append(pending.task)
            if pending.task is not None and pending.task.done:
                self._ready(pending)
            elif not any(request.phase is Phase.WAITING for request in pending.requests):
                self._give_up(pending)
            elif monotonic() - pending.since > COMPILE_S:
                self._give_up(pending)
                self._fail(pending, f"not compiled within {COMPILE_S:g} s")

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

    def _give_up(self, pending: _Pending) -> None:
        del self._pending[pending.text]
        if pending.task in self._running:
            self._running.remove(pending.task)
            self._stuck.append(pending.task)

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
        mask = np.frombuffer(matcher.compute_bitmask(), np.int32)[: self._words].copy()
        words, bits = _bits(self._never)
        np.bitwise_and.at(mask.view(np.uint32), words, ~bits)
        if matcher.is_error():
            mask[:] = 0
            return mask, False
        return mask, matcher.is_accepting()

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
        from llguidance import LLMatcher, LLTokenizer  # an extra, and slow to import

        if self._tokenizer is None:
            self._tokenizer = self._read(LLTokenizer)
        if text.lstrip().startswith("{"):
            text = _without_gbnf(text) if '"gbnf"' in text else text
        elif "::=" in text:
            text = _lark_of(text)
        matcher = LLMatcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        first, accepts = self.look(matcher)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        return Compiled(matcher, first, accepts)

    def _read(self, kind: Any) -> Any:
        """Return the tokenizer; its last tokens may be beyond the model's vocabulary."""
        path, ids = os.path.join(self._folder, "tokenizer.json"), list(self._eos_token_ids)
        try:
            try:
                tokenizer = kind(path, n_vocab=self._vocab_size, eos_token=ids or None)
            except ValueError:
                tokenizer = kind(path, eos_token=ids or None)
            with open(path, "rb") as file:
                added = msgspec.json.decode(file.read(), type=_TokenizerFile).added_tokens
        except (ValueError, msgspec.DecodeError) as error:
            raise GrammarError(f"llguidance cannot read {path}: {error}") from error
        self.spelled = {
            each.id: tokenizer.greedy_tokenize(each.content)
            for each in added
            if not each.special and each.id < self._vocab_size and tokenizer.is_special_token(each.id)
        }
        ends = np.asarray(ids or [tokenizer.eos_token], np.int64)
        unused = np.arange(self._vocab_size, 32 * self._words)
        self._never = np.concatenate([ends, unused])
        return tokenizer


def _lark_of(text: str) -> str:
    """Return a grammar in GBNF as Lark writes it; raises GrammarError."""
    from llguidance.gbnf_to_lark import any_to_lark  # as above

    if len(text) > MAX_GBNF:
        raise GrammarError(f"{len(text)} characters of GBNF; at most {MAX_GBNF}")
    try:
        return str(any_to_lark(text))
    except Exception as error:
        raise GrammarError(f"{type(error).__name__}: {error}") from error


def _without_gbnf(text: str) -> str:
    """Return grammars, llguidance's form of several, whose texts in GBNF (member ``gbnf``) are in Lark."""
    try:
        grammars = msgspec.json.decode(text, type=_Grammars)
    except msgspec.DecodeError:
        return text  # llguidance says what is wrong
    for each in grammars.grammars:
        if isinstance(gbnf := each.pop("gbnf", None), str):
            each["lark_grammar"] = _lark_of(gbnf)
    return msgspec.json.encode(grammars).decode()


def _in_deep_thread(work: Callable[[], None]) -> None:
    usual = threading.stack_size(STACK_BYTES)
    try:
        threading.Thread(target=work, name="caesura-grammar", daemon=True).start()
    finally:
        threading.stack_size(usual)


def _bits(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return index and value of the words with the bits of ``tokens``, int64 [n]."""
    return tokens >> 5, np.uint32(1) << (tokens & 31).astype(np.uint32)


def deepest(text: str) -> int:
    """Return how many brackets of ``text`` are open at most, wherever they stand."""
    codes = np.frombuffer(text.encode(errors="surrogatepass"), np.uint8)
    change = np.isin(codes, list(b"([{")).astype(np.int32) - np.isin(codes, list(b")]}"))
    depth = np.cumsum(change)
    return int((depth - np.minimum.accumulate(np.minimum(depth, 0))).max(initial=0))


def _short(reason: str) -> str:
    return reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]}…"
