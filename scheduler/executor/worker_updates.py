"""Weight updates on a worker: it opens the source that rank 0 has opened, and writes its shard from it.

Invariants:
- Nothing is written before rank 0 says so, which it does when every rank has opened and checked the source
  and no step runs. An update that is abandoned writes nothing more.
- Each rank reads files, maps memory and receives broadcasts for itself; only what came in frames of a message
  is sent on. The result of a source is the same on every rank.
- Files must be those that rank 0 has found, by their digest: weights of two checkpoints never meet.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode, TensorSpec
from ...io_struct.weights import UpdateWeightsFromDistributedReqInput
from ..execution.model_runner import ModelRunner
from ..memory.storage import bytes_of
from ..memory.workspace import Workspace
from ..observability.stage_profiler import StageProfiler
from ..runtime.background import Task
from ..runtime.engine_config import EngineConfig
from ..weights.changes import Compared, UpdateChanges
from ..weights.digests import DigestedRows
from ..weights.loaded_model import LoadedModel
from ..weights.loader import END, WeightLoader, write_some
from ..weights.reading import require_finite
from ..weights.source import BufferSource, ComponentSource, SharedMemory, WeightPiece, WeightSource
from ..weights.staged_delta import DeltaLoader
from ..weights.transports.disk import Checkpoint, open_fitting
from ..weights.transports.distributed import DistributedSource, WeightsUpdateGroups
from ..weights.transports.ipc import SharedMemoryMaps
from ..weights.upload import WriteStream, pieces_of
from .rpc import AbandonedError

Operation = Generator[bool, None, Any]
"""Yields True when it waits for something; returns the answer's value."""


class Folder(msgspec.Struct, kw_only=True, tag=True):
    path: str
    digest: str
    """Digest of the files that rank 0 has found; other files are refused."""


class Buffers(msgspec.Struct, kw_only=True, tag=True):
    """Tensors in memory that another process shares, or in the frames of the call."""

    name: str
    specs: list[TensorSpec]
    memory: SharedMemory | None


class Broadcast(msgspec.Struct, kw_only=True, tag=True):
    request: UpdateWeightsFromDistributedReqInput


Source = Folder | Buffers | Broadcast


class Written(msgspec.Struct, kw_only=True):
    """Result of a write, or of a comparison that writes nothing, on one rank."""

    changed: list[str]
    """Names of tensors that differed from what was there."""
    compared: Compared


def described(source: WeightSource) -> tuple[Source, Sequence[bytes | memoryview]]:
    """Return what a worker opens ``source`` by, and its frames; raises ``unsupported`` where none can."""
    if isinstance(source, Checkpoint):
        return Folder(path=str(source.path), digest=source.digest), ()
    if isinstance(source, DistributedSource):
        # Rank 0 alone relays: the engines behind it are in a group of its own.
        return Broadcast(request=msgspec.structs.replace(source.request, relay_to=None)), ()
    if isinstance(source, BufferSource):
        frames = [_on_host(each) for each in source.buffers] if source.memory is None else []
        return Buffers(name=source.name, specs=source.specs, memory=source.memory), frames
    assert not isinstance(source, ComponentSource), "models of several components have one rank"
    raise CaesuraError(ErrorCode.UNSUPPORTED, f"updates by {source.name} are not built for several ranks")


def _on_host(buffer: memoryview | Tensor) -> memoryview:
    if isinstance(buffer, Tensor):
        return memoryview(bytes_of(buffer.to(torch.device("cpu"))))
    return buffer


class WorkerUpdates:
    """Rank 0 may call the public methods; ``wake`` wakes the worker's loop, and is called in threads."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        runner: ModelRunner,
        groups: WeightsUpdateGroups,
        write_stream: WriteStream | None,
        wake: Callable[[], None],
    ) -> None:
        self._config = config
        self._loaded = loaded
        self._loader = loaded.loader
        self._delta = DeltaLoader(loaded.model, loaded.loader)
        self._opened_loader: WeightLoader = self._loader
        self._changes: UpdateChanges | None = None
        self._runner = runner
        self._groups = groups
        self._write_stream = write_stream
        self._wake = wake
        self._workspace = Workspace()
        self._maps = SharedMemoryMaps(config.device)
        self._stages = StageProfiler()
        self._pieces: Generator[Any, None, None] | None = None
        self._first: Any = END
        self._turn = 0

    def open(
        self, source: Source, fresh: bool, staging: bool, full: bool | None, *frames: memoryview
    ) -> Operation:
        """Open and check a source; ``fresh`` if nothing is written, or staged, since the last commit.

        ``full``: every element is compared, or a selection; with None nothing is.
        """
        self.abandon()
        turn = self._turn
        self._opened_loader = loader = self._delta if staging else self._loader
        if fresh:
            loader.forget_written()
        opened = yield from self._opened(source, frames)
        self._require(turn)
        loader.check(opened.specs, complete=opened.complete)
        self._changes = None if full is None else UpdateChanges(full=full)
        stream = None if staging else self._write_stream
        pieces = pieces_of(opened, loader, stream, self._config.load_bucket_bytes)
        self._pieces = pieces
        while (piece := next(pieces, END)) is None:
            yield True
            self._require(turn)
        self._first = piece
        return None

    def write(self) -> Operation:
        """Write, or stage, the open source; return what was changed."""
        loader = self._opened_loader
        loader.take_counts()
        if loader is self._loader and self._first is not END:
            self._delta.forget()
        loader.changes = self._changes
        try:
            yield from self._each_piece(loader.write)
        finally:
            loader.changes = None
        if loader is self._loader:
            self._runner.synchronize()
        self.abandon()
        changed = loader.changed
        loader.take_counts()
        return Written(changed=changed, compared=self._compared())

    def foresee(self) -> Operation:
        """Compare the open source with what it would overwrite; return what would be changed."""
        changes = self._changes
        assert changes is not None, "rank 0 has said how to compare"
        yield from self._each_piece(lambda piece: self._loader.foresee(piece, changes))
        self.abandon()
        return Written(changed=[], compared=self._compared())

    def untouched(self, full: bool) -> Compared:
        """Return the tensors of which nothing is staged, as unchanged ones."""
        self._changes = UpdateChanges(full=full)
        self._delta.add_untouched(self._changes)
        return self._compared()

    def _compared(self) -> Compared:
        return [] if self._changes is None else self._changes.take()

    def _each_piece(self, take: Callable[[WeightPiece], None]) -> Operation:
        turn, pieces, piece = self._turn, self._pieces, self._first
        assert pieces is not None, "rank 0 has opened no source"
        while piece is not END:
            with self._runner.on_stream():
                piece = write_some(take, piece, pieces, self._stages)
            yield False
            self._require(turn)
            while piece is None:
                piece = next(pieces, END)
                if piece is None:
                    yield True
                    self._require(turn)

    def digests(self, staged: bool) -> list[DigestedRows]:
        """Return those of what is in place, or will be after the swap of what is ``staged``."""
        found = (self._delta.digests if staged else None) or self._loader.digests
        return [] if found is None else found.rows()

    def swap(self) -> set[str]:
        """Exchange what is staged with what is in place; return the names of the tensors that differed."""
        with self._runner.on_stream():
            changed = self._delta.swap()
        self._runner.synchronize()
        return changed

    def restore(self) -> None:
        """Undo a swap that was not committed."""
        with self._runner.on_stream():
            if self._delta.restore():
                self._loaded.model.finalize_weights()
        self._runner.synchronize()

    def commit_delta(self, keep: bool) -> None:
        self._delta.commit(keep=keep)

    def take_back(self) -> None:
        self._delta.take_back()

    def forget_staged(self) -> None:
        self.abandon()
        self._delta.forget_written()

    def forget_delta(self) -> None:
        """Forget what is staged, and the version before."""
        self.forget_staged()
        self._delta.forget()

    def drain(self, request: UpdateWeightsFromDistributedReqInput) -> Operation:
        """Receive broadcasts and drop them: rank 0 sends this rank its part of an adapter."""
        source = self._groups.open(request)
        with closing(source.pieces(self._config.load_bucket_bytes, lambda name: True)) as pieces:
            for _ in pieces:
                yield True

    def abandon(self) -> None:
        self._turn += 1
        if self._pieces is not None:
            self._pieces.close()
        self._pieces, self._first = None, END
        self._maps.end_session()

    def derive(self, check_finite: bool) -> Operation:
        """Do everything in a commit that can fail."""
        self._loader.require_whole()
        with self._runner.on_stream():
            self._loaded.model.finalize_weights()
        self._runner.synchronize()
        if check_finite:
            names = self._loader.written | self._delta.written
            for _ in require_finite(self._loaded.model, names, self._runner.on_stream):
                yield False
        self._loader.forget_written()
        return None

    def collect(self) -> None:
        """Unmap memory whose owner is gone, unless it may still be read."""
        if self._pieces is None:
            self._maps.collect()

    def _opened(self, source: Source, frames: tuple[memoryview, ...]) -> Generator[bool, None, WeightSource]:
        if isinstance(source, Folder):
            return (yield from self._folder(source))
        if isinstance(source, Broadcast):
            return self._groups.open(source.request)
        if (memory := source.memory) is None:
            return BufferSource(source.name, source.specs, frames)
        view = self._maps.view(memory.handle)[memory.start : memory.start + memory.nbytes]
        return BufferSource(source.name, source.specs, [view])

    def _folder(self, folder: Folder) -> Generator[bool, None, Checkpoint]:
        """Open a folder in a thread: steps go on meanwhile."""
        config, loader, workspace = self._loaded.config, self._loader, self._workspace
        opening = Task(lambda: open_fitting(folder.path, config).into(workspace, loader.owned), self._wake)
        while not opening.done:
            yield True
        found = opening.result()
        if found.digest != folder.digest:
            reason = f"{folder.path} has other files here than on rank 0, by name, size, time or header"
            raise CaesuraError(
                ErrorCode.CHECKPOINT_ERROR, reason, path=folder.path, reason="other files than on rank 0"
            )
        return found

    def _require(self, turn: int) -> None:
        if turn != self._turn:
            raise AbandonedError(ErrorCode.NO_SESSION, "rank 0 has abandoned the update")
