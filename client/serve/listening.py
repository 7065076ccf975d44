"""Where ``caesura serve`` listens and with which keys, as its command line says.

Invariants:
- Keys come from files or the environment, never from the command line, and no process that is started inherits them.
- An address beyond loopback needs an API key, or the explicit word that everybody who can reach it may use it.
"""

import contextlib
import errno
import ipaddress
import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

import click

API_KEY, ADMIN_KEY = "CAESURA_API_KEY", "CAESURA_ADMIN_KEY"
OPEN_TO_ALL = (
    "generate, abort the generations of others, pause, replace the weights, have the scheduler connect to any address and have "
    "files under --weights-root read"
)
"""What whoever reaches a server without keys can do; for the help and the warning at start."""


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """What clients must send; None: nothing."""

    api: str | None
    admin: str | None

    @classmethod
    def take(cls, api_file: str | None, admin_file: str | None) -> "Keys":
        """From files, else from the environment, which then has them no longer.

        Raises:
            click.UsageError: a file cannot be read, or a key is empty.
        """
        return cls(_key(API_KEY, api_file), _key(ADMIN_KEY, admin_file))


def _key(variable: str, file: str | None) -> str | None:
    key = os.environ.pop(variable, None)
    if file is not None:
        try:
            key = Path(file).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = (
                error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
            )  # never what is in it
            raise click.UsageError(f"cannot read the key file {file}: {reason}") from None
    if key is None:
        return None
    key = key.strip()
    if not key:
        raise click.UsageError(f"the key in {file or variable} is empty")
    return key


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def check_host(host: str, keys: Keys, *, insecure: bool) -> None:
    """Refuse an address that others reach without a key.

    Raises:
        click.UsageError: it is one, and nobody has said that this is meant.
    """
    if not _is_loopback(host) and keys.api is None and not insecure:
        raise click.UsageError(
            f"--host {host} can be reached from other machines: it needs --api-key-file (or {API_KEY}) and preferably an admin "
            "key, or --insecure-bind, which gives full access to anyone who can reach it"
        )


def warn(host: str, keys: Keys, tls: ssl.SSLContext | None) -> None:
    """Say on stderr what others can do, or read."""
    if _is_loopback(host):
        return
    if keys.api is None:
        what = f"no API key: anyone who can reach it can {OPEN_TO_ALL}"
    elif tls is None:
        what = "no TLS: keys, prompts and outputs are sent unencrypted"
    else:
        return
    click.echo(f"warning: insecure: {host} can be reached from other machines, and there is {what}", err=True)


def bound(host: str, port: int) -> socket.socket:
    """A socket that has the address but does not listen yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        other = "; give another --port (0: any free one)" if error.errno == errno.EADDRINUSE else ""
        raise click.ClickException(f"cannot listen on {host}:{port}: {error.strerror}{other}") from error
    listener.set_inheritable(False)
    return listener
