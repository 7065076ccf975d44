"""Where the ranks of an engine run, by its options or by what launchers put into the environment.

Invariants:
- Every process comes to the same ``nnodes`` and ``master_addr`` from its own options and environment.
- An option wins over the environment, which counts only with ``tp`` above 1.
- Options and variables that contradict each other are refused by name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ..io_struct.errors import CaesuraError, ErrorCode

DEFAULT_PORT = 29600
"""Port of rank 0 where nothing names one."""
_SLURM_PORTS = range(20_000, 30_000)
"""Ports of rank 0 in steps of Slurm, one by job and step: below those that the kernel hands out."""
_LOOPBACK = "127.0.0.1"
_NEEDED = {"nnodes": "given", "node_rank": "the number of this node", "master_addr": "the address of node 0"}
"""Options of a place, each with what it is."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Place of one process among ``nnodes``, each of which has as many ranks."""

    nnodes: int
    node_rank: int
    master_addr: str
    """``HOST:PORT`` where workers join."""
    first_device: int = 0
    """Index of the device of the node's first rank."""

    def options(self, tp: int) -> dict[str, Any]:
        """Return the options of an engine of ``tp`` ranks that this places."""
        return {
            "nnodes": self.nnodes,
            "node_rank": self.node_rank,
            "master_addr": self.master_addr,
            "tp_joined": tp - tp // self.nnodes,
            "tp_address": f"tcp://{self.master_addr}",
        }

    def ranks(self, tp: int) -> range:
        count = tp // self.nnodes
        return range(self.node_rank * count, (self.node_rank + 1) * count)


@dataclass(frozen=True, slots=True)
class _Processes:
    """The processes that a launcher has started together, and the place of this one."""

    count: int
    index: int
    nodes: int
    local_index: int
    host: str
    port: int
    variable: str
    """Name of the variable that has ``count``."""


def place_of(options: Mapping[str, Any], environment: Mapping[str, str]) -> Placement | None:
    """Return the place of the process with these options; None: its engine has one node.

    Raises ``invalid_request``.
    """
    tp = options["tp"]
    given = {name: options[name] for name in _NEEDED if options[name] is not None}
    by_hand = [name for name in ("tp_joined", "tp_address") if options.get(name)]
    started = None
    if tp > 1 and not by_hand and given.get("nnodes") != 1 and len(given) < len(_NEEDED):
        started = _torchrun(environment) or _slurm(environment) or _leader_worker_set(environment)
    if started is None and given.get("nnodes", 1) == 1:
        _refuse_others(given)
        return None
    found = {} if started is None else _found(started, tp, given, environment)
    place = found | given
    for name, what in _NEEDED.items():
        if name not in place:
            raise _refused(name, None, f"must be {what} with nnodes = {given['nnodes']}")
    count, index = place["nnodes"], place["node_rank"]
    if count < 1 or tp % count:
        raise _refused("nnodes", count, f"must divide tp = {tp}")
    if not 0 <= index < count:
        raise _refused("node_rank", index, f"must be from 0 to {count - 1} with nnodes = {count}")
    for name in by_hand:
        raise _refused(name, options[name], "is for workers that are started by hand, without nnodes")
    return Placement(**place | {"master_addr": _with_port(place["master_addr"])})


def _refuse_others(given: Mapping[str, Any]) -> None:
    """Refuse options that say nothing about an engine of one node; with nnodes = 1 scripts may give them."""
    if "nnodes" not in given:
        for name, value in given.items():
            raise _refused(name, value, "needs nnodes")
    if given.get("node_rank"):
        raise _refused("node_rank", given["node_rank"], "must be below nnodes = 1")


def _found(
    started: _Processes, tp: int, given: Mapping[str, Any], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return the options that the launcher of ``started`` has answered."""
    origin = f"{started.variable} = {started.count}"
    if given.get("nnodes", started.count) != started.count:
        reason = f"contradicts {origin}: give node_rank and master_addr, too, or none of them"
        raise _refused("nnodes", given["nnodes"], reason)
    if started.count != tp and (started.count != started.nodes or tp % started.count):
        reason = (
            f"contradicts {origin} on {started.nodes} nodes: there must be one process for each rank or "
            "node; nnodes = 1 has each process run an engine of its own"
        )
        raise _refused("tp", tp, reason)
    found = {
        "nnodes": started.count,
        "node_rank": started.index,
        "master_addr": f"{started.host}:{started.port}",
    }
    # a launcher may show each process its own device alone
    shares = started.count > started.nodes and "," in environment.get("CUDA_VISIBLE_DEVICES", ",")
    return found | {"first_device": started.local_index} if shares else found


def _torchrun(environment: Mapping[str, str]) -> _Processes | None:
    """Read what torchrun sets, and who starts processes as torch.distributed's ``env://`` wants it."""
    name = "WORLD_SIZE"
    if not {name, "RANK", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return None
    count = _number(environment, name)
    local = _number(environment, "LOCAL_WORLD_SIZE", 1)
    # torchrun itself listens at MASTER_PORT
    port = _number(environment, "MASTER_PORT") + (environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
    host = _LOOPBACK if count == local else environment["MASTER_ADDR"]
    return _of_several(
        _Processes(
            count,
            _number(environment, "RANK"),
            max(1, count // max(1, local)),
            _number(environment, "LOCAL_RANK", 0),
            host,
            port,
            name,
        )
    )


def _slurm(environment: Mapping[str, str]) -> _Processes | None:
    """Read what srun sets for each task of a step; a batch script is none."""
    name = "SLURM_STEP_NUM_TASKS"
    if name not in environment:
        return None
    nodes = _number(environment, "SLURM_STEP_NUM_NODES")
    job, step = _number(environment, "SLURM_JOB_ID", 0), _number(environment, "SLURM_STEP_ID", 0)
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    return _of_several(
        _Processes(
            _number(environment, name),
            _number(environment, "SLURM_PROCID"),
            nodes,
            _number(environment, "SLURM_LOCALID", 0),
            _LOOPBACK if nodes == 1 else first_host(hosts),
            _SLURM_PORTS[(job + step) % len(_SLURM_PORTS)],
            name,
        )
    )


def _leader_worker_set(environment: Mapping[str, str]) -> _Processes | None:
    """Read what Kubernetes' LeaderWorkerSet sets in each pod of a group."""
    name = "LWS_GROUP_SIZE"
    if name not in environment:
        return None
    count = _number(environment, name)
    index = _number(environment, "LWS_WORKER_INDEX")
    host = environment.get("LWS_LEADER_ADDRESS", "")
    return _of_several(_Processes(count, index, count, 0, host, DEFAULT_PORT, name))


def _of_several(started: _Processes) -> _Processes | None:
    return started if started.count > 1 else None


def first_host(hosts: str) -> str:
    """Return the first name of a list as Slurm writes it: ``gpu[08-11,14],login`` has ``gpu08``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    assert first is not None
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise _refused(name, text, "is no number")
    return int(text)


def _with_port(address: str) -> str:
    """Return ``HOST:PORT``, with the default port if ``address`` has none."""
    problem = "is no address HOST:PORT"
    try:
        parts = urlsplit(f"//{address}")
        port = parts.port
    except ValueError as error:
        raise _refused("master_addr", address, problem) from error
    if not parts.hostname or parts.netloc != address or "@" in address:
        raise _refused("master_addr", address, problem)
    return address if port is not None else f"{address.removesuffix(':')}:{DEFAULT_PORT}"


def _refused(field: str, value: object, reason: str) -> CaesuraError:
    return CaesuraError(ErrorCode.INVALID_REQUEST, f"{field} = {value!r} {reason}", field=field, value=value)
