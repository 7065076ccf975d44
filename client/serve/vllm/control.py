"""vLLM 0.33's routes for pause, sleep, caches and calls by name.

Invariants: an error that a retry cannot mend is 4xx, which trainers do not repeat. A pause that clears the
cache leaves no KV of earlier weights, neither a request's nor the prefix cache's. While some memory is
released the engine stays paused: only the wake that brings back the last of it continues, and only with valid
weights. Methods that are called by name are those of :data:`METHODS`.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from litestar import Response, get, post

from ....io_struct import CaesuraError, MemoryTag
from ....io_struct.control import LeaseAction, PositiveDuration
from ....io_struct.weights import DEFAULT_BROADCAST_TIMEOUT_S
from ...exceptions import InvalidRequest, MemoryReleased, NotIdle, Unsupported
from ..bodies import HTTPRequest, NothingBody, Strict, query_of, read_control
from ..commands import Form, answered, command
from ..context import Front, FrontEnd
from ..error_responses import json_response
from ..generations import ClientLeft, client_left, unless_left
from . import weights
from .weights import refused

PauseMode = Literal["abort", "wait", "keep"]
WakeTag = Literal["weights", "kv_cache", "scheduling"]
ABORT_PATHS = ["/abort_requests", "/inference/v1/abort_requests"]
_CACHE: list[MemoryTag] = ["kv_cache"]


def _status(word: str, **fields: Any) -> Form:
    return Form(lambda *_: {"status": word, **fields}, refused)


class PauseOptions(Strict, kw_only=True):
    """In the query or in the body."""

    mode: PauseMode = "abort"
    clear_cache: bool = True
    """With ``keep`` also the KV of the requests, which is computed again."""
    lease_s: PositiveDuration | None = None
    """Caesura's own, as below: seconds without a command of any HTTP client."""
    on_lease_expiry: LeaseAction = "continue"


@post("/pause", status_code=200, opt={"access": "admin", "struct": PauseOptions})
async def pause(request: HTTPRequest, front: Front) -> Response[bytes]:
    options = await read_control(request, PauseOptions, query=True)
    answer = answered(front, "pause_generation", _status("paused"), options, _pause(front, options))
    if options.mode != "wait":
        return await answer
    try:
        return await unless_left(request, answer)
    except ClientLeft:
        return client_left()


async def _pause(front: FrontEnd, options: PauseOptions) -> None:
    lease_s = front.options.pause_lease if options.lease_s is None else options.lease_s
    paused = partial(front.client.pause, lease_s=lease_s, on_lease_expiry=options.on_lease_expiry)
    if options.mode == "keep":
        front.admission.open()
        await paused("retract" if options.clear_cache else "in_place")
    else:
        async with front.admission.refusing(drain=options.mode == "wait"):
            await paused("abort" if options.mode == "abort" else "retract")
    if options.clear_cache:
        await front.client.flush_cache()


@get("/is_paused", opt={"access": "user"})
async def is_paused(front: Front) -> Response[bytes]:
    """Return true also while the last requests are waited for."""
    paused = front.admission.pausing or (await front.health.status()).generation != "running"
    return json_response({"is_paused": paused})


@post("/resume", status_code=200, opt={"access": "admin"})
async def resume(front: Front) -> Response[bytes]:
    """Go on, after the device allocator's unused blocks have been returned."""

    async def resumed() -> None:
        if released := (await front.health.status()).released_tags:
            raise MemoryReleased(
                f"requests would wait while the engine sleeps: POST /wake_up, for {', '.join(released)}",
                released=released,
            )
        with front.admission.opening():
            await front.client.continue_generation()

    return await answered(front, "continue_generation", _status("resumed"), None, resumed())


class AbortBody(Strict, kw_only=True):
    request_ids: list[str] | None = None


_ABORTED = Form(lambda _, count: {"status": "aborted", "aborted": count}, refused)


@command(ABORT_PATHS, _ABORTED, name="abort_request", access="user")
async def abort_requests(front: FrontEnd, body: AbortBody) -> int:
    """Abort the generations of these ids, or all without ids, and go on with the others."""
    return (await front.client.abort(body.request_ids, abort_all=not body.request_ids)).aborted


class WorldSizeQuery(Strict, kw_only=True):
    include_dp: bool = True


@get("/get_world_size", opt={"access": "user", "query": WorldSizeQuery})
async def get_world_size(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Return the number of ranks that a trainer's group has, beside the trainer's own."""
    counts_replicas = query_of(request, WorldSizeQuery).include_dp
    if front.fleet is not None:
        return json_response({"world_size": front.fleet.tp * (front.fleet.size if counts_replicas else 1)})
    return json_response({"world_size": 1 + len((await front.health.status()).ranks)})


class SleepOptions(Strict, kw_only=True):
    level: Annotated[int, msgspec.Meta(ge=0, le=2)] = 1
    """0: pause only. 1: also release the memory, with a copy of the weights in host memory. 2: without."""
    mode: PauseMode = "abort"
    tags: list[MemoryTag] | None = None
    """SkyRL's: the memory to release; null: all."""


_SLEEPS = Form(lambda options, _: {"status": "sleeping", "level": options.level}, refused)


@command("/sleep", _SLEEPS, query=True, lists=["tags"])
async def sleep(front: FrontEnd, body: SleepOptions) -> None:
    """Pause and release the engine's memory, until ``/wake_up``."""
    if body.level:
        if not front.options.enable_memory_saver:
            raise Unsupported("releasing memory is off: start the server with --enable-memory-saver")
        weights_go = body.tags is None or "weights" in body.tags
        if body.level == 1 and weights_go and not (await front.health.status()).weights_cpu_backup:
            raise Unsupported(
                "level 1 keeps a copy of the weights: start the server with --enable-weights-cpu-backup, or "
                "sleep at level 2 and update the weights after waking up",
                field="level",
                value=1,
            )
    await _pause(front, PauseOptions(mode=body.mode, clear_cache=body.level > 0))
    if body.level:
        await front.client.release_memory(body.tags)


class WakeOptions(Strict, kw_only=True):
    tags: list[WakeTag] | None = None


def _woken(body: WakeOptions, awake: bool) -> dict[str, Any]:
    return {"status": "awake" if awake else "sleeping", "tags": body.tags}


@command("/wake_up", Form(_woken, refused), query=True, lists=["tags"])
async def wake_up(front: FrontEnd, body: WakeOptions) -> bool:
    """Bring back memory by tag; with the last of it, and weights that are valid, generation goes on."""
    tags = body.tags
    memory: list[MemoryTag] = [tag for tag in tags or () if tag != "scheduling"]
    if tags is None or memory:
        released = (await front.health.status()).released_tags
        if "kv_cache" in memory and "cuda_graph" in released:
            memory.append("cuda_graph")
        await front.client.resume_memory(None if tags is None else memory)
    status = await front.health.status()
    if status.released_tags or status.weights != "valid":
        return False
    with front.admission.opening():
        await front.client.continue_generation()
    return True


@get("/is_sleeping", opt={"access": "user"})
async def is_sleeping(front: Front) -> Response[bytes]:
    """Return true also of an engine that is only paused."""
    status = await front.health.status()
    asleep = front.admission.pausing or status.generation != "running" or bool(status.released_tags)
    return json_response({"is_sleeping": asleep})


@command("/release_kv_cache_memory", _status("kv_cache_released"))
async def release_kv_cache_memory(front: FrontEnd, body: NothingBody) -> None:
    """Release the KV cache of a paused engine; requests that are kept are computed again."""
    if (await front.health.status()).generation != "paused":
        raise NotIdle("the KV cache is released during a pause: call POST /pause first")
    await front.client.release_memory(_CACHE)


class ResetOptions(Strict, kw_only=True):
    reset_running_requests: bool = False
    """True: also the KV of running requests, which are computed again."""
    # accepted and ignored
    reset_external: bool = False


_RESET = Form(lambda _, success: {"success": success}, refused)


@command("/reset_prefix_cache", _RESET, name="flush_cache", query=True)
async def reset_prefix_cache(front: FrontEnd, body: ResetOptions) -> bool:
    """Empty the prefix cache; false while requests hold KV."""
    pauses = body.reset_running_requests and (await front.health.status()).generation == "running"
    if pauses:
        await front.client.pause("retract")
    try:
        await front.client.flush_cache()
    except NotIdle:
        return False
    finally:
        if pauses:
            await front.client.continue_generation()
    return True


class CheckerBody(Strict, kw_only=True):
    action: Literal["checksum", "reset", "compare"]
    baseline: dict[str, str] | None = None
    """Checksums by name, for ``compare``."""


@command("/weight_checker", Form(lambda _, found: found, refused))
async def weight_checker(front: FrontEnd, body: CheckerBody) -> dict[str, Any]:
    """Return checksums of the weights or compare them with a trainer's; ``reset`` poisons the weights."""
    if body.action == "reset":
        await front.client.check_weights("reset_tensors")
        return {"status": "reset"}
    if body.action == "compare" and body.baseline is None:
        raise InvalidRequest("compare needs a baseline", field="baseline")
    found = (await front.client.check_weights("checksum")).checksums
    if body.action == "checksum":
        return {"checksums": found}
    wanted = body.baseline or {}
    different = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    return {"match": not different, "mismatches": different}


class CallBody(Strict, kw_only=True):
    method: str
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    timeout: float | None = None
    """Seconds of silence of a parameter server; otherwise accepted and ignored."""


async def _from_parameter_server(front: FrontEnd, handles: dict[str, str], limit_s: float | None) -> None:
    await front.client.update_weights_from_checkpoint_engine(
        handles, timeout_s=DEFAULT_BROADCAST_TIMEOUT_S if limit_s is None else limit_s
    )


async def _from_folder(front: FrontEnd, folder: str, _: float | None) -> None:
    await weights.update_from_folder(front, folder)


async def _start(front: FrontEnd, is_checkpoint_format: bool, _: float | None) -> None:
    await weights.start(front, weights.StartBody(is_checkpoint_format=is_checkpoint_format))


async def _update(front: FrontEnd, update_info: dict[str, Any], _: float | None) -> None:
    await weights.update(front, update_info)


async def _finish(front: FrontEnd, weight_version: str | None, _: float | None) -> None:
    await weights.finish(front, weight_version)


METHODS: dict[str, tuple[Callable[..., Awaitable[None]], str, Any, Any]] = {
    "update_weights_from_ipc": (_from_parameter_server, "zmq_handles", dict[str, str], msgspec.NODEFAULT),
    "update_weights_from_path": (_from_folder, "weight_dir", str, msgspec.NODEFAULT),
    "skyrl_start_weight_update": (_start, "is_checkpoint_format", bool, True),
    "update_weights_nccl": (_update, "update_info", dict[str, Any], msgspec.NODEFAULT),
    "update_weights_ipc": (_update, "update_info", dict[str, Any], msgspec.NODEFAULT),
    "update_weights_disk": (_update, "update_info", dict[str, Any], msgspec.NODEFAULT),
    "skyrl_finish_weight_update": (_finish, "weight_version", str | None, None),
}
"""Methods of checkpoint-engine, prime-rl and SkyRL: the function, and the name, type and default of its one
argument."""


@command("/collective_rpc", Form(lambda _, results: {"results": results}, refused), size="specs")
async def collective_rpc(front: FrontEnd, body: CallBody) -> list[None]:
    """Call a method of :data:`METHODS` once for all ranks; every other is refused by name."""
    if body.method not in METHODS:
        raise Unsupported(
            f"{body.method!r} is not a method that can be called: {', '.join(METHODS)} are",
            field="method",
            value=body.method,
        )
    work, name, kind, default = METHODS[body.method]
    by_place = body.args or []
    given = dict(zip([name], by_place, strict=False)) | (body.kwargs or {})
    if len(by_place) > 1 or given.keys() - {name}:
        raise InvalidRequest(f"{body.method} takes one argument, {name}", field="args")
    value = given.get(name, default)
    if value is msgspec.NODEFAULT:
        raise InvalidRequest(f"{body.method} needs {name}", field="args")
    try:
        argument = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{name}: {error}", field="args") from error
    await work(front, argument, body.timeout)
    return [None]


@get("/liveness", opt={"access": "open"})
async def liveness(front: Front) -> Response[bytes]:
    try:
        await front.health.check()
    except CaesuraError:
        return json_response({"status": "engine_unresponsive"}, 503)
    return json_response({"status": "ok"})
