"""``ChatTemplate``: a conversation as one prompt, by a Jinja template, as a rule the one of the model.

Invariants:
- No template is trusted, a model's or a client's: it runs in Jinja's sandbox, in a process
  (``template_worker.py``) that the kernel ends when it takes too much. Any failure is an
  :class:`~..exceptions.InvalidRequest` of the conversation.
- Threads that render at the same time have a process each. A process ends with its ``ChatTemplate``.
- Keys of messages whose value is null are left out. Arguments of calls are objects, or JSON where a template
  refuses these.
"""

import json
import secrets
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...process.limited_processes import LimitedProcesses, ProcessEndedError
from ..exceptions import CheckpointError, InvalidRequest

CPU_S = 2
"""Maximum seconds of CPU time of a rendering."""
MEMORY_BYTES = 512 << 20
MAX_CHARACTERS = 16 << 20
MAX_TEMPLATE_CHARACTERS = 1 << 20
PATIENCE_S = 60.0
"""Seconds after which a process that gets no CPU time is killed."""
_WORKER = Path(__file__).with_name("template_worker.py")


class ChatTemplate:
    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Take templates by name (``"default"``, ``"tool_use"``) and special tokens (``bos_token``, ...)."""
        self._sources = found = dict(sources)
        self._workers = LimitedProcesses(_WORKER, lambda: {"sources": found, **_limits()})
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """Return a conversation's prompt with further ``variables``; raises if it is refused or no Jinja.

        Args:
            messages: the conversation, of text.
            tools: descriptions of functions.
            add_generation_prompt: end where the assistant's answer begins.
            continue_final_message: end with the text of the last message, which is to be continued.
            chat_template: a template in place of the model's.
            variables: further variables of the template.
        """
        if not messages:
            raise InvalidRequest("messages must not be empty", field="messages")
        names = ("tool_use", "default") if tools is not None else ("default",)
        name = next((name for name in names if name in self._sources), None)
        if chat_template is None and name is None:
            has = f"chat templates {sorted(self._sources)} but no default"
            reason = f"the model has {has if self._sources else 'no chat template'}"
            raise InvalidRequest(reason, field="messages")
        if len(chat_template or "") > MAX_TEMPLATE_CHARACTERS:
            reason = f"chat_template is over the limit of {MAX_TEMPLATE_CHARACTERS} characters"
            raise InvalidRequest(reason, field="chat_template")
        end = ""
        if continue_final_message:
            end = f"<{secrets.token_hex(16)}> "  # a template that trims messages takes the space
            *before, last = messages
            messages = [*before, {**last, "content": (last.get("content") or "") + end}]
        shown = {
            **self._special_tokens,
            "documents": None,
            **variables,
            "messages": [
                {key: value for key, value in each.items() if value is not None} for each in messages
            ],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            request = json.dumps({"name": name, "source": chat_template, "variables": shown}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the messages are not JSON: {error}", field="messages") from error
        answer = self._ask(request)
        if "error" in answer:
            text = json.dumps(json.loads(request, object_hook=_with_text)).encode()
            again = self._ask(text) if text != request else {}
            answer = again if "text" in again else answer
        if "invalid" in answer and chat_template is not None:
            reason = f"chat_template cannot be compiled: {answer['invalid']}"
            raise InvalidRequest(reason, field="chat_template")
        if "invalid" in answer:
            raise CheckpointError(f"the chat template cannot be compiled: {answer['invalid']}")
        if "error" in answer:
            reason = f"the chat template refuses the messages: {answer['error']}"
            raise InvalidRequest(reason, field="messages")
        return _before(end, answer["text"]) if end else answer["text"]

    def _ask(self, request: bytes) -> dict[str, str]:
        try:
            return self._workers.ask(request, PATIENCE_S)
        except ProcessEndedError as ended:
            if ended.status == -signal.SIGXCPU:
                return {"error": f"the template takes more than {CPU_S} s of CPU time"}
            reason = f"the process that renders the template has ended with status {ended.status}"
            return {"error": reason}


def _limits() -> dict[str, int]:
    return {"cpu_s": CPU_S, "memory_bytes": MEMORY_BYTES, "max_characters": MAX_CHARACTERS}


def _with_text(item: dict[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as JSON, as DeepSeek V3's template takes them."""
    arguments = item.get("arguments")
    if not isinstance(arguments, dict):
        return item
    return {**item, "arguments": json.dumps(arguments, ensure_ascii=False)}


def _before(end: str, text: str) -> str:
    """Return what comes before the last ``end``, and as little space there as the template left behind it."""
    before, found, after = text.rpartition(end.rstrip())
    if not found:
        reason = "the chat template does not show the last message, so it cannot be continued"
        raise InvalidRequest(reason, field="continue_final_message")
    return before if after.startswith(" ") else before.rstrip()
