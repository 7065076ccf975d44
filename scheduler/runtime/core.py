"""The part of an engine that knows what a step is, and how that of a language model is built.

Invariants:
- :class:`Core` is all that the rest of an engine sees of it: the socket, the commands, the loop, memory and results are the same
  for every kind of engine.
- What can be released is allocated while the core is built (``build.py``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...io_struct import GenerateReqInput, Message
from ..cache.manager import CacheManager
from ..control.committed_weights import Start
from ..execution.build import (
    MakeRunner,
    build_components,
    build_states,
    build_windows,
    routing_bytes_per_token,
)
from ..execution.kernel_report import Serving, what_serves
from ..execution.model_runner import ModelRunner
from ..executor.executor import Executor
from ..memory.device_cache import DeviceCache
from ..memory.residency import ComponentResidencyManager
from ..messaging.outbox import Outbox
from ..observability.stage_profiler import StageProfiler
from ..scheduling.batcher import Batcher
from ..scheduling.chunking import ChunkSizer
from ..scheduling.live_requests import LiveRequests
from ..scheduling.output_processor import OutputProcessor
from ..scheduling.request import Request, RequestTable, WeightStamp
from ..scheduling.step_recovery import Recovery
from ..scheduling.stepping import (
    Admission,
    KeptPrompts,
    StepBatcher,
    StepOutbox,
    StepOutputs,
    StepQueue,
    StepRecovery,
    StepRunner,
)
from ..scheduling.waiting_queue import TokenAdmission, WaitingQueue
from ..scoring.reference import load_reference
from ..scoring.scoring import ReferenceModel
from ..weights.loaded_model import LoadedWeights
from ..weights.transports.disk import OpenFolder, open_fitting
from .config import PAGE_SIZE, EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a core is built with."""

    config: EngineConfig
    residency: ComponentResidencyManager
    device_cache: DeviceCache
    stages: StageProfiler
    start: Start
    """The weights to begin with."""
    stamp: WeightStamp
    executor: Executor
    send: Callable[[bytes, Any], None]
    """Sends a message to a client."""
    on_finished: Callable[[Any, Any], None]
    """Called once for each sample, with its terminal result, after what it held was released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """The objects that compute steps, and the state that they work on."""

    loaded: LoadedWeights
    open_folder: OpenFolder
    reference: ReferenceModel | None = None
    runner: StepRunner
    model_runner: ModelRunner | None = None
    """This rank's, of a language model."""
    request_type: type[Message]
    """The message that asks for samples."""
    admission: Admission
    live: LiveRequests[Any]
    waiting: StepQueue
    batcher: StepBatcher
    prompts: KeptPrompts | None = None
    """None: prompts are kept as KV alone."""
    outputs: StepOutputs
    outbox: StepOutbox
    recovery: StepRecovery
    cache: CacheManager
    """The KV pages; without any where steps have no KV."""
    serving: Serving
    context_len: int = 0
    """Most tokens of prompt plus output; 0 where nothing is limited so."""
    vocab_size: int = 0
    kv_bytes_per_token: int = 0
    routing_bytes_per_token: int = 0
    latent_bytes_per_pixel: float | None = None
    """Of a language model None."""
    pipeline_depth: int = 0


def language_core(around: Surroundings, make_runner: MakeRunner) -> Core:
    """The core of a language model, over paged KV."""
    config, residency = around.config, around.residency
    reference = load_reference(config, residency)
    executor = around.executor
    started = executor.start(around.start.folder)
    loaded, pool, routing, limits = build_components(
        config, residency, around.start.folder, executor.parallel, executor
    )
    own = make_runner(config, loaded, pool, routing)
    started.wait()
    runner = executor.runner(own)
    table = RequestTable(config.sizes.rows, limits.context_len, PAGE_SIZE, loaded.config.vocab_size)
    cache = CacheManager(
        pool.num_pages,
        PAGE_SIZE,
        config.prefix_cache,
        around.stamp.epoch,
        build_windows(config, loaded, pool),
        build_states(pool),
    )
    waiting = WaitingQueue()
    chunks = ChunkSizer(config.sizes.chunk_tokens, config.target_step_s)
    batcher = Batcher(
        table,
        cache,
        waiting,
        chunks=chunks,
        share_prefixes=config.prefix_cache,
        routing=routing,
    )
    live: LiveRequests[Request] = LiveRequests()
    outbox = Outbox(around.send)
    outputs = OutputProcessor(
        table, batcher, waiting, live, outbox, on_finished=around.on_finished, stamp=around.stamp
    )
    recovery = Recovery(
        batcher=batcher, outputs=outputs, runner=runner, chunks=chunks, device_cache=around.device_cache
    )
    return Core(
        loaded=loaded,
        open_folder=lambda path, _: open_fitting(path, loaded.config),
        reference=reference,
        runner=runner,
        model_runner=own if isinstance(own, ModelRunner) else None,
        request_type=GenerateReqInput,
        admission=TokenAdmission(limits),
        live=live,
        waiting=waiting,
        batcher=batcher,
        outputs=outputs,
        outbox=outbox,
        recovery=recovery,
        cache=cache,
        serving=what_serves(config, loaded),
        context_len=limits.context_len,
        vocab_size=limits.vocab_size,
        kv_bytes_per_token=pool.nbytes // (pool.num_pages * PAGE_SIZE),
        routing_bytes_per_token=routing_bytes_per_token(loaded),
        pipeline_depth=config.pipeline_depth or 0,
    )
