"""Builds and wires the objects of an engine.

Invariants:
- The endpoint is bound before anything is allocated, so a second engine on the same endpoint fails first.
- If an object cannot be built, everything that was built before is released.
"""

import contextlib
import secrets
from dataclasses import dataclass

from ... import __version__
from ...io_struct import (
    CaesuraError,
    ErrorCode,
    GetMemoryHistoryReqInput,
    GetStatusReqInput,
    GetWeightsManifestReqInput,
    HelloReqInput,
    MemoryTag,
)
from ..cache.manager import LedgerError
from ..control.committed_weights import Start, WeightsFile
from ..control.distributed_updates import DistributedUpdates
from ..control.handlers import Commands
from ..control.lifecycle import Lifecycle
from ..control.memory_occupation import MemoryOccupation
from ..control.parameter_server import ParameterServerUpdates
from ..control.process_groups import ProcessGroupCommands
from ..control.profiling import ProfilingCommands
from ..control.weight_commit import WeightCommit
from ..control.weight_sending import WeightSending
from ..control.weight_sessions import Sessions
from ..control.weight_updates import WeightUpdates
from ..control.weights_checker import WeightsChecker
from ..execution.build import MakeRunner, build_runner
from ..executor.executor import Executor
from ..memory.device_cache import DeviceCache
from ..memory.device_module import DeviceModule, device_module_for
from ..memory.residency import ComponentResidencyManager
from ..messaging.answers import Answers, SampleResult
from ..messaging.client_access import ServerKeys
from ..messaging.command_queue import CommandQueue
from ..messaging.dispatcher import Dispatcher, Queries
from ..messaging.generations import Generations
from ..messaging.hello import answer_hello
from ..messaging.replies import Replies
from ..messaging.router_socket import Router
from ..messaging.status import StaticFacts, StatusReporter
from ..models.config import load_model_config
from ..models.registry import require_ranks
from ..observability.memory_history import MemoryGauges, MemoryHistory
from ..observability.stage_profiler import StageProfiler
from ..observability.step_trace import StepTrace
from ..observability.throughput import Counters, Throughput
from ..scheduling.live_requests import LiveSample
from ..scheduling.request import WeightStamp
from ..scoring.scoring import Scoring
from ..weights.transports.distributed import WeightsUpdateGroups
from ..weights.upload import WriteStream, uploader_of, write_stream_of
from .background import Wakeup
from .config import EngineConfig
from .core import Core, Surroundings, language_core
from .files import is_pipeline
from .guard import Guard
from .housekeeping import Housekeeping
from .loop import Scheduler
from .shutdown import Shutdown
from .watchdog import Heartbeat


@dataclass(frozen=True, slots=True)
class _Core:
    """What computes steps, with the engine's state."""

    steps: Core
    folder: str | None
    """The folder that the weights came from; None means the configuration's model_path."""
    residency: ComponentResidencyManager
    lifecycle: Lifecycle


@dataclass(frozen=True, slots=True)
class _Commands:
    """The objects that carry out commands and scoring."""

    handlers: Commands
    sending: WeightSending
    scoring: Scoring | None


class Engine:
    """A wired scheduler; ``scheduler.run()`` serves."""

    def __init__(
        self, config: EngineConfig, shutdown: Shutdown | None = None, make_runner: MakeRunner | None = None
    ) -> None:
        """Bind the endpoint, then build everything else.

        Args:
            config: the resolved configuration.
            shutdown: decides when the loop ends; None if only a shutdown message ends it.
            make_runner: builds the runner of the steps; None means :func:`build_runner`.
        """
        assert config.endpoint is not None
        assert config.pipeline_depth is not None
        self._cleanup = contextlib.ExitStack()
        keys = ServerKeys.read(config.curve_secret_key_file, config.curve_authorized_clients)
        self.router = Router(config.endpoint, on_gone=self._client_gone, keys=keys)
        self._cleanup.callback(self.router.close)
        self.heartbeat = Heartbeat()
        self.wakeup = Wakeup()
        self._cleanup.callback(self.wakeup.close)
        try:
            self._build(config, shutdown or shutdown_of(config), make_runner or build_runner)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the endpoint, stop the background threads, and release memory."""
        self._cleanup.close()

    def _build(self, config: EngineConfig, shutdown: Shutdown, make_runner: MakeRunner) -> None:
        self._weights_file = WeightsFile(config)
        self._cleanup.callback(self._weights_file.close)
        module = device_module_for(config.device)
        self._device_cache = DeviceCache(module)
        backed_up: tuple[MemoryTag, ...] = ("weights",) if config.weights_cpu_backup else ()
        self._executor = _executor(config)
        self._cleanup.callback(self._executor.close)
        residency = ComponentResidencyManager(
            config.device, device_cache=self._device_cache, backed_up=backed_up
        )
        self._cleanup.callback(residency.close)
        self._gauges = MemoryGauges(module, residency)  # before anything large is allocated
        self.history = MemoryHistory(self._gauges)
        self._device_cache.note_failure = lambda what, freed: self.history.note(
            "failure", what, returned=freed
        )
        self._stages = StageProfiler(log=config.log_stages, describe_memory=self._gauges.describe)
        core = self._build_core(config, residency, make_runner)
        self._device_cache.synchronize = core.steps.runner.synchronize
        self._device_cache.elsewhere = self._executor.empty
        self._throughput = Throughput(
            lambda: self._counters(core),
            lambda: core.lifecycle.may_execute and core.steps.batcher.has_work,
            config.log_stats_interval_s,
        )
        commands = self._build_commands(config, core, module)
        self._build_serving(config, core, commands, module, shutdown)
        self.scheduler = self._build_loop(config, core, shutdown)
        self._device_cache.empty("start")  # loading leaves unused blocks
        self.history.note("start", config.model_path)

    def _counters(self, core: _Core) -> Counters:
        lifecycle, batcher, kv = core.lifecycle, core.steps.batcher, self.cache.usage()
        states = (lifecycle.generation, lifecycle.pause_mode)
        return Counters(
            generated_tokens=self.outputs.generated_tokens,
            prefilled_tokens=batcher.prefilled_tokens,
            prompt_tokens=batcher.prompt_tokens,
            cached_tokens=batcher.cached_tokens,
            paused_s=sum(total.seconds for total in lifecycle.pause_totals()),
            running=batcher.num_running + batcher.num_prefilling,
            waiting=len(core.steps.waiting),
            kv_held=kv.held,
            kv_total=kv.total,
            images=batcher.images is not None,
            state=" ".join(filter(None, states))
            + ("" if lifecycle.weights == "valid" else f", weights {lifecycle.weights}"),
        )

    def _build_loop(self, config: EngineConfig, core: _Core, shutdown: Shutdown) -> Scheduler:
        guard = Guard(fatal=(LedgerError,) if config.check_ledger else ())
        self.housekeeping = Housekeeping(
            router=self.router,
            dispatcher=self.dispatcher,
            commands=self.commands,
            awaited_by=self.answers.awaited_by,
            lifecycle=core.lifecycle,
            live=self.live,
            updates=self.updates,
            history=self.history,
            device_cache=self._device_cache,
            throughput=self._throughput,
            guard=guard,
            idle_empty_s=config.idle_empty_s,
        )
        return Scheduler(
            router=self.router,
            dispatcher=self.dispatcher,
            lifecycle=core.lifecycle,
            batcher=core.steps.batcher,
            live=self.live,
            outputs=self.outputs,
            outbox=self.outbox,
            runner=core.steps.runner,
            recovery=core.steps.recovery,
            housekeeping=self.housekeeping,
            guard=guard,
            stages=self._stages,
            pipeline_depth=core.steps.pipeline_depth,
            wakeup=self.wakeup,
            shutdown=shutdown,
            heartbeat=self.heartbeat,
            heard=self._executor.heard,
        )

    def _build_core(
        self, config: EngineConfig, residency: ComponentResidencyManager, make_runner: MakeRunner
    ) -> _Core:
        start = self._weights_file.start()
        stamp = WeightStamp(start.epoch, start.version, secrets.token_hex(8))
        around = Surroundings(
            config=config,
            residency=residency,
            device_cache=self._device_cache,
            stages=self._stages,
            start=start,
            stamp=stamp,
            executor=self._executor,
            send=self.router.send,
            on_finished=self._finished,
        )
        core = _make_core(around, make_runner)
        self._weights_file.begin(stamp, core.loaded.digest)
        self.cache, self.live, self.outbox, self.outputs = core.cache, core.live, core.outbox, core.outputs
        keeps_weights = config.weights_cpu_backup or residency.nbytes("weights") == 0
        lifecycle = self._build_lifecycle(config, start, stamp, core, keeps_weights=keeps_weights)
        self.history.where = lambda: (lifecycle.step, lifecycle.stamp.epoch)
        return _Core(core, start.folder, residency, lifecycle)

    def _build_lifecycle(
        self, config: EngineConfig, start: Start, stamp: WeightStamp, core: Core, *, keeps_weights: bool
    ) -> Lifecycle:
        """The state of an engine that begins as ``start`` says."""
        return Lifecycle(
            sessions=Sessions(deadline_s=config.session_deadline_s, orphan_s=config.session_orphan_s),
            batcher=core.batcher,
            waiting=core.waiting,
            outputs=core.outputs,
            cache=core.cache,
            runner=core.runner,
            device_cache=self._device_cache,
            stamp=stamp,
            history=self.history,
            stages=self._stages,
            lost=start.lost,
            serve_lost=config.on_lost_weights == "serve_initial",
            keeps_weights=keeps_weights,
            prompts=core.prompts,
        )

    def _build_serving(
        self, config: EngineConfig, core: _Core, commands: _Commands, module: DeviceModule, shutdown: Shutdown
    ) -> None:
        """Build what is between the socket and the commands and waiting queue."""
        lifecycle = core.lifecycle
        self.answers = Answers(config.result_ttl_s, config.result_bytes or 0)
        if config.device == "cpu":
            self._gauges.answers_bytes = self.answers.nbytes
        self.replies = Replies(self.answers, self.outbox, self.router.send, lambda: lifecycle.step)
        self.generations = Generations(
            request_type=core.steps.request_type,
            admission=core.steps.admission,
            refuse_while_paused=config.requests_while_paused == "refuse",
            lifecycle=lifecycle,
            live=self.live,
            waiting=core.steps.waiting,
            outputs=self.outputs,
            answers=self.answers,
            replies=self.replies,
            shutdown=shutdown,
        )
        self.commands = CommandQueue(
            handlers=commands.handlers,
            lifecycle=lifecycle,
            answers=self.answers,
            replies=self.replies,
            device_cache=self._device_cache,
            check_ledger=self.cache.check if config.check_ledger else None,
        )
        self.status = self._build_status(config, core, commands, module)
        queries: Queries = {
            HelloReqInput: lambda request: answer_hello(request, lifecycle.stamp.incarnation),
            GetStatusReqInput: lambda request: self.status(request.id),
            GetMemoryHistoryReqInput: self.history.answer,
            GetWeightsManifestReqInput: commands.sending.manifest,
        }
        self.dispatcher = Dispatcher(
            queries=queries,
            generations=self.generations,
            commands=self.commands,
            scoring=commands.scoring,
            lifecycle=lifecycle,
            sessions=self.updates.sessions,
            answers=self.answers,
            replies=self.replies,
            device_cache=self._device_cache,
            shutdown=shutdown,
        )

    def _build_commands(self, config: EngineConfig, core: _Core, module: DeviceModule) -> _Commands:
        loaded, runner = core.steps.loaded, core.steps.runner
        residency, lifecycle = core.residency, core.lifecycle
        write_stream = write_stream_of(loaded.device, runner.on_stream)
        self.process_groups = WeightsUpdateGroups(
            loaded.device,
            self.wakeup.set,
            interface=config.group_interface,
            write_stream=write_stream,
        )
        self._cleanup.callback(self.process_groups.close)
        self.updates = self._build_updates(config, core, write_stream)
        parameter_server = ParameterServerUpdates(config=config, updates=self.updates, wake=self.wakeup.set)
        self._cleanup.callback(parameter_server.close)
        own = core.steps.model_runner
        graphs = None if own is None else own.graphs
        if own is not None:
            own.stages = self._stages
        self._gauges.derived_bytes = loaded.derived_bytes
        self._gauges.graphs_bytes = lambda: 0 if graphs is None else graphs.nbytes
        occupation = MemoryOccupation(
            residency=residency,
            lifecycle=lifecycle,
            updates=self.updates,
            cache=self.cache,
            prompts=core.steps.prompts,
            runner=runner,
            executor=self._executor,
            graphs=graphs,
            device_cache=self._device_cache,
            history=self.history,
            stages=self._stages,
            heartbeat=self.heartbeat,
        )
        checker = WeightsChecker(
            model=loaded.model,
            runner=runner,
            lifecycle=lifecycle,
            executor=self._executor,
            poison=self.updates.poison,
        )
        sending = self._build_sending(core)
        trace = StepTrace(self._stages, config.profile_dir, config.device, self.wakeup.set)
        self._cleanup.callback(trace.close)
        handlers = Commands(
            lifecycle=lifecycle,
            updates=self.updates,
            distributed=DistributedUpdates(
                updates=self.updates, groups=self.process_groups, executor=self._executor
            ),
            sending=sending,
            parameter_server=parameter_server,
            process_groups=ProcessGroupCommands(self.process_groups, self._executor),
            occupation=occupation,
            checker=checker,
            profiling=ProfilingCommands(trace, lambda: lifecycle.step),
        )
        return _Commands(handlers, sending, self._build_scoring(core, module))

    def _build_sending(self, core: _Core) -> WeightSending:
        return WeightSending(
            model=core.steps.loaded.model,
            runner=core.steps.runner,
            lifecycle=core.lifecycle,
            groups=self.process_groups,
            executor=self._executor,
        )

    def _build_updates(
        self, config: EngineConfig, core: _Core, write_stream: WriteStream | None
    ) -> WeightUpdates:
        loaded, runner, lifecycle = core.steps.loaded, core.steps.runner, core.lifecycle
        return WeightUpdates(
            config=config,
            model=loaded.model,
            loader=loaded.loader,
            runner=runner,
            executor=self._executor,
            lifecycle=lifecycle,
            sessions=lifecycle.sessions,
            batcher=core.steps.batcher,
            outputs=self.outputs,
            weight_commit=WeightCommit(
                check_finite=config.check_finite,
                model=loaded.model,
                loader=loaded.loader,
                runner=runner,
                executor=self._executor,
                lifecycle=lifecycle,
                sessions=lifecycle.sessions,
                batcher=core.steps.batcher,
                cache=self.cache,
                device_cache=self._device_cache,
                weights_file=self._weights_file,
            ),
            uploader=uploader_of(write_stream, loaded.device),
            history=self.history,
            stages=self._stages,
            weights_file=self._weights_file,
            model_path=core.folder or config.model_path,
            open_folder=core.steps.open_folder,
            wake=self.wakeup.set,
        )

    def _build_scoring(self, core: _Core, module: DeviceModule) -> Scoring | None:
        if core.steps.reference is None:
            return None
        return Scoring(
            core.steps.reference,
            residency=core.residency,
            lifecycle=core.lifecycle,
            runner=core.steps.runner,
            device_module=module,
            device_cache=self._device_cache,
        )

    def _build_status(
        self, config: EngineConfig, core: _Core, commands: _Commands, module: DeviceModule
    ) -> StatusReporter:
        steps = core.steps
        steps.serving.log()
        facts = StaticFacts(
            dtype=str(steps.loaded.dtype).removeprefix("torch."),
            weights_bytes=steps.loaded.weights_bytes,
            kv_bytes=core.residency.nbytes("kv_cache"),
            kv_bytes_per_token=steps.kv_bytes_per_token,
            routing_bytes_per_token=steps.routing_bytes_per_token,
            context_len=steps.context_len,
            vocab_size=steps.vocab_size,
            latent_bytes_per_pixel=steps.latent_bytes_per_pixel,
            version=__version__,
            operations=steps.serving,
        )
        return StatusReporter(
            config=config,
            facts=facts,
            lifecycle=core.lifecycle,
            updates=self.updates,
            batcher=core.steps.batcher,
            waiting=core.steps.waiting,
            outputs=self.outputs,
            cache=self.cache,
            prompts=core.steps.prompts,
            scoring=commands.scoring,
            samples=self.replies.samples,
            recovery=core.steps.recovery,
            executor=self._executor,
            device_module=module,
            device_cache=self._device_cache,
            residency=core.residency,
            history=self.history,
            stages=self._stages,
            throughput=self._throughput,
            last_step_at=lambda: self.scheduler.last_step_at,
        )

    def _client_gone(self, client: bytes) -> None:
        self.dispatcher.client_gone(client)

    def _finished(self, request: LiveSample, result: SampleResult) -> None:
        self.replies.finished(request, result)


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


def _make_core(around: Surroundings, make_runner: MakeRunner) -> Core:
    """The core of the model in the configuration's folder."""
    if not is_pipeline(around.config.model_path):
        return language_core(around, make_runner)
    try:
        from .image_core import image_core  # diffusers is optional, and only this core needs it
    except ImportError as error:
        raise CaesuraError(
            ErrorCode.UNSUPPORTED,
            f"{error.name} is not installed, which image pipelines need: pip install 'caesura[diffusion]'",
            field="model_path",
        ) from error
    return image_core(around)


def shutdown_of(config: EngineConfig, **fds: int | None) -> Shutdown:
    drain = config.shutdown_mode == "drain"
    return Shutdown(drain=drain, drain_timeout_s=config.drain_timeout_s, **fds)
