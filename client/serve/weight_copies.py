"""Copies of checkpoints that follow what a trainer publishes, and the updates that load them.

Invariants:
- A version is read, verified and applied in a thread, while the engine serves; what is wrong with one leaves
  the engine as it was. A copy is not loaded while it changes.
- An update of a copy sends what changed where the engine still has the version before; else all of it.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...io_struct import DeltaBase, UpdateWeightFromDiskReqInput, WeightUpdateReqOutput
from ..connection.async_client import AsyncSchedulerClient
from ..exceptions import BaseMismatch, InvalidRequest, Unsupported
from .error_responses import printable

if TYPE_CHECKING:
    from ..trainer.published import Version


class PublishedWeights:
    def __init__(self, client: AsyncSchedulerClient) -> None:
        self._client = client
        self._lock = asyncio.Lock()
        # By folder of the copy: its version, and the folder of a delta from the version before.
        self._copies: dict[str, tuple[int, Path | None]] = {}
        # By folder: the version that was loaded from it, and what tells whether the engine still has it.
        self._loaded: dict[str, tuple[int, DeltaBase]] = {}
        self._unfinished: tuple[str, int] | None = None

    async def pull(
        self, copy: str, base: str | None, version: int, read: Callable[[], Callable[[int], "Version"]]
    ) -> None:
        """Bring ``copy`` to ``version``; ``read`` returns the reader of versions. Raises CheckpointError."""

        def work() -> Path | None:
            from ..trainer.published import pull

            return pull(Path(copy), None if base is None else Path(base), version, read())

        async with self._lock:
            self._copies.pop(copy, None)
            delta = await asyncio.to_thread(work)
            self._copies[copy] = version, delta

    def version_of(self, copy: str) -> int | None:
        """Return the version of a copy, or None if this process has not pulled it."""
        return self._copies.get(copy, (None, None))[0]

    async def load(self, copy: str, options: dict[str, Any]) -> WeightUpdateReqOutput:
        """Update the engine from ``copy``; ``options`` are fields of the message."""
        async with self._lock:
            version, delta = self._copies[copy]
            loaded, base = self._loaded.pop(copy, (None, DeltaBase()))
            reply = None
            if delta is not None and loaded == version - 1:
                with suppress(BaseMismatch):  # somebody else has updated it since
                    reply = await self._send_delta(str(delta), options, base)
            if reply is None:
                reply = await self._send(copy, options, None)
            self._unfinished = copy, version
            if reply.committed:
                self.committed(reply)
            return reply

    def committed(self, reply: WeightUpdateReqOutput) -> None:
        """Remember the weights that the last :meth:`load` has made, after its commit or its session's."""
        if self._unfinished is not None:
            copy, version = self._unfinished
            known = {"base_digest": reply.digest} if reply.digest else {"base_epoch": reply.weights_epoch}
            self._loaded[copy] = version, DeltaBase(**known)
        self._unfinished = None

    def abandoned(self) -> None:
        """Forget a load whose session has not been committed."""
        self._unfinished = None

    async def _send_delta(
        self, folder: str, options: dict[str, Any], base: DeltaBase
    ) -> WeightUpdateReqOutput | None:
        """Send a delta as a commit of its own, also while paused, unless the options name a session."""
        if options.get("session_id") is not None:
            return await self._send(folder, options, base)
        async with self._client.weight_update(weight_version=options.get("weight_version")) as session:
            await self._send(folder, {**options, "session_id": session.opened.session_id}, base)
        return session.result

    async def _send(
        self, folder: str, options: dict[str, Any], base: DeltaBase | None
    ) -> WeightUpdateReqOutput:
        request = UpdateWeightFromDiskReqInput(model_path=folder, delta=base, **options)
        sent = self._client.start(request, WeightUpdateReqOutput)
        reply: WeightUpdateReqOutput = await asyncio.shield(sent)
        return reply


def require_folder(name: str, value: str | None) -> str:
    """Return a path that a request must name; Unsupported for an object store."""
    if value is None:
        raise InvalidRequest(f"{name} is missing", field=name)
    if "://" in value:
        raise Unsupported(
            f"{name} = {printable(value)} is in an object store: mount it, and name the folder", field=name
        )
    return value
