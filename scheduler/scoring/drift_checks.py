"""Drift checks: samples are scored again by prefill, and compared with the log-probabilities they came with.

- A check is a replay (``forced_output_ids``) with its sample's parameters. It waits, runs and ends like
  any request, but no client and no figure of generations sees it. Its salt is its own, so that it reads no KV
  of the decode steps that it is to confirm.
- Every check ends once, in :meth:`Drift.scored`; a trainer's message is answered after its last one.
- Only tokens sampled and scored by the same weights and adapter count as drift. A checked sample is scored
  again after a commit, on the same path: that difference is the update's own, and is told apart.
- The tokens of chosen samples are at most ``drift_share`` of those computed, but for the ``drift_samples``
  after a commit, which count towards it.
"""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from ... import io_struct as wire
from ...io_struct import CaesuraError, ErrorCode
from ..scheduling.request import Adapter, OutputArrays, Phase, Request, WeightStamp
from ..scheduling.waiting_queue import require_room

if TYPE_CHECKING:
    from ..runtime.engine import Engine

logger = logging.getLogger(__name__)

WINDOW_TOKENS = 16_384
"""Scored tokens that a report is about, the last ones of an epoch."""
WINDOW_SAMPLES = 1024
"""Samples that they are of, at most."""
LEAST_TOKENS = 64
"""Fewer say nothing about a threshold."""
_WORST = 8
_CLIP = np.log(2.0)
_LARGEST_GAP = 60.0
_NO_PROMPT = np.empty(0, np.int32)
_BUCKETS = (0, 256, 1024, 4096, 16_384)
_RID = ""
"""Request id of all checks, which no client's can be."""
_SALT = "\ud800"
"""Cache salt of all checks: no text on the wire has it."""
_CLEAN, _ACROSS, _STALE, _UPDATE, _OVERTAKEN, _FORBIDDEN = range(6)
_SPANS = {_CLEAN: "clean", _ACROSS: "across_update", _STALE: "stale_kv"}
_STATES: tuple[wire.DriftState, ...] = ("ok", "warn", "limit", "unhealthy")

Spans = Sequence[tuple[WeightStamp, bool, int]]
Floats = npt.NDArray[np.float64]


@dataclass(slots=True, eq=False)
class _Message:
    """A trainer's samples."""

    id: str
    unfinished: int
    scored: "list[_Scored]" = field(default_factory=list)
    failure: CaesuraError | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """A sample to be scored again, and what it came with."""

    rid: str
    index: int
    prompt: npt.NDArray[np.int32]
    params: wire.SamplingParams
    continued: int
    adapter: Adapter | None
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    spans: Spans
    message: _Message | None = None
    is_score: bool = False
    """True if ``logprobs`` are scores by earlier weights."""

    @property
    def named(self) -> str:
        """Name of the adapter, or empty."""
        return "" if self.adapter is None else self.adapter.name


@dataclass(frozen=True, slots=True, eq=False)
class _Scored:
    check: Check
    prompt_len: int
    logprobs: npt.NDArray[np.float32]
    kinds: npt.NDArray[np.int64]
    tokens: int
    """Tokens that count as drift; the next two are theirs."""
    k3: float
    """Sum over the tokens."""
    largest: float
    moved: float | None
    """Largest difference that an update has made; None if no token can say."""

    @staticmethod
    def of(check: Check, result: wire.GenerateReqOutput) -> "_Scored":
        logprobs, kinds = (
            np.frombuffer(result.output_logprobs or b"", "<f4"),
            _kinds(check, result.weight_versions),
        )
        kinds = np.where(np.isneginf(logprobs) & np.isneginf(check.logprobs), _FORBIDDEN, kinds)
        gaps = _gaps(logprobs, check.logprobs)
        is_certain = (logprobs == 0.0) & (check.logprobs == 0.0)  # for example the only token allowed
        same, updated = gaps[kinds <= _ACROSS], gaps[(kinds == _UPDATE) & ~is_certain]
        k3, largest = float(_k3(same).sum()), float(np.abs(same).max(initial=0.0))
        moved = float(np.abs(updated).max()) if len(updated) else None
        return _Scored(check, len(check.prompt), logprobs, kinds, len(same), k3, largest, moved)


class Drift:
    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        config = engine.config
        self.samples = config.drift_samples if config.enable_drift_check else 0
        self._share = config.drift_share if config.enable_drift_check else 0.0
        self._credit = 0.0
        self._due = self.samples  # of the first samples since the last commit
        self._serial = 0
        self._dropped = 0
        self._window: deque[_Scored] = deque()
        self._window_tokens = 0
        self._kept: deque[Check] = deque(maxlen=self.samples)
        """Samples that the present weights have scored."""
        self._state: wire.DriftState = "ok"
        self._current: wire.DriftReport | None = None
        """Report of the window, or None if that has changed since."""
        self._before: wire.DriftReport | None = None
        self._complete: list[_Message] = []

    @property
    def has_answers(self) -> bool:
        return bool(self._complete)

    @property
    def chooses(self) -> bool:
        return self.samples > 0 or self._share > 0.0

    def ended(self, request: Request, outputs: OutputArrays) -> None:
        """Choose a sample that has ended, or not; a replay is none."""
        if request.forced is None:
            self._engine.guard.run("choosing a sample to check", self._choose, request, outputs)

    def _choose(self, request: Request, outputs: OutputArrays) -> None:
        computed = len(request.prompt) + len(outputs.tokens)
        self._credit += self._share * (computed - request.cached_tokens)
        epoch = self._engine.state.stamp.epoch
        is_first = self._due > 0 and all(stamp.epoch == epoch for stamp, *_ in request.spans)
        if not is_first and self._credit <= 0.0:
            return
        self._due -= is_first
        self._start(
            [
                Check(
                    request.rid,
                    request.index,
                    request.prompt,
                    request.params,
                    request.continued,
                    request.adapter,
                    outputs.tokens,
                    outputs.logprobs,
                    tuple(request.spans),
                )
            ]
        )

    def updated(self, adapter: str | None) -> None:
        """Forget scores of replaced weights, or of an adapter, and check the first samples of the new."""
        if not self.chooses:
            return
        if self._window and adapter is None:
            self._before = self.report()
        if adapter is None:
            self._state = "ok"
        left = [
            each
            for each in self._window
            if adapter is not None and not each.check.is_score and each.check.named != adapter
        ]
        self._window, self._current = deque(left), None
        self._window_tokens, self._due = sum(len(each.kinds) for each in left), self.samples
        if adapter is None:
            self._dropped = 0
        again = [each for each in self._kept if adapter in (None, each.named)]
        self._kept = deque((each for each in self._kept if each not in again), self.samples)
        self._start(again)

    def accept(self, message: wire.CheckDriftReqInput) -> list[wire.Message]:
        """Return the report of the self-check, or start checks of all samples of a message."""
        engine = self._engine
        if message.samples is None:
            if not self.chooses:
                reason = "no sample is checked: start the engine with enable_drift_check, or send samples"
                raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field="enable_drift_check")
            newest = [*self._kept][::-1][: message.return_samples]
            samples = [_checked_sample(check) for check in newest]
            return [wire.CheckDriftReqOutput(id=message.id, report=self.report(), samples=samples)]
        engine.shutdown.refuse_work()
        engine.state.require_serviceable("cannot score samples")
        if engine.request_type is not wire.GenerateReqInput:
            reason = "an engine of images has no log-probabilities of tokens"
            raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field="type")
        waiting = len(engine.waiting) - self.counts()[1]
        require_room(len(message.samples), waiting, engine.config.max_waiting_requests)
        job = _Message(message.id, len(message.samples))
        admitted = [self._admitted(job, index, each) for index, each in enumerate(message.samples)]
        for check, request in admitted:
            self._queue(check, request)
        return []

    def scored(self, check: Check, result: wire.GenerateReqOutput) -> None:
        reason, job = result.finish_reason, check.message
        found = None
        if reason.type in ("stop", "length"):
            found = _Scored.of(check, result)
        if job is None:
            self._dropped += found is None
            if found is not None:
                self._take(found)
            return
        if found is not None:
            job.scored.append(found)
        elif job.failure is None:
            told = f"sample {check.index} was not scored: {reason.message}"
            job.failure = CaesuraError(reason.code or ErrorCode.INVALID_REQUEST, told, index=check.index)
        job.unfinished -= 1
        if not job.unfinished:
            self._complete.append(job)

    def answer(self) -> None:
        """Answer messages whose samples have all ended."""
        complete, self._complete = self._complete, []
        for job in complete:
            answer: wire.Message
            if job.failure is not None:
                answer = job.failure.to_reply(job.id)
            else:
                answer = wire.CheckDriftReqOutput(id=job.id, report=self._report(job.scored))
            self._engine.replies.answer(job.id, answer)

    def cancel(self) -> None:
        """End the self-check's requests, which must not keep a command waiting."""
        self._engine.outputs.abort(self._own(), "not needed")

    def counts(self) -> tuple[int, int]:
        """Return how many requests of the self-check hold KV, and how many wait: clients count neither."""
        waits = [each.phase is Phase.WAITING for each in self._own()]
        return len(waits) - sum(waits), sum(waits)

    def report(self) -> wire.DriftReport:
        """Return the report of the present weights, or of those before if these have scored nothing yet."""
        if not self._window and self._before is not None:
            return msgspec.structs.replace(self._before, state=self._state)
        if self._current is None:
            self._current = self._report(self._window)
        return msgspec.structs.replace(self._current, dropped=self._dropped, state=self._state)

    def status(self) -> wire.DriftReport | None:
        return self.report() if self._window or self._before is not None else None

    def _own(self) -> list[Request]:
        return [each for each in self._engine.live.samples(_RID) if each.check.message is None]

    def _admitted(self, job: _Message, index: int, sample: wire.DriftSample) -> tuple[Check, Request]:
        try:
            check = self._check_of(job, index, sample)
            return check, self._request(check)
        except CaesuraError as error:
            raise CaesuraError(error.code, f"samples[{index}]: {error.message}", **error.detail) from error

    def _check_of(self, job: _Message, index: int, sample: wire.DriftSample) -> Check:
        ids = np.asarray(sample.token_ids, np.int32)
        if not 0 < sample.prompt_len < len(ids):
            requirement = f"must be in [1, {len(ids) - 1}], for a prompt and an output of {len(ids)} tokens"
            raise _invalid("prompt_len", sample.prompt_len, requirement)
        if len(sample.logprobs) != 4 * (len(ids) - sample.prompt_len):
            requirement = f"must be those of {len(ids) - sample.prompt_len} output tokens"
            raise _invalid("logprobs", f"{len(sample.logprobs) // 4} values", requirement)
        logprobs = np.frombuffer(sample.logprobs, "<f4")
        if not np.isfinite(logprobs).all():
            raise _invalid("logprobs", "nan or inf", "must be finite")
        params = wire.SamplingParams(temperature=sample.temperature)
        adapter = self._engine.adapters.named(sample.adapter)
        prompt, tokens = ids[: sample.prompt_len], ids[sample.prompt_len :]
        return Check(sample.rid, index, prompt, params, 0, adapter, tokens, logprobs, (), job)

    def _start(self, checks: Iterable[Check]) -> None:
        """Queue what can be scored."""
        if self._engine.shutdown.requested:
            return
        for check in checks:
            adapter = check.adapter
            try:
                adapter = self._engine.adapters.named(None if adapter is None else adapter.name)
                check = replace(check, adapter=adapter)
                request = self._request(check)
            except CaesuraError as error:  # its adapter is gone
                logger.debug("sample %s is not checked: %s", check.rid, error)
                self._dropped += 1
                continue
            self._credit -= len(check.prompt) + len(check.tokens)
            self._queue(check, request)

    def _request(self, check: Check) -> Request:
        self._serial += 1
        message = wire.GenerateReqInput(
            rid=_RID,
            first_sample=self._serial,
            input_ids=check.prompt.tolist(),
            sampling_params=msgspec.structs.replace(
                check.params, n=1, forced_output_ids=check.tokens.tolist(), grammar=None
            ),
            return_logprob=True,
            cache_salt=_SALT,
            continued_tokens=check.continued,
        )
        request: Request = self._engine.admit(message, [], b"", 0)[0]
        request.check = check
        return request

    def _queue(self, check: Check, request: Request) -> None:
        engine = self._engine
        if check.adapter is not None:
            engine.adapters.give(check.adapter, [request])
        engine.live.add([request])
        engine.waiting.append(request)

    def _take(self, found: _Scored) -> None:
        check, kinds = found.check, found.kinds
        self._window.append(replace(found, check=replace(check, prompt=_NO_PROMPT)))
        self._current = None
        self._window_tokens += len(kinds)
        while len(self._window) > (WINDOW_SAMPLES if self._window_tokens <= WINDOW_TOKENS else 1):
            self._window_tokens -= len(self._window.popleft().kinds)
        if self.samples and not np.isin(kinds, (_STALE, _OVERTAKEN)).any() and len(set(kinds)) == 1:
            stamp = self._engine.state.stamp
            if check.adapter is not None:
                stamp = check.adapter.stamped(stamp)
            self._kept.append(
                replace(check, logprobs=found.logprobs, spans=((stamp, False, 0),), is_score=True)
            )
        self._judge()

    def _judge(self) -> None:
        """Compare the window with the thresholds, and act when it gets worse."""
        config, window, before = self._engine.config, self._window, self._state
        tokens = sum(each.tokens for each in window)
        state = self._level(tokens, sum(each.k3 for each in window) / max(tokens, 1))
        if config.deterministic and any(each.largest for each in window):
            state = "limit"
        if state == "limit" and config.drift_action == "unhealthy":
            state = "unhealthy"
        moved = [each.moved for each in window if each.moved is not None]
        rescores = any(each.check.is_score for each in self._engine.live.samples(_RID))
        unchanged = bool(moved) and not any(moved) and not rescores
        if unchanged and state == "ok":
            state = "warn"
        if _STATES.index(state) <= _STATES.index(before):
            if tokens >= LEAST_TOKENS:
                self._state = state
            return
        self._state = state
        report = self.report()
        if unchanged:
            logger.warning(
                "drift: the update to weights epoch %d has changed no log-probability", report.weights_epoch
            )
        if report.tokens and state != "ok" and (report.k3 > config.drift_warn or config.deterministic):
            logger.warning(
                "drift (%s): scored again, %d tokens of epoch %d differ by %.3g on average and %.3g at most "
                "(k3 %.3g)",
                state, report.tokens, report.weights_epoch, report.mean_abs, report.max_abs, report.k3,
            )  # fmt: skip
        if state == "limit" and config.drift_action == "pause" and self._engine.state.generation == "running":
            self._engine.commands.add(b"", wire.PauseGenerationReqInput(mode="in_place"), [])

    def _level(self, tokens: int, k3: float) -> wire.DriftState:
        config = self._engine.config
        over = sum(k3 > limit for limit in (config.drift_warn, config.drift_limit))
        return _STATES[over if tokens >= LEAST_TOKENS else 0]

    def _report(self, scored: Iterable[_Scored]) -> wire.DriftReport:
        stamp, each = self._engine.state.stamp, list(scored)
        lengths = [len(one.kinds) for one in each]
        kinds = np.concatenate([np.empty(0, np.int64), *(one.kinds for one in each)])
        given = np.concatenate([np.empty(0), *(one.check.logprobs for one in each)])
        logprobs = np.concatenate([np.empty(0), *(one.logprobs for one in each)])
        gaps = _gaps(logprobs, given)
        sample = np.repeat(np.arange(len(each)), lengths)
        first = np.cumsum(lengths, dtype=np.int64) - lengths
        output = np.arange(len(kinds)) - first[sample]
        position = output + np.asarray([one.prompt_len for one in each], np.int64)[sample]
        same = (kinds == _CLEAN) | (kinds == _ACROSS)
        figures = _figures(gaps[same])
        names = np.asarray([one.check.named for one in each])[sample]
        bucket = np.searchsorted(_BUCKETS, position, side="right") - 1
        parts: list[tuple[Any, str, npt.NDArray[np.bool_]]]
        parts = [("span", _SPANS[kind], kinds == kind) for kind in _SPANS]
        parts += [("position", _bucket(at), same & (bucket == at)) for at in range(len(_BUCKETS))]
        parts += [
            ("adapter", name, same & (names == name)) for name in sorted({*names[same].tolist()} - {""})
        ]
        worst = np.flatnonzero(same)[np.argsort(-np.abs(gaps[same]), kind="stable")[:_WORST]]
        update = gaps[kinds == _UPDATE]
        return wire.DriftReport(
            **figures,
            weights_epoch=stamp.epoch,
            weight_version=stamp.version,
            samples=len(each),
            state=self._level(figures["tokens"], figures["k3"] if figures["tokens"] else 0.0),
            parts=[
                wire.DriftPart(by=by, name=name, **_figures(gaps[chosen]))
                for by, name, chosen in parts
                if chosen.any()
            ],
            worst=[
                wire.DriftToken(
                    rid=each[sample[at]].check.rid,
                    index=each[sample[at]].check.index,
                    position=int(position[at]),
                    token=int(each[sample[at]].check.tokens[output[at]]),
                    given=float(given[at]),
                    scored=float(logprobs[at]),
                )
                for at in worst.tolist()
                if gaps[at]
            ],
            update=wire.DriftUpdate(**_figures(update)) if len(update) else None,
        )


def _checked_sample(check: Check) -> wire.CheckedSample:
    return wire.CheckedSample(
        token_ids=[*check.prompt.tolist(), *check.tokens.tolist()],
        prompt_len=len(check.prompt),
        temperature=check.params.temperature,
        adapter=check.named or None,
        rid=check.rid,
    )


def _bucket(at: int) -> str:
    return f"{_BUCKETS[at]}-{_BUCKETS[at + 1] - 1}" if at + 1 < len(_BUCKETS) else f"{_BUCKETS[at]}-"


def _kinds(check: Check, versions: Sequence[wire.WeightVersionSpan]) -> npt.NDArray[np.int64]:
    """Return the kind of each token of a check that has ended."""
    count = len(check.tokens)
    scored = _columns(
        [(each.start, each.epoch, each.adapter_epoch, each.stale_kv) for each in versions], count
    )
    given = scored
    if check.message is None:
        of_sample = [(start, stamp.epoch, stamp.adapter_epoch, stale) for stamp, stale, start in check.spans]
        given = _columns(of_sample, count)
    stale = (scored[2] | given[2]).astype(bool)
    same = (scored[:2] == given[:2]).all(0)
    across = (given[:2] != given[:2, :1]).any(0)
    kinds = np.where(stale, _STALE, np.where(across, _ACROSS, _CLEAN))
    # Only scores are compared with scores: between decode and prefill lies more than an update.
    updated = check.is_score and ~stale & (scored[0] - given[0] <= 1)
    return np.where(same, kinds, np.where(updated, _UPDATE, _OVERTAKEN))


def _columns(spans: Sequence[tuple[int, int, int, bool]], count: int) -> npt.NDArray[np.int64]:
    """Return epoch, adapter epoch and staleness of ``count`` tokens, int64 [3, count]."""
    ends = [start for start, *_ in spans[1:]] + [count]
    rows = np.asarray([span[1:] for span in spans], np.int64).T
    return np.repeat(rows, [end - start for (start, *_), end in zip(spans, ends, strict=True)], axis=1)


def _gaps(scored: npt.NDArray[Any], given: npt.NDArray[Any]) -> Floats:
    """Return log r of each token within bounds, so that no token makes a figure infinite or NaN."""
    with np.errstate(invalid="ignore"):
        gaps: Floats = scored.astype(np.float64) - given
    return np.clip(np.nan_to_num(gaps, nan=_LARGEST_GAP), -_LARGEST_GAP, _LARGEST_GAP)


def _k3(gaps: Floats) -> Floats:
    """Return r - 1 - log r of each token."""
    k3: Floats = np.expm1(gaps) - gaps
    return k3


def _figures(gaps: Floats) -> dict[str, Any]:
    if not len(gaps):
        return {"tokens": 0}
    size = np.abs(gaps)
    ratio = np.exp(gaps)
    return {
        "tokens": len(gaps),
        "mean_abs": float(size.mean()),
        "p99": float(np.quantile(size, 0.99, method="higher")),
        "max_abs": float(size.max()),
        "k1": float(0.0 - gaps.mean()),
        "k3": float(_k3(gaps).mean()),
        "ess": float(ratio.sum() ** 2 / (len(gaps) * (ratio**2).sum())),
        "clip_share": float((size > _CLIP).mean()),
    }


def _invalid(name: str, value: object, requirement: str) -> CaesuraError:
    reason = f"{name} = {value!r} {requirement}"
    return CaesuraError(ErrorCode.INVALID_REQUEST, reason, field=name, value=value)
