"""Collects the results of samples, and sends each in a message of its own: its tensors are the frames of that message.

Invariants:
- Results go out in the order in which samples ended.
- A result that cannot be sent is replaced by an error, and does not hold up the others.
"""

import logging
from collections.abc import Callable

from ...io_struct import ErrorCode, FinishReason, GenerateImagesReqOutput
from ..memory.device_memory import is_out_of_memory

logger = logging.getLogger(__name__)

Send = Callable[[bytes, GenerateImagesReqOutput], None]


class ImageOutbox:
    """Results that have not been sent yet."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._results: list[tuple[bytes, GenerateImagesReqOutput]] = []

    @property
    def has_undelivered(self) -> bool:
        """Whether any result has not been sent yet."""
        return bool(self._results)

    def add_result(self, client: bytes, result: GenerateImagesReqOutput) -> None:
        """Add the terminal result of a sample."""
        self._results.append((client, result))

    def deliver(self, step: int) -> None:
        """Send all results."""
        results, self._results = self._results, []
        for client, result in results:
            try:
                self._send(client, result)
                continue
            except Exception as error:
                logger.error("request %s: its result could not be sent", result.rid, exc_info=error)
                replacement = _without_content(result, error)
            try:
                self._send(client, replacement)
            except Exception as error:  # the other results must go out
                logger.error("request %s: no result could be sent", result.rid, exc_info=error)


def _without_content(result: GenerateImagesReqOutput, error: Exception) -> GenerateImagesReqOutput:
    code = ErrorCode.OUT_OF_MEMORY if is_out_of_memory(error) else ErrorCode.INTERNAL
    message = f"its result cannot be sent: {type(error).__name__}: {error}"
    return GenerateImagesReqOutput(
        rid=result.rid,
        index=result.index,
        finish_reason=FinishReason(type="error", message=message, code=code),
        weight_versions=[],
        seed=result.seed,
        steps=result.steps,
        steps_done=0,
    )
