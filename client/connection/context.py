"""The process's ZeroMQ context, shared by all connections to engines.

Invariants:
- There is a context, with its threads and descriptors, as long as a connection is open.
- A forked child makes a context of its own, and leaves the parent's alone.
"""

import os
import threading

import zmq

Context = zmq.Context["zmq.Socket[bytes]"]

MAX_IO_THREADS = 4
"""Maximum number of I/O threads, which move and encrypt the bytes of all connections; at most half of the
cores.
"""

_lock = threading.Lock()
_context: Context | None = None
_users = 0
_inherited: list[Context | None] = []
"""Contexts of the parent, which must not be ended here."""


def acquire() -> Context:
    """Return the shared context, made if there is none; :func:`release` must follow."""
    global _context, _users
    with _lock:
        if _context is None:
            _context = zmq.Context(max(1, min(MAX_IO_THREADS, (os.cpu_count() or 1) // 2)))
            _context.set(zmq.MAX_SOCKETS, _context.get(zmq.SOCKET_LIMIT))
        _users += 1
        return _context


def release() -> None:
    """Give up one use of the context, after its sockets were closed; the last one ends it."""
    global _context, _users
    with _lock:
        _users -= 1
        if _users == 0 and _context is not None:
            _context.destroy(linger=0)  # term() would wait for ever for a socket that was left open
            _context = None


def _in_child() -> None:
    global _context, _users
    _inherited.append(_context)
    _context, _users = None, 0
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_in_child)
