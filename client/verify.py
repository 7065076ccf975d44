"""Computes stored rollouts again, and says which token is not what its record claims.

- A span is tested on an engine whose weights have its digest, and on no other.
- Every token is sampled again from its own prefix with its seed, over the cached KV of the recorded tokens.
  So logprob and kept set are those of its temperature, penalties and filters.
- Prefill and decode may round differently. A token that is not drawn again is a finding only if it is not
  among the kept ones, or a likelier one would have been taken; ``strict`` makes each of them one.
- Tokens with stale KV cannot be computed again, because their KV is of several weights: they are counted.
- An image is made again from its seed. Steps after an update are counted: no weights alone make their latent.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from ..io_struct import CaesuraError, RoutedExperts, SamplingParams, WeightVersionSpan
from ..io_struct.generate import GREEDY_BELOW, removes_tokens
from .connection.blocking import SchedulerClient
from .connection.results import GenerateOutput, read_floats
from .launch.launcher import launch_scheduler
from .rollout_records import ImageRecord, Record, RolloutRecord, read_rollouts

DEFAULT_BOUND = 0.05
_SHOWN = 20
_AT_ONCE = 256
"""Requests that an engine is given together."""


@dataclass(frozen=True, slots=True)
class Finding:
    token: int
    """Index of the output token, or of an image's step."""
    reason: str


@dataclass(slots=True)
class Verdict:
    """The result for one record."""

    record: Record
    findings: list[Finding] = field(default_factory=list)
    verified: int = 0
    """Tokens or steps that were computed again."""
    drawn_again: int = 0
    """Verified tokens that the seed draws again, or steps without a finding."""
    stale: int = 0
    """Tokens or steps that cannot be computed again, because they depend on several weights."""
    largest: float = 0.0
    """Largest difference of a logprob, or of a latent's element."""

    def differs(self, name: str, claimed: float, found: float, bound: float) -> list[str]:
        """Return a reason if ``found`` is not what was claimed."""
        difference = 0.0 if claimed == found else abs(claimed - found)
        self.largest = max(self.largest, difference)
        return [] if difference <= bound else [f"{name} {claimed:.4f} is {found:.4f}"]


def verify(
    records: Sequence[Record],
    models: Iterable[str],
    *,
    adapters: Iterable[str] = (),
    bound: float = DEFAULT_BOUND,
    strict: bool = False,
    **engine: Any,
) -> list[Verdict]:
    """Return a verdict on each record; ``engine`` are options of :func:`launch_scheduler`.

    ``models`` and ``adapters`` are folders. An engine is started on one model after the other, until all
    digests are found.
    """
    verdicts, adapters = [Verdict(record) for record in records], [*adapters]
    waiting = {at: [*record.weight_versions] for at, record in enumerate(records)}
    for at, spans in waiting.items():
        is_image = isinstance(records[at], ImageRecord)
        waiting[at] = [span for span in spans if not (span.stale_kv or (is_image and span.start))]
        verdicts[at].stale = sum(span.end - span.start for span in spans if span not in waiting[at])
    found: dict[str, str] = {}
    for model in models:
        if not any(waiting.values()):
            break
        with launch_scheduler(model, enable_lora=bool(adapters), **engine) as client:
            status = client.status()
            found[model] = status.digest
            names = _load(client, adapters)
            for at, spans in waiting.items():
                mine = [
                    s for s in spans if s.digest and s.digest == status.digest and s.adapter_digest in names
                ]
                for span in mine:
                    record = records[at]
                    if isinstance(record, ImageRecord):
                        _test_image(client, verdicts[at], record, span.end, bound)
                        continue
                    adapter = names[span.adapter_digest]
                    _Test(client, verdicts[at], record, span, adapter, bound, strict).run()
                waiting[at] = [span for span in spans if span not in mine]
    for at, spans in waiting.items():
        verdicts[at].findings += [_without_weights(span, found) for span in spans]
        verdicts[at].findings.sort(key=lambda finding: finding.token)
    return verdicts


def _load(client: SchedulerClient, adapters: Sequence[str]) -> dict[str, str | None]:
    """Load adapters; return the name by digest, None for the model itself."""
    names: dict[str, str | None] = {"": None}
    for number, path in enumerate(adapters):
        name = f"verified-{number}"
        names[client.load_adapter(name, path).digest] = name
    return names


def _without_weights(span: WeightVersionSpan, found: Mapping[str, str]) -> Finding:
    if not span.digest:
        reason = "no digest of their weights is recorded: the engine kept none"
        return Finding(span.start, f"tokens {span.start} to {span.end - 1}: {reason}")
    given = ", ".join(f"{model} has {digest or 'none'}" for model, digest in found.items())
    reason = f"no model has the digest {span.digest} of version {span.version!r}: {given}"
    if span.digest in found.values():
        reason = f"no adapter has the digest {span.adapter_digest} of {span.adapter!r}"
    return Finding(span.start, f"tokens {span.start} to {span.end - 1}: {reason}")


def _test_image(
    client: SchedulerClient, verdict: Verdict, record: ImageRecord, end: int, bound: float
) -> None:
    """Make the image again, and compare what was recorded of its first ``end`` steps."""
    options = {**record.options, "n": record.index + 1, "output": "latents", "return_embeds": False}
    made = client.generate_images(
        record.prompt, seed=record.seed, return_steps=record.step_indices, **options
    )
    again = made[record.index] if isinstance(made, list) else made
    ours = ImageRecord.of(record.prompt, record.options, again)
    probs = dict(zip(ours.step_indices, ours.log_probs, strict=True))
    latents = dict(zip(ours.latent_indices, ours.latents, strict=True))
    found: dict[int, list[str]] = {}
    for step, claimed in zip(record.step_indices, record.log_probs, strict=True):
        if step < end:
            found.setdefault(step, []).extend(verdict.differs("logprob", claimed, probs[step], bound))
    for place, data in zip(record.latent_indices, record.latents, strict=True):
        if place <= end:
            reasons = found.setdefault(max(place - 1, 0), [])
            where = f"the latent {'after it' if place else 'before it'}"
            if len(data) != len(latents.get(place, b"")):
                reasons.append(f"{where} has {len(data)} bytes, not {len(latents.get(place, b''))}")
                continue
            each = zip(read_floats(data), read_floats(latents[place]), strict=True)
            reasons += verdict.differs(
                f"{where}: an element", *max(each, key=lambda pair: abs(pair[0] - pair[1])), bound
            )
    verdict.verified += end
    verdict.drawn_again += end - sum(map(bool, found.values()))
    verdict.findings += [
        Finding(step, f"step {step}: {text}") for step, each in found.items() for text in each
    ]


@dataclass(slots=True)
class _Test:
    client: SchedulerClient
    verdict: Verdict
    record: RolloutRecord
    span: WeightVersionSpan
    adapter: str | None
    bound: float
    strict: bool

    def run(self) -> None:
        record, span = self.record, self.span
        prompt, params = [*record.input_ids, *record.output_ids[: span.end - 1]], record.sampling_params
        routed = record.routed_experts
        # It fills the prefix cache, over which the tokens are sampled.
        whole = self.client.generate(
            prompt,
            SamplingParams(max_new_tokens=1),
            return_routed_experts=routed is not None,
            routed_experts_start_len=0 if routed is None else routed.start,
            adapter=self.adapter,
        )
        if routed is not None:
            self._compare_routing(routed, whole.routed_experts)
        for first in range(span.start, span.end, _AT_ONCE):
            tokens = range(first, min(first + _AT_ONCE, span.end))
            submitted = [
                self.client.submit(
                    [*record.input_ids, *record.output_ids[:token]],
                    msgspec.structs.replace(
                        params,
                        n=1,
                        seed=record.seed,
                        max_new_tokens=1,
                        min_new_tokens=int(params.min_new_tokens > token),
                    ),
                    return_logprob=True,
                    return_raw_logprob=True,
                    token_ids_logprob=[record.output_ids[token]],
                    return_sampling_mask=removes_tokens(params),
                    first_sample=record.index,
                    continued_tokens=token,
                    adapter=self.adapter,
                )
                for token in tokens
            ]
            for token, handle in zip(tokens, submitted, strict=True):
                self._compare(token, handle.result())

    def _compare(self, token: int, again: GenerateOutput) -> None:
        record, verdict = self.record, self.verdict
        claimed, drawn = record.output_ids[token], again.output_ids[0]
        assert again.output_token_ids_logprobs is not None and again.output_logprobs is not None
        found = again.output_token_ids_logprobs.logprobs[0]
        verdict.verified += 1
        verdict.drawn_again += drawn == claimed
        reasons = []
        if record.output_logprobs is not None:
            reasons += verdict.differs("logprob", record.output_logprobs[token], found, self.bound)
        if record.raw_logprobs is not None and again.raw_logprobs is not None and drawn == claimed:
            reasons += verdict.differs(
                "raw logprob", record.raw_logprobs[token], again.raw_logprobs[0], self.bound
            )
        if drawn != claimed:
            kept = None if again.sampling_mask is None else again.sampling_mask.at(0)
            lead = again.output_logprobs[0] - found
            if kept is not None and claimed not in kept:
                reasons.append(f"it is not among the {len(kept)} tokens that the filters keep")
            elif record.sampling_params.temperature < GREEDY_BELOW and lead > self.bound:
                reasons.append(f"token {drawn} is likelier by {lead:.4f}, and the sample is greedy")
            elif math.isinf(found):
                reasons.append("it cannot be sampled with these parameters")
            elif self.strict:
                reasons.append(f"seed {record.seed} draws token {drawn}")
        if record.sampling_mask is not None and claimed not in record.sampling_mask.at(token):
            reasons.append("it is not in its own sampling mask")
        verdict.findings += [Finding(token, f"token {token} (id {claimed}): {reason}") for reason in reasons]

    def _compare_routing(self, claimed: RoutedExperts, found: RoutedExperts | None) -> None:
        """Compare the experts of positions that tokens of the span, or its prompt, come from."""
        if found is None:
            self.verdict.findings.append(Finding(self.span.start, "the model has no experts to route to"))
            return
        behind = len(self.record.input_ids) - 1
        first = 0 if self.span.start == 0 else behind + self.span.start
        theirs = dict(_rows(found))
        for position, row in _rows(claimed):
            if first <= position < behind + self.span.end and row != theirs.get(position):
                token = max(position - behind, 0)
                where = f"token {token}" if position >= behind else f"prompt position {position}"
                self.verdict.findings.append(Finding(token, f"{where}: its experts differ"))


def _rows(routed: RoutedExperts) -> Iterator[tuple[int, list[list[int]]]]:
    """Yield each position with the chosen experts of its layers, ascending."""
    rows, layers, chosen = routed.shape
    ids = memoryview(routed.data).cast("B" if routed.dtype == "U8" else "H")
    for row in range(rows):
        starts = (chosen * (row * layers + layer) for layer in range(layers))
        yield routed.start + row, [sorted(ids[start : start + chosen]) for start in starts]


def _option(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals:
            raise click.BadParameter(f"{each!r} is not NAME=VALUE")
        options[name.replace("-", "_")] = {"true": True, "false": False}.get(value, value)
    return options


@click.command("verify")
@click.argument("record", type=click.Path(exists=True, dir_okay=False))
@click.option("--model", "models", multiple=True, required=True, type=click.Path(), help="Checkpoint folder.")
@click.option("--adapter", "adapters", multiple=True, type=click.Path(), help="Folder of an adapter.")
@click.option(
    "--bound",
    type=click.FloatRange(0.0),
    default=DEFAULT_BOUND,
    show_default=True,
    help="Largest difference of a logprob.",
)
@click.option("--strict", is_flag=True, help="Each token must be drawn again by its seed.")
@click.option(
    "-o",
    "--engine-option",
    "engine",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_option,
    help="Option of the engines: dtype=float32, deterministic=true, ...",
)
def verify_command(
    record: str,
    models: tuple[str, ...],
    adapters: tuple[str, ...],
    bound: float,
    strict: bool,
    engine: dict[str, Any],
) -> None:
    """Compute the rollouts of RECORD again, each with the checkpoint that has the digest of its weights.

    Exit status 1 if a token is not what its record claims, or no checkpoint has its digest.
    """
    try:
        records = [*read_rollouts(record)]
        verdicts = verify(records, models, adapters=adapters, bound=bound, strict=strict, **engine)
    except (CaesuraError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    console = Console(highlight=False, markup=False)
    table = Table("rollout", "length", "verified", "drawn again", "stale", "largest difference", "findings")
    for number, each in enumerate(verdicts):
        counts = len(each.record), each.verified, each.drawn_again, each.stale
        table.add_row(str(number), *map(str, counts), f"{each.largest:.2g}", str(len(each.findings)))
    console.print(table)
    for number, each in enumerate(verdicts):
        for finding in each.findings[:_SHOWN]:
            console.print(f"rollout {number}, {finding.reason}")
        if len(each.findings) > _SHOWN:
            console.print(f"rollout {number}: {len(each.findings) - _SHOWN} more")
    if any(each.findings for each in verdicts):
        raise SystemExit(1)
