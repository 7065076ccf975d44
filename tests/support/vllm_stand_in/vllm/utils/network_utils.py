import socket


def get_ip() -> str:
    return "127.0.0.1"


def get_open_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
