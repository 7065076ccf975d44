"""Answers on their way: to everybody who waits for them, and into the store for retries.

Invariants:
- An answer that cannot be sent is replaced by one that says so; sending never raises.
- Tokens and results that a command caused leave before its reply, to every client.
"""

import logging
from collections.abc import Callable

from ...io_struct import BatchTokenOutput, GenerateReqOutput, Message
from ..batching.request import Request
from ..guard import checked, defect
from .answers import Answers, answer_bytes
from .outbox import Outbox
from .send_queues import result_bytes

logger = logging.getLogger(__name__)


class Replies:
    """Sends and stores."""

    def __init__(
        self,
        answers: Answers,
        outbox: Outbox,
        send: Callable[[bytes, Message], None],
        step: Callable[[], int],
    ) -> None:
        """``step`` tells the number of the last step that was launched."""
        self._answers = answers
        self._outbox = outbox
        self._send = send
        self._step = step

    def answer(self, message_id: str, answer: Message) -> None:
        """The last answer to a message, to everybody who waits for it."""
        self._outbox.deliver(self._step())
        exchange = self._answers.get(message_id)
        if exchange is None:
            return
        for client in exchange.clients:
            answer = self.say(client, answer, message_id)
        exchange.remaining = 1
        self._answers.add(exchange, answer, answer_bytes(answer))

    def finished(self, request: Request, result: GenerateReqOutput) -> None:
        """Store the result of a sample for retries. Its own client gets it through the outbox, others who attached here."""
        exchange = self._answers.get(request.message_id)
        if exchange is None:
            return
        answer = self.results([result])
        self._answers.add(exchange, answer, result_bytes(result))
        for client in exchange.clients:
            if client != request.client:
                self.say(client, answer, request.message_id)

    def results(self, results: list[GenerateReqOutput]) -> BatchTokenOutput:
        """The answer that carries ``results``."""
        return BatchTokenOutput(step=self._step(), finished=results)

    def say(self, client: bytes, answer: Message, message_id: str | None = None) -> Message:
        """Send ``answer``, or in its place that it cannot be sent; returns what was sent.

        Args:
            message_id: what it answers. None: the answer's own id says so.
        """
        try:
            self._send(client, checked(answer))
        except Exception as error:  # noqa: BLE001  an answer that cannot be encoded, or no memory for it
            answered = message_id if message_id is not None else str(getattr(answer, "id", ""))
            answer = defect("answering", answered, error)
            try:
                self._send(client, answer)
            except Exception as again:
                logger.error("client %s is not answered", client.hex(), exc_info=again)
        return answer
