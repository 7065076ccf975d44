"""Sentences for people about values that do not fit their type, from msgspec's errors.

Invariants: the sentence names the field as its sender wrote it (``sampling_params.n``), the value if it is
known, and what is valid. What is quoted is short. Only refused values come here.
"""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, dataclass_transform

import msgspec
from msgspec import UNSET, inspect

_MAX_SHOWN = 60
_MAX_NAME = 200
"""Characters of a field's name that are repeated: where a field is unknown, its sender chose it."""
_PLACE = re.compile(r"(?P<key>`key` in )?`\$(?P<path>[\w.\[\]-]*)`")
_STEP = re.compile(r"\.(?P<name>[\w-]+)|\[(?P<index>\d*)(?:\.\.\.)?\]")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(?P<name>.*)`", re.DOTALL)
_NAMES_ELSEWHERE = {
    "max_new_tokens": "max_tokens max_length max_completion_tokens max_output_tokens",
    "max_tokens": "max_new_tokens max_length max_completion_tokens max_output_tokens",
    "min_new_tokens": "min_tokens min_length",
    "min_tokens": "min_length",
    "n": "best_of n_samples num_samples num_generations num_return_sequences",
    "sampling_seed": "seed",
    "seed": "sampling_seed",
    "stop_token_ids": "eos_token_id",
    "stop": "stop_strings stop_sequences stop_words",
    "return_logprob": "logprobs",
    "top_logprobs_num": "top_logprobs",
    "top_logprobs": "top_logprobs_num",
    "logprobs": "return_logprob top_logprobs_num",
    "logprob_start_len": "prompt_logprobs",
    "text": "prompt",
    "prompt": "text input_ids",
    "input_ids": "prompt_ids prompt_token_ids token_ids",
    "rid": "request_id",
    "in_place": "keep freeze",
    "lease_s": "lease",
    "deadline_s": "deadline",
    "model": "model_path model_name_or_path pretrained_model_name_or_path",
    "tp": "tp_size tensor_parallel_size tensor_model_parallel_size",
    "dtype": "torch_dtype",
    "kv_memory_fraction": "mem_fraction_static gpu_memory_utilization",
    "kv_pool_tokens": "max_total_tokens",
    "context_len": "max_model_len context_length max_seq_len",
    "max_running_requests": "max_num_seqs",
    "max_waiting_requests": "max_queued_requests",
    "chunked_prefill_size": "max_num_batched_tokens",
    "prefix_cache": "enable_prefix_caching",
    "kv_tier_bytes": "kv_offloading_size hicache_size enable_hierarchical_cache",
    "deterministic": "enable_deterministic_inference",
}
"""Our names to those of other engines that spelling alone would not lead to; the first that fits counts."""
_GREEDY = "temperature = 0 decodes greedily, any other samples"
_TEXT = (
    "it is about text, which caesura.client.text.TextClient and `caesura serve` make; the engine has tokens"
)
_GRAMMAR = ("grammar", "caesura.client.grammar makes a grammar of it")
_ADVICE: dict[str, tuple[str, str]] = {
    "do_sample": ("temperature", _GREEDY),
    "greedy": ("temperature", _GREEDY),
    "num_beams": ("temperature", "there is no beam search"),
    "use_beam_search": ("temperature", "there is no beam search"),
    "sampling_params": ("stream_options", "its fields stand in the body itself"),
    "stop": ("stop_token_ids", f"{_TEXT}, and stop_token_ids"),
    "no_stop_trim": ("stop_token_ids", _TEXT),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag", "structured_outputs"), _GRAMMAR),
    "skip_special_tokens": ("stop_token_ids", _TEXT),
    "disable_radix_cache": ("prefix_cache", "turn prefix_cache off"),
    "disable_cuda_graph": ("cuda_graphs", "turn cuda_graphs off"),
    "enforce_eager": ("cuda_graphs", "turn cuda_graphs off"),
    "random_seed": ("prefix_cache", "each request has a seed of its own"),
    "seed": ("prefix_cache", "each request has a seed of its own"),
    "trust_remote_code": ("model_backend", "no code of a checkpoint is ever executed"),
    "host": ("endpoint", "it is part of endpoint, tcp://HOST:PORT"),
    "port": ("endpoint", "it is part of endpoint, tcp://HOST:PORT"),
}
"""Names that are no fields: a field that each would stand next to, and the remedy."""

_WORDS: dict[type[inspect.Type], str] = {
    inspect.NoneType: "null",
    inspect.ListType: "a list",
    inspect.DictType: "an object",
    inspect.StructType: "an object",
    inspect.BytesType: "bytes",
}


class FieldError(NamedTuple):
    field: str
    """Path of the field, ``sampling_params.n``; empty where the whole value is meant."""
    sentence: str


def field_error(
    error: msgspec.ValidationError,
    kind: Any,
    given: Any = UNSET,
    *,
    whole: str = "the message",
    prefix: str = "",
    beside: Sequence[str] = (),
) -> FieldError:
    """Say what ``error`` means, which was raised for a value of type ``kind``.

    ``given`` is the refused value in plain objects, ``whole`` its name, ``prefix`` its place, ``beside`` the
    names there.
    """
    problem, path, is_key = _parts(str(error))
    steps = _steps(path)
    place = _dotted(prefix, path)
    types = _at(_info(kind), steps)
    if unknown := _UNKNOWN_FIELD.fullmatch(problem):
        name = printable(unknown["name"][:_MAX_NAME])
        around = _names_in(_at(_info(kind), steps[:-1])) if steps else []
        where = _dotted(place, f".{name}")
        said = unknown_name(name, _names_in(types), around or beside, place=place)
        return FieldError(where, f"{where} {said}")
    if missing := _MISSING_FIELD.fullmatch(problem):
        name = _dotted(place, f".{missing['name']}")
        return FieldError(name, f"{name} is missing")
    if is_key and any(isinstance(each, inspect.StructType) for each in types):
        return FieldError(place, f"every key of {place or whole} must be a string")
    if is_key:
        types = [each.key_type for each in types if isinstance(each, inspect.DictType)]
    wanted = _wanted(types)
    if not wanted:
        return FieldError(place, f"{place or whole}: {problem}")
    if is_key or "..." in path:  # which entry it was is not known
        what = "every key" if is_key else "every value"
        return FieldError(place, f"{what} of {place.removesuffix('[...]')} must be {wanted}")
    value = _value_at(given, steps)
    equals = "" if value is UNSET else f" = {shown(value)}"
    hint = _hint(value, types) if isinstance(value, str) else ""
    return FieldError(place, f"{place or whole}{equals} must be {wanted}{hint}")


def unknown_name(name: str, names: Sequence[str], beside: Sequence[str] = (), *, place: str = "") -> str:
    """Return the end of a sentence about ``name``: the remedy or the nearest of ``names``, and all."""
    if (instead := advice(name, names)) is not None:
        hint = f": {instead}"
    elif name in beside:
        hint = f" here: it stands next to {place}"
    elif other_name(name, names) is None and (elsewhere := other_name(name, beside)) is not None:
        hint = f" (did you mean {elsewhere}, next to {place}?)"
    else:
        near = nearest(name, names)
        hint = "" if near is None else f" (did you mean {near}?)"
    return f"is not known{hint}; valid are {', '.join(names)}"


def advice(name: str, names: Sequence[str]) -> str | None:
    """Say what to do instead of giving ``name`` next to ``names``, where no other name is the answer."""
    field, instead = _ADVICE.get(name, ("", ""))
    return instead if field in names else None


def other_name(name: str, names: Sequence[str]) -> str | None:
    """Return the one of ``names`` that another engine calls ``name``, or None."""
    found = (ours for ours, others in _NAMES_ELSEWHERE.items() if ours in names and name in others.split())
    return next(found, None)


def nearest(name: str, names: Sequence[str]) -> str | None:
    """Return the one of ``names`` that was probably meant, or None if none resembles ``name``."""
    name = name[:_MAX_NAME]
    if (other := other_name(name, names)) is not None:
        return other
    if close := get_close_matches(name, names, n=1, cutoff=0.75):
        return close[0]
    inside = [
        each
        for each in names
        if (len(name) > 1 and each.startswith(name))
        or (len(name) > 3 and name in each)
        or (len(each) > 3 and each in name)
    ]
    return next(iter(inside or get_close_matches(name, names, n=1)), None)


def shown(value: Any) -> str:
    """Return ``value`` for a sentence: as Python writes it, shortened."""
    if isinstance(value, str) and len(value) > _MAX_SHOWN:
        return f"{value[:_MAX_SHOWN]!r}… ({len(value)} characters)"
    if isinstance(value, (list, tuple, dict, bytes)) and len(value) > _MAX_SHOWN:
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def one_of(choices: Sequence[str]) -> str:
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last


def fields_of(kind: type[msgspec.Struct]) -> list[str]:
    """Return the names of the fields of ``kind``, except those of any type, which are there to be refused."""
    return _names_in([_info(kind)])


def _names_in(types: Sequence[inspect.Type]) -> list[str]:
    fields = [field for each in types if isinstance(each, inspect.StructType) for field in each.fields]
    return [field.encode_name for field in fields if not isinstance(field.type, inspect.AnyType)]


@cache
def _info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _parts(text: str) -> tuple[str, str, bool]:
    """Return what is wrong, the path to it without its ``$``, and True if a key is meant."""
    problem, _, tail = text.rpartition(" - at ")
    place = _PLACE.fullmatch(tail)
    if not problem or place is None:
        return text, "", False
    return problem, place["path"], place["key"] is not None


def _steps(path: str) -> list[str | int | None]:
    """Names and positions; None for an entry of an object that is not told."""
    return [
        step["name"] if step["name"] is not None else int(step["index"]) if step["index"] else None
        for step in _STEP.finditer(path)
    ]


def _dotted(prefix: str, path: str) -> str:
    return f"{prefix}{path}" if prefix else path.removeprefix(".")


def _at(kind: inspect.Type, steps: Sequence[str | int | None]) -> list[inspect.Type]:
    """Return the types at the end of ``steps``, unions taken apart."""
    types = _alternatives(kind)
    for step in steps:
        below = [found for each in types for found in _below(each, step)]
        types = [further for found in below for further in _alternatives(found)]
    return types


def _alternatives(kind: inspect.Type) -> list[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        return _alternatives(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [found for each in kind.types for found in _alternatives(each)]
    return [kind]


def _below(kind: inspect.Type, step: str | int | None) -> list[inspect.Type]:
    if isinstance(kind, inspect.StructType):
        return [field.type for field in kind.fields if field.encode_name == step]
    if isinstance(kind, inspect.ListType) and isinstance(step, int):
        return [kind.item_type]
    return [kind.value_type] if isinstance(kind, inspect.DictType) and step is None else []


def _wanted(types: Sequence[inspect.Type]) -> str:
    words = list(dict.fromkeys(word for each in types for word in _in_words(each)))
    words.sort(key=lambda word: word == "null")  # it stands last
    return one_of(words) if words else ""


def _in_words(kind: inspect.Type) -> list[str]:
    if isinstance(kind, inspect.LiteralType):
        return [repr(value) for value in kind.values]
    if isinstance(kind, inspect.BoolType):
        return ["true", "false"]
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        return [("an integer" if isinstance(kind, inspect.IntType) else "a number") + _range(kind)]
    if isinstance(kind, inspect.StrType):
        return ["a string" + _length(kind)]
    if isinstance(kind, inspect.ListType) and (of := _wanted(_alternatives(kind.item_type))):
        return [f"a list of {_count(kind)}{_plural(of)}"]
    word = _WORDS.get(type(kind))
    return [] if word is None else [word]


def _count(kind: inspect.ListType) -> str:
    least, most = kind.min_length or 0, kind.max_length
    if most is None:
        return f"at least {least} " if least else ""
    if least == most:
        return f"{most} "
    return f"{least} to {most} " if least else f"at most {most} "


def _plural(words: str) -> str:
    return re.sub(r"\ban? (integer|number|string|object|list)\b", r"\1s", words)


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.gt is not None:
        return f" above {kind.gt:g}" + ("" if kind.le is None else f", at most {kind.le:g}")
    if kind.ge is not None and kind.le is not None:
        return f" from {_digits(kind.ge)} to {_digits(kind.le)}"
    if kind.ge is not None:
        return f" of at least {_digits(kind.ge)}"
    return "" if kind.le is None else f" of at most {_digits(kind.le)}"


def _digits(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)


def _length(kind: inspect.StrType) -> str:
    if kind.min_length and kind.max_length is not None:
        return f" of {kind.min_length} to {kind.max_length} characters"
    if kind.max_length is not None:
        visible = " without control characters" if kind.pattern else ""
        return f" of at most {kind.max_length} characters{visible}"
    return ""


def _value_at(given: Any, steps: Sequence[str | int | None]) -> Any:
    for step in steps:
        try:
            given = given[step]
        except (LookupError, TypeError):
            return UNSET
    return given


def _hint(value: str, types: Sequence[inspect.Type]) -> str:
    literals = [each.values for each in types if isinstance(each, inspect.LiteralType)]
    choices = [choice for values in literals for choice in values if isinstance(choice, str)]
    near = nearest(value, choices)
    return "" if near is None else f" (did you mean {near!r}?)"


def printable(text: str) -> str:
    r"""Return ``text`` with unprintable characters escaped: ``\x1b``, ``\n``, ``\u202e``, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


@dataclass_transform(kw_only_default=True, frozen_default=True)
class NamedFields(msgspec.StructMeta):
    """Metaclass that answers unknown keywords with the nearest field, also of static ``fields_beside``."""

    if not TYPE_CHECKING:  # checkers read the fields; a constructor of any keywords would hide them

        def __call__(cls, /, *values: Any, **fields: Any) -> Any:  # noqa: N805 (of a metaclass)
            try:
                return _construct(cls, *values, **fields)
            except TypeError:
                names = cls.__struct_fields__
                unknown = next((name for name in fields if name not in names), None)
                if unknown is None:
                    raise
                beside = cls.fields_beside() if hasattr(cls, "fields_beside") else ()
                said = unknown_name(unknown, names, beside, place=cls.__name__)
            raise TypeError(f"{cls.__name__}: {unknown} {said}")


_construct = msgspec.StructMeta.__call__
