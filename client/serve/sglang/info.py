"""SGLang's routes for health, load, model and server information.

Invariants: nothing here generates a token or waits for a step; an engine that is paused, updating or without
memory is healthy; one that does not answer is 503, and so is one whose drift says so; no answer has a key.
"""

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from litestar import Response, get, route
from litestar.exceptions import ClientException

from ....io_struct import CaesuraError, GetStatusReqOutput
from ..bodies import HTTPRequest, Strict, query_of
from ..context import Front, FrontEnd
from ..error_responses import engine_error, error_object, json_response
from ..vllm import info as vllm

_SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")
_PUBLIC = (
    "host", "port", "model_path", "tokenizer_path", "enable_memory_saver", "allow_pickled_tensors",
    "max_body_bytes", "max_update_bytes", "max_batch", "incremental_streaming",
    "stream_interval",
)  # fmt: skip
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
}
"""Settings that trainers compare with their own; replicas are data parallelism to them."""


async def _healthy(front: FrontEnd, *, ready: bool = False) -> Response[bytes]:
    try:
        status = await front.health.check()
    except CaesuraError as error:
        return engine_error(error, 503)
    if status.drift is not None and status.drift.state == "unhealthy":
        figure, limit = status.drift.k3, "drift_limit, and drift_action is unhealthy"
        return json_response(error_object(f"drift: k3 = {figure:.3g} is over {limit}", 503), 503)
    fleet = front.fleet
    serves = status.generation == "running" and status.weights == "valid" and status.memory == "resident"
    reasons = "" if fleet is None or not ready else fleet.reasons()
    if ready and not (serves and (fleet is None or fleet.dispatcher.serving)):
        state = f"not ready: generation {status.generation}, weights {status.weights}, memory {status.memory}"
        return json_response(error_object("; ".join(filter(None, [state, reasons])), 503), 503)
    return Response(reasons.encode(), media_type="text/plain")


@get(["/health", "/health_generate"], opt={"access": "open"})
async def health(front: Front) -> Response[bytes]:
    """Answer 200 while the engine answers, paused or not."""
    return await _healthy(front)


@route("/ping", http_method=["GET", "POST"], status_code=200, opt={"access": "open"})
async def ping(front: Front) -> Response[bytes]:
    """Answer clients of vLLM as ``/health`` does."""
    return await _healthy(front)


@get("/version", opt={"access": "user"})
async def version(front: Front) -> Response[bytes]:
    return json_response({"version": (await front.health.status()).version})


@get("/ready", opt={"access": "open"})
async def ready(front: Front) -> Response[bytes]:
    """Answer 200 while a request would be generated for at once."""
    return await _healthy(front, ready=True)


@get(["/weight_version", "/get_weight_version"], opt={"access": "user"})
async def weight_version(front: Front) -> Response[bytes]:
    status = await front.health.status()
    return json_response({"weight_version": status.weight_version, "weights_epoch": status.weights_epoch})


@get(["/model_info", "/get_model_info"], opt={"access": "user"})
async def model_info(front: Front) -> Response[bytes]:
    status = await front.health.status()
    config = await asyncio.to_thread(_config, front.options.model_path)
    return json_response(
        {
            "model_path": status.model_path,
            "served_model_name": front.options.model_name,
            "tokenizer_path": front.options.tokenizer_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": status.weight_version,
            "weights_epoch": status.weights_epoch,
            "weights_digest": status.digest,
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


class _ServerInfoQuery(Strict, kw_only=True):
    config_format: Literal["json"] | None = None


@get(["/server_info", "/get_server_info"], opt={"access": "user", "query": _ServerInfoQuery})
async def server_info(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Return SGLang's form, or vLLM's if the query has vLLM's ``config_format``."""
    status = await front.health.status()
    if query_of(request, _ServerInfoQuery).config_format is not None:
        return json_response(vllm.server_info(front, status))
    parts = [status]
    if front.fleet is not None:
        parts = [part.engine for part in await front.fleet.parts() if part.engine is not None]
    return json_response(
        {
            **_PARALLEL,
            **_sizes(front, status),
            **{name: getattr(front.options, name) for name in _PUBLIC},
            "weights_root": front.options.update_root or None,
            "skip_tokenizer_init": front.manager.tokenizer is None,
            "served_model_name": front.options.model_name,
            "dtype": status.dtype,
            "enable_return_routed_experts": status.kv.routing_bytes_per_token > 0,
            "enable_weights_cpu_backup": status.weights_cpu_backup,
            "enable_metrics": True,
            "enable_lora": status.max_loras > 0,
            "max_loras_per_batch": status.max_loras,
            "max_loaded_loras": status.max_loaded_loras,
            "max_lora_rank": status.max_lora_rank,
            "device": status.device,
            "context_length": status.context_len,
            "max_running_requests": status.max_running_requests,
            "max_total_num_tokens": status.kv.total,
            "max_req_input_len": status.context_len - 1,
            "page_size": status.kv.page_size,
            "weight_version": status.weight_version,
            "weights_epoch": status.weights_epoch,
            "weights_digest": status.digest,
            "incarnation": status.incarnation,
            "status": "ready",
            "startup_time": time.time() - status.uptime_s,
            "internal_states": [await _state(front, part) for part in parts],
            "version": status.version,
            "frontend": "http",
        }
    )


def _sizes(front: FrontEnd, status: GetStatusReqOutput) -> dict[str, Any]:
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


async def _state(front: FrontEnd, part: GetStatusReqOutput) -> dict[str, Any]:
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
    """Return tokens per second of the last second; a replica averages over some seconds itself."""
    if front.fleet is not None:
        return part.gen_throughput
    return (await front.metrics.engine.look(front.client)).throughput


class _LoadsQuery(Strict, kw_only=True):
    include: str = "all"
    dp_rank: Annotated[int, msgspec.Meta(ge=0)] | None = None
    format: Literal["json", "prometheus"] = "json"


@get("/v1/loads", opt={"access": "user", "query": _LoadsQuery})
async def loads(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Return how much there is to do; requests that wait during a pause count."""
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
    status = await front.health.status()
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
    """Return the older form of ``/v1/loads``."""
    loads = await _loads(front, await front.health.status())
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
    """Return the number of this server's requests that have not ended, in vLLM's form."""
    return json_response({"server_load": front.metrics.under_way})
