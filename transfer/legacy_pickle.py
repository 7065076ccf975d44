"""Parses pickles of foreign protocols into plain fields; imports and calls in them are recorded, never
executed.

Invariants:
- Nothing named in a message is imported, looked up, called or given an attribute. Python's unpickler is not
  used at all: even with a harmless ``find_class`` it takes 64 GiB for one memo index. This is a stack machine
  for the opcodes that picklers emit since protocol 2; every other opcode is refused.
- The result is finite and small: at most :data:`MAX_DEPTH` levels, and :data:`MAX_VALUES` values counted as
  often as they occur. A container that lies in another one is closed, and dictionary keys are text, so
  neither cycles nor shared tuples can be built to blow up later.
- Every failure is a :class:`CaesuraError` ``malformed_message``.
"""

import io
import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ..io_struct.errors import CaesuraError, ErrorCode

MAX_PROTOCOL = 5
MAX_BYTES = 64 << 20
MAX_OPCODES = 1 << 20
"""A list of 40,000 tensors' names, dtypes, shapes and offsets."""
MAX_VALUES = 1 << 20
MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Global:
    """A name that unpickling would have imported."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """An object that unpickling would have made, by calling ``function``."""

    function: Global
    args: tuple[object, ...]
    state: object = None
    """What it would have been given afterwards, its ``__dict__`` for instance."""


def parse(data: bytes) -> object:
    """Return the one object in ``data``: plain fields, :class:`Global` and :class:`Call`.

    Raises:
        CaesuraError: ``malformed_message``, it is not a pickle of such an object within the limits above.
    """
    if len(data) > MAX_BYTES:
        _refuse(f"{len(data)} bytes are over the limit of {MAX_BYTES}")
    machine, stream = _Machine(), io.BytesIO(data)
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            if number >= MAX_OPCODES:
                _refuse(f"more than {MAX_OPCODES} opcodes")
            if opcode.name == "STOP":
                if stream.tell() != len(data):
                    _refuse(f"{len(data) - stream.tell()} bytes after its end")
                return machine.result()
            machine.run(opcode.name, argument)
    except (ValueError, IndexError, KeyError) as error:  # undecodable, or pops what is not there
        reason = str(error) if isinstance(error, ValueError) else "an empty stack or memo entry is used"
        raise _error(reason) from error
    return _refuse("it ends without STOP")


@dataclass(slots=True)
class _Node:
    value: Any
    size: int = 1
    depth: int = 0
    closed: bool = False
    """It lies in a container, whose size and depth count it as it is."""


_CONSTANTS: dict[str, Callable[[], _Node]] = {
    "NONE": lambda: _Node(None),
    "NEWTRUE": lambda: _Node(True),
    "NEWFALSE": lambda: _Node(False),
    "EMPTY_TUPLE": lambda: _Node(()),
    "EMPTY_LIST": lambda: _Node([]),
    "EMPTY_DICT": lambda: _Node({}),
}
_TEXTS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_SCALARS = {
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINFLOAT",
    "SHORT_BINBYTES",
    "BINBYTES",
    "BINBYTES8",
} | _TEXTS
_KEYS = (str,)  # their hashes are salted: other keys could be made to collide


@dataclass(slots=True)
class _Machine:
    stack: list[_Node] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, _Node] = field(default_factory=dict)

    def result(self) -> object:
        (node,) = self.stack  # ValueError: none, or more than one
        if self.marks:
            _refuse("a mark is left over")
        return node.value

    def run(self, name: str, argument: Any) -> None:
        if name in _SCALARS:
            if name in _TEXTS:
                argument.encode()  # lone surrogates, which no message of ours could quote
            self.stack.append(_Node(argument))
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in _OPCODES:
            _OPCODES[name](self, argument)
        elif name == "PROTO" and argument > MAX_PROTOCOL:
            _refuse(f"protocol {argument}")
        elif name not in ("PROTO", "FRAME"):  # a frame only groups bytes
            _refuse(f"opcode {name}")

    def pop(self, count: int = 1) -> list[_Node]:
        """Return the topmost ``count``, in the order in which they were pushed, and not from below a mark."""
        start = len(self.stack) - count
        if start < (self.marks[-1] if self.marks else 0):
            raise IndexError
        taken = self.stack[start:]
        del self.stack[start:]
        return taken

    def pop_to_mark(self) -> list[_Node]:
        start = self.marks.pop()
        taken = self.stack[start:]
        del self.stack[start:]
        return taken

    def mark(self, _: Any) -> None:
        self.marks.append(len(self.stack))

    def drop(self, _: Any) -> None:
        self.pop()

    def drop_to_mark(self, _: Any) -> None:
        self.pop_to_mark()

    def put(self, index: int | None) -> None:
        self.memo[len(self.memo) if index is None else index] = self.stack[-1]

    def get(self, index: int) -> None:
        self.stack.append(self.memo[index])

    def make_tuple(self, count: int | None) -> None:
        items = self.pop_to_mark() if count is None else self.pop(count)
        node = _Node(tuple(item.value for item in items))
        _hold(node, items)
        self.stack.append(node)

    def extend(self, items: list[_Node]) -> None:
        target = self.stack[-1]
        if type(target.value) is not list:
            _refuse("items are appended to what is no list")
        _hold(target, items)
        target.value.extend(item.value for item in items)

    def update(self, items: list[_Node]) -> None:
        target = self.stack[-1]
        if type(target.value) is not dict or len(items) % 2:
            _refuse("items are set on what is no dictionary")
        if not all(isinstance(key.value, _KEYS) for key in items[::2]):
            _refuse("a dictionary key is no text")
        _hold(target, items)
        target.value.update(zip((k.value for k in items[::2]), (v.value for v in items[1::2]), strict=True))

    def name(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self.stack.append(_Node(Global(module, name)))

    def name_from_stack(self, _: Any) -> None:
        module, name = (node.value for node in self.pop(2))
        if type(module) is not str or type(name) is not str:
            _refuse("a global's name is no text")
        self.stack.append(_Node(Global(module, name)))

    def call(self, _: Any) -> None:
        function, args = self.pop(2)
        if type(function.value) is not Global or type(args.value) is not tuple:
            _refuse("what is called is no global, or its arguments are no tuple")
        node = _Node(Call(function.value, args.value))
        _hold(node, [args])
        self.stack.append(node)

    def build(self, _: Any) -> None:
        (state,) = self.pop()
        target = self.stack[-1]
        if type(target.value) is not Call or target.value.state is not None:
            _refuse("state is given to what is no new object")
        _hold(target, [state])
        target.value = Call(target.value.function, target.value.args, state.value)


def _hold(container: _Node, items: list[_Node]) -> None:
    """Make ``items`` part of ``container``; from then on they do not change, and neither may a closed
    container.
    """
    for item in items:
        item.closed = True
        container.size += item.size
        container.depth = max(container.depth, item.depth + 1)
    if container.closed:
        _refuse("a container changes after it was put into another one")
    if container.size > MAX_VALUES or container.depth > MAX_DEPTH:
        _refuse(f"more than {MAX_VALUES} values or {MAX_DEPTH} levels")


_OPCODES: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine.mark,
    "POP": _Machine.drop,
    "POP_MARK": _Machine.drop_to_mark,
    "MEMOIZE": _Machine.put,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "TUPLE": _Machine.make_tuple,
    "TUPLE1": lambda machine, _: machine.make_tuple(1),
    "TUPLE2": lambda machine, _: machine.make_tuple(2),
    "TUPLE3": lambda machine, _: machine.make_tuple(3),
    "APPEND": lambda machine, _: machine.extend(machine.pop()),
    "APPENDS": lambda machine, _: machine.extend(machine.pop_to_mark()),
    "SETITEM": lambda machine, _: machine.update(machine.pop(2)),
    "SETITEMS": lambda machine, _: machine.update(machine.pop_to_mark()),
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.name_from_stack,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "BUILD": _Machine.build,
}


def _error(reason: str) -> CaesuraError:
    return CaesuraError(
        ErrorCode.MALFORMED_MESSAGE, f"a pickle that cannot be read as plain fields: {reason}"
    )


def _refuse(reason: str) -> NoReturn:
    raise _error(reason)
