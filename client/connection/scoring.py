"""From the arguments of ``score`` to the request, and from the reply to lists.

Invariant: a sequence has exactly one log-probability for each of its tokens from ``start`` on.
"""

from collections.abc import Sequence
from typing import Any

from ...io_struct import ScoreReqInput, ScoreReqOutput
from ..exceptions import InternalError, InvalidRequest
from .options import id_of
from .prompts import Prompts, sequences, token_ids
from .results import read_floats


class Scores:
    """A score request, and how its answer is read."""

    def __init__(
        self,
        input_ids: Prompts,
        start: int | Sequence[int],
        temperature: float,
        message_id: str | None,
    ) -> None:
        """Take one ``start`` for all sequences, or one for each.

        Raises:
            InvalidRequest: ids or starts are no integers, or not one start for each sequence.
        """
        each, self._single = sequences(input_ids)
        ids = [token_ids(sequence) for sequence in each]
        starts = [start] * len(ids) if isinstance(start, int) else token_ids(start, "start")
        if len(starts) != len(ids):
            raise InvalidRequest(
                f"{len(starts)} start for {len(ids)} sequences", field="start", value=len(starts)
            )
        self.request = ScoreReqInput(
            id=id_of(message_id), input_ids=ids, start=starts, temperature=temperature
        )

    def decode(self, reply: ScoreReqOutput) -> Any:
        """Return ``list[float]``, or a list of them for several sequences.

        Raises:
            InternalError: not as many as were asked for.
        """
        logprobs = [read_floats(data) for data in reply.logprobs]
        wanted = [
            len(ids) - start for ids, start in zip(self.request.input_ids, self.request.start, strict=True)
        ]
        got = [len(values) for values in logprobs]
        if got != wanted:
            raise InternalError(f"{got} log-probabilities for {wanted} tokens")
        return logprobs[0] if self._single else logprobs
