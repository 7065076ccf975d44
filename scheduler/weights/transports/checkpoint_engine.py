"""The engine's half of checkpoint-engine's protocol: a parameter server pushes buckets through memory it
shares.

The server binds a REQ socket, the engine connects a REP socket. Server to engine are pickles, engine to
server is text:

    server                                            engine
    its buffer: (rebuild_cuda_tensor, arguments)      ""  it is open            state: opening
    a bucket: [{name, dtype, shape, offset}, …]       ""  loaded, synchronised  state: loading, repeated
    None                                              ""  the buffer is let go  state: closing
    None                                              ""  committed             the end

    an exception, any time                            no answer                 the end: some rank has failed
    anything that failed here                         what was wrong            state: refusing, until the
    server's exception

On a host without accelerators the buffer is a memfd, described as by ``SharedMemoryHandle``.

- ``legacy_pickle`` parses messages into plain fields, and every field is checked before it is used.
- A thread talks to the server and touches nothing else. It hands over one turn at a time; the loop's verdict
  is the answer.
- A server that waits for an answer gets one, also after the update has failed: it would block its own ranks
  otherwise.
- Silence is bounded: by ``timeout_s`` between two messages, and for all of *refusing*.
"""

import re
from collections.abc import Iterator
from enum import Enum
from time import monotonic

import msgspec
import zmq

from ....io_struct import CaesuraError, CudaIPCHandle, ErrorCode, SharedMemoryHandle, TensorSpec
from ....transfer.legacy_pickle import MAX_BYTES, Call, Global, parse
from ....transfer.safetensors import DTYPES, NAMES_BY_TORCH
from ...runtime.background import Wakeup
from ..source import SharedMemory

_ADDRESS = re.compile(r"ipc://.{1,107}|tcp://(127(\.\d{1,3}){3}|localhost|\[::1\]):\d{1,5}")
_LINGER_MS = 1000
_MAX_WAIT_S = 3600.0  # poll counts milliseconds in 32 bits
_MAX_DIMENSIONS = 64
_MAX_INT = (1 << 63) - 1
_SIZE = Global("torch", "Size")
_REBUILD = Global("torch.multiprocessing.reductions", "rebuild_cuda_tensor")
_REBUILD_ARGUMENTS = (
    "class", "size", "stride", "start", "storage_class", "dtype", "device", "handle", "nbytes", "offset",
    "requires_grad", "ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required",
)  # fmt: skip
"""Arguments of torch's rebuild_cuda_tensor, named as in ``CudaIPCHandle`` where they are the same."""


class Marker(Enum):
    CLOSING = "the buffer is to be let go"
    ENDING = "everything has come; to be answered after the commit"


Turn = SharedMemory | list[TensorSpec] | Marker | CaesuraError
"""The server's buffer, the tensors in it now, a marker, or why it is silent, gave up or is unreadable."""


class _Refusing(Exception):  # noqa: N818  a jump to that state, not an error of its own
    pass


class Conversation:
    """One update with one server. Made and told by the loop, held by a thread that runs :meth:`turns`."""

    def __init__(self, address: str, device_uuid: str, timeout_s: float) -> None:
        """Raise ``invalid_request`` if ``address`` is not one of this host."""
        if not _ADDRESS.fullmatch(address) or not address.isprintable():
            reason = (
                "a parameter server's address is ipc:// (107 bytes) or tcp:// with a loopback address, not "
                f"{address!r}"
            )
            raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="zmq_handles", value=address)
        self._address = address
        self._device_uuid = device_uuid
        self._timeout_s = timeout_s
        self._refusal: str | None = None
        self._refusing = False
        self._closed = False
        self._unanswered = False
        self._wakeup = Wakeup()

    def refuse(self, reason: str) -> None:
        """Fail the update; the server hears ``reason`` in answer to whatever it has sent or will send."""
        self._refusal = self._refusal or reason
        self._wakeup.set()

    def close(self) -> None:
        self._closed = True
        self._wakeup.set()

    def turns(self) -> Iterator[Turn]:
        """Yield the server's messages in a thread; asking for the next consents, or says the refusal."""
        context = zmq.Context()
        socket = context.socket(zmq.REP)
        try:
            socket.setsockopt(zmq.LINGER, _LINGER_MS)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
            socket.setsockopt(zmq.IPV6, int("[" in self._address))
            try:
                yield from self._protocol(socket)
            except CaesuraError as error:
                self._refusal = self._refusal or error.message
                yield error
                self._refuse_all(socket)
            except _Refusing:
                self._refuse_all(socket)
        finally:
            socket.close()
            context.term()
            self._wakeup.close()

    def _protocol(self, socket: zmq.Socket[bytes]) -> Iterator[Turn]:
        try:
            socket.connect(self._address)
        except zmq.ZMQError as error:
            self._closed = True
            reason = f"cannot connect to {self._address}: {error}"
            raise CaesuraError(
                ErrorCode.INVALID_REQUEST, reason, field="zmq_handles", value=self._address
            ) from error
        yield opening_of(self._hear(socket), self._device_uuid)
        self._consent(socket)
        while (message := self._hear(socket)) is not None:
            yield specs_of(message)
            self._consent(socket)
        yield Marker.CLOSING
        self._consent(socket)
        if self._hear(socket) is not None:
            raise _malformed("something follows the first None that is not another one")
        yield Marker.ENDING
        self._consent(socket)

    def _hear(self, socket: zmq.Socket[bytes]) -> object:
        frames = self._receive(socket, monotonic() + self._timeout_s)
        if frames is None:
            self._closed = True
            reason = f"the parameter server at {self._address} was silent for {self._timeout_s:g} s"
            raise CaesuraError(ErrorCode.DEADLINE_EXCEEDED, reason, pending=self._address)
        message = _read(frames)
        if isinstance(message, Call):
            self._closed = True  # it expects no answer, and nothing more from us
            said = f"the parameter server gave up: {_described(message)}"
            raise CaesuraError(
                ErrorCode.CHECKPOINT_ERROR, said, path=self._address, reason=_described(message)
            )
        return message

    def _receive(self, socket: zmq.Socket[bytes], deadline: float) -> list[bytes] | None:
        """Return the next message, or None if none came in time or :meth:`close` was called."""
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wakeup.fd, zmq.POLLIN)
        while not self._closed and (left := deadline - monotonic()) > 0:
            if self._refusal is not None and not self._refusing:
                raise _Refusing
            events = dict(poller.poll(max(1, round(min(left, _MAX_WAIT_S) * 1000))))
            self._wakeup.clear()
            if socket in events:
                self._unanswered = True
                return socket.recv_multipart()
        return None

    def _consent(self, socket: zmq.Socket[bytes]) -> None:
        if self._refusal is not None:
            raise _Refusing
        self._answer(socket, "")

    def _answer(self, socket: zmq.Socket[bytes], text: str) -> None:
        socket.send(text.encode())
        self._unanswered = False

    def _refuse_all(self, socket: zmq.Socket[bytes]) -> None:
        self._refusing, deadline = True, monotonic() + self._timeout_s
        if self._unanswered and not self._closed:
            self._answer(socket, self._refusal or "refused")
        while (frames := self._receive(socket, deadline)) is not None:
            try:
                if isinstance(_read(frames), Call):
                    return
            except CaesuraError:  # as refused as anything else
                pass
            self._answer(socket, self._refusal or "refused")


def opening_of(message: object, device_uuid: str) -> SharedMemory:
    """Return the first message of a server; raises ``malformed_message``."""
    if type(message) is dict:
        try:
            memory = msgspec.convert(message, SharedMemoryHandle)
        except msgspec.ValidationError as error:
            raise _malformed(f"its buffer's description is wrong: {error}") from error
        return SharedMemory(memory, 0, memory.nbytes)
    if not (type(message) is tuple and len(message) == 2 and message[0] == _REBUILD):
        raise _malformed("its first message describes no buffer")
    arguments = message[1]
    if type(arguments) is not tuple or len(arguments) != len(_REBUILD_ARGUMENTS):
        raise _malformed(f"a tensor is described by {len(_REBUILD_ARGUMENTS)} arguments")
    found = dict(zip(_REBUILD_ARGUMENTS, arguments, strict=True))
    shape = _shape_of(found["size"])
    if found["dtype"] != Global("torch", "uint8") or len(shape) != 1 or found["stride"] not in ((1,), [1]):
        raise _malformed("its buffer is no flat tensor of uint8")
    fields = {name: found[name] for name in CudaIPCHandle.__struct_fields__ if name in found}
    # Instead of "device", the server's own number of what must be the same one.
    fields["device_uuid"] = device_uuid
    try:
        handle = msgspec.convert(fields, CudaIPCHandle, builtin_types=(bytes,))  # no base64
    except msgspec.ValidationError as error:
        raise _malformed(f"its buffer's description is wrong: {error}") from error
    start = _natural(found["start"], "start")
    if start + shape[0] > handle.nbytes:
        raise _malformed(f"its buffer ends beyond the {handle.nbytes} bytes that it lies in")
    return SharedMemory(handle, start, shape[0])


def specs_of(message: object) -> list[TensorSpec]:
    """Return the tensors of one bucket; raises ``malformed_message``. They may not fit the buffer."""
    if type(message) is not list:
        raise _malformed("it is neither a buffer, a bucket, None nor an exception")
    return [_spec_of(item) for item in message]


def _spec_of(item: object) -> TensorSpec:
    if type(item) is not dict or item.keys() != {"name", "dtype", "shape", "offset"}:
        raise _malformed("a tensor is described by name, dtype, shape and offset")
    name, dtype = item["name"], item["dtype"]
    if type(name) is not str:
        raise _malformed("a tensor's name is no text")
    if type(dtype) is not Global or dtype.module != "torch" or dtype.name not in NAMES_BY_TORCH:
        raise _malformed(f"tensor {name!r} is of no dtype of torch that weights have")
    shape = _shape_of(item["shape"])
    nbytes = DTYPES[NAMES_BY_TORCH[dtype.name]].nbytes
    for length in shape:
        nbytes *= length
    return TensorSpec(
        name=name,
        dtype=NAMES_BY_TORCH[dtype.name],
        shape=shape,
        offset=_natural(item["offset"], "offset"),
        nbytes=_natural(nbytes, "size"),
    )


def _shape_of(value: object) -> list[int]:
    if type(value) is Call and value.function == _SIZE and len(value.args) == 1:
        value = value.args[0]
    if not isinstance(value, (list, tuple)) or len(value) > _MAX_DIMENSIONS:
        raise _malformed("a shape is no list of lengths")
    return [_natural(length, "length") for length in value]


def _natural(value: object, what: str) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_INT:
        raise _malformed(f"a tensor's {what} is no natural number of 63 bits")
    return value


def _read(frames: list[bytes]) -> object:
    if len(frames) != 1:
        raise _malformed(f"it has {len(frames)} frames")
    return parse(frames[0])


def _described(call: Call) -> str:
    texts = [text for text in call.args if isinstance(text, str)]
    return f"{call.function.name}: {' '.join(texts)}"[:2000]


def _malformed(problem: str) -> CaesuraError:
    reason = f"a parameter server's message cannot be understood: {problem}"
    return CaesuraError(ErrorCode.MALFORMED_MESSAGE, reason)
