"""An engine's memory for people: its record, and a live view for the terminal (the page is
``serve/pages/document.py``).
"""

from .live import watch
from .record import MemoryRecord, fetch

__all__ = ["MemoryRecord", "fetch", "watch"]
