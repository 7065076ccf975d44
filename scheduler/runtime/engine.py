"""The engine: one object whose parts find each other through it.

Invariants:
- The endpoint is bound before anything is allocated, so a second engine on the same endpoint fails first.
- If a part cannot be built, everything that was built before is released.
- A part takes the engine and reads other parts when it works, not when it is built, so the order below is only that of
  memory and of what a constructor needs at once.
"""

import secrets
from contextlib import ExitStack, closing
from time import monotonic

from ...io_struct import CaesuraError, ErrorCode, MemoryTag
from ..cache.manager import LedgerError
from ..control.committed_weights import WeightsFile
from ..control.engine_state import EngineState
from ..control.parameter_server import ParameterServerUpdates
from ..control.weight_sending import WeightSending
from ..control.weight_sessions import Sessions
from ..control.weight_updates import WeightUpdates
from ..execution.build import MakeRunner, build_runner
from ..executor.executor import Executor
from ..memory.device_cache import DeviceCache
from ..memory.device_module import device_module_for
from ..memory.residency import ComponentResidencyManager
from ..messaging.answers import Answers
from ..messaging.client_access import ServerKeys
from ..messaging.command_queue import CommandQueue
from ..messaging.dispatcher import Dispatcher
from ..messaging.replies import Replies
from ..messaging.router_socket import Router
from ..models.config import load_model_config
from ..models.registry import require_ranks
from ..observability.memory_history import MemoryGauges, MemoryHistory, OwnBytes
from ..observability.stage_profiler import StageProfiler
from ..observability.step_trace import StepTrace
from ..observability.throughput import Counters, Throughput
from ..scheduling.request import WeightStamp
from ..scoring.scoring import Scoring
from ..weights.transports.distributed import WeightsUpdateGroups
from ..weights.upload import write_stream_of
from .background import Wakeup
from .config import EngineConfig
from .core import Core, language_core
from .files import is_pipeline
from .guard import Guard
from .housekeeping import Housekeeping
from .loop import Scheduler
from .shutdown import Shutdown
from .watchdog import Heartbeat


class Engine:
    """The parts of an engine; ``scheduler.run()`` serves."""

    def __init__(
        self, config: EngineConfig, shutdown: Shutdown | None = None, make_runner: MakeRunner | None = None
    ) -> None:
        """Bind the endpoint, then build everything else.

        Args:
            config: the resolved configuration.
            shutdown: decides when the loop ends, or None if only a shutdown message ends it.
            make_runner: builds the runner of the steps, or None for :func:`build_runner`.
        """
        assert config.endpoint is not None
        self.config = config
        self.shutdown = shutdown or shutdown_of(config)
        self.started_at = monotonic()
        self._cleanup = ExitStack()
        self._has_steps = False  # while the model is loaded, components may leave the device already
        keys = ServerKeys.read(config.curve_secret_key_file, config.curve_authorized_clients)
        self.router = self._cleanup.enter_context(
            closing(
                Router(config.endpoint, on_gone=lambda client: self.dispatcher.client_gone(client), keys=keys)
            )
        )
        self.heartbeat = Heartbeat()
        self.wakeup = self._cleanup.enter_context(closing(Wakeup()))
        try:
            self._build(make_runner or build_runner)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the endpoint, stop the background threads, and release memory."""
        self._cleanup.close()

    def _build(self, make_runner: MakeRunner) -> None:
        config, closed = self.config, self._cleanup.enter_context
        self.weights_file = closed(closing(WeightsFile(config)))
        self.device_module = device_module_for(config.device)
        self.device_cache = DeviceCache(
            self.device_module,
            synchronize=lambda: self.runner.synchronize() if self._has_steps else None,
            elsewhere=lambda place: self.executor.empty(place) if self._has_steps else (),
            note_failure=lambda what, freed: self.history.note("failure", what, returned=freed),
        )
        self.executor = closed(closing(_executor(config)))
        backed_up: tuple[MemoryTag, ...] = ("weights",) if config.weights_cpu_backup else ()
        self.residency = closed(
            closing(
                ComponentResidencyManager(config.device, device_cache=self.device_cache, backed_up=backed_up)
            )
        )
        self.gauges = MemoryGauges(
            self.device_module, self.residency, self._own_bytes
        )  # before large allocations
        self.history: MemoryHistory = MemoryHistory(
            self.gauges, lambda: (self.state.step, self.state.stamp.epoch)
        )
        self.stages = StageProfiler(log=config.log_stages, describe_memory=self.gauges.describe)
        self.initial_weights = self.weights_file.start()
        start = self.initial_weights
        self.state: EngineState = EngineState(
            self, WeightStamp(start.epoch, start.version, secrets.token_hex(8)), start.lost
        )
        self.sessions = Sessions(deadline_s=config.session_deadline_s, orphan_s=config.session_orphan_s)
        self.replies = Replies(self)
        self._build_steps(make_runner)
        self.throughput = Throughput(
            self._counters,
            lambda: self.state.may_execute and self.batcher.has_work,
            config.log_stats_interval_s,
        )
        self.write_stream = write_stream_of(self.loaded.device, self.runner.on_stream)
        self.process_groups = closed(
            closing(
                WeightsUpdateGroups(
                    self.loaded.device,
                    self.wakeup.set,
                    interface=config.group_interface,
                    write_stream=self.write_stream,
                )
            )
        )
        self.updates: WeightUpdates = WeightUpdates(self)
        self.parameter_server: ParameterServerUpdates = closed(closing(ParameterServerUpdates(self)))
        self.sending: WeightSending = WeightSending(self)
        self.checksums: dict[str, str] = {}
        """Checksums of the weights checker's snapshot, by tensor; empty before the first."""
        self.trace = closed(
            closing(StepTrace(self.stages, config.profile_dir, config.device, self.wakeup.set))
        )
        self.scoring = None if self.steps.reference is None else Scoring(self, self.steps.reference)
        self.answers = Answers(config.result_ttl_s, config.result_bytes or 0)
        self.commands = CommandQueue(self)
        self.dispatcher = Dispatcher(self)
        self.guard = Guard(fatal=(LedgerError,) if config.check_ledger else ())
        self.housekeeping = Housekeeping(self)
        self.scheduler = Scheduler(self)
        self.device_cache.empty("start")  # loading leaves unused blocks
        self.history.note("start", config.model_path)

    def _build_steps(self, make_runner: MakeRunner) -> None:
        """Build what computes steps: the parts that depend on what a step is."""
        self.steps = steps = _core(self, make_runner)
        self.loaded, self.model, self.loader = steps.loaded, steps.loaded.model, steps.loaded.loader
        self.weights_bytes, self.derived_bytes = steps.loaded.weights_bytes, steps.loaded.derived_bytes
        self.runner, self.batcher, self.recovery = steps.runner, steps.batcher, steps.recovery
        self.live, self.waiting, self.admit = steps.live, steps.waiting, steps.admit
        self.outputs, self.outbox, self.request_type = steps.outputs, steps.outbox, steps.request_type
        self.cache, self.prompts, self.open_folder = steps.cache, steps.prompts, steps.open_folder
        self.graphs = None if steps.model_runner is None else steps.model_runner.graphs
        self._has_steps = True
        steps.serving.log()
        self.weights_file.begin(self.state.stamp, steps.loaded.digest)

    def _own_bytes(self) -> OwnBytes:
        graphs = 0 if self.graphs is None else self.graphs.nbytes
        return OwnBytes(self.derived_bytes, graphs, self.answers.nbytes if self.config.device == "cpu" else 0)

    def _counters(self) -> Counters:
        state, batcher, kv = self.state, self.batcher, self.cache.usage()
        return Counters(
            generated_tokens=self.outputs.generated_tokens,
            prefilled_tokens=batcher.prefilled_tokens,
            prompt_tokens=batcher.prompt_tokens,
            cached_tokens=batcher.cached_tokens,
            paused_s=sum(total.seconds for total in state.pause_totals()),
            running=batcher.num_running + batcher.num_prefilling,
            waiting=len(self.waiting),
            kv_held=kv.held,
            kv_total=kv.total,
            images=batcher.images is not None,
            state=" ".join(filter(None, (state.generation, state.pause_mode)))
            + ("" if state.weights == "valid" else f", weights {state.weights}"),
        )


def _executor(config: EngineConfig) -> Executor:
    """Start the workers of this host, after refusing a model that cannot be divided among ``tp`` ranks."""
    if config.tp > 1:
        if is_pipeline(config.model_path):
            raise CaesuraError(
                ErrorCode.UNSUPPORTED,
                f"tp = {config.tp}: image pipelines have one rank",
                field="tp",
                value=config.tp,
            )
        require_ranks(load_model_config(config.model_path, config.model_backend), config.tp)
    return Executor(config)


def _core(engine: Engine, make_runner: MakeRunner) -> Core:
    """The core of the model in the configuration's folder."""
    if not is_pipeline(engine.config.model_path):
        return language_core(engine, make_runner)
    try:
        from .image_core import image_core  # diffusers is optional, and only this core needs it
    except ImportError as error:
        raise CaesuraError(
            ErrorCode.UNSUPPORTED,
            f"{error.name} is not installed, which image pipelines need: pip install 'caesura[diffusion]'",
            field="model_path",
        ) from error
    return image_core(engine)


def shutdown_of(config: EngineConfig, **fds: int | None) -> Shutdown:
    drain = config.shutdown_mode == "drain"
    return Shutdown(drain=drain, drain_timeout_s=config.drain_timeout_s, **fds)
