"""Text from a peer, made safe for a terminal: it cannot move a cursor, colour, start a line or hide anything."""


def printable(text: str) -> str:
    r"""Return ``text`` with unprintable characters escaped: ``\x1b``, ``\n``, ``\u202e``, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text
    )
