"""The broadcasts of a process group of torch.distributed: which tensors each has, and how they are received,
relayed and sent. Sender and receiver read a call alike, and whatever is wrong with it is found before a
broadcast is entered.

- A thread receives into two buffers, and the loop writes from one while the other fills, waiting for neither:
  events order them on a device. A buffer that is sent is filled again after its broadcast has ended.
- Small tensors share a buffer on a device: their broadcasts are waited for together.
- A relay that fails is over, and says so; it never fails the reception that it serves.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate, islice
from time import monotonic
from typing import Any

import msgspec
import torch
from torch import Tensor

from .... import io_struct as wire
from ....io_struct import CaesuraError, ErrorCode
from ....transfer.process_group import broadcast_options
from ....transfer.weight_delta import nbytes_of as nbytes_of_tensor
from ...runtime.background import Task
from ...runtime.dtypes import DTYPES
from ..upload import WriteStream

SHARED_BYTES = 32 << 20
"""Bytes that are waited for together on a device: torch looks for the end once in a millisecond."""
GRACE_S = 2.0
"""Seconds for the backend's own timeout to be reported."""
_ALIGN = 256
"""Bytes. Each broadcast is received at a multiple of it."""
_MAX_BYTES = 1 << 62  # beyond, neither torch nor a reply can hold the number

Batch = list[wire.TensorSpec]
"""The tensors of one broadcast; ``offset`` and ``nbytes`` are within it."""


def batches_of(request: wire.UpdateWeightsFromDistributedReqInput | wire.SendWeightsReqInput) -> list[Batch]:
    """Return the broadcasts of ``request``; raises ``invalid_request`` if they do not add up."""
    specs = [_whole(spec) for spec in request.specs]
    if sum(spec.nbytes for spec in specs) > _MAX_BYTES:
        raise CaesuraError(ErrorCode.INVALID_REQUEST, "the tensors are larger than any memory", field="specs")
    counts = request.tensors_per_broadcast
    if request.load_format is None:
        if counts is not None:
            reason = "needs load_format=flattened_bucket: one broadcast per tensor has nothing to count"
            raise _miscounted(reason)
        return [[spec] for spec in specs]
    if counts is None:
        return [_placed(specs)]
    if sum(counts) != len(specs):
        raise _miscounted(f"counts {sum(counts)} tensors, and specs has {len(specs)}")
    rest = iter(specs)
    return [_placed(list(islice(rest, count))) for count in counts]


def nbytes_of(batch: Batch) -> int:
    return sum(spec.nbytes for spec in batch)


def _placed(specs: Sequence[wire.TensorSpec]) -> Batch:
    offsets = accumulate((spec.nbytes for spec in specs), initial=0)
    return [msgspec.structs.replace(spec, offset=at) for spec, at in zip(specs, offsets, strict=False)]


def _whole(spec: wire.TensorSpec) -> wire.TensorSpec:
    dtype = DTYPES.get(spec.dtype)
    if dtype is None or spec.start_row:
        problem = "starts in its midst" if dtype is not None else f"has the unknown dtype {spec.dtype!r}"
        reason = f"tensor {spec.name!r} {problem}"
        raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="specs", value=spec.name)
    nbytes = nbytes_of_tensor(spec.dtype, spec.shape, spec.count)
    return msgspec.structs.replace(spec, offset=0, nbytes=nbytes, buffer=0)


def _miscounted(problem: str) -> CaesuraError:
    reason = f"tensors_per_broadcast {problem}"
    return CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="tensors_per_broadcast")


@dataclass(frozen=True, slots=True)
class Plan:
    places: list[tuple[int, int]]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Received:
    broadcasts: list[Tensor]
    """uint8, one for each."""
    arrived: torch.Event | None
    """None on the host, where they have arrived."""


def plans_of(sizes: Sequence[int], shared_bytes: int) -> Iterator[Plan]:
    """Put as many broadcasts together as ``shared_bytes`` hold, at least one."""
    places: list[tuple[int, int]] = []
    end = 0
    for size in sizes:
        if places and end + size > shared_bytes:
            yield Plan(places, end)
            places, end = [], 0
        places.append((end, size))
        end += -(-size // _ALIGN) * _ALIGN
    if places:
        yield Plan(places, end)


def broadcasts(
    backend: Any,
    plans: Sequence[Plan],
    buffers: Sequence[Tensor],
    written: Sequence[torch.Event | None],
    stream: WriteStream | None,
    timeout: timedelta,
    relay: "Relay | None" = None,
) -> Iterator[Received]:
    """Fill ``buffers`` in turn, after what was ``written`` from each, and ``relay`` it; in a thread."""
    options = broadcast_options(timeout)
    works: deque[Any] = deque()
    try:
        for number, plan in enumerate(plans):
            with nullcontext() if stream is None else stream.beside():
                if relay is not None:
                    relay.settle(number % 2)
                event = written[number % 2]
                if stream is not None and event is not None:
                    stream.wait(event)
                views = [buffers[number % 2][at : at + size] for at, size in plan.places]
                works += [backend.broadcast([view], options) for view in views]
                while works:
                    works.popleft().wait()
                received = Received(views, None if stream is None else stream.here())
                if relay is not None:
                    relay.forward(number % 2, views)
            yield received
        if relay is not None:
            with nullcontext() if stream is None else stream.beside():
                relay.settle(0)
                relay.settle(1)
    finally:
        # The traceback of a broadcast that failed keeps this frame, and would keep the backend's threads and
        # sockets.
        works.clear()
        del backend


@dataclass(eq=False)
class Transmission:
    """One send: the loop fills a buffer while a thread broadcasts the other."""

    backend: Any
    buffers: Sequence[Tensor]
    """Two, uint8, of the largest broadcast."""
    stream: WriteStream | None
    timeout_s: float
    submit: Callable[[Callable[[], None]], None]
    """Runs a callable in the group's thread, after those before it."""
    wake: Callable[[], None]
    broken: Callable[[str], CaesuraError]
    """Ends the group, for a reason."""
    is_open: bool = True
    """True while broadcasts of this send may still come, or be on their way."""
    _tasks: list[Task[None] | None] = field(default_factory=lambda: [None, None])
    _slot: int = 0
    _deadline: float = 0.0

    def __post_init__(self) -> None:
        self._options = broadcast_options(timedelta(seconds=self.timeout_s))
        self._extend()

    def room(self) -> Tensor | None:
        """Return the buffer to fill next, or None while it is on its way; raises ``group_error``."""
        return self.buffers[self._slot] if self._is_free(self._slot) else None

    def send(self, nbytes: int) -> None:
        """Broadcast the first ``nbytes`` of the buffer that :meth:`room` gave."""
        view = self.buffers[self._slot][:nbytes]
        filled = None if self.stream is None else self.stream.mark()
        self._tasks[self._slot] = Task(lambda: self._broadcast(view, filled), self.wake, submit=self.submit)
        self._slot = 1 - self._slot

    def is_over(self) -> bool:
        """Return True once every broadcast has ended; raises as :meth:`room`."""
        return all([self._is_free(self._slot), self._is_free(1 - self._slot)])

    def close(self) -> None:
        self.is_open = False

    def _is_free(self, slot: int) -> bool:
        task = self._tasks[slot]
        if task is None:
            return True
        if not task.done:
            if monotonic() > self._deadline:
                raise self.broken(f"a broadcast did not end within {self.timeout_s:g} s")
            return False
        self._tasks[slot] = None
        self._extend()
        try:
            task.result()
        except RuntimeError as error:
            raise self.broken(f"a broadcast failed: {first_line(error)}") from error
        return True

    def _extend(self) -> None:
        self._deadline = monotonic() + self.timeout_s + GRACE_S

    def _broadcast(self, view: Tensor, filled: torch.Event | None) -> None:
        if self.stream is None or filled is None:
            self.backend.broadcast([view], self._options).wait()
            return
        with self.stream.beside():
            self.stream.wait(filled)
            self.backend.broadcast([view], self._options).wait()


class Relay:
    """Broadcasts on what another group's thread receives, from the buffers that it is received into."""

    def __init__(self, backend: Any, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.failure: str | None = None
        """Why the ranks behind this one did not get everything, or None."""
        self._backend = backend
        self._options = broadcast_options(timedelta(seconds=timeout_s))
        self._works: dict[int, list[Any]] = {}

    def forward(self, slot: int, views: Sequence[Tensor]) -> None:
        """Broadcast ``views``, which lie in buffer ``slot``, without waiting; never raises."""
        if self.failure is not None:
            return
        try:
            self._works[slot] = [self._backend.broadcast([view], self._options) for view in views]
        except RuntimeError as error:
            self._fail(error)

    def settle(self, slot: int) -> None:
        """Wait until what is relayed from buffer ``slot`` has arrived, or cannot; never raises."""
        for work in self._works.pop(slot, ()):
            try:
                work.wait()
            except RuntimeError as error:
                self._fail(error)

    def _fail(self, error: RuntimeError) -> None:
        self.failure = self.failure or f"a broadcast failed: {first_line(error)}"


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
