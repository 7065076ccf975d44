"""An engine's memory for people: its record, and a live view for the terminal (the page:
``serve/pages/document.py``).

Invariant: the view shows what :class:`~.record.MemoryRecord` holds, which is one engine's history and status
as they came over the wire; nothing here talks to an engine but :func:`~.record.fetch`.
"""

from .live import watch
from .record import MemoryRecord, fetch

__all__ = ["MemoryRecord", "fetch", "watch"]
