"""An engine's memory for people: a page that needs nothing else, and a live view for the terminal.

Invariant: both show what :class:`~.record.MemoryRecord` holds, which is one engine's history and status as they came over
the wire; nothing here talks to an engine but :func:`~.record.fetch`.
"""

from .live import watch
from .page import write_page
from .record import MemoryRecord, fetch

__all__ = ["MemoryRecord", "fetch", "watch", "write_page"]
