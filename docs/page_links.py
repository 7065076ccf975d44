"""Links and anchors of a Markdown page, as a code host reads them; for the site's hooks and for the tests of
the pages.

Invariant: code, in fences or in backticks, has no links and no headings.
"""

import posixpath
import re
from collections.abc import Callable, Iterator

_FENCE = re.compile(r" *(```+)")
_TICKS = re.compile(r"(`+)[^`]+\1")
_LINK = re.compile(r"(?P<before>\]\()(?P<target>[^()\s]+)(?P<after>\))")
_HEADING = re.compile(r"^#{1,6} +(?P<title>.+?) *$", re.MULTILINE)


def links(text: str) -> list[str]:
    """Return every target, as it is written."""
    found: list[str] = []

    def remember(target: str) -> str:
        found.append(target)
        return target

    with_links(text, remember)
    return found


def with_links(text: str, change: Callable[[str], str]) -> str:
    """Return ``text`` with each link's target replaced by what ``change`` makes of it."""
    return "".join(
        part
        if is_code
        else _LINK.sub(lambda link: link["before"] + change(link["target"]) + link["after"], part)
        for part, is_code in _split(text)
    )


def anchors(text: str) -> list[str]:
    """Return the anchor of each heading, in order: in lower case, without punctuation, a hyphen for each
    space.
    """
    prose = "".join(part for part, fenced in _blocks(text) if not fenced)
    titles = (
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading["title"]) for heading in _HEADING.finditer(prose)
    )
    return [re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles]


def resolved(page: str, target: str) -> str:
    """Return the path in the repository that ``target`` (without an anchor) names on the page at the path
    ``page``.
    """
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target)) if target else page


def is_address(target: str) -> bool:
    """Return True if a target leads out of the repository."""
    return re.match(r"[a-z]+:", target) is not None


def _split(text: str) -> Iterator[tuple[str, bool]]:
    """Return the parts of ``text`` in order, and whether each is code."""
    for block, fenced in _blocks(text):
        end = 0
        for code in () if fenced else _TICKS.finditer(block):
            yield block[end : code.start()], False
            yield code[0], True
            end = code.end()
        yield block[end:], fenced


def _blocks(text: str) -> Iterator[tuple[str, bool]]:
    """Return the blocks of ``text`` in order, and whether each is fenced."""
    block, fence = "", ""
    for line in text.splitlines(keepends=True):
        mark = _FENCE.match(line)
        if fence:
            block += line
            if mark and mark[1] == fence:
                yield block, True
                block, fence = "", ""
        elif mark:
            yield block, False
            block, fence = line, mark[1]
        else:
            block += line
    yield block, bool(fence)
