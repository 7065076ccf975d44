"""``ChatTemplate``: a conversation as one prompt, by the Jinja template that comes with a model.

Invariants:
- A template is data of a checkpoint, not trusted code: it runs in Jinja's immutable sandbox and within the bounds of
  ``template_limits.py``. Any failure of it is an :class:`~..exceptions.InvalidRequest` of the conversation.
- A template gets what transformers gives it (``apply_chat_template``): the same globals, filters, extensions and special
  tokens. Keys of messages whose value is null are left out.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from ..exceptions import CheckpointError, InvalidRequest
from .template_limits import BoundedEnvironment, check_numbers, rendered

_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template raises on messages that it was not written for."""


class _GenerationBlocks(jinja2.ext.Extension):
    """``{% generation %}`` marks text of the assistant for training; here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    check_numbers((indent,))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # the local date, as transformers gives it


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.bound_filters()
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """The chat templates of one model, compiled once."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """``sources``: template by name, ``"default"`` and perhaps ``"tool_use"``. ``special_tokens``: ``bos_token`` and the
        like, which templates use by name.

        Raises:
            CheckpointError: a template is not valid Jinja.
        """
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template cannot be compiled: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation; ``variables`` are further variables of the template (``enable_thinking``, …).

        Raises:
            InvalidRequest: no messages, or the template refuses them or fails on them.
        """
        if not messages:
            raise InvalidRequest("messages must not be empty", field="messages")
        present = [{key: value for key, value in each.items() if value is not None} for each in messages]
        names = ("tool_use", "default") if tools is not None else ("default",)
        template = next((self._templates[name] for name in names if name in self._templates), None)
        if template is None:
            raise InvalidRequest(
                f"the model has chat templates {sorted(self._templates)} but no default", field="messages"
            )
        shown = {
            **self._special_tokens,
            "documents": None,
            **variables,
            "messages": present,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return rendered(template, shown)
        except _FAILURES as error:
            raise InvalidRequest(
                f"the chat template refuses the messages: {error}", field="messages"
            ) from error
