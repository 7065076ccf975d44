"""Rollouts on disk: a line of JSON for each sample, with what it takes to compute it again.

A record has the prompt, parameters and seed, the tokens with their logprobs or the steps with their latents,
and the digests of the weights that made them (``weight_versions``). ``verify.py`` tests it with checkpoints.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ..io_struct import RoutedExperts, SamplingMask, SamplingParams, WeightVersionSpan
from .connection.image_generation import ImageOutput
from .connection.results import GenerateOutput
from .exceptions import InvalidRequest


class RolloutRecord(
    msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, tag_field="format", tag="caesura_rollout_1"
):
    """One sample; lists over tokens have an entry for each of ``output_ids``."""

    rid: str
    """Request id."""
    index: int = 0
    """Index of the sample in its request; with ``seed`` it makes the noise."""
    seed: int
    """Seed that was used."""
    input_ids: list[int]
    """Prompt, at least one token."""
    output_ids: list[int]
    """Output tokens."""
    sampling_params: SamplingParams
    """Parameters of the request."""
    weight_versions: list[WeightVersionSpan]
    """Spans that cover the output, each with the digest of its weights."""
    output_logprobs: list[float] | None = None
    """Logprobs of the output tokens. None: not verified, as the fields that follow."""
    raw_logprobs: list[float] | None = None
    """Logprobs under the unmodified logits."""
    sampling_mask: SamplingMask | None = None
    """Tokens that top-k, top-p and min-p kept."""
    routed_experts: RoutedExperts | None = None
    """Experts of each position but the last."""

    @staticmethod
    def of(
        input_ids: Sequence[int], sampling_params: SamplingParams | Mapping[str, Any], output: GenerateOutput
    ) -> "RolloutRecord":
        """Return the record of ``output``, which a request with these arguments has returned."""
        params = (
            sampling_params
            if isinstance(sampling_params, SamplingParams)
            else SamplingParams(**sampling_params)
        )
        named = (name for name in RolloutRecord.__struct_fields__ if hasattr(output, name))
        return RolloutRecord(
            input_ids=[*input_ids],
            sampling_params=params,
            **{name: getattr(output, name) for name in named},
        )

    def __len__(self) -> int:
        return len(self.output_ids)


class ImageRecord(
    msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, tag_field="format", tag="caesura_image_1"
):
    """One image, as its steps; ``step_indices`` and ``latent_indices`` are those of an ``ImageOutput``."""

    rid: str
    """Request id."""
    index: int = 0
    """Index of the sample in its request; with ``seed`` it makes the noise."""
    seed: int
    """Seed that was used."""
    prompt: str | None
    """Text, or None where ``options`` have ids."""
    options: dict[str, Any]
    """Further keywords of the request."""
    weight_versions: list[WeightVersionSpan]
    """Spans over the steps that were made, each with the digest of its weights."""
    step_indices: list[int]
    """Steps with a log-probability."""
    log_probs: list[float]
    """Log-probability of each of ``step_indices``."""
    latent_indices: list[int] = []
    """Places of ``latents`` in the grid."""
    latents: list[bytes] = []
    """float32 of each place."""

    @staticmethod
    def of(prompt: str | None, options: Mapping[str, Any], output: ImageOutput) -> "ImageRecord":
        """Return the record of ``output``, which ``generate_images(prompt, **options)`` has returned."""
        given = {name: value for name, value in options.items() if name not in ("n", "seed", "return_steps")}
        if given.get("embeds") is not None:
            raise InvalidRequest("a record has a prompt or its ids, not embeddings", field="embeds")
        named = ("rid", "index", "seed", "weight_versions", "step_indices", "log_probs", "latent_indices")
        data = memoryview(b"" if output.latents is None else output.latents.data)
        size = len(data) // max(1, len(output.latent_indices))
        return ImageRecord(
            prompt=prompt,
            options=msgspec.to_builtins(given),
            latents=[bytes(data[at * size :][:size]) for at in range(len(output.latent_indices))],
            **{name: getattr(output, name) for name in named},
        )

    def __len__(self) -> int:
        return self.weight_versions[-1].end if self.weight_versions else 0


Record = RolloutRecord | ImageRecord


def save_rollouts(path: str | os.PathLike[str], records: Iterable[Record]) -> None:
    """Append records to the file ``path``."""
    with open(path, "ab") as file:
        file.writelines(msgspec.json.encode(record) + b"\n" for record in records)


def read_rollouts(path: str | os.PathLike[str]) -> Iterator[Record]:
    """Yield the records of a file. Raises ValueError with the number of a line that is none."""
    decode = msgspec.json.Decoder(Record).decode
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = decode(line)
            except msgspec.DecodeError as error:
                raise ValueError(f"{os.fspath(path)}, line {number}: {error}") from error
            _require_lengths(record, f"{os.fspath(path)}, line {number}")
            yield record


def _require_lengths(record: Record, where: str) -> None:
    count = len(record)
    spans = [edge for span in record.weight_versions for edge in (span.start, span.end)]
    whole = not count or (spans[:1] == [0] and spans[1:-1:2] == spans[2::2] and spans[-1:] == [count])
    if isinstance(record, ImageRecord):
        pairs = (record.step_indices, record.log_probs), (record.latent_indices, record.latents)
        if not whole or any(len(one) != len(other) for one, other in pairs):
            raise ValueError(f"{where}: its lists or spans do not cover its {count} steps")
        return
    lists = (record.output_logprobs, record.raw_logprobs, record.sampling_mask)
    if not whole or any(each is not None and len(each) != count for each in lists) or not record.input_ids:
        raise ValueError(f"{where}: its lists or spans do not cover its {count} tokens")
