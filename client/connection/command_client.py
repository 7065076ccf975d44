# Generated from connection/async_command_client.py by `python client/_blocking/generate.py`: change that file.
"""``CommandClient``: the connection that commands go through, for any number of threads.

Invariants:
- No call waits forever for an engine that has ended: when the connection or the launched process ends, every pending
  call raises :class:`EngineDied`.
- Every command carries the client's owner token, unless it is given another.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

from ... import io_struct as wire
from .channel import Result, ThreadClient, wait_for
from .options import ConnectionOptions, seconds
from .sessions import OpenSession

if TYPE_CHECKING:
    from ..trainer import SharedBuckets

ReplyT = TypeVar("ReplyT", bound=wire.Message)


class CommandClient(ThreadClient):
    """A connection to one engine, without the commands' methods."""

    def __init__(
        self, endpoint: str, *, owner: str | None = None, **connection: Unpack[ConnectionOptions]
    ) -> None:
        super().__init__(endpoint, connection)
        self.owner = owner
        """Owner token of commands that are not given another. None means no token."""
        self._session = OpenSession()
        self._shared: SharedBuckets | None = None

    @property
    def incarnation(self) -> str | None:
        """Incarnation of the engine that answered last, 16 hex digits; None before the first connection."""
        return self._channel.incarnation

    def close(self) -> None:
        """Close the connection; pending calls raise :class:`EngineDied`. The engine keeps running. Idempotent."""
        self._channel.close()
        if self._shared is not None:
            self._shared.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def session_id(self) -> str | None:
        """The open weight session that this client began, as far as it knows; None means none."""
        return self._session.id

    def start(
        self, request: wire.Request, expects: type[wire.Message], buffers: Sequence[memoryview] = ()
    ) -> Result:
        """Send a message without waiting; the future returns its reply or raises the typed error."""
        self._sign(request)
        return self._channel.start_call(request, expects, buffers)

    def _call(self, request: wire.Request, expects: type[ReplyT], timeout: float | None) -> ReplyT:
        timeout = seconds("timeout", timeout)
        try:
            reply: ReplyT = wait_for(self.start(request, expects), request.id, timeout)
        except wire.CaesuraError as error:
            self._session.failed(request, error)
            raise
        return reply

    def _sign(self, request: wire.Request) -> None:
        if isinstance(request, wire.ControlRequest) and request.owner is None:
            request.owner = self.owner
