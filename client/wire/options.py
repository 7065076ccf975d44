"""What the methods of both clients take and give beyond plain values."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, TypedDict

from ...io_struct import BeginWeightUpdateReqOutput, WeightUpdateReqOutput, new_id
from ..exceptions import InvalidRequest
from .curve import ClientKeys, KeyOrFile

DEFAULT_CONNECT_TIMEOUT_S = 10.0
DEFAULT_KEEPALIVE_TIMEOUT_S = 120.0
"""Sixty keepalives: the engine sends none while it is inside of one C call, such as a step or a large copy."""

LONGEST_S = 1e9
"""Thirty years: beyond it is for ever."""

CheckerAction = Literal["checksum", "snapshot", "compare", "reset_tensors"]


class ConnectionOptions(TypedDict, total=False):
    """Keywords of every client, with the defaults where left out."""

    connect_timeout: float | None
    """Seconds that a call waits for a scheduler to appear; default 10, None: for ever. After that was in vain, and a second after
    an engine was lost, calls fail as soon as one try to connect has."""
    keepalive_timeout: float | None
    """An engine that says nothing for so many seconds while something is unanswered counts as hung: what is pending fails with
    :class:`EngineDied`. Default 120, None: never (docs/lifecycle.md, "Clients and lost engines")."""
    curve_server_key: KeyOrFile | None
    """Public key of an engine that has keys, or a file of it, as ``caesura keygen`` writes it. None, the default: it has none."""
    curve_client_key_file: KeyOrFile | None
    """The client's own pair for such an engine."""


class ChannelOptions(TypedDict):
    """:class:`ConnectionOptions`, checked, as a channel takes them."""

    connect_timeout: float | None
    keepalive_timeout: float | None
    keys: ClientKeys | None


class GenerateOptions(TypedDict, total=False):
    """Keywords of every generation: fields of :class:`~caesura.io_struct.GenerateReqInput`, with its defaults where left out."""

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
    """Keywords of every weight update, with the engine's defaults where left out."""

    weight_version: str | None
    """The new public label, at commit. None, the default: unchanged."""
    flush_cache: bool
    """True, the default: requests that run are retracted and the prefix cache is cleared. False: they are frozen in place."""
    torch_empty_cache: bool
    """Also return the allocator's unused blocks; default False."""
    abort_all_requests: bool
    """End every request first; default False."""
    session_id: str | None
    """The open session that the update belongs to. Left out: that which this client began, if one is open."""


@dataclass(slots=True)
class WeightUpdate:
    """What ``weight_update(...)`` hands to its block."""

    opened: BeginWeightUpdateReqOutput
    """The answer to ``begin``, with the ``session_id``."""
    result: WeightUpdateReqOutput | None = None
    """The reply to the commit; None until the block has ended well."""


def channel_options(given: ConnectionOptions) -> ChannelOptions:
    """What a channel is made with.

    Raises:
        InvalidRequest: a time is no number; a key or its file cannot be used.
        TypeError: an option that there is not.
    """
    if unknown := given.keys() - ConnectionOptions.__annotations__.keys():
        raise TypeError(f"a client has no option {', '.join(sorted(unknown))}")
    keys = ClientKeys.read(given.get("curve_server_key"), given.get("curve_client_key_file"))
    connect = given.get("connect_timeout", DEFAULT_CONNECT_TIMEOUT_S)
    keepalive = given.get("keepalive_timeout", DEFAULT_KEEPALIVE_TIMEOUT_S)
    return ChannelOptions(
        connect_timeout=seconds("connect_timeout", connect),
        keepalive_timeout=seconds("keepalive_timeout", keepalive),
        keys=keys,
    )


def seconds(name: str, value: Any) -> float | None:
    """A time to wait as clocks take it: None for ever, which is what infinity and what no clock can count mean too; 0 for
    what has passed already.

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
    """``message_id``, or a fresh one."""
    return new_id() if message_id is None else message_id
