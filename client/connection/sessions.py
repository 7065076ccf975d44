"""The id of the explicit weight session that a client has open.

Invariants: the id is known from the answer to ``begin`` until the session was ended, the engine does not know
it any more, or is gone. What is sent meanwhile carries it, so a session that has ended in secret is an error
here, never a commit.
"""

from collections.abc import Mapping
from typing import Any

from ...io_struct import EndWeightUpdateReqInput, Request, WeightUpdateOptions
from ..exceptions import DeadlineExceeded, EngineDied, NoSession, NotIdle, NotOwner, WeightMismatch, is_answer
from .options import update_fields

_STILL_OPEN = (WeightMismatch, NotIdle, NotOwner)
"""Refusals of an ``end`` that leave its session open."""


class OpenSession:
    def __init__(self) -> None:
        self.id: str | None = None
        """None if no session of this client is open."""

    def named(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return fields of an update, with this session if the options name none; raises as
        ``update_fields``.
        """
        return update_fields({"session_id": self.id, **options})

    def ended(self, session_id: str | None) -> None:
        """Forget the session of that id, which has ended."""
        if session_id == self.id:
            self.id = None

    def failed(self, request: Request, error: BaseException) -> None:
        """Note that ``request`` got no reply but ``error``."""
        if isinstance(error, EngineDied):
            self.id = None
        elif isinstance(request, WeightUpdateOptions | EndWeightUpdateReqInput):
            over = isinstance(request, EndWeightUpdateReqInput) and is_answer(error)
            if isinstance(error, NoSession | DeadlineExceeded) or (
                over and not isinstance(error, _STILL_OPEN)
            ):
                self.ended(request.session_id)
