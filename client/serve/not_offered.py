"""Routes that clients know from SGLang and vLLM and that are not served here: the 404 says why, or what to call instead.

Invariant: nothing here is a route; a path that is served is not listed.
"""

_ADAPTERS = "there are no LoRA adapters: merge the adapter and send all weights"
_SESSION = (
    "weights arrive through SGLang's routes (/update_weights_from_disk, /update_weights_from_tensor, …)"
)
_PEERS = (
    "engines give each other weights in their checkpoint's layout, over their own sockets: call clone_weights of "
    "caesura.client.trainer"
)
_WHY = {
    "/load_lora_adapter": _ADAPTERS,
    "/load_lora_adapter_from_tensors": _ADAPTERS,
    "/unload_lora_adapter": _ADAPTERS,
    "/v1/load_lora_adapter": _ADAPTERS,
    "/v1/unload_lora_adapter": _ADAPTERS,
    "/pull_weights": "the engine writes no checkpoints and applies no deltas: write a complete checkpoint under --weights-root and "
    "call /update_weights_from_disk (slime: --update-weight-mode full, without --update-weight-local-checkpoint-dir)",
    "/get_weights_by_name": "weights are not read out: compare them with POST /weights_checker",
    "/init_weights_send_group_for_remote_instance": _PEERS,
    "/send_weights_to_remote_instance": _PEERS,
    "/set_internal_state": "options are fixed at start",
    "/v1/responses": "the Responses API is not served: /v1/chat/completions is",
    "/v1/images/edits": "images as input are not supported: /v1/images/generations makes them from text",
    "/v1/images/variations": "images as input are not supported: /v1/images/generations makes them from text",
    # vLLM's
    "/sleep": "call POST /release_memory_occupation, SGLang's route",
    "/wake_up": "call POST /resume_memory_occupation, SGLang's route",
    "/reset_prefix_cache": "call POST /flush_cache, SGLang's route",
    "/init_weight_transfer_engine": _SESSION,
    "/start_weight_update": _SESSION,
    "/finish_weight_update": _SESSION,
    "/init_broadcaster": 'weights are taken from a folder: POST /update_weights (weight_broadcast.type = "filesystem")',
    "/collective_rpc": "no methods of the engine are called by name",
}
"""Path to the sentence, whose subject is the route."""


def why_not(path: str) -> str | None:
    """What a 404 of ``path`` says; None: nothing is known of it."""
    reason = _WHY.get(path.rstrip("/"))
    return None if reason is None else f"{path.rstrip('/')} is not served: {reason}"
