"""SGLang's routes for health, load, model and server information, and tokenization.

Invariants: nothing here generates a token or waits for a step; an engine that is paused, updating or without memory is
healthy, and one that does not answer is 503; no key is in any answer.
"""

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from litestar import Response, get, post, route
from litestar.exceptions import ClientException
from litestar.handlers import HTTPRouteHandler

from ....io_struct import CaesuraError, GetStatusReqOutput
from ..context import Front, FrontEnd, ServeOptions
from ..errors import engine_error, error_object, json_response, native_error, status_of
from ..exchange import HTTPRequest, query_of, read_control
from ..modality import makes_tokens
from .control_schema import DetokenizeBody, Strict, TokenizeBody

_SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")


async def _status(front: FrontEnd) -> GetStatusReqOutput:
    return await front.health.status()


async def _healthy(front: FrontEnd, *, ready: bool = False) -> Response[bytes]:
    try:
        status = await front.health.check()
    except CaesuraError as error:
        return engine_error(error, 503)
    fleet = front.fleet
    serves = status.generation == "running" and status.weights == "valid" and status.memory == "resident"
    out = "" if fleet is None or not ready else fleet.reasons()
    if ready and not (serves and (fleet is None or fleet.dispatcher.serving)):
        what = f"not ready: generation {status.generation}, weights {status.weights}, memory {status.memory}"
        return json_response(error_object("; ".join([what, *([out] if out else [])]), 503), 503)
    return Response(out.encode(), media_type="text/plain")


@get(["/health", "/health_generate"], opt={"access": "open"})
async def health(front: Front) -> Response[bytes]:
    """200 while the engine answers, paused or not."""
    return await _healthy(front)


@route("/ping", http_method=["GET", "POST"], status_code=200, opt={"access": "open"})
async def ping(front: Front) -> Response[bytes]:
    """Answer as ``/health``, to what clients of vLLM send."""
    return await _healthy(front)


@get("/version", opt={"access": "user"})
async def version(front: Front) -> Response[bytes]:
    """The engine's release, in vLLM's form."""
    return json_response({"version": (await _status(front)).version})


@get("/ready", opt={"access": "open"})
async def ready(front: Front) -> Response[bytes]:
    """200 while a request would be generated for at once."""
    return await _healthy(front, ready=True)


@get(["/weight_version", "/get_weight_version"], opt={"access": "user"})
async def weight_version(front: Front) -> Response[bytes]:
    """The label of the weights that serve."""
    status = await _status(front)
    return json_response({"weight_version": status.weight_version, "weights_epoch": status.weights_epoch})


@get(["/model_info", "/get_model_info"], opt={"access": "user"})
async def model_info(front: Front) -> Response[bytes]:
    """What is served."""
    status, config = await _status(front), await asyncio.to_thread(_config, front.options.model_path)
    return json_response(
        {
            "model_path": status.model_path,
            "served_model_name": front.options.model_name,
            "tokenizer_path": front.options.tokenizer_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": status.weight_version,
            "weights_epoch": status.weights_epoch,
            "incarnation": status.incarnation,
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": config.get("model_type"),
            "architectures": config.get("architectures"),
            "max_model_len": status.context_len,
            "vocab_size": status.vocab_size,
            "dtype": status.dtype,
        }
    )


def _config(model_path: str) -> dict[str, Any]:
    try:
        config = json.loads((Path(model_path) / "config.json").read_bytes())
    except (OSError, ValueError):  # served by name only, or from another host
        return {}
    return config if isinstance(config, dict) else {}


_PUBLIC = (
    "host", "port", "model_path", "tokenizer_path", "enable_memory_saver", "allow_pickled_tensors",
    "max_body_bytes", "max_update_bytes", "max_batch", "incremental_streaming",
)  # fmt: skip
"""Of :class:`ServeOptions`; keys are not."""
_PARALLEL = {
    "pp_size": 1,
    "dp_size": 1,
    "ep_size": 1,
    "moe_dp_size": 1,
    "nnodes": 1,
    "node_rank": 0,
    "disaggregation_mode": "null",
    "disaggregation_bootstrap_port": None,
    "kv_events": None,
    "load_format": "auto",
    "skip_tokenizer_init": False,
}
"""What trainers compare with their own settings, but for the number of ranks. Replicas are data parallelism to them."""


async def _parts(front: FrontEnd, status: GetStatusReqOutput) -> list[GetStatusReqOutput]:
    """The status of every engine; of one, ``status``."""
    if front.fleet is None:
        return [status]
    return [part.engine for part in await front.fleet.parts() if part.engine is not None]


def _sizes(front: FrontEnd, status: GetStatusReqOutput) -> dict[str, Any]:
    """Ranks, and of several engines who they are."""
    if front.fleet is None:
        count = 1 + len(status.ranks)
        return {"tp_size": count, "num_gpus": count}
    members = [
        {
            "name": each.name,
            "state": each.state,
            "reason": each.reason,
            "load": each.load,
            "endpoint": each.address.endpoint,
        }
        for each in front.fleet.members
    ]
    ranks = {"tp_size": front.fleet.tp, "dp_size": front.fleet.size}
    return {**ranks, "num_gpus": front.fleet.size * front.fleet.tp, "replicas": members}


def _settings(options: ServeOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in _PUBLIC}


@get(["/server_info", "/get_server_info"], opt={"access": "user"})
async def server_info(front: Front) -> Response[bytes]:
    """Settings and state."""
    status = await _status(front)
    states = [await _state(front, part) for part in await _parts(front, status)]
    return json_response(
        {
            **_PARALLEL,
            **_sizes(front, status),
            **_settings(front.options),
            "weights_root": front.options.update_root or None,
            "skip_tokenizer_init": front.manager.tokenizer is None,
            "served_model_name": front.options.model_name,
            "dtype": status.dtype,
            "enable_return_routed_experts": status.kv.routing_bytes_per_token > 0,
            "enable_weights_cpu_backup": status.weights_cpu_backup,
            "enable_metrics": True,
            "enable_lora": False,
            "device": status.device,
            "context_length": status.context_len,
            "max_running_requests": status.max_running_requests,
            "max_total_num_tokens": status.kv.total,
            "max_req_input_len": status.context_len - 1,
            "page_size": status.kv.page_size,
            "weight_version": status.weight_version,
            "weights_epoch": status.weights_epoch,
            "incarnation": status.incarnation,
            "status": "ready",
            "startup_time": time.time() - status.uptime_s,
            "internal_states": states,
            "version": status.version,
            "frontend": "http",
        }
    )


async def _state(front: FrontEnd, part: GetStatusReqOutput) -> dict[str, Any]:
    """An engine's status, with SGLang's names beside."""
    state: dict[str, Any] = msgspec.to_builtins(part)
    return state | {
        "last_gen_throughput": await _throughput(front, part),
        "effective_max_running_requests_per_dp": part.max_running_requests,
        "memory_usage": {
            "weight": part.device_memory.weights,
            "kvcache": part.device_memory.kv_cache,
            "token_capacity": part.kv.total,
        },
    }


async def _throughput(front: FrontEnd, part: GetStatusReqOutput) -> float:
    """Of the last second; of one engine of several, of the seconds that it averages over itself."""
    if front.fleet is not None:
        return part.gen_throughput
    return (await front.metrics.engine.look(front.client)).throughput


class _LoadsQuery(Strict, kw_only=True):
    include: str = "all"
    dp_rank: Annotated[int, msgspec.Meta(ge=0)] | None = None
    format: Literal["json", "prometheus"] = "json"


@get("/v1/loads", opt={"access": "user"})
async def loads(request: HTTPRequest, front: Front) -> Response[bytes]:
    """How much there is to do; what waits during a pause counts."""
    query = query_of(request, _LoadsQuery)
    unknown = set(query.include.split(",")) - set(_SECTIONS)
    if unknown:
        raise ClientException(
            f"include: unknown {', '.join(sorted(unknown))}; known are {', '.join(_SECTIONS)}"
        )
    count = 1 if front.fleet is None else front.fleet.size
    if query.dp_rank is not None and query.dp_rank >= count:
        only = "there is one rank, 0" if count == 1 else f"there are {count} replicas, from 0"
        raise ClientException(f"dp_rank: {only}")
    status = await _status(front)
    loads = await _loads(front, status)
    if query.dp_rank is not None:
        loads = [load for load in loads if load["dp_rank"] == query.dp_rank]
    if query.format == "prometheus":
        lines = [
            f'caesura_load_{k}{{dp_rank="{load["dp_rank"]}"}} {v}\n'
            for load in loads
            for k, v in load.items()
            if isinstance(v, (int, float))
        ]
        return Response("".join(lines).encode(), media_type="text/plain")
    return json_response(
        {
            "timestamp": time.time(),
            "version": status.version,
            "accelerator": status.device,
            "num_accelerators": count,
            "dp_rank_count": count,
            "loads": loads,
        }
    )


async def _loads(front: FrontEnd, status: GetStatusReqOutput) -> list[dict[str, Any]]:
    """One for each engine; a replica that does not answer has none."""
    if front.fleet is None:
        return [await _load(front, status, 0)]
    parts = enumerate(await front.fleet.parts())
    return [await _load(front, part.engine, at) for at, part in parts if part.engine is not None]


async def _load(front: FrontEnd, status: GetStatusReqOutput, dp_rank: int) -> dict[str, Any]:
    running = status.running_requests + status.prefilling_requests
    totals, kv = status.totals, status.kv
    used = kv.total - kv.free - kv.cached
    return {
        "timestamp": time.time(),
        "dp_rank": dp_rank,
        "num_running_reqs": running,
        "num_waiting_reqs": status.waiting_requests,
        "num_reqs": running + status.waiting_requests,
        "num_total_reqs": running + status.waiting_requests,
        "num_used_tokens": used,
        "num_total_tokens": used,
        "max_total_num_tokens": kv.total,
        "token_usage": used / kv.total if kv.total else 0.0,
        "gen_throughput": await _throughput(front, status),
        "cache_hit_rate": totals.cached_tokens / totals.prompt_tokens if totals.prompt_tokens else 0.0,
        "utilization": running / status.max_running_requests,
        "max_running_requests": status.max_running_requests,
        "memory": {
            "weight_bytes": status.device_memory.weights,
            "kv_cache_bytes": status.device_memory.kv_cache,
            "reserved_bytes": status.device_memory.reserved,
        },
        "queues": {"waiting": status.waiting_requests, "retracted": status.num_retractions},
    }


@get("/get_load", opt={"access": "user"})
async def get_load(front: Front) -> Response[bytes]:
    """The older form of ``/v1/loads``."""
    loads = await _loads(front, await _status(front))
    return json_response(
        [
            {
                "dp_rank": load["dp_rank"],
                "num_reqs": load["num_reqs"],
                "num_waiting_reqs": load["num_waiting_reqs"],
                "num_tokens": load["num_used_tokens"],
            }
            for load in loads
        ]
    )


@get("/load", opt={"access": "user"})
async def server_load(front: Front) -> Response[bytes]:
    """Requests of this server that have not ended, in vLLM's form."""
    return json_response({"server_load": front.metrics.under_way})


@post(
    ["/tokenize", "/v1/tokenize"],
    status_code=200,
    opt={"access": "user", "body": "text"},
    guards=[makes_tokens],
)
async def tokenize(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Text, texts or a conversation to token ids."""
    body = await read_control(request, TokenizeBody, text=True)
    if (body.prompt is None) == (body.messages is None):
        raise ClientException("exactly one of prompt and messages is needed")
    _check_rows(front, body.prompt)
    try:
        tokens = await front.workers.run(lambda: _tokens_of(front, body))
    except CaesuraError as error:
        return native_error(error.message, status_of(error), error.code)
    counts = [len(each) for each in tokens]
    one = not isinstance(body.prompt, list)
    return json_response(
        {
            "tokens": tokens[0] if one else tokens,
            "count": counts[0] if one else counts,
            "max_model_len": front.options.context_length,
        }
    )


def _check_rows(front: FrontEnd, rows: object) -> None:
    if isinstance(rows, list) and len(rows) > front.options.max_batch:
        raise ClientException(f"{len(rows)} texts are over the limit of {front.options.max_batch}")


def _tokens_of(front: FrontEnd, body: TokenizeBody) -> list[list[int]]:
    if body.messages is not None:
        generates = body.add_generation_prompt
        return [front.manager.apply_chat_template(body.messages, add_generation_prompt=generates)]
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
    return [front.manager.tokenize(text, add_special_tokens=body.add_special_tokens) for text in texts]


@post(
    ["/detokenize", "/v1/detokenize"],
    status_code=200,
    opt={"access": "user", "body": "text"},
    guards=[makes_tokens],
)
async def detokenize(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Token ids to text, or lists of them to texts."""
    body = await read_control(request, DetokenizeBody)
    kinds = {type(each) for each in body.tokens}
    if len(kinds) > 1:
        raise ClientException("tokens must be one list of integers, or a list of such lists")
    nested = kinds == {list}
    _check_rows(front, body.tokens if nested else None)
    try:
        texts = await front.workers.run(lambda: _texts_of(front, body, nested))
    except CaesuraError as error:
        return native_error(error.message, status_of(error), error.code)
    text = texts if nested else texts[0]
    return json_response({"text": text, "prompt": text})  # the latter is vLLM's name


def _texts_of(front: FrontEnd, body: DetokenizeBody, nested: bool) -> list[str]:
    rows: list[Any] = list(body.tokens) if nested else [body.tokens]
    return [front.manager.detokenize(row, skip_special_tokens=body.skip_special_tokens) for row in rows]


ROUTES: list[HTTPRouteHandler] = [
    health,
    ping,
    version,
    ready,
    weight_version,
    model_info,
    server_info,
    loads,
    get_load,
    server_load,
    tokenize,
    detokenize,
]
