import socket

_HELD: list[socket.socket] = []
"""Sockets that are bound and do not listen: nobody else is given their ports."""


def get_ip() -> str:
    return "127.0.0.1"


def get_open_port() -> int:
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the store's socket has it, too
    held.bind(("127.0.0.1", 0))
    _HELD.append(held)
    return int(held.getsockname()[1])
