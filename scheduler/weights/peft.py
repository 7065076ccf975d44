"""Adapters as PEFT saves them: ``adapter_config.json`` and ``adapter_model.safetensors``.

Invariants: an adapter is checked against the model before a value is read; whatever would change the forward
otherwise than by ``scale * B @ A`` beside a product with weights is refused by its name in the config.
"""

import math
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Generic, TypeVar

import msgspec
import torch
from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode
from ..layers.experts import ExpertModules
from ..layers.lora import Factors
from ..layers.parameters import CASTABLE
from ..memory.storage import bytes_of
from ..runtime.dtypes import DTYPES, NAMES
from ..runtime.files import checkpoint_error, read_small
from .source import NamedSpec

CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(.+)\.lora_([AB])\.weight")
_INNER, _EXPERTS = ".base_layer", ".experts."
_COPY = re.compile(r"(.+)\.base_layer\.weight")
_PATTERN = re.compile(r"(?:\^|\.\*\\\.)?(?:[\w-]|\\?\.)+\$?")
_ANY = r".*\."
"""Beginning of a pattern that says no more than its absence: names match by their ends."""
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    **dict.fromkeys(("use_dora", "lora_bias", "fan_in_fan_out", "use_qalora"), (False, None)),
    **dict.fromkeys(("modules_to_save", "trainable_token_indices"), (None, [], {})),
    **dict.fromkeys(("layer_replication", "alora_invocation_tokens"), (None, [])),
}
"""Values of fields of which every other one changes the forward in a way that is not computed here."""

Rank = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
ValueT = TypeVar("ValueT", int, float)


class AdapterConfig(msgspec.Struct):
    """The fields of ``adapter_config.json`` that scale the factors."""

    r: Rank = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, float] | None = None


class _Pattern(Generic[ValueT]):
    """Values by names of modules, or of their ends; a name with ``^`` or ``$`` is a whole one."""

    def __init__(self, values: Mapping[str, ValueT] | None, default: ValueT) -> None:
        self._default: ValueT = default
        self._whole: dict[str, tuple[int, ValueT]] = {}
        self._ends: dict[str, tuple[int, ValueT]] = {}
        for number, (key, value) in enumerate((values or {}).items()):
            key = key.removeprefix(_ANY).replace(r"\.", ".")
            name = key.removeprefix("^").removesuffix("$")
            self._whole.setdefault(name, (number, value))
            if key == name:
                self._ends.setdefault(name, (number, value))

    def of(self, module: str) -> ValueT:
        """Return the value of the first name that matches."""
        names = [module[end + 1 :] for end, letter in enumerate(module) if letter == "."]
        found = [self._ends[name] for name in names if name in self._ends]
        if module in self._whole:
            found.append(self._whole[module])
        return min(found)[1] if found else self._default


def parse_config(data: bytes, origin: str) -> AdapterConfig:
    """Return the config; raises ``checkpoint_error``, or ``unsupported`` by the field that is not served."""
    try:
        given = msgspec.json.decode(data, type=dict[str, object])
        config = msgspec.convert(given, AdapterConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise checkpoint_error(origin, f"is not an adapter's config: {error}") from error
    for name, neutral in _NEUTRAL.items():
        value = given.get(name, neutral[0])
        if value not in neutral:
            reason = (
                f"{name} = {value!r} in {CONFIG} is not served: only LoRA beside products with weights is"
            )
            raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field=name, value=str(value)[:200])
    for field in ("rank_pattern", "alpha_pattern"):
        for key in getattr(config, field) or ():
            if not _PATTERN.fullmatch(key):  # a regular expression of strangers may take for ever
                reason = f"{field} has {key!r}: only names of modules, or of their ends, are matched"
                raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field=field, value=key[:200])
    return config


def read_config(folder: str | Path) -> AdapterConfig:
    path = Path(folder) / CONFIG
    return parse_config(read_small(path, MAX_CONFIG_BYTES), str(path))


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """A checked adapter: where each of its tensors belongs."""

    factors: dict[str, tuple[str, str, float]]
    """Names of the tensors A and B of each module, and its scale."""
    rank: int
    """The largest."""
    copies: dict[str, str]
    """Modules of the tensors that must equal the base's weights: PEFT saves an adapted head's."""
    stacked: dict[str, ExpertModules]
    """Experts of the names in ``factors`` that are parameters of all of them."""

    def values(self, tensors: Mapping[str, Tensor]) -> dict[str, Factors]:
        found: dict[str, Factors] = {}
        for module, (a, b, scale) in self.factors.items():
            given = Factors(tensors[a], tensors[b], scale)
            experts = self.stacked.get(module)
            found |= {module: given} if experts is None else _by_expert(module, given, experts)
        return found


def _by_expert(name: str, given: Factors, experts: ExpertModules) -> Iterator[tuple[str, Factors]]:
    """Yield each module's part of the factors A [experts * rank, in] and B [out, rank * experts]."""
    a = given.a.unflatten(0, (experts.count, -1))
    b = given.b.unflatten(1, (-1, experts.count)).permute(2, 0, 1).contiguous()
    for expert in range(experts.count):
        rows = b[expert]
        parts = [(experts.names.down, rows)]
        if name == experts.gate_up:
            by_turns = (
                (rows[::2].contiguous(), rows[1::2].contiguous()) if experts.names.stacked else rows.chunk(2)
            )
            parts = list(zip((experts.names.gate, experts.names.up), by_turns, strict=True))
        for part, own in parts:
            yield experts.name(expert, part), Factors(a[expert], own, given.scale)


def plan_adapter(
    config: AdapterConfig,
    specs: Iterable[NamedSpec],
    shapes: Mapping[str, tuple[int, int]],
    own_name: Callable[[str], str],
    max_rank: int,
    experts: Mapping[str, ExpertModules],
) -> AdapterPlan:
    """Check an adapter against the model; raises ``weight_mismatch`` with all that does not fit.

    ``shapes``: (outputs, inputs) of each module; ``own_name`` maps a checkpoint's tensor name to the model's.
    ``experts``: routed experts by the module that holds them, whose parameters PEFT adapts together by two
    wrappers of that module, one inside the other; their shapes tell whose is which.
    """
    specs, shapes = list(specs), dict(shapes)
    if not experts and (of_experts := [spec.name for spec in specs if _EXPERTS in spec.name]):
        reason = f"{of_experts[0]} is of routed experts, for which there is no memory here (lora_experts)"
        raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field="lora_experts", value=False)
    problems: list[str] = []
    found, copies = _given(specs, shapes, own_name, problems)
    stacked: dict[str, ExpertModules] = {}
    for module, of in ((each, experts.get(each.removesuffix(_INNER))) for each in list(found)):
        if of is not None:
            halves = found.pop(module)
            name, size = of.parameter([spec.shape for _, spec in sorted(halves.items())])
            stacked[name], shapes[name] = of, size
            if found.setdefault(name, halves) is not halves:
                problems.append(f"{name} has factors twice")
    largest = 0
    ranks, alphas = _Pattern(config.rank_pattern, config.r), _Pattern(config.alpha_pattern, config.lora_alpha)
    for module, halves in found.items():
        rank = ranks.of(module)
        count = stacked[module].count if module in stacked else 1
        problems += _problems(module, halves, shapes, count * rank)
        largest = max(largest, rank)
    if not found:
        problems.append("it has no factors")
    if problems:
        more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
        raise CaesuraError(
            ErrorCode.WEIGHT_MISMATCH,
            f"the adapter does not fit the model: {'; '.join(problems[:8])}{more}",
            problems=problems[:64],
        )
    if largest > max_rank:
        raise CaesuraError(
            ErrorCode.INVALID_REQUEST,
            f"the adapter's rank of {largest} is beyond max_lora_rank = {max_rank}",
            field="r",
            value=largest,
            limit=max_rank,
        )
    power = 0.5 if config.use_rslora else 1.0
    factors = {
        module: (halves["A"].name, halves["B"].name, alphas.of(module) / ranks.of(module) ** power)
        for module, halves in found.items()
    }
    return AdapterPlan(factors, largest, copies, stacked)


def _given(
    specs: Iterable[NamedSpec],
    shapes: Mapping[str, tuple[int, int]],
    own_name: Callable[[str], str],
    problems: list[str],
) -> tuple[dict[str, dict[str, NamedSpec]], dict[str, str]]:
    """Return the factors A and B of each module, and the modules of copies of the base's weights."""
    found: dict[str, dict[str, NamedSpec]] = {}
    copies: dict[str, str] = {}
    for spec in specs:
        name = spec.name.removeprefix(_PREFIX)
        if (match := _COPY.fullmatch(name)) and match[1] in shapes:
            copies[spec.name] = match[1]
            if tuple(spec.shape) != shapes[match[1]]:
                problems.append(f"{spec.name} is {list(spec.shape)}, not {list(shapes[match[1]])}")
            continue
        match = _FACTOR.fullmatch(name)
        if match is None:
            problems.append(f"{spec.name} is no factor of a module")
            continue
        module = own_name(f"{match[1]}.weight").removesuffix(".weight")
        halves = found.setdefault(module, {})
        if match[2] in halves:
            problems.append(f"{module} has lora_{match[2]} twice")
        halves[match[2]] = spec
    return found, copies


def _problems(
    module: str, halves: Mapping[str, NamedSpec], shapes: Mapping[str, tuple[int, int]], rank: int
) -> list[str]:
    if module not in shapes:
        return [f"{module} is no module that an adapter can change"]
    outputs, inputs = shapes[module]
    problems = []
    for half, due in (("A", [rank, inputs]), ("B", [outputs, rank])):
        spec = halves.get(half)
        if spec is None:
            problems.append(f"{module} has no lora_{half}")
        elif list(spec.shape) != due:
            problems.append(f"{spec.name} is {list(spec.shape)}, not {due}")
        elif DTYPES.get(spec.dtype) not in CASTABLE:
            problems.append(f"{spec.name} has dtype {spec.dtype}")
    return problems


class SentFactors(msgspec.Struct, array_like=True):
    """One module's factors on their way to a worker: two frames of bytes belong to it."""

    module: str
    scale: float
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]


def sent(factors: Mapping[str, Factors]) -> tuple[list[SentFactors], list[memoryview]]:
    """Return what :func:`received` makes the same factors of, and its frames: their memory, contiguous."""
    described, frames = [], []
    for module, each in factors.items():
        pair = each.a, each.b
        dtypes = NAMES[pair[0].dtype], NAMES[pair[1].dtype]
        shapes = tuple(pair[0].shape), tuple(pair[1].shape)
        described.append(SentFactors(module, each.scale, dtypes, shapes))
        frames += [memoryview(bytes_of(tensor)) for tensor in pair]
    return described, frames


def received(described: Sequence[SentFactors], frames: Sequence[memoryview]) -> dict[str, Factors]:
    found = {}
    for number, each in enumerate(described):
        a, b = (
            torch.frombuffer(frame, dtype=DTYPES[dtype]).view(shape)
            for frame, dtype, shape in zip(
                frames[2 * number : 2 * number + 2], each.dtypes, each.shapes, strict=True
            )
        )
        found[each.module] = Factors(a, b, each.scale)
    return found


def change_norm(factors: Iterable[Factors]) -> Generator[None, None, float]:
    """Return the Frobenius norm of ``scale * B @ A`` over all modules, yielding between them.

    Raises ``weights_not_finite`` if it is not.
    """
    total = 0.0
    for each in factors:
        a, b = each.a.float(), each.b.float()
        total += each.scale * each.scale * float(((b.T @ b).double() * (a @ a.T)).sum())
        yield
    if not math.isfinite(total):
        reason = "the adapter has values that are not finite, or its scale makes them so"
        raise CaesuraError(ErrorCode.WEIGHTS_NOT_FINITE, reason)
    return math.sqrt(max(total, 0.0))
