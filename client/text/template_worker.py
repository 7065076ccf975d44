"""Render chat templates in a process of its own, which ``chat_template.py`` starts by this path and may kill.

Invariants: the kernel limits memory and CPU time; it ends with its connection. Templates run in Jinja's
immutable sandbox, with transformers' globals, filters and extensions.
Calls have their arguments as objects, which are text where a template joins them with text, as DeepSeek's do.
"""

import json
import math
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_MESSAGE_CHARACTERS = 1000
MAX_COMPILED = 8


class _GenerationBlocks(jinja2.ext.Extension):
    """``{% generation %}``, which marks text of the assistant for training; only its body is rendered."""

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
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Arguments(dict[str, Any]):
    """Arguments of a call: an object, and to templates that join them with text what the model wrote."""

    def __init__(self, arguments: dict[str, Any], written: str | None) -> None:
        super().__init__(arguments)
        self._written = _tojson(arguments) if written is None else written

    def __str__(self) -> str:
        return self._written

    def __add__(self, behind: str) -> str:
        return self._written + behind

    def __radd__(self, before: str) -> str:
        return before + self._written


class _NoContent(str):
    """The content of a message that only calls: empty to templates that join it, none to those that ask."""


def _prepare(messages: list[dict[str, Any]]) -> None:
    """Give calls and messages without content the forms that all templates take."""
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            written = function.pop("written", None) if isinstance(function, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
                function["arguments"] = _Arguments(function["arguments"], written)
        if calls and message.get("content") == "":
            message["content"] = _NoContent()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _allow(seconds: int) -> None:
    """Let the kernel end this process after so many more seconds of CPU time, or up to one more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


class Worker:
    def __init__(self, sources: dict[str, str], max_characters: int) -> None:
        self._sources = sources
        self._max_characters = max_characters
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
        )
        self._environment.filters["tojson"] = _tojson
        self._environment.tests["none"] = lambda value: value is None or isinstance(value, _NoContent)
        self._environment.globals["raise_exception"] = _raise_exception
        # the local date, as transformers gives it
        self._environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self.compiled = lru_cache(maxsize=MAX_COMPILED)(self._environment.from_string)

    def answer(self, name: str, source: str | None, variables: dict[str, Any]) -> dict[str, str]:
        """Render the template ``source`` of a client, or the model's of that ``name``."""
        try:
            template = self.compiled(self._sources[name] if source is None else source)
        except jinja2.TemplateSyntaxError as error:
            return {"invalid": _message(error)}
        _prepare(variables["messages"])
        text = template.render(variables)
        text.encode()  # a template can write surrogates, which no text has
        if len(text) > self._max_characters:
            return {"error": f"the prompt is over the limit of {self._max_characters} characters"}
        return {"text": text}


def _message(error: Exception) -> str:
    return str(error)[:MAX_MESSAGE_CHARACTERS].encode("utf-8", "backslashreplace").decode()


def main(descriptor: int) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the parent's threads may block SIGXCPU
    connection = Connection(descriptor)
    start = json.loads(connection.recv_bytes())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (start["memory_bytes"],) * 2)
    worker = Worker(start["sources"], start["max_characters"])
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        _allow(start["cpu_s"])
        try:
            answer = json.dumps(worker.answer(**json.loads(request))).encode()
        except MemoryError:
            worker.compiled.cache_clear()  # one client's templates may hold what the next one needs
            answer = json.dumps({"error": "the template needs too much memory"}).encode()
        except Exception as error:  # noqa: BLE001  what templates raise on messages they were not written for
            answer = json.dumps({"error": _message(error)}).encode()
        connection.send_bytes(answer)


if __name__ == "__main__":
    main(int(sys.argv[1]))
