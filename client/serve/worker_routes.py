"""The engines behind one server, by sglang-router's routes: listed, added from other hosts, and taken out.

Invariants: an engine that is added serves with the weights of the others when the call is answered, or is not
there. The requests of one that is taken out continue on others; the engine itself goes on.
"""

import hashlib
import time
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from litestar import Response, delete, get
from litestar.params import FromPath

from ..exceptions import InvalidRequest, Unsupported
from ..group.members import EngineAddress, Member
from .bodies import Strict
from .commands import Form, answered, command
from .context import Front, FrontEnd
from .error_responses import json_response

if TYPE_CHECKING:
    from ..group.replicas import ReplicaFleet

_KEY = msgspec.Meta(min_length=40, max_length=40)
_FORM = Form(lambda _, found: found)


class WorkerBody(Strict, kw_only=True):
    url: str
    """``tcp://HOST:PORT`` or ``ipc://PATH`` of a running scheduler."""
    curve_server_key: Annotated[str, _KEY] | None = None
    """CURVE public key of the engine; null: that of ``--curve-server-key``. Caesura's own."""
    worker_type: Literal["regular"] | None = None
    # refused unless empty
    bootstrap_port: Any = None

    REFUSED: ClassVar = ("bootstrap_port",)


@command("/workers", _FORM)
async def add_worker(front: FrontEnd, body: WorkerBody) -> dict[str, Any]:
    """Add a running engine; it gets the weights that the others serve, which the call waits for."""
    if body.bootstrap_port:
        raise Unsupported("bootstrap_port is not supported: every engine prefills", field="bootstrap_port")
    options, began = front.options, time.monotonic()
    server_key = body.curve_server_key or options.curve_server_key
    address = EngineAddress(body.url, server_key, options.curve_client_key_file)
    member = await _fleet(front).add(address)
    return {**_worker(member), "joined_s": time.monotonic() - began}


@get("/workers", opt={"access": "admin"})
async def workers(front: Front) -> Response[bytes]:
    """List the engines: which of them serve, and why others do not."""
    found = [_worker(member) for member in _fleet(front).members]
    healthy = sum(worker["is_healthy"] for worker in found)
    return json_response({"workers": found, "total": len(found), "stats": {"healthy_count": healthy}})


@get("/workers/{worker_id:str}", opt={"access": "admin"})
async def worker(front: Front, worker_id: FromPath[str]) -> Response[bytes]:
    return json_response(_worker(_named(_fleet(front), worker_id)))


@delete("/workers/{worker_id:str}", opt={"access": "admin"}, status_code=200)
async def remove_worker(front: Front, worker_id: FromPath[str]) -> Response[bytes]:
    """Take an engine out; its requests continue on others."""

    async def remove() -> dict[str, Any]:
        fleet = _fleet(front)
        member = _named(fleet, worker_id)
        await fleet.remove(member.name)
        return _worker(member)

    return await answered(front, "workers", _FORM, None, remove())


def _fleet(front: FrontEnd) -> "ReplicaFleet":
    if front.fleet is None:
        raise Unsupported("this server has one engine: start it with --worker-urls or --replicas")
    return front.fleet


def _named(fleet: "ReplicaFleet", worker_id: str) -> Member:
    for member in fleet.members:
        if worker_id in (_id(member), member.name):
            return member
    raise InvalidRequest(f"there is no worker {worker_id!r}", field="worker_id", value=worker_id)


def _id(member: Member) -> str:
    return hashlib.blake2b(member.name.encode(), digest_size=8).hexdigest()


def _worker(member: Member) -> dict[str, Any]:
    return {
        "id": _id(member),
        "url": member.address.endpoint,
        "worker_type": "regular",
        "is_healthy": member.serves,
        "load": member.load,
        "state": member.state,
        "reason": member.reason,
    }
