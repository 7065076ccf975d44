"""vLLM's form of ``/server_info``, as far as trainers read it."""

from typing import Any

from ....io_struct import GetStatusReqOutput
from ..context import FrontEnd


def server_info(front: FrontEnd, status: GetStatusReqOutput) -> dict[str, Any]:
    """Return ``{"vllm_config", "vllm_env", "system_env"}`` of ``/server_info?config_format=json``."""
    replicas = 1 if front.fleet is None else front.fleet.size
    ranks = 1 + len(status.ranks) if front.fleet is None else front.fleet.tp
    config = {
        "model_config": {
            "model": status.model_path,
            "served_model_name": front.options.model_name,
            "tokenizer": front.options.tokenizer_path,
            "dtype": f"torch.{status.dtype}",
            "max_model_len": status.context_len,
            # of logits divided by the temperature, as in vLLM's; top-k, top-p and min-p come after it
            "logprobs_mode": "processed_logprobs",
        },
        "parallel_config": {
            "tensor_parallel_size": ranks,
            "pipeline_parallel_size": 1,
            "data_parallel_size": replicas,
            "world_size": ranks,
            "world_size_across_dp": ranks * replicas,
        },
        "cache_config": {
            "block_size": status.kv.page_size,
            "num_gpu_blocks": status.kv.total // status.kv.page_size,
            "enable_prefix_caching": True,
        },
        "scheduler_config": {"max_num_seqs": status.max_running_requests},
        "weight_transfer_config": {"backend": front.options.weight_transfer_backend},
        "lora_config": _lora_config(status),
    }
    return {"vllm_config": config, "vllm_env": {}, "system_env": {}}


def _lora_config(status: GetStatusReqOutput) -> dict[str, Any] | None:
    if not status.max_loras:
        return None
    return {
        "max_loras": status.max_loras,
        "max_cpu_loras": status.max_loaded_loras,
        "max_lora_rank": status.max_lora_rank,
    }
