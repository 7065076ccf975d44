"""The engine: one object whose parts find each other through it, when they work and not when they are built.

The endpoint is bound before anything is allocated, so a second engine on it fails first. If a part cannot be
built, everything before is released.
"""

import secrets
from contextlib import ExitStack
from time import monotonic
from typing import Any

from ...io_struct import CaesuraError, ErrorCode, MemoryTag
from ..cache.manager import LedgerError
from ..control.adapter_loading import restore
from ..control.adapters import Adapters
from ..control.committed_weights import WeightsFile
from ..control.engine_state import EngineState
from ..control.parameter_server import ParameterServerUpdates
from ..control.profiling import StepTrace
from ..control.update_groups import WeightSending
from ..control.weight_sessions import Sessions
from ..control.weight_updates import WeightUpdates
from ..execution.build import MakeRunner, build_runner
from ..executor.executor import Executor
from ..memory.device_memory import DeviceCache
from ..memory.device_module import device_module_for
from ..memory.residency import ComponentResidencyManager
from ..messaging.command_queue import CommandQueue
from ..messaging.endpoint import ServerKeys
from ..messaging.message_dispatcher import Dispatcher
from ..messaging.outbox import Outbox
from ..messaging.router_socket import Router
from ..messaging.stored_answers import Answers, Replies
from ..models.config import load_model_config, quantized
from ..models.registry import require_ranks
from ..observability.memory_history import MemoryGauges, MemoryHistory, OwnBytes
from ..observability.stage_profiler import StageProfiler
from ..observability.throughput import Throughput
from ..scheduling.request import WeightStamp
from ..scheduling.step_recovery import Recovery
from ..scheduling.waiting_queue import LiveRequests, WaitingQueue
from ..scoring.drift_checks import Drift
from ..weights.digests import DigestedRows
from ..weights.staged_delta import DeltaLoader
from ..weights.transports.distributed import WeightsUpdateGroups
from ..weights.upload import write_stream_of
from .background import Wakeup
from .engine_config import EngineConfig
from .files import is_pipeline
from .guard import Guard
from .housekeeping import Housekeeping
from .loop import Scheduler
from .shutdown import Shutdown
from .steps import Steps, token_steps
from .watchdog import Heartbeat


class Engine:
    def __init__(
        self, config: EngineConfig, shutdown: Shutdown | None = None, make_runner: MakeRunner | None = None
    ) -> None:
        """Build the engine; with ``shutdown`` None only a shutdown message ends it."""
        assert config.endpoint is not None
        self.config = config
        self.shutdown = shutdown or Shutdown(config.shutdown_mode == "drain", config.drain_timeout_s)
        self.started_at = monotonic()
        self._cleanup = ExitStack()
        try:
            keys = ServerKeys.read(config.curve_secret_key_file, config.curve_authorized_clients)
            self.router = Router(config.endpoint, lambda client: self.dispatcher.client_gone(client), keys)
            self._cleanup.callback(self.router.close)
            self.heartbeat, self.wakeup = Heartbeat(), Wakeup()
            self._cleanup.callback(self.wakeup.close)
            self._build_memory()
            self._build_steps(make_runner or build_runner)
            self._build_control()
            restore(self)
            self.guard = Guard(fatal=(LedgerError,) if config.check_ledger else ())
            self.housekeeping = Housekeeping(self)
            self.scheduler = Scheduler(self)
            self.device_cache.empty("start")  # loading leaves unused blocks
            self.history.note("start", config.model_path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._cleanup.close()

    def _build_memory(self) -> None:
        config = self.config
        self.weights_file = WeightsFile(config)
        self._cleanup.callback(self.weights_file.close)
        self.device_module = device_module_for(config.device)
        self._has_steps = False  # while the model is loaded, components may leave the device already
        self.device_cache = DeviceCache(
            self.device_module,
            synchronize=lambda: self.runner.synchronize() if self._has_steps else None,
            elsewhere=lambda place: self.executor.empty(place) if self._has_steps else (),
            note_failure=lambda what, freed: self.history.note("failure", what, returned=freed),
        )
        self.executor = _executor(config)
        self._cleanup.callback(self.executor.close)
        backed_up: tuple[MemoryTag, ...] = ("weights",) if config.weights_cpu_backup else ()
        self.residency = ComponentResidencyManager(
            config.device, device_cache=self.device_cache, backed_up=backed_up
        )
        self._cleanup.callback(self.residency.close)
        self.gauges = MemoryGauges(self.device_module, self.residency, self._own_bytes)
        self.history: MemoryHistory = MemoryHistory(
            self.gauges, lambda: (self.state.step, self.state.stamp.epoch)
        )
        self.stages = StageProfiler(log=config.log_stages, describe_memory=self.gauges.describe)
        self.initial_weights = start = self.weights_file.start()
        stamp = WeightStamp(start.epoch, start.version, secrets.token_hex(8))
        self.state: EngineState = EngineState(self, stamp, start.lost)
        self.sessions = Sessions(deadline_s=config.session_deadline_s, orphan_s=config.session_orphan_s)
        self.replies = Replies(self)
        self.live: LiveRequests[Any] = LiveRequests()
        self.waiting: WaitingQueue[Any] = WaitingQueue()
        self.outbox = Outbox(self.router.send, one_by_one=is_pipeline(config.model_path))
        self.recovery = Recovery(self)
        self.drift: Drift = Drift(self)

    def _build_steps(self, make_runner: MakeRunner) -> None:
        self.steps = steps = _steps(self, make_runner)
        self.loaded, self.model, self.loader = steps.loaded, steps.loaded.model, steps.loaded.loader
        self.delta = DeltaLoader(self.model, self.loader)
        self.weights_bytes, self.derived_bytes = steps.loaded.weights_bytes, steps.loaded.derived_bytes
        self.runner, self.batcher, self.outputs = steps.runner, steps.batcher, steps.outputs
        self.grammars = steps.grammars
        self.request_type, self.admit = steps.request_type, steps.admit
        self.cache, self.prompts, self.graphs = steps.cache, steps.prompts, steps.graphs
        self.open_folder, self.scoring = steps.open_folder, steps.scoring
        self._has_steps = True
        if self.cache.tier is not None:
            self._cleanup.callback(self.cache.tier.close)
        steps.serving.log()
        if self.loader.digests is not None:
            elsewhere = self.executor.call("digests", False, reply=list[DigestedRows]).wait()
            self.state.note_digest(self.loader.digests.total(elsewhere))
        self.weights_file.begin(self.state.stamp, steps.loaded.digest)
        self.throughput = Throughput(self)

    def _build_control(self) -> None:
        config, device, wake = self.config, self.loaded.device, self.wakeup.set
        self.write_stream = write_stream_of(device, self.runner.on_stream)
        self.process_groups = WeightsUpdateGroups(
            device, wake, interface=config.group_interface, write_stream=self.write_stream
        )
        self._cleanup.callback(self.process_groups.close)
        self.updates: WeightUpdates = WeightUpdates(self)
        self.parameter_server: ParameterServerUpdates = ParameterServerUpdates(self)
        self._cleanup.callback(self.parameter_server.close)
        self.sending: WeightSending = WeightSending(self)
        self.checksums: dict[str, str] = {}
        """The weights checker's snapshot, by tensor; empty before the first."""
        self.trace = StepTrace(self.stages, config.profile_dir, config.device, wake)
        self._cleanup.callback(self.trace.close)
        self.answers = Answers(config.result_ttl_s, config.result_bytes or 0)
        self.adapters = Adapters(self)
        self.commands = CommandQueue(self)
        self.dispatcher = Dispatcher(self)

    def _own_bytes(self) -> OwnBytes:
        graphs = 0 if self.graphs is None else self.graphs.nbytes
        return OwnBytes(self.derived_bytes, graphs, self.answers.nbytes if self.config.device == "cpu" else 0)


def _executor(config: EngineConfig) -> Executor:
    if config.tp > 1:
        if is_pipeline(config.model_path):
            reason = f"tp = {config.tp}: image pipelines have one rank"
            raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field="tp", value=config.tp)
        model_config = load_model_config(config.model_path, config.model_backend)
        if config.quantization != "auto":
            model_config = quantized(model_config, config)
        require_ranks(model_config, config.tp, config.ep, config.dp_attention)
    return Executor(config)


def _steps(engine: Engine, make_runner: MakeRunner) -> Steps:
    if not is_pipeline(engine.config.model_path):
        return token_steps(engine, make_runner)
    try:
        from .image_steps import image_steps  # needs diffusers, which is optional
    except ImportError as error:
        reason = (
            f"{error.name} is not installed, which image pipelines need: pip install 'caesura[diffusion]'"
        )
        raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field="model_path") from error
    return image_steps(engine)
