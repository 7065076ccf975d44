"""Types of the arguments and results that both clients share."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, TypedDict

from ...io_struct import BeginWeightUpdateReqOutput, WeightUpdateReqOutput, new_id
from ..exceptions import InvalidRequest
from .curve import ClientKeys, KeyOrFile

DEFAULT_CONNECT_TIMEOUT_S = 10.0
DEFAULT_KEEPALIVE_TIMEOUT_S = 120.0
"""Sixty keepalive intervals: the engine sends none during a single C call, such as a step or a large copy."""

LONGEST_S = 1e9
"""About thirty years; longer times mean no limit."""

CheckerAction = Literal["checksum", "snapshot", "compare", "reset_tensors"]


class ConnectionOptions(TypedDict, total=False):
    """Keywords of every client; all are optional."""

    connect_timeout: float | None
    """Seconds that a call waits for a scheduler to listen; 10 by default, None means no limit. After a first timeout, and a second
    after an engine was lost, calls fail as soon as one attempt to connect has."""
    keepalive_timeout: float | None
    """An engine that sends nothing for this many seconds while calls are pending counts as hung: they fail with
    :class:`EngineDied`. 120 by default, None disables the check (docs/reference/lifecycle.md, "Clients and lost engines")."""
    curve_server_key: KeyOrFile | None
    """CURVE public key of the engine, or a file that contains it, as ``caesura keygen`` writes it. None, the default, means an engine
    without keys."""
    curve_client_key_file: KeyOrFile | None
    """File with this client's CURVE key pair; needed for an engine with keys."""


class ChannelOptions(TypedDict):
    """:class:`ConnectionOptions`, checked, as a channel takes them."""

    connect_timeout: float | None
    keepalive_timeout: float | None
    keys: ClientKeys | None


class GenerateOptions(TypedDict, total=False):
    """Keywords of every generation: fields of :class:`~caesura.io_struct.GenerateReqInput`, with its defaults."""

    return_logprob: bool
    return_raw_logprob: bool
    return_sampled_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: Sequence[int] | None
    return_routed_experts: bool
    routed_experts_start_len: int
    cache_salt: str
    min_weights_epoch: int | None


class UpdateOptions(TypedDict, total=False):
    """Keywords of every weight update; all are optional."""

    weight_version: str | None
    """The new version label, set at commit. None, the default, means unchanged."""
    flush_cache: bool
    """True, the default: running requests are retracted and the prefix cache is flushed. False: they are frozen in place."""
    torch_empty_cache: bool
    """Also empty the device allocator's cache; False by default."""
    abort_all_requests: bool
    """Abort all requests first; False by default."""
    session_id: str | None
    """The open session of the update. The default is the one that this client began, if it is open."""


@dataclass(slots=True)
class WeightUpdate:
    """The value of a ``with weight_update(...)`` block."""

    opened: BeginWeightUpdateReqOutput
    """The reply to ``begin``, with the ``session_id``."""
    result: WeightUpdateReqOutput | None = None
    """The reply to the commit; None until the block has ended without an error."""


def channel_options(given: ConnectionOptions) -> ChannelOptions:
    """Checked options of a channel.

    Raises:
        InvalidRequest: a time is not a number, or a key or its file cannot be used.
        TypeError: an unknown option.
    """
    if unknown := given.keys() - ConnectionOptions.__annotations__.keys():
        raise TypeError(f"unknown client option {', '.join(sorted(unknown))}")
    keys = ClientKeys.read(given.get("curve_server_key"), given.get("curve_client_key_file"))
    connect = given.get("connect_timeout", DEFAULT_CONNECT_TIMEOUT_S)
    keepalive = given.get("keepalive_timeout", DEFAULT_KEEPALIVE_TIMEOUT_S)
    return ChannelOptions(
        connect_timeout=seconds("connect_timeout", connect),
        keepalive_timeout=seconds("keepalive_timeout", keepalive),
        keys=keys,
    )


def seconds(name: str, value: Any) -> float | None:
    """A timeout in seconds. None means no limit, and so do infinity and extremely large values; negative values become 0.

    Raises:
        InvalidRequest: it is not a number.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or value != value:
        raise InvalidRequest(
            f"{name} = {value!r} must be a number of seconds, or None", field=name, value=str(value)
        )
    number: Any = value  # integers may be larger than floats
    return None if number > LONGEST_S else max(0.0, float(number))


def id_of(message_id: str | None) -> str:
    """``message_id``, or a new one."""
    return new_id() if message_id is None else message_id
