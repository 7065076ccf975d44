"""``TokenizerManager``: generation with text input and output, over one connection to the engine.

Invariants:
- Every sample ends in exactly one :class:`Sample`, or its request in one exception. Messages of the engine
  after a stop string was found do not change the sample; only an error of the engine is raised.
- The engine generates no needless tokens: a stop string aborts its sample there, and a cancelled
  :meth:`generate` or a closed :meth:`stream` aborts its request.
- A slow reader needs one buffer: tokens are decoded together, but searched for stop strings as they arrive.
- A request without stop strings that does not stream gets one message from the engine, and is decoded once.
- Everything runs on one event loop, that of the client.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import msgspec

from ...io_struct import (
    MAX_LOGIT_BIAS,
    MAX_TOKEN_IDS_LOGPROB,
    AbortReq,
    AbortReqOutput,
    FinishReason,
    GenerateReqInput,
    SamplingParams,
)
from ...io_struct.base import MAX_ID_LENGTH
from ..connection.async_channel import Channel, Deltas, Result
from ..connection.async_client import AsyncSchedulerClient
from ..connection.connection import Generation
from ..connection.prompts import token_ids
from ..connection.results import (
    GenerateOutput,
    TokenDelta,
    TokenDetails,
    joined_masks,
    joined_rows,
)
from ..exceptions import EngineError, InvalidRequest, PromptTooLong
from .sample_text import SampleText, shortened
from .stop_strings import StopStrings, shared_stop_strings
from .tokenizer import TextTokenizer

ENCODE_INLINE = 2048
"""Characters up to which a text is tokenized on the event loop, in about a millisecond."""

START_SLICE = 32
"""Generations of a batch that are started before other tasks run."""

MAX_STOP_CHARACTERS = 2048
"""Maximum of all stop strings of a prompt; the automaton takes some 300 bytes for each character."""
MAX_SALT_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 64

_DEFAULTS = SamplingParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt with ``sampling_params.n`` samples; InvalidRequest if a field is too large."""

    prompt: str | Sequence[int]
    sampling_params: SamplingParams = _DEFAULTS
    stop: Sequence[str] = ()
    """Stop strings; the front end searches for them, the engine knows tokens only."""
    no_stop_trim: bool = False
    """Keep the matched stop string or token in the text."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    add_special_tokens: bool = True
    """For a prompt that is text."""
    detokenize: bool = True
    """False leaves the text empty; ``stop`` must be empty, too."""
    rid: str | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    """Position from which on the prompt has logprobs; -1 means none."""
    top_logprobs_num: int = 0
    token_ids_logprob: Sequence[int] | None = None
    return_sampled_logprob: bool = False
    return_sampling_mask: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    return_hidden_states: bool = False
    hidden_states_layers: Sequence[int] | None = None
    hidden_states_start_len: int = 0
    cache_salt: str = ""
    prefix_lease: str | None = None
    prefix_lease_s: float = 300.0
    adapter: str | None = None
    """Name of a loaded adapter. None means the model itself."""
    min_weights_epoch: int | None = None
    stream_interval: int | None = None
    """Tokens of each chunk of a stream after the first token's. None means the server's default."""
    scored: bool = False
    """Only the prompt is of interest: the token that the engine samples all the same is left out."""

    def __post_init__(self) -> None:
        params, token_ids = self.sampling_params, self.token_ids_logprob
        check_size("rid", len(self.rid or ""), MAX_ID_LENGTH, "characters")
        check_size("stop", characters(self.stop), MAX_STOP_CHARACTERS, "characters in all")
        check_size("cache_salt", len(self.cache_salt), MAX_SALT_CHARACTERS, "characters")
        check_size(
            "token_ids_logprob", 0 if token_ids is None else len(token_ids), MAX_TOKEN_IDS_LOGPROB, "ids"
        )
        check_size("stop_token_ids", len(params.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids")
        check_size("logit_bias", len(params.logit_bias or {}), MAX_LOGIT_BIAS, "tokens")


def check_size(field: str, size: int, limit: int, what: str) -> None:
    if size > limit:
        raise InvalidRequest(f"{field}: {size} {what} are over the limit of {limit}", field=field, value=size)


def characters(texts: Sequence[str]) -> int:
    return sum(len(text) for text in texts if isinstance(text, str))


_ENGINE_FIELDS = [
    each.name for each in fields(GenerationRequest) if each.name in GenerateReqInput.__struct_fields__
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The final result of one sample."""

    index: int
    """Index of the sample, below ``n``."""
    rid: str
    """Request id: the given one, or a random one."""
    prompt_ids: list[int]
    """The prompt as token ids."""
    text: str
    """The text, without the stop string or token that ended it unless ``no_stop_trim``."""
    output: GenerateOutput
    """Tokens, logprobs and spans, all cut at the token that completed a stop string (reason ``stop``)."""
    matched: int | str | None
    """Stop string or token id that ended it. None unless the finish reason is ``stop``."""


class Chunk(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The new text and tokens of one sample of a stream."""

    index: int
    """Index of the sample, below ``n``."""
    rid: str
    """Request id: the given one, or a random one."""
    text: str
    """The new text, of whole characters, as far as no stop string can begin in it."""
    delta: TokenDelta | None
    """New tokens. None if only text is new."""
    finished: Sample | None
    """The result, in the last chunk of this sample, or None."""
    prompt_tokens: int
    """Length of the prompt, in tokens."""


@dataclass(frozen=True, slots=True)
class _Work:
    request: GenerationRequest
    prompt_ids: list[int]
    wire: GenerateReqInput
    tokenizer: TextTokenizer | None
    """None if only ids are wanted."""
    stops: StopStrings | None


class _Follower:
    """The tokens of one sample that have arrived, made into text when it is asked for."""

    def __init__(self, work: _Work, index: int) -> None:
        self._work = work
        self._index = index
        self._text = (
            None
            if work.tokenizer is None
            else SampleText(
                work.tokenizer,
                work.prompt_ids,
                work.stops,
                skip_special_tokens=work.request.skip_special_tokens,
                min_new_tokens=work.request.sampling_params.min_new_tokens,
            )
        )
        self._arrived: list[TokenDelta] = []
        self._tokens: list[TokenDelta] = []  # made into text, not read
        self._read = 0  # tokens that were read, where stop strings may hold some back
        self._whole: list[str] = []
        self._shown = 0  # pieces of it that were read
        self._output: GenerateOutput | None = None
        self._ended = False  # all the text that there will be has been made
        self._given = False  # the reader has its terminal result

    def arrive(self, delta: TokenDelta) -> None:
        if not self._work.request.scored:
            self._arrived.append(delta)

    def end(self, output: GenerateOutput) -> None:
        self._output = output

    @property
    def stopped(self) -> bool:
        return self._text is not None and self._text.length is not None

    @property
    def generating(self) -> bool:
        return self._output is None

    def advance(self) -> None:
        arrived, self._arrived = self._arrived, []
        self._tokens += arrived
        text, output = self._text, self._output
        if text is None:
            self._ended = output is not None
            return
        ids = arrived[0].output_ids if len(arrived) == 1 else [id for one in arrived for id in one.output_ids]
        if output is None:
            self._show(text.feed(ids))
            return
        # A stop token has no text, and comes in one message with the end.
        last = ids[-1:] if output.finish_reason.matched is not None else []
        self._show(text.feed(ids[: len(ids) - len(last)]))
        if not self._ended:
            self._ended = True
            keep = self._work.request.no_stop_trim
            self._show(text.finish(last if keep else ()))
            self._show((text.stop or "") if keep else "")

    def sample(self) -> Sample:
        self.advance()
        assert self._output is not None
        output = self._output
        if self._work.request.scored:
            ended = output.finish_reason.type in ("stop", "length")
            reason = FinishReason(type="length", length=0) if ended else output.finish_reason
            output = replace(shortened(output, 0), finish_reason=reason)
        matched: int | str | None = output.finish_reason.matched
        if self._text is not None and self._text.length is not None:
            output = replace(shortened(output, self._text.length), finish_reason=FinishReason(type="stop"))
            matched = self._text.stop
        return Sample(
            index=output.index,
            rid=output.rid,
            prompt_ids=self._work.prompt_ids,
            text="".join(self._whole),
            output=output,
            matched=matched,
        )

    def chunk(self, rid: str) -> Chunk | None:
        self.advance()
        delta = self._read_tokens() if self._tokens else None
        text = "".join(self._whole[self._shown :])
        self._shown = len(self._whole)
        finished = self.sample() if self._ended and not self._given else None
        self._given = self._ended
        if not text and delta is None and finished is None:
            return None
        prompt = len(self._work.prompt_ids)
        return Chunk(
            index=self._index, rid=rid, text=text, delta=delta, finished=finished, prompt_tokens=prompt
        )

    def _show(self, text: str) -> None:
        if text:
            self._whole.append(text)

    def _read_tokens(self) -> TokenDelta | None:
        """Return the tokens whose text is known: others may still be cut off by a stop string."""
        delta, self._tokens = joined(self._tokens), []
        if self._text is None or self._work.stops is None or (self._ended and not self.stopped):
            return delta
        known = min(len(delta.output_ids), self._text.settled - self._read)
        if known < len(delta.output_ids):
            self._tokens.append(delta.cut(known, None))
        self._read += known
        return delta.cut(0, known) if known else None


class Flow:
    """The samples of one prompt while they are generated, for a reader that takes chunks when it can.

    ``wake`` is called when there may be something new, but not again before all that was new is read.
    """

    def __init__(self, work: _Work, channel: Channel, wake: Callable[[], object], interval: int = 1) -> None:
        """Let tokens wait for those of a position that ``interval`` divides, or for the sample's end."""
        self._work = work
        self._wake = wake
        self._interval = interval
        self._channel = channel
        self._followers: dict[int, _Follower] = {}
        self._unread: dict[int, None] = {}
        self._held: dict[int, None] = {}  # have tokens that wait for others
        self._unsearched: dict[int, None] = {}
        self.generation = channel.start_generation(work.wire, self)
        self.generation.waiter.add_done_callback(lambda _: wake())

    def ended(self) -> bool:
        """Return True if the engine has nothing to add, or raise the error of the generation."""
        waiter = self.generation.waiter
        if waiter.done():
            waiter.result()
        return waiter.done()

    def close(self) -> None:
        if not self.generation.waiter.done():
            _abort(self._channel, self.generation)

    def on_tokens(self, delta: TokenDelta) -> None:
        follower = self._followers.get(delta.index) or self.follower(delta.index)
        if not follower.stopped:  # the engine does not know of the stop yet
            follower.arrive(delta)
            if -delta.start % self._interval < len(delta.output_ids):
                self._note(delta.index)
            else:
                self._held[delta.index] = None
            self._search_soon(delta.index)

    def on_finished(self, output: GenerateOutput) -> None:
        if output.finish_reason.type != "error":  # the waiter raises it for the whole request
            self.follower(output.index).end(output)
            self._note(output.index)
            self._search_soon(output.index)

    def follower(self, index: int) -> _Follower:
        found = self._followers.get(index)
        if found is None:
            found = self._followers[index] = _Follower(self._work, index)
        return found

    def next_chunk(self) -> Chunk | None:
        """Return what is unread of the sample that has waited longest; None if nothing is."""
        if self._held and self.generation.waiter.done():  # perhaps by an error, before which they are sent
            self._unread |= self._held
            self._held.clear()
        while self._unread:
            index = next(iter(self._unread))
            del self._unread[index]
            chunk = self._followers[index].chunk(self.generation.rid)
            if chunk is not None:
                return chunk
        return None

    def _note(self, index: int) -> None:
        if not self._unread:
            self._wake()
        self._unread[index] = None

    def _search_soon(self, index: int) -> None:
        if self._work.stops is not None:
            if not self._unsearched:  # once, after all messages that are there
                asyncio.get_running_loop().call_soon(self._search)
            self._unsearched[index] = None

    def _search(self) -> None:
        unsearched, self._unsearched = self._unsearched, {}
        for index in unsearched:
            follower = self._followers[index]
            follower.advance()
            if follower.stopped and follower.generating:
                _abort(self._channel, self.generation, index)


def _abort(channel: Channel, generation: Generation[Result, Deltas], index: int | None = None) -> None:
    with contextlib.suppress(EngineError):
        channel.start_call(AbortReq(rid=generation.rid, index=index), AbortReqOutput)


class TokenizerManager:
    """Generates text over one client. Without a tokenizer prompts are token ids, and texts are empty."""

    def __init__(
        self,
        client: AsyncSchedulerClient,
        tokenizer: TextTokenizer | None,
        *,
        context_length: int | None = None,
    ) -> None:
        """Refuse texts longer than ``context_length`` tokens without tokenizing them; None means no limit."""
        self.client = client
        self.tokenizer = tokenizer
        self._context_length = context_length
        self._live: set[Generation[Result, Deltas]] = set()

    async def generate(self, request: GenerationRequest) -> list[Sample]:
        """Return all samples of one prompt, in order, or EngineError with what there was."""
        work = await self._prepare(request, stream=False)
        if work.stops is None:
            generation = self._started(self.client.channel.start_generation(work.wire))
            samples = []
            for output in await self._outputs(generation):
                follower = _Follower(work, output.index)
                follower.arrive(output.as_delta())
                follower.end(output)
                samples.append(follower.sample())
            return samples
        flow = Flow(work, self.client.channel, lambda: None)
        self._started(flow.generation)
        outputs = await self._outputs(flow.generation)
        return [flow.follower(output.index).sample() for output in outputs]

    async def follow(self, request: GenerationRequest, wake: Callable[[], object], interval: int = 1) -> Flow:
        """Start a generation that is read from its :class:`Flow`, which its reader must close.

        ``interval`` is the default of the request's ``stream_interval``.
        """
        work = await self._prepare(request, stream=True)
        flow = Flow(work, self.client.channel, wake, request.stream_interval or interval)
        self._started(flow.generation)
        return flow

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Yield chunks; the last of each sample has its :class:`Sample`. If closed early, abort."""
        changed = asyncio.Event()
        flow = await self.follow(request, changed.set)
        try:
            while True:
                changed.clear()
                while (chunk := flow.next_chunk()) is not None:
                    yield chunk
                if not changed.is_set() and flow.ended():
                    return
                await changed.wait()
        finally:
            flow.close()

    async def generate_batch(self, requests: Sequence[GenerationRequest]) -> list[list[Sample]]:
        """Return the samples of many prompts, in order; the first failure, with a note, aborts all others."""
        tasks: list[asyncio.Task[list[Sample]]] = []
        try:
            for request in requests:
                tasks.append(asyncio.ensure_future(self.generate(request)))
                if len(tasks) % START_SLICE == 0:
                    await asyncio.sleep(0)
            if not tasks:
                return []
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()  # those that are done keep their result
        errors = [(position, task.exception()) for position, task in enumerate(tasks) if task.done()]
        for position, error in errors:
            if error is not None:
                error.add_note(f"prompt {position} of {len(requests)}")
                raise error
        return [task.result() for task in tasks]

    def abort_all(self) -> None:
        """Abort every generation of this manager, but none of other clients; each returns what it has."""
        for generation in self._live:
            _abort(self.client.channel, generation)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text; PromptTooLong if it cannot fit into the context."""
        return self._encoder(text).encode(text, add_special_tokens=add_special_tokens)

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, without context."""
        return self.need_tokenizer("tokens").decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Return the token ids of a conversation; ``kwargs`` as of :meth:`TextTokenizer.render_chat`."""
        return self.encode_chat(
            self.render_chat(messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs)
        )

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        return self.need_tokenizer("messages").render_chat(messages, **kwargs)

    def encode_chat(self, prompt: str) -> list[int]:
        return self._encoder(prompt, "messages").encode(prompt, add_special_tokens=False)

    def _encoder(self, text: str, field: str = "text") -> TextTokenizer:
        """Return the tokenizer if ``text`` can fit into the context; tokenizing is expensive."""
        tokenizer = self.need_tokenizer(field)
        tokens = self._context_length
        if tokens is not None and len(text) > tokens * tokenizer.longest:
            reason = (
                f"a text of {len(text)} characters is over the limit of {tokens * tokenizer.longest}: "
                f"{tokens} tokens of at most {tokenizer.longest}"
            )
            raise PromptTooLong(reason, field=field, limit=tokens)
        return tokenizer

    def need_tokenizer(self, field: str) -> TextTokenizer:
        if self.tokenizer is None:
            reason = "this engine is served without a tokenizer: only token ids are accepted"
            raise InvalidRequest(reason, field=field)
        return self.tokenizer

    async def _prepare(self, request: GenerationRequest, *, stream: bool) -> _Work:
        stops = shared_stop_strings(request.stop) if request.stop else None
        if stops is not None:
            self.need_tokenizer("stop")
            if not request.detokenize:
                raise InvalidRequest("stop strings need detokenize", field="stop")
            if request.sampling_params.forced_output_ids is not None:
                raise InvalidRequest("stop strings cannot end forced_output_ids", field="stop")
        ids = await self._prompt_ids(request)
        given = {name: getattr(request, name) for name in _ENGINE_FIELDS}
        for name in ("token_ids_logprob", "hidden_states_layers"):
            if given[name] is not None:
                given[name] = token_ids(given[name])
        wire = GenerateReqInput(input_ids=ids, stream=stream or stops is not None, **given)
        return _Work(request, ids, wire, self.tokenizer if request.detokenize else None, stops)

    async def _prompt_ids(self, request: GenerationRequest) -> list[int]:
        text = request.prompt
        if not isinstance(text, str):
            return token_ids(text)
        encode = self._encoder(text).encode
        if len(text) <= ENCODE_INLINE:
            return encode(text, add_special_tokens=request.add_special_tokens)
        return await asyncio.to_thread(encode, text, add_special_tokens=request.add_special_tokens)

    def _started(self, generation: Generation[Result, Deltas]) -> Generation[Result, Deltas]:
        self._live.add(generation)
        generation.waiter.add_done_callback(lambda _: self._live.discard(generation))
        return generation

    async def _outputs(self, generation: Generation[Result, Deltas]) -> list[GenerateOutput]:
        try:
            outputs: list[GenerateOutput] = await generation.waiter
        except asyncio.CancelledError:
            _abort(self.client.channel, generation)
            raise
        return outputs


def joined(deltas: Sequence[TokenDelta]) -> TokenDelta:
    """Join contiguous deltas of one sample into one, for a reader that is slower than the engine."""
    first = deltas[0]
    if len(deltas) == 1:
        return first
    logprobs = [delta.output_logprobs or () for delta in deltas]
    return msgspec.structs.replace(
        first,
        output_ids=list(chain.from_iterable(delta.output_ids for delta in deltas)),
        output_logprobs=None if first.output_logprobs is None else list(chain.from_iterable(logprobs)),
        output_top_logprobs=joined_rows([delta.output_top_logprobs for delta in deltas]),
        output_token_ids_logprobs=joined_rows([delta.output_token_ids_logprobs for delta in deltas]),
        details=_joined_details([delta.details for delta in deltas]),
    )


def _joined_details(parts: Sequence[TokenDetails | None]) -> TokenDetails | None:
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return TokenDetails(
        weights=list(chain.from_iterable(part.weights for part in known)),
        raw_logprobs=_flat([part.raw_logprobs for part in known]),
        sampled_logprobs=_flat([part.sampled_logprobs for part in known]),
        sampling_mask=joined_masks([part.sampling_mask for part in known]),
    )


def _flat(parts: Sequence[list[float] | None]) -> list[float] | None:
    return None if parts[0] is None else list(chain.from_iterable(part or () for part in parts))
