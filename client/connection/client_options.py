"""Types of the arguments and results that both clients share."""

import operator
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Self, TypedDict

from ...io_struct import BeginWeightUpdateReqOutput, TensorSpec, WeightUpdateReqOutput, new_id
from ...io_struct.base import MAX_LABEL_LENGTH
from ...io_struct.field_errors import shown, unknown_name
from ...io_struct.weights import ReportKind
from ..exceptions import InvalidRequest
from .endpoints import ClientKeys, KeyOrFile

DEFAULT_CONNECT_TIMEOUT_S = 10.0
DEFAULT_KEEPALIVE_TIMEOUT_S = 120.0
"""Sixty keepalive intervals: the engine sends none during a single C call, such as a step or a large copy."""

LONGEST_S = 1e9
"""About thirty years; longer times mean no limit."""


class ConnectionOptions(TypedDict, total=False):
    """Keywords of every client; all are optional."""

    connect_timeout: float | None
    """Seconds that a call waits for a scheduler to listen; None means no limit. After a first timeout, and a
    second after an engine was lost, calls fail with the first failed attempt. Left out: at once if nobody
    listens, else after 10 s."""
    keepalive_timeout: float | None
    """Seconds of an engine's silence after which pending calls fail with :class:`EngineDied`: 120 by default,
    None means never."""
    curve_server_key: KeyOrFile | None
    """CURVE public key of the engine, or a file with it; None, the default: an engine without keys."""
    curve_client_key_file: KeyOrFile | None
    """File with this client's CURVE key pair; needed for an engine with keys."""


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """Checked :class:`ConnectionOptions`."""

    connect_timeout: float | None = DEFAULT_CONNECT_TIMEOUT_S
    keepalive_timeout: float | None = DEFAULT_KEEPALIVE_TIMEOUT_S
    waits_for_engine: bool = True
    """False if a scheduler must listen already: the first failed try ends what waits."""
    keys: ClientKeys | None = None

    @classmethod
    def of(cls, given: ConnectionOptions) -> Self:
        """Check the keywords of a client; InvalidRequest for a bad value, TypeError for an unknown option."""
        require_known("client", given, ConnectionOptions)
        keys = ClientKeys.read(given.get("curve_server_key"), given.get("curve_client_key_file"))
        return cls(
            seconds("connect_timeout", given.get("connect_timeout", DEFAULT_CONNECT_TIMEOUT_S)),
            seconds("keepalive_timeout", given.get("keepalive_timeout", DEFAULT_KEEPALIVE_TIMEOUT_S)),
            "connect_timeout" in given,
            keys,
        )


class OutputOptions(TypedDict, total=False):
    """Fields of :class:`~caesura.io_struct.GenerateReqInput` that every kind of generation has."""

    return_logprob: bool
    return_sampled_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: Sequence[int] | None
    return_sampling_mask: bool
    return_routed_experts: bool
    routed_experts_start_len: int
    return_hidden_states: bool
    hidden_states_layers: Sequence[int] | None
    hidden_states_start_len: int
    cache_salt: str
    prefix_lease: str | None
    prefix_lease_s: float
    adapter: str | None
    min_weights_epoch: int | None


class GenerateOptions(OutputOptions, total=False):
    """Fields of :class:`~caesura.io_struct.GenerateReqInput`, with its defaults."""

    return_raw_logprob: bool
    first_sample: int
    continued_tokens: int
    stream_details: bool


class CallOptions(TypedDict, total=False):
    """Keywords of every command; all are optional."""

    message_id: str | None
    """Id of an earlier call with the same arguments that timed out, to attach to it."""
    timeout: float | None
    """Seconds for the call. None, the default, means until the engine answers or dies."""


class UpdateOptions(TypedDict, total=False):
    """Keywords of every weight update; all are optional."""

    weight_version: str | int | None
    """The new version label, set at commit; a number becomes text. None, the default, means unchanged."""
    flush_cache: bool
    """True, the default: retract running requests and flush the prefix cache; else they are frozen."""
    torch_empty_cache: bool
    """Also empty the device allocator's cache; False by default."""
    component: str | None
    """Written component of a diffusion pipeline, such as ``vae``. None, the default: its transformer."""
    abort_all_requests: bool
    """Abort all requests first; False by default."""
    report: ReportKind | None
    """``full`` or ``sampled``: the reply says what was changed. None, the default, means the engine's."""
    min_changed: float | None
    """Least share of elements that changes. None, the default, means the engine's, if it has one."""
    max_rel_norm: float | None
    """Largest relative norm of a group's change. None, the default, means the engine's, if it has one."""
    refuse_beyond: bool | None
    """True: refuse an update beyond these bounds; False: warn. None, the default, means the engine's."""
    session_id: str | None
    """The open session of the update. The default is the one that this client began, if it is open."""


class SessionOptions(TypedDict, total=False):
    """Keywords of a weight session; all are optional."""

    manifest: list[TensorSpec] | None
    """All tensors of the checkpoint, or of ``component``: checked at once, and required by the commit."""
    component: str | None
    """Component of a diffusion pipeline that ``manifest`` describes. None means its transformer."""
    deadline_s: float | None
    """Seconds after which the session is aborted. None means the engine's ``session_deadline_s``."""


@dataclass(slots=True)
class WeightUpdate:
    """The value of a ``with weight_update(...)`` block."""

    opened: BeginWeightUpdateReqOutput
    """The reply to ``begin``, with the ``session_id``."""
    result: WeightUpdateReqOutput | None = None
    """The reply to the commit; None until the block has ended without an error."""


def must_be(field: str, given: Any, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"{field} = {shown(given)} must be {wanted}", field=field)


def require_known(kind: str, given: Mapping[str, Any], options: type) -> None:
    """Raise a TypeError that says what was meant by keywords that ``options``, a TypedDict, has not."""
    known = sorted(options.__annotations__)
    if unknown := sorted(given.keys() - set(known)):
        raise TypeError(f"{kind} option {unknown[0]} {unknown_name(unknown[0], known)}")


def seconds(name: str, value: Any) -> float | None:
    """Check a timeout in seconds: very large values mean no limit, negative ones become 0."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or value != value:
        reason = f"{name} = {value!r} must be a number of seconds, or None"
        raise InvalidRequest(reason, field=name, value=str(value))
    number: Any = value  # integers may be larger than floats
    return None if number > LONGEST_S else max(0.0, float(number))


def this_process() -> str:
    """Name this process, for the log of an engine."""
    program = os.path.basename(sys.argv[0] if sys.argv else "") or "python"
    return f"{program}, pid {os.getpid()} on {socket.gethostname()}"[:MAX_LABEL_LENGTH]


def label(weight_version: Any) -> str | None:
    """Return a version label as the wire has it; an integer, such as a step counter, becomes text."""
    if weight_version is None or isinstance(weight_version, str):
        return weight_version
    if hasattr(weight_version, "__index__") and not isinstance(weight_version, bool):
        return str(operator.index(weight_version))
    raise must_be("weight_version", weight_version, "a string or an integer")


def update_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return :class:`UpdateOptions` as fields of a message."""
    require_known("update", options, UpdateOptions)
    return {**options, "weight_version": label(options.get("weight_version"))}


def folder_of(model_path: Any) -> str:
    try:
        return os.fsdecode(model_path)
    except TypeError:
        error = must_be("model_path", model_path, "a path")
        error.detail["value"] = str(model_path)
        raise error from None


def require_group(group: Any) -> None:
    if not hasattr(group, "carry_out"):
        wanted = "a WeightUpdateGroup: WeightUpdateGroup.create([client]) makes one"
        raise must_be("group", group, wanted)


def tags_of(tags: Any) -> Any:
    """Return a list of memory tags; one alone may stand for a list. The engine checks them."""
    return [tags] if isinstance(tags, str) else tags if tags is None else list(tags)


def id_of(message_id: str | None) -> str:
    return new_id() if message_id is None else message_id
