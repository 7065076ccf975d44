"""Text in, stop strings and text out, for asyncio and for threads.

Invariants: a call that fails, times out or is interrupted aborts what it started. The blocking client runs an
event loop in a thread of its own; any number of threads may call it.
"""

import asyncio
import json
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar, Unpack

from ..connection.async_client import AsyncSchedulerClient
from ..connection.client_options import ConnectionOptions, OutputOptions, seconds
from ..connection.fork import Process
from ..connection.prompts import Sampling, per_prompt_sampling, require_known_options, sampling, sequences
from ..exceptions import EngineDied, TimedOut
from .answer_parser import opens_reasoning, parser_for
from .sessions import ChatPrompts, Message, SessionStore, assistant_message
from .tokenizer import TextTokenizer
from .tokenizer_manager import Chunk, GenerationRequest, Sample, TokenizerManager

Prompt = str | Sequence[int]
ResultT = TypeVar("ResultT")


class TextOptions(OutputOptions, total=False):
    """Keywords of every generation of text: fields of :class:`~.tokenizer_manager.GenerationRequest`."""

    no_stop_trim: bool
    skip_special_tokens: bool
    add_special_tokens: bool


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """An answer in a session."""

    message: dict[str, Any]
    """The answer as the next message of the conversation, with reasoning and tool calls told apart."""
    sample: Sample
    """Tokens and text of the answer, and ``prompt_ids``, which begin with those of the turns before."""
    session: dict[str, Any]
    """Number of the turn, its parent, and why it branches, as over HTTP."""


class AsyncTextClient:
    """Text over a connection to one engine, for coroutines of one event loop.

    ``tokenizer`` is a folder with a ``tokenizer.json``, or a :class:`TextTokenizer`; the rest
    :class:`ConnectionOptions`.
    """

    def __init__(
        self,
        endpoint: str,
        tokenizer: str | os.PathLike[str] | TextTokenizer,
        **connection: Unpack[ConnectionOptions],
    ) -> None:
        if not isinstance(tokenizer, TextTokenizer):
            tokenizer = TextTokenizer.from_folder(os.fspath(tokenizer))
        self.tokenizer = tokenizer
        """The tokenizer; its ``render_chat`` makes a prompt of a conversation."""
        self.client = AsyncSchedulerClient(endpoint, **connection)
        """The client of the engine, for token ids and commands."""
        self.sessions = SessionStore()
        """Sessions of :meth:`chat`; their ``export`` returns training samples."""
        self._manager = TokenizerManager(self.client, self.tokenizer)

    async def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        stop: str | Sequence[str] = (),
        rid: str | None = None,
        timeout: float | None = None,
        **options: Unpack[TextOptions],
    ) -> Any:
        """Generate and wait for the results.

        One prompt returns one :class:`Sample` (a list if ``n`` > 1); a list of prompts returns their samples
        in order, the ``n`` of each together. Other options are those of
        :meth:`AsyncSchedulerClient.generate`.

        Args:
            prompt: text or token ids, or a list of such prompts.
            sampling_params: for all prompts, or one per prompt: :class:`SamplingParams`, or a dict of its
                fields.
            stop: strings at which a sample ends; ``text`` and tokens are cut there.
            no_stop_trim: keep the stop string or token in the text.
            skip_special_tokens: leave special tokens out of the text; True by default.
            add_special_tokens: let the tokenizer add its own to text, such as BOS; True by default. Give
                False for prompts that a chat template has written.
            rid: request id; for a list it becomes ``rid-0``, ``rid-1``, … None means random.
            timeout: seconds for the whole call; generations that are late are aborted. None means no limit.

        Raises:
            InvalidRequest: a prompt is neither text nor token ids, or a parameter is unknown.
            EngineError: of the first prompt that was refused or failed; the others of this call are aborted.
        """
        prompts, single = _prompts(prompt)
        params = per_prompt_sampling(sampling_params, len(prompts))
        requests = [
            _request(each, params[number], stop, rid if rid is None or single else f"{rid}-{number}", options)
            for number, each in enumerate(prompts)
        ]
        try:
            async with asyncio.timeout(seconds("timeout", timeout)) as limit:
                found = await self._manager.generate_batch(requests)
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimedOut(f"no text within {timeout} s: it was aborted", timeout=timeout) from None
        samples = [sample for of_prompt in found for sample in of_prompt]
        return samples[0] if single and len(samples) == 1 else samples

    def stream(
        self,
        prompt: Prompt,
        sampling_params: Sampling | None = None,
        *,
        stop: str | Sequence[str] = (),
        rid: str | None = None,
        **options: Unpack[TextOptions],
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the text of one prompt as it comes, at last each :class:`Sample`; closing early aborts."""
        return self._manager.stream(_request(prompt, sampling_params, stop, rid, options))

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: Sampling | None = None,
        *,
        session: str,
        tools: Sequence[dict[str, Any]] | None = None,
        rid: str | None = None,
        timeout: float | None = None,
        **variables: Any,
    ) -> ChatAnswer:
        """Answer a conversation in a session: ids of its earlier turns stay what was sampled.

        Args:
            messages: the whole conversation, in the form that the model's template takes.
            sampling_params: of one sample.
            session: name of a session of this client, which begins with the first call that names it.
            tools: descriptions of functions that the answer may call.
            rid: request id; None means random.
            timeout: as of :meth:`generate`.
            variables: further variables of the template.

        Raises:
            SessionGone: it was finished, has expired, or gave way to others.
        """
        tokenizer = self.tokenizer
        settings: dict[str, Any] = {"tools": tools, **variables}

        def render(given: Sequence[Message], generation: bool | None) -> str:
            return tokenizer.render_chat(given, add_generation_prompt=generation is not False, **settings)

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        form = json.dumps(settings, sort_keys=True, default=str).encode()
        prompts = ChatPrompts(render=render, encode=encode, tokenizer=tokenizer, form=form)
        turn = await asyncio.to_thread(self.sessions.turn, session, messages, prompts)
        opened = opens_reasoning(tokenizer, turn.prompt_ids, "auto")
        parser = parser_for(
            tokenizer, tools=tools, tool_parser="auto", reasoning_parser="auto", in_reasoning=opened
        )
        options: Any = {"return_logprob": True, "skip_special_tokens": parser is None, **turn.lease()}
        sample: Sample = await self.generate(
            turn.prompt_ids, sampling_params, rid=rid, timeout=timeout, **options
        )
        message: dict[str, Any] = {"role": "assistant", "content": sample.text}
        if parser is not None:
            last = [sample.matched] if sample.matched in tokenizer.skipped else []
            parser.feed(sample.text)
            parser.end(tokenizer.decode(last, skip_special_tokens=False))
            message = assistant_message(parser.answer)
            for call in message.get("tool_calls", ()):  # templates take objects
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return ChatAnswer(message, sample, turn.told(self.sessions.record(turn, sample, message)))

    async def finish(self, session: str) -> bool:
        """End a session; the engine evicts what only it has cached first. False if there is none."""
        found = self.sessions.finish(session)
        if names := self.sessions.take_ended():
            await self.client.end_prefix_leases(names)
        return found

    async def close(self) -> None:
        """Close the connection; pending calls raise :class:`EngineDied`. The engine keeps running."""
        await self.client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class TextClient:
    """Text over a connection to one engine, for any number of threads; see :class:`AsyncTextClient`."""

    def __init__(
        self,
        endpoint: str,
        tokenizer: str | os.PathLike[str] | TextTokenizer,
        **connection: Unpack[ConnectionOptions],
    ) -> None:
        self._process = Process("client")
        self._text = AsyncTextClient(endpoint, tokenizer, **connection)
        self.tokenizer = self._text.tokenizer
        """The tokenizer; its ``render_chat`` makes a prompt of a conversation."""
        self.sessions = self._text.sessions
        """Sessions of :meth:`chat`; their ``export`` returns training samples."""
        self._submitting = threading.RLock()  # a stream may be finalized by the thread that holds it
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="caesura-text", daemon=True)
        self._thread.start()

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        stop: str | Sequence[str] = (),
        rid: str | None = None,
        timeout: float | None = None,
        **options: Unpack[TextOptions],
    ) -> Any:
        """Generate and wait for the results, as :meth:`AsyncTextClient.generate`."""
        return self._run(
            lambda: self._text.generate(
                prompt, sampling_params, stop=stop, rid=rid, timeout=timeout, **options
            )
        )

    def stream(
        self,
        prompt: Prompt,
        sampling_params: Sampling | None = None,
        *,
        stop: str | Sequence[str] = (),
        rid: str | None = None,
        **options: Unpack[TextOptions],
    ) -> Iterator[Chunk]:
        """Yield the text of one prompt as it comes, as :meth:`AsyncTextClient.stream`."""
        chunks = self._text.stream(prompt, sampling_params, stop=stop, rid=rid, **options)

        async def following() -> Chunk | None:
            return await anext(chunks, None)

        try:
            while (chunk := self._run(following)) is not None:
                yield chunk
        finally:
            if self._process.is_here:
                with suppress(EngineDied):
                    ending = self._submit(chunks.aclose)
                    if threading.current_thread() is not self._thread:  # which finalizes what it collects
                        ending.result()

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: Sampling | None = None,
        *,
        session: str,
        **options: Any,
    ) -> ChatAnswer:
        """Answer a conversation in a session, as :meth:`AsyncTextClient.chat`."""
        return self._run(lambda: self._text.chat(messages, sampling_params, session=session, **options))

    def finish(self, session: str) -> bool:
        """End a session, as :meth:`AsyncTextClient.finish`."""
        return self._run(lambda: self._text.finish(session))

    def close(self) -> None:
        """Close the connection; pending calls raise :class:`EngineDied`. The engine keeps running."""
        if not self._process.is_here:
            return
        with self._submitting:
            if not self._closed:
                self._submit(self._end)
                self._closed = True
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, work: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        self._process.require()
        future = self._submit(work)
        try:
            return future.result()
        except BaseException:  # an interrupted wait aborts what it waited for
            future.cancel()
            raise

    def _submit(self, work: Callable[[], Coroutine[Any, Any, ResultT]]) -> Future[ResultT]:
        """Start ``work`` in the loop, unless :meth:`_end` was submitted before."""
        with self._submitting:
            if self._closed:
                raise EngineDied("this client is closed")
            return asyncio.run_coroutine_threadsafe(work(), self._loop)

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _end(self) -> None:
        try:
            await self._text.close()
            if others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(others)  # they raise that the client is closed
        finally:
            self._loop.stop()


def _prompts(given: Any) -> tuple[list[Prompt], bool]:
    if isinstance(given, str):
        return [given], True
    if isinstance(given, Sequence) and given and isinstance(given[0], str):
        return list(given), False
    return sequences(given)


def _request(
    prompt: Prompt,
    params: Sampling | None,
    stop: str | Sequence[str],
    rid: str | None,
    options: TextOptions,
) -> GenerationRequest:
    require_known_options(options, TextOptions)
    return GenerationRequest(
        prompt=prompt,
        sampling_params=sampling(params),
        stop=[stop] if isinstance(stop, str) else stop,
        rid=rid,
        **options,
    )
