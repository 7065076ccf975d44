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
from typing import TYPE_CHECKING

from ...io_struct import CaesuraError
from ..memory.device_memory import EmptyCacheReport
from ..observability.stage_profiler import StageProfiler
from ..scheduling.request import WeightStamp
from ..weights.reading import find_non_finite, require_finite
from .operations import Wait, waiting
from .weight_sessions import Session

if TYPE_CHECKING:
    from ..runtime.engine import Engine

logger = logging.getLogger(__name__)


class WeightCommit:
    """Commits sessions whose tensors are all written."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine

    def run(self, session: Session, stages: StageProfiler) -> Generator[Wait, None, EmptyCacheReport | None]:
        """Make what ``session`` has written serve; returns what emptying the device cache gave back, None without it."""
        engine = self._engine
        yield from self._prepare(session, stages)
        engine.weights_file.supersede()
        before = engine.state.stamp
        with stages.stage("flush"):
            if session.flush:
                engine.batcher.retract_all()
            engine.state.commit_weights(session.version, session.source)
            engine.weights_file.committed(engine.state.stamp, session)
            if session.flush:
                engine.cache.flush()
            report = engine.device_cache.empty("update") if session.empty else None
        _warn(session, before, engine.state.stamp)
        return report

    def _prepare(self, session: Session, stages: StageProfiler) -> Generator[Wait, None, None]:
        """The first phase, in which every rank can still refuse: all are ready to serve the new weights, or it raises."""
        engine = self._engine
        engine.loader.require_whole()
        derived = engine.executor.call("derive", engine.config.check_finite and bool(engine.loader.written))
        own: CaesuraError | None = None
        try:
            with stages.stage("derive"), engine.runner.on_stream():
                engine.model.finalize_weights()
            engine.runner.synchronize()
            if engine.config.check_finite and engine.loader.written:
                yield from self._require_finite(session, stages)
        except CaesuraError as error:
            own = error
        for wait in waiting(derived.settle(own)):
            yield wait
            engine.sessions.require_open(session)

    def _require_finite(self, session: Session, stages: StageProfiler) -> Generator[Wait, None, None]:
        """Raise ``weights_not_finite`` if a value of a written or derived tensor is NaN or infinite."""
        engine = self._engine
        search = find_non_finite(engine.model, engine.loader.written)
        while True:
            try:
                with stages.stage("derive"), engine.runner.on_stream():
                    next(search)
            except StopIteration as end:
                require_finite(end.value)
                return
            yield Wait.SLICE
            engine.sessions.require_open(session)


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
