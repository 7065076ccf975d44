"""Parses pickles of foreign protocols into plain fields; imports and calls are recorded, never executed.

Invariants:
- Nothing named in a message is imported, looked up, called or given an attribute. Python's unpickler is not
  used at all: even with a harmless ``find_class`` it takes 64 GiB for one memo index. This is a stack machine
  for the opcodes that picklers emit since protocol 2; every other opcode is refused.
- The result is finite and small: at most :data:`MAX_DEPTH` levels, and :data:`MAX_VALUES` values counted as
  often as they occur. A container inside another is closed and dictionary keys are text, so neither cycles
  nor shared tuples can blow up later.
- Every failure is a :class:`CaesuraError` ``malformed_message``.
"""

import io
import pickletools
from dataclasses import dataclass
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
    """State that it would have been given afterwards, its ``__dict__`` for instance."""


def parse(data: bytes) -> object:
    """Return the one object in ``data``: plain fields, :class:`Global` and :class:`Call`."""
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


_TEXTS = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"})
_SCALARS = _TEXTS | {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    def __init__(self) -> None:
        self.stack: list[_Node] = []
        self.marks: list[int] = []
        self.memo: dict[int, _Node] = {}

    def result(self) -> object:
        (node,) = self.stack  # ValueError: none, or more than one
        if self.marks:
            _refuse("a mark is left over")
        return node.value

    def run(self, name: str, argument: Any) -> None:  # noqa: C901, PLR0915  (one case for each opcode)
        if name in _SCALARS:
            if name in _TEXTS:
                argument.encode()  # lone surrogates, which no message of ours could quote
            self.push(argument)
            return
        match name:
            case "MEMOIZE" | "BINPUT" | "LONG_BINPUT":
                self.memo[len(self.memo) if argument is None else argument] = self.stack[-1]
            case "BINGET" | "LONG_BINGET":
                self.stack.append(self.memo[argument])
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                self.push_tuple(self.pop(_TUPLES[name]))
            case "MARK":
                self.marks.append(len(self.stack))
            case "TUPLE":
                self.push_tuple(self.pop_to_mark())
            case "REDUCE" | "NEWOBJ":
                function, args = self.pop(2)
                if type(function.value) is not Global or type(args.value) is not tuple:
                    _refuse("what is called is no global, or its arguments are no tuple")
                self.push(Call(function.value, args.value), [args])
            case "BUILD":
                (state,) = self.pop()
                target = self.stack[-1]
                if type(target.value) is not Call or target.value.state is not None:
                    _refuse("state is given to what is no new object")
                _hold(target, [state])
                target.value = Call(target.value.function, target.value.args, state.value)
            case "APPEND" | "APPENDS":
                items = self.pop() if name == "APPEND" else self.pop_to_mark()
                target = self.stack[-1]
                if type(target.value) is not list:
                    _refuse("items are appended to what is no list")
                _hold(target, items)
                target.value.extend(item.value for item in items)
            case "SETITEM" | "SETITEMS":
                self.set_items(self.pop(2) if name == "SETITEM" else self.pop_to_mark())
            case "NONE" | "NEWTRUE" | "NEWFALSE" | "EMPTY_TUPLE":
                self.push(_CONSTANTS[name])
            case "EMPTY_LIST":
                self.push([])
            case "EMPTY_DICT":
                self.push({})
            case "GLOBAL":
                module, _, attribute = argument.partition(" ")
                self.push(Global(module, attribute))
            case "STACK_GLOBAL":
                module, attribute = (node.value for node in self.pop(2))
                if type(module) is not str or type(attribute) is not str:
                    _refuse("a global's name is no text")
                self.push(Global(module, attribute))
            case "POP":
                self.pop()
            case "POP_MARK":
                self.pop_to_mark()
            case "PROTO" if argument > MAX_PROTOCOL:
                _refuse(f"protocol {argument}")
            case "PROTO" | "FRAME":  # a frame only groups bytes
                pass
            case _:
                _refuse(f"opcode {name}")

    def push(self, value: Any, items: list[_Node] | None = None) -> None:
        """Push a value, which contains those of ``items``."""
        node = _Node(value)
        if items is not None:
            _hold(node, items)
        self.stack.append(node)

    def push_tuple(self, items: list[_Node]) -> None:
        self.push(tuple(item.value for item in items), items)

    def pop(self, count: int = 1) -> list[_Node]:
        """Return the topmost ``count``, in the order in which they were pushed, and not from below a mark."""
        start = len(self.stack) - count
        if start < (self.marks[-1] if self.marks else 0):
            raise IndexError
        return self._taken(start)

    def pop_to_mark(self) -> list[_Node]:
        return self._taken(self.marks.pop())

    def _taken(self, start: int) -> list[_Node]:
        taken = self.stack[start:]
        del self.stack[start:]
        return taken

    def set_items(self, items: list[_Node]) -> None:
        target, keys = self.stack[-1], items[::2]
        if type(target.value) is not dict or len(items) % 2:
            _refuse("items are set on what is no dictionary")
        if not all(isinstance(key.value, str) for key in keys):  # hashes of others could be made to collide
            _refuse("a dictionary key is no text")
        _hold(target, items)
        target.value.update(zip((k.value for k in keys), (v.value for v in items[1::2]), strict=True))


def _hold(container: _Node, items: list[_Node]) -> None:
    """Make ``items`` part of ``container``: from then on they do not change, nor may a closed container."""
    for item in items:
        item.closed = True
        container.size += item.size
        container.depth = max(container.depth, item.depth + 1)
    if container.closed:
        _refuse("a container changes after it was put into another one")
    if container.size > MAX_VALUES or container.depth > MAX_DEPTH:
        _refuse(f"more than {MAX_VALUES} values or {MAX_DEPTH} levels")


def _error(reason: str) -> CaesuraError:
    message = f"a pickle that cannot be read as plain fields: {reason}"
    return CaesuraError(ErrorCode.MALFORMED_MESSAGE, message)


def _refuse(reason: str) -> NoReturn:
    raise _error(reason)
