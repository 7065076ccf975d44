"""Admission, the registry of live requests, and the queue of those without KV.

Invariants:
- A request that could not run alone on an empty engine is refused here, with the numbers; later stages refuse
  nothing.
- First come, first served. Retracted and preempted requests go back to the front, in the order in which they
  first ran. A request that may skip others and cannot start keeps its own place.
- A request leaves the queue when it is started or finished. Finished entries are dropped when they reach the
  front, or when there are more of them than live ones, so abort never searches the queue.
"""

import secrets
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from time import monotonic
from typing import TYPE_CHECKING, Generic, TypeVar

from ...io_struct import (
    MAX_HIDDEN_BYTES,
    MAX_INT32,
    MAX_TOKEN_IDS_LOGPROB,
    MAX_TOP_LOGPROBS,
    CaesuraError,
    ErrorCode,
    GenerateReqInput,
)
from ..runtime.engine_config import PAGE_SIZE
from .request import Phase, Request, make_requests

if TYPE_CHECKING:
    from ..images.image_request import ImageRequest

MAX_FURTHER_BYTES = 32 << 20
FINISHED_ENTRIES = 64
"""Finished requests that the queue may contain in addition to one per live request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    context_len: int
    pool_tokens: int
    vocab_size: int
    max_waiting: int
    eos_token_ids: tuple[int, ...]
    has_experts: bool = False
    num_layers: int = 0
    hidden_bytes: int = 0
    """Bytes of a hidden state."""
    has_inner_states: bool = False

    def admit(
        self, message: GenerateReqInput, _buffers: list[memoryview], client: bytes, waiting: int
    ) -> list[Request]:
        """Check a generate message and make its requests, one per sample; changes no state."""
        params, prompt_len = message.sampling_params, len(message.input_ids)
        for field, value, requirement in params.problems():
            field = f"sampling_params.{field}"
            raise _invalid(f"{field} = {value!r} {requirement}", field, value if value == value else "nan")
        for field, ids in (
            ("input_ids", message.input_ids),
            ("sampling_params.stop_token_ids", params.stop_token_ids),
            ("sampling_params.logit_bias", list(params.logit_bias or ())),
            ("sampling_params.allowed_token_ids", params.allowed_token_ids or []),
            ("sampling_params.bad_words_ids", list(chain.from_iterable(params.bad_words_ids or ()))),
            ("sampling_params.forced_output_ids", params.forced_output_ids or []),
        ):
            _check_ids(field, ids, self.vocab_size)
        if prompt_len == 0:
            raise _invalid("input_ids is empty: a prompt has at least one token id", "input_ids", [])
        if (continued := message.continued_tokens) >= prompt_len:
            requirement = f"must be less than the {prompt_len} tokens of input_ids"
            raise _invalid(f"continued_tokens = {continued} {requirement}", "continued_tokens", continued)
        if message.return_routed_experts and not self.has_experts:
            reason = "return_routed_experts: this model has no experts"
            raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field="return_routed_experts")
        if (start := message.routed_experts_start_len) > prompt_len:
            field = "routed_experts_start_len"
            reason = f"{field} = {start} is beyond the prompt of {prompt_len} tokens"
            raise _invalid(reason, field, start, prompt_tokens=prompt_len)
        require_room(params.n, waiting, self.max_waiting)
        forced = params.forced_output_ids
        limit = self._total_limit(prompt_len, params.max_new_tokens if forced is None else len(forced))
        self._check_further_logprobs(message, limit)
        if message.return_hidden_states:
            self._check_hidden_states(message, limit)
        return make_requests(
            message,
            client=client,
            seed=params.seed if params.seed is not None else secrets.randbits(63),
            limit=limit,
            eos_token_ids=self.eos_token_ids,
            arrival=monotonic(),
            num_layers=self.num_layers,
        )

    def _total_limit(self, prompt_len: int, max_new_tokens: int | None) -> int:
        new_tokens = max_new_tokens if max_new_tokens is not None else max(self.context_len - prompt_len, 1)
        if prompt_len + new_tokens > self.context_len:
            raise CaesuraError(
                ErrorCode.PROMPT_TOO_LONG,
                f"{prompt_len} prompt tokens and {new_tokens} new ones exceed "
                f"the context of {self.context_len}",
                prompt_tokens=prompt_len,
                max_new_tokens=new_tokens,
                limit=self.context_len,
            )
        # The last sampled token needs no KV. Without max_new_tokens the pool limits a request and refuses
        # none.
        needed = prompt_len + new_tokens - 1
        if needed > self.pool_tokens and max_new_tokens is None and prompt_len <= self.pool_tokens:
            return self.pool_tokens + 1
        if needed > self.pool_tokens:
            reason = f"the request needs KV for {needed} tokens, the whole pool holds {self.pool_tokens}"
            raise CaesuraError(
                ErrorCode.EXCEEDS_KV_POOL, reason, needed_tokens=needed, total_tokens=self.pool_tokens
            )
        return prompt_len + new_tokens

    def _check_hidden_states(self, message: GenerateReqInput, limit: int) -> None:
        start, most = message.hidden_states_start_len, self.num_layers
        layers = [-1] if message.hidden_states_layers is None else message.hidden_states_layers
        for layer in layers:
            if not -most - 1 <= layer <= most:
                reason = f"hidden_states_layers has {layer}: must be in [{-most - 1}, {most}]"
                raise _invalid(reason, "hidden_states_layers", layer)
            if layer not in (-1, most) and not self.has_inner_states:
                reason = (
                    f"hidden_states_layers has {layer}: transformers computes this model, only -1 is known"
                )
                raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field="hidden_states_layers")
        prompt_len = len(message.input_ids)
        if start > prompt_len:
            reason = f"hidden_states_start_len = {start} is beyond the prompt of {prompt_len} tokens"
            raise _invalid(reason, "hidden_states_start_len", start, prompt_tokens=prompt_len)
        nbytes = (limit - 1 - start) * len(layers) * self.hidden_bytes
        if not layers or nbytes > MAX_HIDDEN_BYTES:
            reason = (
                f"must be 1 or more, of at most {MAX_HIDDEN_BYTES} bytes in all: these take up to {nbytes}"
            )
            raise _invalid(f"hidden_states_layers: {reason}", "hidden_states_layers", len(layers))

    def _check_further_logprobs(self, message: GenerateReqInput, limit: int) -> None:
        top, token_ids = message.top_logprobs_num, message.token_ids_logprob or []
        start, prompt_len, num_ids = message.logprob_start_len, len(message.input_ids), len(token_ids)
        most = min(MAX_TOP_LOGPROBS, self.vocab_size)
        nbytes = (8 * top + 4 * num_ids) * (limit - (start if 0 <= start < prompt_len else prompt_len))
        fits = nbytes <= MAX_FURTHER_BYTES or not message.return_logprob
        too_large = f"and token_ids_logprob: up to {nbytes} bytes, the limit is {MAX_FURTHER_BYTES}"
        most_ids = f"has at most {MAX_TOKEN_IDS_LOGPROB} ids"
        for field, value, requirement, holds in (
            ("top_logprobs_num", top, f"must be in [0, {most}]", 0 <= top <= most),
            ("logprob_start_len", start, "must be a position, or -1", -1 <= start <= MAX_INT32),
            ("token_ids_logprob", num_ids, most_ids, num_ids <= MAX_TOKEN_IDS_LOGPROB),
            ("top_logprobs_num", top, too_large, fits),
        ):
            if not holds:
                raise _invalid(f"{field} = {value}: {requirement}", field, value)
        _check_ids("token_ids_logprob", token_ids, self.vocab_size)


def _invalid(reason: str, field: str, value: object, **detail: object) -> CaesuraError:
    return CaesuraError(ErrorCode.INVALID_REQUEST, reason, field=field, value=value, **detail)


def require_room(samples: int, waiting: int, limit: int) -> None:
    if waiting + samples > limit:
        reason = f"{waiting} samples are waiting, the limit is {limit}"
        raise CaesuraError(ErrorCode.QUEUE_FULL, reason, waiting=waiting, limit=limit)


def _check_ids(field: str, ids: list[int], vocab_size: int) -> None:
    if ids and max(ids) >= vocab_size:
        position, value = next((i, token) for i, token in enumerate(ids) if token >= vocab_size)
        reason = f"{field}[{position}] = {value} is outside the vocabulary of {vocab_size}"
        raise _invalid(reason, field, value, position=position, vocab_size=vocab_size)


SampleT = TypeVar("SampleT", bound="Request | ImageRequest")


class LiveRequests(Generic[SampleT]):
    def __init__(self) -> None:
        self._by_key: dict[tuple[str, int], SampleT] = {}
        self._by_rid: defaultdict[str, list[SampleT]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[SampleT]:
        return iter(list(self._by_key.values()))

    def add(self, requests: Iterable[SampleT]) -> None:
        for request in requests:
            self._by_key[request.key] = request
            self._by_rid[request.rid].append(request)

    def remove(self, request: SampleT) -> None:
        del self._by_key[request.key]
        samples = self._by_rid[request.rid]
        samples.remove(request)
        if not samples:
            del self._by_rid[request.rid]

    def samples(self, rid: str) -> list[SampleT]:
        return list(self._by_rid.get(rid, ()))

    def of_client(self, client: bytes) -> list[SampleT]:
        return [request for request in self._by_key.values() if request.client == client]


class WaitingQueue(Generic[SampleT]):
    def __init__(self) -> None:
        self._queue: deque[SampleT] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, request: SampleT) -> None:
        self._queue.append(request)
        self._count += 1

    def push_front(self, requests: list[SampleT]) -> None:
        for request in reversed(requests):
            request.phase = Phase.WAITING
            self._queue.appendleft(request)
        self._count += len(requests)

    def forget_finished(self) -> None:
        """Count one queued request as finished. Its entry stays until there are too many."""
        self._count -= 1
        if len(self._queue) > 2 * self._count + FINISHED_ENTRIES:
            self._queue = deque(self.live())

    def live(self) -> Iterator[SampleT]:
        return (request for request in self._queue if request.phase is Phase.WAITING)

    def head(self) -> list[SampleT]:
        return list(islice(self.live(), 1))

    def start_next(
        self,
        may_start: Callable[[SampleT], bool | None],
        start: Callable[[SampleT, int], bool],
        look_ahead: int,
    ) -> SampleT | None:
        """Start and remove the first of ``look_ahead`` requests for which ``may_start`` is true.

        Those for which it is None are passed over. ``start`` gets how many others it skips; on False no other
        is tried. If it raises, the queue is unchanged.
        """
        skipped: list[SampleT] = []
        left = look_ahead
        started: SampleT | None = None
        candidate: SampleT | None = None
        try:
            while self._queue and left:
                candidate = self._queue.popleft()
                if candidate.phase is not Phase.WAITING:
                    candidate = None
                elif may := may_start(candidate):
                    if start(candidate, look_ahead - left):
                        started, candidate = candidate, None
                        self._count -= 1
                    break
                else:
                    left -= may is False
                    skipped.append(candidate)
                    candidate = None
        finally:
            if candidate is not None:
                skipped.append(candidate)
            self._queue.extendleft(reversed(skipped))
        return started


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)
