"""Types that JSON schemas allow for values, for calls whose format writes values without quotes.

Invariant: the work is linear in the schema, whatever its references are; clients send schemas.
"""

from collections.abc import Mapping
from typing import Any

KINDS = ("array", "boolean", "integer", "null", "number", "object", "string")
_CHAIN = 16
"""References that are followed one after the other."""
_SHARED = (
    "type", "const", "enum", "nullable", "minLength", "maxLength", "pattern", "format", "allOf", "not", "if",
)  # fmt: skip
"""Keywords beside a union that hold for each of its choices."""
_NAMES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return what a schema's ``$ref`` within ``root`` stands for, or the schema."""
    for _ in range(_CHAIN):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for part in reference[2:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema


def choices_of(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the schemas one of which a value of ``schema`` fits: itself or those of its unions, in order."""
    found: list[Mapping[str, Any]] = []
    seen: set[int] = set()
    left: list[tuple[Mapping[str, Any], Any]] = [({}, schema)]
    while left:
        shared, each = left.pop()
        each = resolved(each, root)
        if id(each) in seen:
            continue
        each = each if isinstance(each, Mapping) else {}
        seen.add(id(each))
        unions = [each[name] for name in ("anyOf", "oneOf") if isinstance(each.get(name), list)]
        if unions:
            shared = {**shared, **{name: each[name] for name in _SHARED if name in each}}
            left += [(shared, choice) for union in unions for choice in reversed(union)]
        else:
            found.append({**shared, **each})
    return found


def kinds_of(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Return the names of the JSON types that a schema of ``root`` allows; empty if it allows any."""
    found = [_kinds(choice, root) for choice in choices_of(schema, root)]
    return set().union(*found) if all(found) else set()


def _kinds(schema: Mapping[str, Any], root: Mapping[str, Any]) -> set[str]:
    parts = schema.get("allOf")
    for part in (schema, *(parts if isinstance(parts, list) else ())):
        part = resolved(part, root)
        if not isinstance(part, Mapping):
            continue
        kind, values = part.get("type"), [part["const"]] if "const" in part else part.get("enum")
        if isinstance(kind, str):
            kind = [kind]
        elif not isinstance(kind, list):
            kind = [_NAMES[type(value)] for value in values] if isinstance(values, list) else []
        if kinds := {each for each in kind if each in KINDS}:
            return kinds | {"null"} if schema.get("nullable") else kinds
    return set()
