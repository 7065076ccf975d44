"""The commit of a weight session: derive, check, flush, and make the new weights serve.

Invariants:
- Nothing serves the new weights, and no epoch or label changes, before everything that can refuse the commit has passed.
- Reading the weights yields between slices, so status and abort are answered meanwhile; without ``check_finite`` a commit
  does not yield.
- A commit that raises has left the weights half new; the caller aborts the session, which poisons them.
"""

import logging
from collections.abc import Generator

from ...io_struct import CaesuraError, ErrorCode
from ..batching.request import WeightStamp
from ..cache.manager import CacheManager
from ..memory.device_cache import DeviceCache
from ..memory.device_memory import EmptyCacheReport
from ..models.base import Weights
from ..observability.stage_profiler import StageProfiler
from ..stepping import StepBatcher, StepRunner
from ..weights.finite import find_non_finite
from ..weights.loader import WeightLoader
from .lifecycle import Lifecycle, Wait
from .weight_sessions import Session, Sessions

logger = logging.getLogger(__name__)

NAMED = 3
"""Tensors with values that are not finite which an error names."""


class WeightCommit:
    """Commits sessions whose tensors are all written."""

    def __init__(
        self,
        *,
        check_finite: bool,
        model: Weights,
        loader: WeightLoader,
        runner: StepRunner,
        lifecycle: Lifecycle,
        sessions: Sessions,
        batcher: StepBatcher,
        cache: CacheManager,
        device_cache: DeviceCache,
    ) -> None:
        """``check_finite``: refuse weights that are not finite."""
        self._check_finite = check_finite
        self._model = model
        self._loader = loader
        self._runner = runner
        self._lifecycle = lifecycle
        self._sessions = sessions
        self._batcher = batcher
        self._cache = cache
        self._device_cache = device_cache

    def run(self, session: Session, stages: StageProfiler) -> Generator[Wait, None, EmptyCacheReport | None]:
        """Make what ``session`` has written serve; returns what emptying the device cache gave back, None without it."""
        with stages.stage("derive"), self._runner.on_stream():
            self._loader.require_whole()
            self._model.finalize_weights()
        self._runner.synchronize()
        if self._check_finite and self._loader.written:
            yield from self._require_finite(session, stages)
        before = self._lifecycle.stamp
        with stages.stage("flush"):
            if session.flush:
                self._batcher.retract_all()
            self._lifecycle.commit_weights(session.version, session.source)
            if session.flush:
                self._cache.flush()
            report = self._device_cache.empty("update") if session.empty else None
        _warn(session, before, self._lifecycle.stamp)
        return report

    def _require_finite(self, session: Session, stages: StageProfiler) -> Generator[Wait, None, None]:
        """Raise ``weights_not_finite`` if a value of a written or derived tensor is NaN or infinite."""
        search = find_non_finite(self._model, self._loader.written)
        while True:
            try:
                with stages.stage("derive"), self._runner.on_stream():
                    next(search)
            except StopIteration as end:
                found = end.value
                break
            yield Wait.SLICE
            self._sessions.require_open(session)
        if found:
            named = ", ".join(map(str, found[:NAMED]))
            more = f", and {len(found) - NAMED} more tensors" if len(found) > NAMED else ""
            raise CaesuraError(
                ErrorCode.WEIGHTS_NOT_FINITE,
                f"these tensors have values that are NaN or infinite: {named}{more}",
                tensors=len(found),
                non_finite=[
                    {"name": each.name, "count": each.count, "total": each.total} for each in found[:NAMED]
                ],
            )


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
