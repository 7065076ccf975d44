"""Options of an engine, of which its command line and its launcher are made.

Invariant: an option is stated here alone, with its type, its default and its help;
``scheduler/runtime/engine_config.py`` says which values are possible.
"""

import os
from dataclasses import dataclass
from typing import Literal

from ..io_struct import Residency

AnyPath = str | os.PathLike[str]
DtypeName = Literal["auto", "float32", "bfloat16", "float16", "fp32", "bf16", "fp16", "float", "half"]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Everything that an engine may be told at start. The field docstrings are the command line's help."""

    endpoint: str | None = None
    """Address to listen on: an ipc:// path or a tcp:// address. Addresses beyond loopback need CURVE keys.
    The default is a new ipc:// socket in a private directory.
    """
    curve_secret_key_file: AnyPath | None = None
    """File with the engine's CURVE key pair, as caesura keygen writes it. With it, connections are encrypted
    and only authorized clients are accepted. The default is no keys.
    """
    curve_authorized_clients: AnyPath | None = None
    """Public keys of the authorized clients: a file, or a folder of *.key files. They are read again at each
    connection."""
    model_backend: Literal["auto", "native", "transformers"] = "auto"
    """Code that computes the model. native: the engine's own, for the architectures that it has;
    transformers: transformers' modules over the engine's matrix products and attention, for most of the
    others. auto: native where it can serve the model, else transformers if it is installed.
    """
    dtype: DtypeName = "auto"
    """Data type of computation: float32, bfloat16 or float16 (or fp32, bf16, fp16, and SGLang's float and
    half). auto: the data type of the checkpoint.
    """
    quantization: Literal["auto", "fp8", "int8", "int4", "mxfp4"] = "auto"
    """Format of linear layers' weights, which are quantised as they are written, on start and by every
    update. fp8: blocks of 128 x 128 with a float32 scale each. On the CPU: int8, blocks of 1 x 128; int4 and
    mxfp4, blocks of 1 x 32, with an output head in int8. auto: the format of the checkpoint.
    """
    quantization_skipped: str = ""
    """Comma-separated modules that keep the dtype, with all below them: model.layers.0, or the last
    components of names, as o_proj for that of every layer. Routers always do, and with fp8 the output head.
    """
    quantization_originals: bool = False
    """On the CPU also keep the values that weights are quantised of, in the model's data type, so that deltas
    of single elements can change them: 2 bytes for each weight in bfloat16.
    """
    device: str = "auto"
    """Device to run on: cpu, cuda, and so on; mps is not served. auto: the accelerator if there is one that
    is served, else cpu.
    """
    num_threads: int | None = None
    """CPU threads within an operation. The default is torch's, shared out among the ranks of this host."""
    tp: int = 1
    """Tensor parallelism: the number of ranks that share every layer. Ranks beyond the first are worker
    processes, which are started here unless tp_joined says otherwise; each takes the next device.
    """
    ep: int = 1
    """Expert parallelism: the number of groups that the tp ranks form to divide routed experts, whole ones to
    each group. Ranks of a group divide the width of theirs; with ep equal to tp there is nothing to divide.
    """
    dp_attention: int = 1
    """Data-parallel attention: with as many as tp, each rank computes whole attention for requests of its own
    and has their KV cache alone, while all other layers stay divided. 1: attention is divided by heads.
    """
    tp_joined: int = 0
    """Number of ranks, the last ones, that are started by hand on other hosts (caesura worker --join ADDRESS
    --rank R).
    """
    tp_address: str | None = None
    """tcp:// address where workers join. Addresses beyond loopback need CURVE keys. The default is a private
    socket, which only workers of this host reach.
    """
    nnodes: int | None = None
    """Number of nodes that share the ranks equally. The same command runs on each, with another node_rank. By
    default the environment says it if tp is above 1: torchrun's, srun's or LeaderWorkerSet's; else 1.
    """
    node_rank: int | None = None
    """Number of this node, from 0. Node 0 has the scheduler; on others the command runs ranks, until the
    engine has been shut down. The default is as for nnodes.
    """
    master_addr: str | None = None
    """HOST or HOST:PORT of node 0, where the ranks of other nodes join; the default port is 29600. Addresses
    beyond loopback need CURVE keys, or a secret in the variable CAESURA_NODES_SECRET. The default is as for
    nnodes.
    """
    join_timeout_s: float = 600.0
    """Seconds for which rank 0 waits for workers to join, and a node or worker that is started by hand for a
    rank 0 that starts it. Meanwhile they say what is missing; then they end.
    """
    context_len: int | None = None
    """Maximum length of prompt plus output, in tokens. The default is the model's."""
    kv_pool_tokens: int | None = None
    """Size of the KV cache pool in tokens, with dp_attention that of each rank. By default,
    kv_memory_fraction of the memory that is free after loading."""
    kv_memory_fraction: float | None = None
    """Fraction of the free device memory for the KV cache pool when kv_pool_tokens is not given, or for what
    the running samples of an image pipeline hold. The default is 0.5 on the CPU and for image pipelines, 0.85
    on accelerators and 0.8 on those with less than 30 GB.
    """
    max_running_requests: int | None = None
    """Maximum number of running samples, which hold KV cache or latents. The default is 256 on the CPU and on
    accelerators with less than 30 GB, 512 with less than 60 GB and 1024 with more; 16 for image pipelines.
    """
    max_waiting_requests: int = 16384
    """Maximum number of queued samples; further requests are refused."""
    chunked_prefill_size: int | None = None
    """Maximum number of prompt tokens in a step (chunked prefill). The default is 512 on the CPU, 2048 on
    accelerators with less than 30 GB, 4096 with less than 60 GB and 8192 with more.
    """
    target_step_s: float = 0.2
    """Prefill chunks are made small enough that a step takes about this many seconds, which bounds the wait
    for a pause. inf: only chunked_prefill_size limits them.
    """
    prefix_cache: bool = True
    """Reuse the KV cache of equal prompt prefixes computed with the same weights."""
    kv_tier_bytes: int = 0
    """Bytes of host memory, on each rank, for KV that leaves the pool: of evicted prefixes, retracted
    requests, a released pool. While the weights are the same, it is copied back instead of computed. 0: none.
    """
    kv_tier_folder: AnyPath | None = None
    """Folder for an unnamed file of kv_tier_folder_bytes, which takes the KV that host memory has no room
    for. It is gone when the engine ends. By default there is none.
    """
    kv_tier_folder_bytes: int = 0
    """Size of that file in bytes, on each rank."""
    pipeline_depth: int | None = None
    """Number of steps in flight while the next step is scheduled: 0 or 1. The default is 0 on the CPU and 1
    on accelerators.
    """
    speculation: Literal["none", "suffix"] = "none"
    """suffix: draft tokens out of earlier outputs, the same prompt's first, and of the request's own text,
    and compute them in one step, where that is faster. Results are the same. It implies a pipeline_depth
    of 0.
    """
    attention_backend: Literal["auto", "flashinfer", "triton", "sdpa"] = "auto"
    """Attention backend. auto: compiled kernels on the CPU; on CUDA flashinfer, else triton, else sdpa: the
    first that is installed and computes a trial step.
    """
    cuda_graphs: bool = True
    """Capture decode steps as CUDA graphs if the attention backend supports it (flashinfer and triton)."""
    cuda_graph_max_bs: int | None = None
    """Maximum number of samples of a decode step that is captured; steps of more are launched kernel by
    kernel. Fewer take less memory, and less time at start and after a resume. The default is
    max_running_requests.
    """
    autotune: bool = True
    """Run warm-up steps at start, which choose kernels and allocate threads, workspaces and the first KV
    pages before the first request.
    """
    autotune_lm_head_rows: int = 64
    """Maximum number of rows of the LM head and the sampler in the warm-up. 0: neither is warmed up."""
    requests_while_paused: Literal["queue", "refuse"] = "queue"
    """Treatment of generate requests that arrive during a pause."""
    idle_empty_s: float = 5.0
    """Empty the device allocator's cache once after this many seconds without work."""
    result_ttl_s: float = 60.0
    """Seconds for which results of clients that could not be reached can be fetched, as far as result_bytes
    allows.
    """
    result_bytes: int | None = None
    """Bytes of host memory for results, kept for repeated messages and for clients that could not be reached;
    allocated at start. New results overwrite the oldest; one that alone takes more is not stored. The default
    is 16 MiB, and 64 MiB for image pipelines, whose trajectories may need more.
    """
    state_file: AnyPath | None = None
    """JSON file that records which weights were committed last. A restart with the same file continues from
    them. By default, nothing is recorded.
    """
    on_lost_weights: Literal["refuse", "serve_initial"] = "refuse"
    """Behaviour when the weights that state_file names are not available. refuse: serve nothing until a
    complete update; serve_initial: serve the weights of model_path.
    """
    session_deadline_s: float = 600.0
    """Default deadline of a weight update session, in seconds; then it is aborted."""
    session_orphan_s: float = 10.0
    """Seconds after which the weight update session of a disconnected client is aborted, unless a message of
    the session arrives.
    """
    weights_cpu_backup: bool = False
    """Keep a copy of the weights on the host while their memory is released, and restore it when the memory
    is resumed. Without it, released weights need a complete update.
    """
    load_bucket_bytes: int = 8 << 20
    """Bytes of weights to load at a time; between two such buckets the engine handles messages."""
    check_finite: bool = False
    """Check every written weight for NaN and infinities at each commit, and refuse the commit if there are
    any: the weights are poisoned then. It reads all weights that were written.
    """
    weights_digest: bool = True
    """Keep a digest of the weights, which status, replies to updates and the spans of samples carry: proofs
    of rollouts and checks of sparse updates need it. It reads what is written once more.
    """
    update_report: Literal["off", "sampled", "full"] = "off"
    """Say in the reply what an update changed: by every element, or by a selection of them."""
    min_changed: float | None = None
    """Least share of the elements that an update changes, from 0 to 1; others are warned of, or refused.
    """
    max_rel_norm: float | None = None
    """Largest norm of the change of a group of tensors, over the norm of their values before; larger ones are
    warned of, or refused.
    """
    refuse_beyond: bool = False
    """Refuse updates beyond these bounds: before the first byte where all tensors come in one call of a
    running engine, but not by broadcasts; else the weights are poisoned.
    """
    group_interface: str | None = None
    """Network interface (for example eth0) for weight update groups. The default is loopback if the master
    address is loopback, else the interface of the host name's address.
    """
    allow_legacy_pickle: bool = False
    """Accept checkpoint-engine's pickled messages. They are parsed into plain fields and never unpickled."""
    deterministic: bool = False
    """Bitwise batch-invariant results: tokens and logprobs of a request do not depend on other requests or on
    pauses. The engine refuses to start where this is not possible.
    """
    enable_lora: bool = False
    """Serve LoRA adapters (load_adapter). Memory for max_loras of them and one that is being loaded, of rank
    max_lora_rank each, is taken at start.
    """
    max_loras: int = 4
    """Maximum number of adapters whose requests run at once."""
    max_loaded_loras: int | None = None
    """Maximum number of loaded adapters; the one not used for longest makes room for another. Above
    max_loras, copies are kept on the host and brought to the device when requests come. Default: max_loras.
    """
    max_lora_rank: int = 32
    """Largest rank of an adapter."""
    lora_experts: bool = False
    """Take memory for adapters of routed experts, too: factors for every expert."""
    reference_model_path: AnyPath | None = None
    """Hugging Face folder of the reference model for score requests. By default there is none."""
    reference_residency: Residency = "resident"
    """Placement of the reference model's weights. resident: always on the device; offload: only during
    scoring; layerwise: during scoring, layer by layer.
    """
    reference_pool_tokens: int | None = None
    """Size of the reference model's KV cache pool in tokens. The default is one sequence of context_len."""
    enable_drift_check: bool = False
    """Score some finished samples again, and the first ones after each weight update, on the other code path
    (prefill), and report how far their log-probabilities are from those that they were sampled with.
    """
    drift_share: float = 0.005
    """Share of the computed tokens whose samples are scored again."""
    drift_samples: int = 4
    """Number of samples that are scored again after each weight update: the first ones that finish, and as
    many from before it, which say what the update itself has changed."""
    drift_warn: float = 0.001
    """KL divergence (the estimator k3) above which a warning is logged. With deterministic any difference is
    over the limit."""
    drift_limit: float = 0.015
    """KL divergence above which drift_action is taken."""
    drift_action: Literal["warn", "unhealthy", "pause"] = "warn"
    """Action above drift_limit. warn: log; unhealthy: log, and /health answers 503 until a later report is
    below; pause: log, and pause the engine (in_place).
    """
    frozen_residency: Residency = "resident"
    """Placement of the text encoders and the VAE of an image pipeline. resident: always on the device;
    offload: on the device while steps need them; layerwise: likewise, but two blocks at a time.
    """
    transformer_residency: Residency = "resident"
    """Placement of the transformer of an image pipeline, with the same choices."""
    prompt_cache_bytes: int = 64 << 20
    """Maximum bytes of encoded prompts that an image engine keeps on the device for later requests. 0: none.
    """
    check_ledger: bool = False
    """For tests: after every control message, check that free, cached and held KV pages add up."""
    log_stages: bool = False
    """Log the start and end of each stage of steps, pauses, updates and releases; at log level DEBUG with the
    memory in use.
    """
    log_stats_interval_s: float = 10.0
    """While requests run, log running and waiting requests, KV use and throughput every this many seconds,
    and once more when they have ended. 0: never.
    """
    profile_dir: AnyPath | None = None
    """Folder that traces of torch's profiler are written under (caesura profile). By default, a new folder in
    the temporary directory, made when the first trace starts.
    """
    log_level: str = "INFO"
    """Minimum severity of log records: DEBUG, INFO, WARNING or ERROR."""
    log_format: Literal["text", "json"] = "text"
    """Format of log lines. json: one object per line, with time, level, replica, rank, logger and message."""
    log_name: str = ""
    """Name of this engine in its log lines. caesura serve --replicas sets it to replica-0, replica-1, and so
    on.
    """
    shutdown_mode: Literal["abort", "drain"] = "abort"
    """Treatment of unfinished requests at SIGTERM or a shutdown message. abort: end them at once; drain: let
    them finish within drain_timeout_s.
    """
    drain_timeout_s: float = 30.0
    """Maximum seconds to drain; then the remaining requests are aborted."""
    watchdog_timeout_s: float = 300.0
    """Exit with status 70 when the scheduler loop has been stuck for this many seconds. 0: never."""
