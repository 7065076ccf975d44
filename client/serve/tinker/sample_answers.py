"""The answer to a sampling request, as protobuf and as JSON.

Invariant: the few fields of Tinker's ``SampleResponse`` are written by hand, by their numbers, in the wire
types 0 (varint) and 2 (bytes); :data:`WEIGHTS` is our own, which other readers skip.
"""

import json
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from litestar import Response

from ...connection.results import GenerateOutput, TokenLogprobs
from ...exceptions import InvalidRequest
from ...text.tokenizer_manager import Sample
from ..error_responses import json_response

PROTOBUF = "application/x-protobuf"
HEADER = "X-Caesura-Weight-Versions"
MAX_HEADER = 4096
WEIGHTS = 1000
NO_TOKEN = (0, -99999.0)
"""Id and logprob in the place of tokens that there are none of."""
_FLOAT32 = 1


class Targets(msgspec.Struct, kw_only=True):
    """Token ids at each position of the prompt but the first; sparse with both lists of indices."""

    data: list[int]
    shape: list[int]
    dtype: str = "int64"
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None

    def check(self, rows: int) -> None:
        """Refuse what is not a matrix of ids with a row for each token of the prompt but the first."""
        crow, columns = self.sparse_crow_indices, self.sparse_col_indices
        if len(self.shape) != 2 or self.shape[0] != rows or not 0 < self.shape[1] < 2**31:
            problem = (
                f"shape {self.shape} is not [{rows}, K]: a row for each token of the prompt but the first"
            )
        elif not self.tokens():
            problem = "no id is given"
        elif crow is None:
            problem = "" if len(self.data) == math.prod(self.shape) else "data and shape do not match"
        else:
            ascends = [*crow] == sorted(crow) and crow[:1] == [0] and crow[-1:] == [len(self.data)]
            inside = all(0 <= column < self.shape[1] for column in columns or ())
            whole = ascends and inside and len(crow) == rows + 1 and len(columns or ()) == len(self.data)
            problem = "" if whole else "the sparse indices do not match data and shape"
        if problem:
            raise InvalidRequest(f"target_prompt_logprobs: {problem}", field="target_prompt_logprobs")

    def tokens(self) -> list[int]:
        """Return the different ids."""
        return sorted({token for token in self.data if token >= 0})

    def cells(self) -> list[tuple[int, int]]:
        """Return the row and the id of each value; -1 stands for none."""
        crow = self.sparse_crow_indices
        if crow is None:
            return [(i // self.shape[1], token) for i, token in enumerate(self.data)]
        rows = [row for row in range(len(crow) - 1) for _ in range(crow[row], crow[row + 1])]
        return list(zip(rows, self.data, strict=True))


class Wanted(NamedTuple):
    """Parts of the answer, beside tokens and their logprobs."""

    prompt_logprobs: bool = False
    top_prompt: int = 0
    top_sample: int = 0
    last: int | None = None
    """Number of the prompt's last tokens that are scored; None means all but the first."""
    targets: Targets | None = None

    def values(self, samples: Sequence[Sample]) -> int:
        """Return the number of logprobs in the answer."""
        sampled = sum(len(sample.output.output_ids) for sample in samples) * (1 + self.top_sample)
        targets = 0 if self.targets is None else len(self.targets.data)
        return sampled + samples[0].output.prompt_tokens * (1 + self.top_prompt) + targets


def answer(samples: Sequence[Sample], wanted: Wanted, *, protobuf: bool) -> Response[bytes]:
    """Return the response, which says in a header and in its body which weights made each token."""
    weights = [msgspec.to_builtins(sample.output.weight_versions) for sample in samples]
    if protobuf:
        encoded = _protobuf(samples, wanted) + _field(WEIGHTS, msgspec.json.encode(weights))
        response = Response(encoded, media_type=PROTOBUF)
    else:
        response = json_response(_json(samples, wanted, weights))
    header = json.dumps(weights, separators=(",", ":"))  # which has no characters but ASCII's
    if len(header) <= MAX_HEADER:
        response.headers[HEADER] = header
    return response


def _json(samples: Sequence[Sample], wanted: Wanted, weights: Sequence[Any]) -> dict[str, Any]:
    first = samples[0].output
    return {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": sample.output.finish_reason.type,
                "tokens": sample.output.output_ids,
                "logprobs": sample.output.output_logprobs,
                "topk_logprobs": _pairs(sample.output.output_top_logprobs, wanted.top_sample),
                "weight_versions": versions,
            }
            for sample, versions in zip(samples, weights, strict=True)
        ],
        "prompt_logprobs": _prompt_logprobs(first, wanted),
        "topk_prompt_logprobs": _pairs(*_prompt_top(first, wanted)),
        "prompt_cache_hit_tokens": first.cached_tokens,
    }


def _protobuf(samples: Sequence[Sample], wanted: Wanted) -> bytes:
    first = samples[0].output
    sequences = []
    for sample in samples:
        output = sample.output
        logprobs = output.output_logprobs or []
        sequence = _field(1, int(output.finish_reason.type == "length"))
        sequence += _field(2, struct.pack(f"<{len(output.output_ids)}i", *output.output_ids))
        sequence += _field(3, _floats(logprobs)) + _top(4, output.output_top_logprobs, wanted.top_sample)
        sequences.append(_field(1, sequence))
    prompt = _prompt_logprobs(first, wanted)
    return b"".join(
        [
            *sequences,
            b"" if prompt is None else _field(2, _floats([math.nan if p is None else p for p in prompt])),
            _top(3, *_prompt_top(first, wanted)),
            _field(4, first.cached_tokens),
            b"" if wanted.targets is None else _field(5, _targets(first, wanted.targets)),
        ]
    )


def _prompt_logprobs(output: GenerateOutput, wanted: Wanted) -> list[float | None] | None:
    """Return one for each token of the prompt; None where it is not wanted, and for the first."""
    if not wanted.prompt_logprobs or output.input_logprobs is None:
        return None
    known = output.input_logprobs[1:][-(wanted.last or output.prompt_tokens) :]
    return [*[None] * (output.prompt_tokens - len(known)), *known]


def _prompt_top(output: GenerateOutput, wanted: Wanted) -> tuple[TokenLogprobs | None, int, int]:
    """Return the likeliest tokens, how many of them, and how many positions before have none."""
    found = output.input_top_logprobs
    if found is None or not wanted.top_prompt:
        return None, 0, 0
    found = found.cut(max(0, len(found) - (wanted.last or len(found))))
    return found, wanted.top_prompt, output.prompt_tokens - len(found)


def _pairs(
    found: TokenLogprobs | None, count: int, before: int = 0
) -> list[list[tuple[int, float]] | None] | None:
    if found is None or not count:
        return None
    rows = [[(token, value) for value, token in found.at(i)[:count]] for i in range(len(found))]
    return [*[None] * before, *rows]


def _top(number: int, found: TokenLogprobs | None, count: int, before: int = 0) -> bytes:
    rows = _pairs(found, count, before)
    if rows is None:
        return b""
    cells = [pair for row in rows for pair in (row or [NO_TOKEN] * count)]
    ids = struct.pack(f"<{len(cells)}i", *(token for token, _ in cells))
    values = _floats([value for _, value in cells])
    return _field(number, _field(1, ids) + _field(2, values) + _field(3, count) + _field(4, len(rows)))


def _targets(output: GenerateOutput, targets: Targets) -> bytes:
    """Return the logprobs of the wanted tokens, in the layout in which these were given."""
    found = output.input_token_ids_logprobs
    rows = [] if found is None else [{id: v for v, id in found.at(i)} for i in range(len(found))]
    values = _floats([rows[row][token] if token >= 0 else 0.0 for row, token in targets.cells()])
    crow, columns = targets.sparse_crow_indices, targets.sparse_col_indices
    if crow is None or columns is None:
        layout = _field(1, values)
    else:
        indices = (struct.pack(f"<{len(each)}q", *each) for each in (crow, columns))
        layout = _field(2, _field(1, values) + b"".join(_field(i, each) for i, each in enumerate(indices, 2)))
    return layout + _field(3, _FLOAT32) + _field(4, b"".join(map(_varint, targets.shape)))


def _floats(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])
