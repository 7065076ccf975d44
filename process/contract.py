"""What an engine and those who start it or connect to it must agree on outside of messages: socket paths and exit statuses."""

MAX_IPC_PATH = 107
"""Bytes of the path of an ``ipc://`` endpoint: ``sun_path`` of Linux, without its final zero."""
SHUT_SUFFIX = ".full"
"""Appended to the path of a socket while its engine accepts no connection, so that a client can say why none is there."""
EXIT_HUNG = 70
"""The exit status of an engine that was ended because its loop or its shutdown hung; no other end has it."""
