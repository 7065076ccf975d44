"""Text from a peer, made safe for a terminal: it moves no cursor, colours, starts and hides nothing."""


def printable(text: str) -> str:
    r"""Return ``text`` with unprintable characters escaped: ``\x1b``, ``\n``, ``\u202e``, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text
    )
