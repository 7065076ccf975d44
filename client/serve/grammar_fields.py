"""Fields of OpenAI, vLLM and SGLang that say what an output looks like, as one grammar.

Invariant: at most one of them is given; ``null`` and empty values are not.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ...io_struct.field_errors import one_of
from .. import grammar
from ..exceptions import InvalidRequest

_Make = Callable[[Any], str]
NATIVE: dict[str, _Make] = {
    "json_schema": grammar.json_schema,
    "regex": grammar.regex,
    "ebnf": str,
    "structural_tag": grammar.structural_tag,
}
"""SGLang's fields."""
GUIDED: dict[str, _Make] = {
    "guided_json": grammar.json_schema,
    "guided_regex": grammar.regex,
    "guided_choice": grammar.choice,
    "guided_grammar": str,
}
"""vLLM's older fields."""
_STRUCTURED: dict[str, _Make] = {
    "json": grammar.json_schema,
    "regex": grammar.regex,
    "choice": grammar.choice,
    "grammar": str,
    "json_object": lambda value: grammar.json_object(),
    "structural_tag": grammar.structural_tag,
}
NOTHING: tuple[Any, ...] = (None, False, "", [], {})


def response_format(value: Any) -> str | None:
    """Return the grammar of OpenAI's field; InvalidRequest for a type that there is not."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return grammar.json_object()
    if kind == "json_schema":
        given = value.get("json_schema")
        if not isinstance(given, Mapping) or given.get("schema") is None:
            raise InvalidRequest("response_format needs json_schema.schema", field="response_format")
        return grammar.json_schema(given["schema"])
    if kind == "structural_tag":
        return grammar.structural_tag(value)
    known = one_of(["text", "json_object", "json_schema", "structural_tag"])
    raise InvalidRequest(f"response_format.type = {kind!r} must be {known}", field="response_format")


def _structured_outputs(value: Any) -> str | None:
    if not isinstance(value, Mapping):
        raise InvalidRequest("structured_outputs must be an object", field="structured_outputs")
    given = {name: each for name, each in value.items() if each not in NOTHING}
    if unknown := sorted(given.keys() - _STRUCTURED.keys()):
        known = one_of(sorted(_STRUCTURED))
        reason = f"structured_outputs.{unknown[0]} is not supported: give {known}"
        raise InvalidRequest(reason, field="structured_outputs")
    if len(given) > 1:
        raise InvalidRequest(
            f"structured_outputs has {' and '.join(given)}: give one", field="structured_outputs"
        )
    return next((_STRUCTURED[name](each) for name, each in given.items()), None)


OPENAI: dict[str, Callable[[Any], str | None]] = {
    "grammar": str,
    "response_format": response_format,
    "structured_outputs": _structured_outputs,
    **GUIDED,
    **NATIVE,
}


def grammar_of(request: object, fields: Mapping[str, Callable[[Any], str | None]]) -> str | None:
    """Return the grammar that one of the ``fields`` of ``request`` asks for; raises InvalidRequest."""
    found: dict[str, str] = {}
    for name, make in fields.items():
        if (value := getattr(request, name)) in NOTHING:
            continue
        try:
            made = make(value)
        except InvalidRequest as error:
            raise InvalidRequest(f"{name}: {error.message}", field=name) from error
        if made is not None:
            found[name] = made
    if len(found) > 1:
        first, second, *_ = found
        raise InvalidRequest(f"{first} and {second} both say what the output is: give one", field=second)
    return next(iter(found.values()), None)
