"""Parts that compute an engine's steps, all that differs between kinds of engines, and how it is built."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...io_struct import CaesuraError, ErrorCode, GenerateReqInput, Message
from ..cache.manager import CacheManager
from ..cache.tier import KVTier
from ..execution.build import (
    MakeRunner,
    build_components,
    build_page_store,
    build_states,
    build_windows,
    routing_bytes_per_token,
)
from ..execution.graphs import DecodeGraphs
from ..execution.kernel_report import Serving, what_serves
from ..execution.model_runner import ModelRunner
from ..scheduling.batcher import Batcher
from ..scheduling.chunking import ChunkSizer
from ..scheduling.grammars import Grammars
from ..scheduling.outputs import OutputProcessor, Outputs
from ..scheduling.request import RequestTable
from ..scoring.scoring import Scoring
from ..weights.loaded_model import LoadedWeights
from ..weights.transports.disk import OpenFolder, open_fitting
from .engine_config import PAGE_SIZE

if TYPE_CHECKING:
    from ..execution.forward import Runner
    from ..images.image_batcher import ImageBatcher
    from ..images.prompt_cache import PromptCache
    from ..images.runner import ImageRunner
    from .engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    loaded: LoadedWeights
    open_folder: OpenFolder
    scoring: Scoring | None = None
    runner: "Runner | ImageRunner"
    graphs: DecodeGraphs | None = None
    request_type: type[Message]
    admit: Callable[[Any, list[memoryview], bytes, int], list[Any]]
    """Makes the samples of a message, its buffers, its client and the number of samples that wait."""
    batcher: "Batcher | ImageBatcher"
    grammars: Grammars | None = None
    prompts: "PromptCache | None" = None
    outputs: Outputs[Any]
    cache: CacheManager
    """The KV pages; one that nobody takes where steps have no KV."""
    serving: Serving
    context_len: int = 0
    """Most tokens of prompt plus output; 0 where nothing is limited so."""
    vocab_size: int = 0
    kv_bytes_per_token: int = 0
    routing_bytes_per_token: int = 0
    latent_bytes_per_pixel: float | None = None
    pipeline_depth: int = 0


def token_steps(engine: "Engine", make_runner: MakeRunner) -> Steps:
    config, residency, executor = engine.config, engine.residency, engine.executor
    scoring = None if (path := config.reference_model_path) is None else Scoring(engine, path)
    folder, stamp = engine.initial_weights.folder, engine.state.stamp
    started = executor.start(folder)
    loaded, pool, routing, limits = build_components(
        config, residency, folder, executor.parallel, executor, executor.sharing
    )
    if config.speculation != "none" and pool.states is not None:
        reason = "speculation does not serve models whose layers keep a state per sequence: leave it out"
        raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field="speculation", value=config.speculation)
    own = make_runner(config, loaded, pool, routing)
    if isinstance(own, ModelRunner):
        own.stages = engine.stages  # from here on: the steps of the warm-up do not count
    started.wait()
    runner = executor.runner(own)
    store = build_page_store(config, pool, routing, runner.on_stream)
    table = RequestTable(config.sizes.rows, limits.context_len, PAGE_SIZE, loaded.config.vocab_size)
    cache = CacheManager(
        pool.num_pages,
        PAGE_SIZE,
        config.prefix_cache,
        stamp.epoch,
        build_windows(config, loaded, pool),
        build_states(pool),
        None if store is None else KVTier(store, executor.call),
        ranks=config.dp_attention,
    )
    chunks = ChunkSizer(config.sizes.chunk_tokens, config.target_step_s)
    grammars = Grammars(
        config.model_path,
        loaded.config.vocab_size,
        loaded.config.eos_token_ids,
        wake=engine.wakeup.set,
        finish=lambda request, reason: outputs.end_of_grammar(request, reason),
    )
    batcher = Batcher(
        table,
        cache,
        engine.waiting,
        chunks=chunks,
        routing=routing,
        grammars=grammars,
        speculates=config.speculation != "none",
    )
    outputs = OutputProcessor(engine, batcher)
    return Steps(
        loaded=loaded,
        open_folder=lambda path, _: open_fitting(path, loaded.config),
        scoring=scoring,
        runner=runner,
        graphs=own.graphs if isinstance(own, ModelRunner) else None,
        request_type=GenerateReqInput,
        admit=limits.admit,
        batcher=batcher,
        grammars=grammars,
        outputs=outputs,
        cache=cache,
        serving=what_serves(config, loaded),
        context_len=limits.context_len,
        vocab_size=limits.vocab_size,
        kv_bytes_per_token=pool.nbytes // (pool.num_pages * PAGE_SIZE),
        routing_bytes_per_token=routing_bytes_per_token(loaded),
        pipeline_depth=config.pipeline_depth or 0,
    )
