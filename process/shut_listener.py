"""Listening tcp sockets that drop connection requests, and keep the connections that they have taken."""

import ctypes
import socket
import struct

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # asm-generic/socket.h
_BPF_RET = 0x06


def shut(listener: socket.socket) -> None:
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RET, 0, 0, 0))
    program = struct.pack("@HP", 1, ctypes.addressof(drop_all))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def open_again(listener: socket.socket) -> None:
    listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
