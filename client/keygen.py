"""``caesura keygen``: key pairs as files readable by their owner alone; none is written if one is there."""

import os
from pathlib import Path

import click
import zmq

from ..process.curve import PUBLIC_SUFFIX, SECRET_SUFFIX, key_file

SERVER, CLIENTS = "server", "clients"


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--client", "names", multiple=True, help="Name of a client key pair; can be repeated.  [default: client]"
)
def keygen(directory: Path, names: tuple[str, ...]) -> None:
    """Generate CURVE key pairs in DIRECTORY: for clients, and for the engine unless it already has one there.

    An engine started with these keys accepts only these clients, and may listen beyond loopback.
    """
    names = names or ("client",)
    if not set(names).isdisjoint({SERVER, CLIENTS, ""}) or any(
        os.sep in name or name[:1] == "." for name in names
    ):
        raise click.UsageError("a client name must be a file name other than 'server' and 'clients'")
    files = _texts(directory, names)
    for path in files:
        if path.exists() or path.is_symlink():
            raise click.ClickException(f"{path} exists; keys are never overwritten, so nothing was written")
    for folder in (directory, directory / CLIENTS):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path, text in files.items():
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        click.echo(f"wrote {path}")
    engine, public, first = (
        directory / (SERVER + SECRET_SUFFIX),
        directory / (SERVER + PUBLIC_SUFFIX),
        directory / (names[0] + SECRET_SUFFIX),
    )  # fmt: skip
    click.echo(f"\nengine: --curve-secret-key-file {engine} --curve-authorized-clients {directory / CLIENTS}")
    click.echo(f"client: --curve-server-key {public} --curve-client-key-file {first}")


def _texts(directory: Path, names: tuple[str, ...]) -> dict[Path, str]:
    places = {directory / name: directory / CLIENTS / name for name in dict.fromkeys(names)}
    if not (directory / (SERVER + SECRET_SUFFIX)).exists():
        places[directory / SERVER] = directory / SERVER
    texts = {}
    for secret_place, public_place in places.items():
        public, secret = zmq.curve_keypair()
        texts[secret_place.with_name(secret_place.name + SECRET_SUFFIX)] = key_file(public, secret)
        texts[public_place.with_name(public_place.name + PUBLIC_SUFFIX)] = key_file(public)
    return texts
