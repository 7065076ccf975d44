"""TLS of the HTTP server, from the files that uvicorn's options of the same names take.

Invariants: TLS 1.2 or later; no password prompt at a terminal; invalid files are reported before anything starts.
"""

import ssl
from pathlib import Path

import click


def tls_context(
    certfile: str | None, keyfile: str | None, password_file: str | None, ca_certs: str | None
) -> ssl.SSLContext | None:
    """What connections are wrapped in; None without a certificate.

    Args:
        certfile: the certificate, and those between it and its root.
        keyfile: its key; None means that it is in ``certfile``.
        password_file: holds the key's password.
        ca_certs: given: clients need a certificate that one of these signed.

    Raises:
        click.UsageError: a file is missing, unreadable or does not fit.
    """
    if certfile is None:
        if keyfile or password_file or ca_certs:
            raise click.UsageError("TLS needs --ssl-certfile")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        password = "" if password_file is None else Path(password_file).read_text("utf-8").strip()
        context.load_cert_chain(certfile, keyfile, password=lambda: password)
        if ca_certs is not None:
            context.load_verify_locations(ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:  # ssl's are OSErrors
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        names = ", ".join(name for name in (certfile, keyfile, password_file, ca_certs) if name)
        raise click.UsageError(f"TLS cannot be set up with {names}: {reason}") from error
    return context
