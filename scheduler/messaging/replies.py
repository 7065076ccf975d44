"""Sends answers to every client that waits for them, and stores them for retries.

Invariants:
- An answer that cannot be sent is replaced by an error; sending never raises.
- Tokens and results that a command caused are sent before its reply, to every client.
"""

import logging
from typing import TYPE_CHECKING

from ...io_struct import BatchTokenOutput, GenerateReqOutput, Message
from ..observability.throughput import SampleTotals
from ..runtime.guard import checked, defect
from ..scheduling.waiting_queue import LiveSample
from .answers import SampleResult

if TYPE_CHECKING:
    from ..runtime.engine import Engine

logger = logging.getLogger(__name__)


class Replies:
    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self.samples = SampleTotals()

    def answer(self, message_id: str, answer: Message) -> None:
        """Send the last answer to a message, to every client that waits for it, and store it."""
        engine = self._engine
        engine.outbox.deliver(engine.state.step)
        exchange = engine.answers.get(message_id)
        if exchange is None:
            return
        for client in exchange.clients:
            answer = self.send_answer(client, answer, message_id)
        exchange.remaining = 1
        engine.answers.add(exchange, answer)

    def finished(self, request: LiveSample, result: SampleResult) -> None:
        """Store the result of a sample; send it to clients that attached, its own gets it by the outbox."""
        engine = self._engine
        self.samples.count(result)
        exchange = engine.answers.get(request.message_id)
        if exchange is None:
            return
        answer = self.result(result)
        engine.answers.add(exchange, answer)
        for client in exchange.clients:
            if client != request.client:
                self.send_answer(client, answer, request.message_id)

    def result(self, result: SampleResult) -> Message:
        if isinstance(result, GenerateReqOutput):
            return BatchTokenOutput(step=self._engine.state.step, finished=[result])
        return result

    def repeat(self, message_id: str, results: list[SampleResult]) -> None:
        """Answer a message that repeats an earlier one under a new id with the results of that."""
        engine = self._engine
        exchange = engine.answers.get(message_id)
        if exchange is None:
            return
        engine.outbox.deliver(engine.state.step)
        exchange.remaining = len(results)
        for answer in map(self.result, results):
            for client in exchange.clients:
                self.send_answer(client, answer, message_id)
            engine.answers.add(exchange, answer)

    def send_answer(self, client: bytes, answer: Message, message_id: str | None = None) -> Message:
        """Send ``answer``, or an error if it cannot be sent; return what was sent.

        ``message_id`` is the message that it answers, if that is not the answer's ``id``.
        """
        engine = self._engine
        try:
            engine.router.send(client, checked(answer))
        except Exception as error:  # noqa: BLE001  the answer cannot be encoded, or there is no memory for it
            answered = message_id if message_id is not None else str(getattr(answer, "id", ""))
            answer = defect("answering", answered, error)
            try:
                engine.router.send(client, answer)
            except Exception as again:
                logger.error("client %s: no answer could be sent", client.hex(), exc_info=again)
        return answer
