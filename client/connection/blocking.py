"""``SchedulerClient`` and ``ControlClient``: the asyncio clients, for any number of threads.

Invariant: methods are the asyncio client's coroutines, which block their thread and so never suspend.
"""

import contextlib
import operator
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack, cast

from ...io_struct import Message, Request
from ..exceptions import TimedOut
from . import channel
from .async_channel import Channel
from .async_client import AsyncGenerationHandle, AsyncSchedulerClient
from .client_options import (
    ChannelOptions,
    ConnectionOptions,
    GenerateOptions,
    SessionOptions,
    WeightUpdate,
    seconds,
)
from .connection import Generation
from .prompts import Ids, Sampling, one_request
from .results import TokenDelta

P = ParamSpec("P")
R = TypeVar("R")


class HeldClient(AsyncSchedulerClient):
    """An asyncio client whose coroutines hold their thread while they wait."""

    _wait_for = staticmethod(channel.at_once(channel.wait_for))
    _wait_for_all = staticmethod(channel.at_once(channel.wait_for_all))
    _run = staticmethod(channel.at_once(operator.call))

    def _opened(self, connection: ConnectionOptions) -> Channel:
        self.thread = channel.ThreadChannel(self.endpoint, ChannelOptions.of(connection))
        return cast("Channel", self.thread)  # its futures are those that the waits above take


def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], R]:
    """Return a method of the asyncio client, or of its handle, as a blocking one."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return channel.finished(method(self._held, *args, **kwargs))

    return call


class ControlClient:
    """:class:`AsyncControlClient` without ``await``, for any number of threads."""

    def __init__(
        self, endpoint: str, *, owner: str | None = None, **connection: Unpack[ConnectionOptions]
    ) -> None:
        self._held = HeldClient(endpoint, owner=owner, **connection)
        self.endpoint = endpoint
        """The engine's address: an ipc:// path or a tcp:// host and port."""

    @property
    def owner(self) -> str | None:
        """Owner token of commands that are not given another, or None."""
        return self._held.owner

    @owner.setter
    def owner(self, owner: str | None) -> None:
        self._held.owner = owner

    @property
    def incarnation(self) -> str | None:
        """Incarnation of the engine that answered last, 16 hex digits; None before the first connection."""
        return self._held.incarnation

    @property
    def session_id(self) -> str | None:
        """Open weight session that this client began, as far as it knows, or None."""
        return self._held.session_id

    def start(
        self, request: Request, expects: type[Message], buffers: Sequence[memoryview] = ()
    ) -> channel.Result:
        """Send a message without waiting; the future returns its reply or raises the typed error."""
        return cast("channel.Result", self._held.start(request, expects, buffers))

    def expect_exit(self) -> None:
        """Expect a call of :meth:`engine_exited`: the launcher watches this engine's process."""
        self._held.thread.expect_exit()

    def engine_exited(self, reason: str) -> None:
        """Fail what is pending and every later call with ``reason``: the engine's process has ended."""
        self._held.thread.engine_exited(reason)

    @contextlib.contextmanager
    def weight_update(
        self,
        *,
        weight_version: str | int | None = None,
        timeout: float | None = None,
        **options: Unpack[SessionOptions],
    ) -> Iterator[WeightUpdate]:
        """Open a session for a ``with`` block; see :meth:`AsyncControlClient.weight_update`."""
        block = self._held.weight_update(weight_version=weight_version, timeout=timeout, **options)
        session = channel.finished(block.__aenter__())
        try:
            yield session
        except BaseException as error:
            channel.finished(block.__aexit__(type(error), error, error.__traceback__))
            raise
        channel.finished(block.__aexit__(None, None, None))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    close = blocking(AsyncSchedulerClient.close)
    pause = blocking(AsyncSchedulerClient.pause)
    continue_generation = blocking(AsyncSchedulerClient.continue_generation)
    renew_pause_lease = blocking(AsyncSchedulerClient.renew_pause_lease)
    flush_cache = blocking(AsyncSchedulerClient.flush_cache)
    update_weights_from_disk = blocking(AsyncSchedulerClient.update_weights_from_disk)
    update_weights_from_tensor = blocking(AsyncSchedulerClient.update_weights_from_tensor)
    update_weights_from_ipc = blocking(AsyncSchedulerClient.update_weights_from_ipc)
    update_weights_from_distributed = blocking(AsyncSchedulerClient.update_weights_from_distributed)
    update_weights_sparse = blocking(AsyncSchedulerClient.update_weights_sparse)
    update_weights_from_checkpoint_engine = blocking(
        AsyncSchedulerClient.update_weights_from_checkpoint_engine
    )
    init_weights_update_group = blocking(AsyncSchedulerClient.init_weights_update_group)
    destroy_weights_update_group = blocking(AsyncSchedulerClient.destroy_weights_update_group)
    load_adapter = blocking(AsyncSchedulerClient.load_adapter)
    unload_adapter = blocking(AsyncSchedulerClient.unload_adapter)
    weights_manifest = blocking(AsyncSchedulerClient.weights_manifest)
    send_weights = blocking(AsyncSchedulerClient.send_weights)
    release_memory = blocking(AsyncSchedulerClient.release_memory)
    resume_memory = blocking(AsyncSchedulerClient.resume_memory)
    begin_weight_update = blocking(AsyncSchedulerClient.begin_weight_update)
    end_weight_update = blocking(AsyncSchedulerClient.end_weight_update)
    rollback_weights = blocking(AsyncSchedulerClient.rollback_weights)
    rollback = blocking(AsyncSchedulerClient.rollback)
    check_drift = blocking(AsyncSchedulerClient.check_drift)
    drift_samples = blocking(AsyncSchedulerClient.drift_samples)
    check_weights = blocking(AsyncSchedulerClient.check_weights)
    status = blocking(AsyncSchedulerClient.status)
    metrics = blocking(AsyncSchedulerClient.metrics)
    memory_history = blocking(AsyncSchedulerClient.memory_history)
    shutdown = blocking(AsyncSchedulerClient.shutdown)
    _explained = blocking(AsyncSchedulerClient._explained)


class GenerationHandle:
    """One submitted prompt: an :class:`AsyncGenerationHandle` without ``await``."""

    def __init__(
        self, client: "SchedulerClient", generation: Generation[channel.Result, channel.Deltas]
    ) -> None:
        self.rid = generation.rid
        """Request id, for ``abort`` and ``fetch_result``."""
        self.message_id = generation.message_id
        """Message id of the request; ``submit`` with this id and the same arguments attaches to it."""
        self.n = generation.n
        """Number of samples."""
        self._client = client  # an engine that was launched lives as long as its client
        self._deltas = generation.deltas
        self._held = AsyncGenerationHandle(client._held, cast("Generation[Any, Any]", generation))

    result = blocking(AsyncGenerationHandle.result)
    results = blocking(AsyncGenerationHandle.results)
    abort = blocking(AsyncGenerationHandle.abort)

    def done(self) -> bool:
        """Return True if all samples have ended."""
        return self._held.done()

    def deltas(self, timeout: float | None = None) -> Iterator[TokenDelta]:
        """Yield every token once, in order per sample, then raise like :meth:`results`."""
        self.done()  # refused in a forked child
        timeout = seconds("timeout", timeout)
        if self._deltas is None:
            for output in self.results(timeout):
                yield output.as_delta()
            return
        try:
            while (delta := channel.next_delta(self._deltas, self.message_id, timeout)) is not None:
                yield delta
        except TimedOut as error:
            raise self._client._explained(error) from None
        self._deltas.put_nowait(None)  # a second iteration ends at once instead of waiting forever
        self.results()

    def __iter__(self) -> Iterator[TokenDelta]:
        return self.deltas()


class SchedulerClient(ControlClient):
    """A :class:`ControlClient` with the methods of :class:`AsyncSchedulerClient`."""

    generate = blocking(AsyncSchedulerClient.generate)
    score = blocking(AsyncSchedulerClient.score)
    generate_images = blocking(AsyncSchedulerClient.generate_images)
    abort = blocking(AsyncSchedulerClient.abort)
    end_prefix_leases = blocking(AsyncSchedulerClient.end_prefix_leases)
    add_corpus = blocking(AsyncSchedulerClient.add_corpus)
    remove_corpus = blocking(AsyncSchedulerClient.remove_corpus)
    list_corpora = blocking(AsyncSchedulerClient.list_corpora)
    fetch_result = blocking(AsyncSchedulerClient.fetch_result)
    start_profile = blocking(AsyncSchedulerClient.start_profile)
    stop_profile = blocking(AsyncSchedulerClient.stop_profile)

    def submit(
        self,
        input_ids: Ids,
        sampling_params: Sampling | None = None,
        *,
        stream: bool = False,
        rid: str | None = None,
        message_id: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerationHandle:
        """Start a generation and return at once; see :meth:`AsyncSchedulerClient.submit`."""
        request = one_request(
            input_ids, sampling_params, options, rid=rid, message_id=message_id, stream=stream
        )
        return GenerationHandle(self, self._held.thread.start_generation(request))
