"""The commit of a weight session: derive, check, flush, and make the new weights serve.

Invariants:
- Nothing serves the new weights, and no epoch or label changes, before everything that can refuse the commit has passed.
- Of several ranks all are ready, or none commits: what can fail happens on every rank first, and what follows, on rank 0 alone,
  cannot.
- Reading the weights yields between slices, so status and abort are answered meanwhile; without ``check_finite`` the
  commit of an engine of one rank does not yield.
- I12: the record of the state file is marked as superseded before the epoch changes, so that no restart gives
  that epoch to other weights.
- A commit that raises has left the weights half new; the caller aborts the session, which poisons them.
"""

import logging
from collections.abc import Generator

from ...io_struct import CaesuraError
from ..cache.manager import CacheManager
from ..executor.executor import Executor
from ..memory.device_cache import DeviceCache
from ..memory.device_memory import EmptyCacheReport
from ..models.base import Weights
from ..observability.stage_profiler import StageProfiler
from ..scheduling.request import WeightStamp
from ..scheduling.stepping import StepBatcher, StepRunner
from ..weights.loader import WeightLoader
from ..weights.reading import find_non_finite, require_finite
from .committed_weights import WeightsFile
from .lifecycle import Lifecycle, Wait, waiting
from .weight_sessions import Session, Sessions

logger = logging.getLogger(__name__)


class WeightCommit:
    """Commits sessions whose tensors are all written."""

    def __init__(
        self,
        *,
        check_finite: bool,
        model: Weights,
        loader: WeightLoader,
        runner: StepRunner,
        executor: Executor,
        lifecycle: Lifecycle,
        sessions: Sessions,
        batcher: StepBatcher,
        cache: CacheManager,
        device_cache: DeviceCache,
        weights_file: WeightsFile,
    ) -> None:
        """``check_finite``: refuse weights that are not finite."""
        self._check_finite = check_finite
        self._model = model
        self._loader = loader
        self._runner = runner
        self._executor = executor
        self._lifecycle = lifecycle
        self._sessions = sessions
        self._batcher = batcher
        self._cache = cache
        self._device_cache = device_cache
        self._weights_file = weights_file

    def run(self, session: Session, stages: StageProfiler) -> Generator[Wait, None, EmptyCacheReport | None]:
        """Make what ``session`` has written serve; returns what emptying the device cache gave back, None without it."""
        yield from self._prepare(session, stages)
        self._weights_file.supersede()
        before = self._lifecycle.stamp
        with stages.stage("flush"):
            if session.flush:
                self._batcher.retract_all()
            self._lifecycle.commit_weights(session.version, session.source)
            self._weights_file.committed(self._lifecycle.stamp, session)
            if session.flush:
                self._cache.flush()
            report = self._device_cache.empty("update") if session.empty else None
        _warn(session, before, self._lifecycle.stamp)
        return report

    def _prepare(self, session: Session, stages: StageProfiler) -> Generator[Wait, None, None]:
        """The first phase, in which every rank can still refuse: all are ready to serve the new weights, or it raises."""
        self._loader.require_whole()
        derived = self._executor.call("derive", self._check_finite and bool(self._loader.written))
        own: CaesuraError | None = None
        try:
            with stages.stage("derive"), self._runner.on_stream():
                self._model.finalize_weights()
            self._runner.synchronize()
            if self._check_finite and self._loader.written:
                yield from self._require_finite(session, stages)
        except CaesuraError as error:
            own = error
        for wait in waiting(derived.settle(own)):
            yield wait
            self._sessions.require_open(session)

    def _require_finite(self, session: Session, stages: StageProfiler) -> Generator[Wait, None, None]:
        """Raise ``weights_not_finite`` if a value of a written or derived tensor is NaN or infinite."""
        search = find_non_finite(self._model, self._loader.written)
        while True:
            try:
                with stages.stage("derive"), self._runner.on_stream():
                    next(search)
            except StopIteration as end:
                require_finite(end.value)
                return
            yield Wait.SLICE
            self._sessions.require_open(session)


def _warn(session: Session, before: WeightStamp, after: WeightStamp) -> None:
    """Warn of a commit that was probably meant otherwise."""
    if not session.counts.written_tensors:
        return
    if not session.counts.changed_tensors:
        logger.warning("weight update changed no tensor: is the trainer sending what it trained?")
    elif before.version == after.version:
        logger.warning(
            "weight update changed %d tensors and left the label at %r (epoch %d): send weight_version with the update, "
            "so that its tokens can be told from those of older weights",
            session.counts.changed_tensors, after.version, after.epoch,
        )  # fmt: skip
