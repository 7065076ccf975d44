#!/usr/bin/env bash
# One call of each route of `caesura serve`, in an order in which all succeed:
#
#     caesura serve --model DIR --enable-memory-saver --enable-lora &
#     MODEL=DIR ADAPTER=DIR bash examples/curl.sh
#
# The model needs a tokenizer with a chat template: some routes take text.
# URL, KEY and ADMIN_KEY may be set as well. Prints each route and what it answered.
set -euo pipefail
URL=${URL:-http://127.0.0.1:30000}
KEY=${KEY:-none}
ADMIN=${ADMIN_KEY:-$KEY}

# The whole answer is read before its beginning is shown: a pipe that closes early is an error to curl.
call() { local answer; answer=$(curl -sS --fail-with-body -H "Authorization: Bearer $ADMIN" "$@") || { echo "$answer"; return 1; }; echo "${answer:0:300}"; }
get() { echo "GET $1"; call "$URL$1"; }
post() { echo "POST $1"; call -H 'Content-Type: application/json' "$URL$1" -d "$2" "${@:3}"; }

# Is it there, and what is it?
get /health
get /health_generate
get /ping
get /version
get /load
get /ready
get /liveness
get /model_info
get /get_model_info
get /server_info
get /get_server_info
get /weight_version
get /get_weight_version
get '/v1/loads?include=core'
get /get_load
get /metrics

# Generate: one answer, a stream, two prompts with two samples each
post /generate '{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8}, "return_logprob": true}'
post /generate '{"text": "Hello", "stream": true, "sampling_params": {"max_new_tokens": 8, "temperature": 0}}'
post /generate '{"input_ids": [[1, 2], [3]], "rid": "batch", "sampling_params": {"n": 2, "max_new_tokens": 4}}'
post /abort_request '{"rid": "batch_0"}'
post /abort_request '{"abort_all": true}'

# Text and tokens
post /tokenize '{"prompt": "Hello"}'
post /detokenize '{"tokens": [40, 41]}'
post /parse_function_call '{"text": "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>", "tools": [{"type": "function", "function": {"name": "f"}}], "tool_call_parser": "hermes"}'
post /separate_reasoning '{"text": "<think>I think</think>I am", "reasoning_parser": "qwen3"}'

# Samples with a trainer's log-probabilities, scored by the engine
post /rollout/drift '{"samples": [{"token_ids": [1, 2, 3, 4], "prompt_len": 3, "logprobs": [-4.5]}]}'

# OpenAI
get /v1/models
get /openapi.json
post /v1/completions '{"prompt": "Hello", "max_tokens": 8}'
post /v1/chat/completions '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}'
post /sessions '{"session_id": "x"}'
post /sessions/x/v1/chat/completions '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}'
get /sessions/x
get /sessions/x/samples
call -X DELETE "${URL}/sessions/x"
post /open_session '{"session_id": "other", "timeout": 60}'
post /close_session '{"session_id": "other"}'
post /open_session '{"session_id": "third"}'
post /finish_session '{"session_id": "third"}'
answered=$(post /v1/responses '{"input": "Hello", "max_output_tokens": 8}')
echo "$answered"
kept=$(sed -n 's/.*"id":"\(resp-[^"]*\)".*/\1/p' <<< "$answered")
call "${URL}/v1/responses/$kept" # get /v1/responses/x
call -X DELETE "${URL}/v1/responses/$kept"

# Anthropic
post /v1/messages '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}'
post /v1/messages/count_tokens '{"messages": [{"role": "user", "content": "Hello"}]}'

# New weights from disk, as a trainer does it
post /weights_checker '{"action": "snapshot"}'
post /pause_generation '{}'
get /flush_cache
post /update_weights_from_disk "{\"model_path\": \"$MODEL\", \"weight_version\": \"1\"}"
post /post_process_weights '{"restore_weights_before_load": false, "post_process_quantization": true}'
post /continue_generation '{}'
post /weights_checker '{"action": "compare"}'
post /update_weight_version '{"new_version": "2"}'

# A LoRA adapter in SGLang's words, in vLLM's, and in SkyRL's
post /load_lora_adapter "{\"lora_name\": \"a\", \"lora_path\": \"$ADAPTER\"}"
post /generate '{"input_ids": [1, 2, 3], "lora_path": "a", "sampling_params": {"max_new_tokens": 4}}'
post /unload_lora_adapter '{"lora_name": "a"}'
post /v1/load_lora_adapter "{\"lora_name\": \"b\", \"lora_path\": \"$ADAPTER\"}"
post /v1/completions '{"model": "b", "prompt": "Hello", "max_tokens": 8}'
post /v1/unload_lora_adapter '{"lora_name": "b"}'
post /skyrl/v1/load_lora_adapter "{\"lora_name\": \"c\", \"lora_path\": \"$ADAPTER\"}"
# POST /load_lora_adapter_from_tensors takes SGLang's pickles, from a Python trainer
# POST /load_lora_adapter_from_distributed receives what rank 0 of a process group broadcasts

# Texts to draft from, of a server with --speculation suffix
post /add_external_corpus '{"corpus_id": "ids", "token_ids": [[1, 2, 3, 4]]}'
get /list_external_corpora
post /remove_external_corpus '{"corpus_id": "ids"}'

# GET /workers lists the engines of a server with --replicas or --worker-urls, and POST /workers adds one:
# {"url": "tcp://HOST:PORT"}; curl -X DELETE "$URL/workers/x" takes the one with the id x out

# Tinker's API, as its SDK calls it: a session, a sampler, a promise of samples, and its result
post /api/v1/client/config '{}'
post /api/v1/client/dynamic_config '{}'
get /api/v1/get_server_capabilities
get /api/v1/healthz
post /api/v1/telemetry '{"events": []}'
begun=$(post /api/v1/create_session '{"tags": []}')
echo "$begun"
tinker=$(sed -n 's/.*"session_id":"\([^"]*\)".*/\1/p' <<< "$begun")
post /api/v1/session_heartbeat "{\"session_id\": \"$tinker\"}"
post /api/v1/create_sampling_session "{\"session_id\": \"$tinker\", \"sampling_session_seq_id\": 0, \"base_model\": \"default\"}"
post /api/v1/join_sampling_session "{\"sampling_session_id\": \"$tinker:0\"}"
post /api/v1/asample "{\"sampling_session_id\": \"$tinker:0\", \"seq_id\": 0, \"prompt\": {\"chunks\": [{\"tokens\": [1, 2, 3]}]}, \"sampling_params\": {\"max_tokens\": 8}}"
post /api/v1/retrieve_future "{\"request_id\": \"$tinker:0:0\"}"
post /api/v1/cancel_future "{\"request_id\": \"$tinker:0:0\"}"
post /api/v1/weights_info '{"tinker_path": "tinker://c"}'
#   get /api/v1/samplers/x
post /api/v1/sessions/x/finish '{}'
# Of a server with --tinker-trainer, also whatever else is below /api/v1:
#   post /api/v1/create_model '{"session_id": "…", "model_seq_id": 0, "base_model": "default"}'
#   post /api/v1/save_weights_for_sampler '{"model_id": "run-1", "path": "step-1", "seq_id": 1}'
#   get /api/v1/x

# The same with vLLM's routes, as prime-rl does it: requests are frozen and go on with the new weights
post '/inference/v1/generate' '{"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 8, "logprobs": 1}}'
post /v1/chat/completions/render '{"messages": [{"role": "user", "content": "Hello"}]}'
post /v1/responses/render '{"input": "Hello"}'
post /v1/messages/render '{"messages": [{"role": "user", "content": "Hello"}]}'
post /v1/completions/render '{"prompt": "Hello"}'
post /v1/chat/completions/derender '{"generate_response": {"choices": [{"token_ids": [40, 41]}]}}'
post /v1/completions/derender '{"generate_responses": [{"choices": [{"token_ids": [40, 41]}]}]}'
post '/pause?mode=keep&clear_cache=false' '{}'
get /is_paused
post /update_weights "{\"weight_dir\": \"$MODEL\"}"
post /resume '{}'
post /abort_requests '{"request_ids": ["nobody"]}'
post /inference/v1/abort_requests '{"request_ids": ["nobody"]}'

# By vLLM's weight transfer, from a folder: nothing serves before the finish
get /get_world_size
post /init_weight_transfer_engine '{"init_info": {"backend": "disk"}}'
post /start_weight_update '{}'
post /update_weights "{\"update_info\": {\"path\": \"$MODEL\"}}"
post /finish_weight_update '{"weight_version": "3"}'
post /shutdown_weight_transfer_engine '{}'
get /weight_info
post /weight_checker '{"action": "checksum"}'
post /collective_rpc "{\"method\": \"update_weights_from_path\", \"args\": [\"$MODEL\"]}"
post '/reset_prefix_cache?reset_running_requests=true' '{}'

# Sleep without and with the release of memory (the latter of a server with --enable-memory-saver)
post '/sleep?level=0' '{}'
get /is_sleeping
post /release_kv_cache_memory '{}'
post '/wake_up?tags=kv_cache&tags=scheduling' '{}'

# New weights as a safetensors file, in a session, while generation goes on: its pieces and its end carry its id
begun=$(post /begin_weight_update '{}')
echo "$begun"
session=$(sed -n 's/.*"session_id":"\([^"]*\)".*/\1/p' <<< "$begun")
echo "POST /update_weights_from_tensor"
call -H 'Content-Type: application/octet-stream' -H "X-Caesura-Session: $session" \
    "$URL/update_weights_from_tensor?flush_cache=true" --data-binary "@$MODEL/model.safetensors"
post /end_weight_update '{"weight_version": "4"}' -H "X-Caesura-Session: $session"

# Lend the memory of the KV cache to a trainer, and take it back (a server with --enable-memory-saver)
post /release_memory_occupation '{"tags": ["kv_cache"]}'
post /resume_memory_occupation '{"tags": ["kv_cache"]}'

# Record a trace of the next steps, and have its file named
post /start_profile '{"record_shapes": true}'
post /stop_profile '{}'

# Of an engine that serves a diffusion pipeline: images and their trajectories, as msgpack
#   post /rollout/generate '{"prompt": "a red circle", "rollout_return_dit_trajectory": true}' > rollouts.msgpack
#   post /v1/images/generations '{"prompt": "a red circle", "size": "512x512", "seed": 7}' > images.json

# With a trainer at the other end (it is rank 0 and broadcasts), or a checkpoint-engine server:
#   post /init_weights_update_group '{"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 2, "backend": "nccl"}'
#   post /update_weights_from_distributed '{"names": ["lm_head.weight"], "dtypes": ["bfloat16"], "shapes": [[32000, 4096]]}'
#   post /destroy_weights_update_group '{}'
#   post /update_weights_from_ipc '{"zmq_handles": {"GPU-…": "ipc://@checkpoint-engine-….sock"}}'
# Versions that slime or SkyRL have published (the latter after an init with the backend delta); back before a delta:
#   post /pull_weights '{"target_version": 1, "source_dir": "/shared/updates", "local_checkpoint_dir": "/shared/copy"}'
#   post /fetch_weights '{"target_version": 1, "sync_dir": "/shared/updates"}'
#   post /rollback_weights '{}'
echo "all done"
