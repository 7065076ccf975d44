"""Makes text from a peer safe for a terminal.

Invariant: what :func:`printable` returns cannot move a cursor, colour a terminal, start a line or hide what follows.
"""


def printable(text: str) -> str:
    r"""``text`` with everything that is not printable as an escape: ``\x1b``, ``\n``, ``\u202e``, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text
    )
