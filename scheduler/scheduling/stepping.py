"""What the loop, the commands and the status ask of an engine's steps, whatever a step is: tokens of a language model, or denoising.

Invariants:
- Who builds a batch, who executes it and who records its output belong to one kind of engine and know its batches. The loop
  hands batches and outputs from one to the next and looks into none of them.
- Each protocol is the smallest that its users need. An engine's own modules work with their own types.
"""

from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from ...io_struct import ErrorCode, ImageLoad, PromptCacheStatus, StepFailures

if TYPE_CHECKING:
    from .request import WeightStamp
    from .step_recovery import Failure


class Batch(Protocol):
    """One step, as it was scheduled."""

    @property
    def forward(self) -> Any:
        """What the runner executes."""
        ...

    @property
    def kind(self) -> str:
        """The stage that the step counts as in stage times."""
        ...


class LaunchedStep(Protocol):
    """A launched step. On accelerators it is still running until :meth:`fetch` returns."""

    def fetch(self) -> Any:
        """Wait for this step (and no later one) and copy its results to the host."""
        ...


class StepRunner(Protocol):
    """Executes steps."""

    def execute(self, batch: Any) -> LaunchedStep:
        """Enqueue one step, :attr:`Batch.forward`."""
        ...

    def synchronize(self) -> None:
        """Return when every launched step has left the device."""
        ...

    def on_stream(self) -> AbstractContextManager[Any]:
        """Device work inside is ordered with the steps: after those launched, before those to come."""
        ...


class StepBatcher(Protocol):
    """Owns the running samples, and builds steps from them and from those that wait."""

    num_retractions: int
    """Samples that were sent back to the queue, since the engine's start."""
    prompt_tokens: int
    """Prompt tokens of all samples that have started, since the engine's start; 0 where prompts are no tokens."""
    cached_tokens: int
    """Those of them that came from a cache."""

    @property
    def num_running(self) -> int:
        """Samples past their prompt."""
        ...

    @property
    def num_prefilling(self) -> int:
        """Samples whose prompt is being computed."""
        ...

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens that steps have computed since the engine's start."""
        ...

    @property
    def images(self) -> ImageLoad | None:
        """Running samples by stage, where they are images; None where they are tokens."""
        ...

    @property
    def num_holding(self) -> int:
        """Samples that hold what an in-place pause freezes: KV, or latents."""
        ...

    @property
    def in_flight(self) -> bool:
        """Whether a launched step is neither completed nor rolled back."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether :meth:`schedule` may return a batch."""
        ...

    def schedule(self) -> Batch | None:
        """Build the next step; None if there is nothing to run, or if a step in flight must be completed first."""
        ...

    def complete_step(self, batch: Any, seconds: float) -> None:
        """Complete a step whose output has been recorded; it took ``seconds``."""
        ...

    def retract_all(self) -> int:
        """Send every running sample back to the queue; returns their number. No step may be in flight."""
        ...

    def restart_prefills(self) -> int:
        """After a weight commit: what was computed of unfinished prompts is computed again."""
        ...

    def mark_stale(self) -> None:
        """After a weight commit: what running samples hold was computed by older weights."""
        ...


class KeptPrompts(Protocol):
    """What steps have made of prompts, kept for later requests beside any KV."""

    def clear(self) -> None:
        """Drop all of it."""
        ...

    def status(self) -> PromptCacheStatus:
        """As of now."""
        ...


class StepOutputs(Protocol):
    """Records the output of steps, and finishes samples, each with one terminal result."""

    generated_tokens: int
    """Since the engine's start; denoised steps of samples where nothing is a token."""
    finished: Counter[str]
    """Number of finished samples, by the type of their finish reason."""

    def set_stamp(self, stamp: "WeightStamp") -> None:
        """After a weight commit: what is made from now on carries ``stamp``."""
        ...

    def record(self, batch: Any, output: Any) -> None:
        """Record the output of a step, and finish the samples that end."""
        ...

    def abort(self, requests: Iterable[Any], message: str, code: ErrorCode | None = None) -> int:
        """Finish samples now, with what they have; returns how many were live."""
        ...

    def abort_all(self, message: str) -> int:
        """:meth:`abort` of every live sample, queued ones included."""
        ...

    def fail(self, requests: Iterable[Any], message: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        """Finish samples with an error."""
        ...


class StepRecovery(Protocol):
    """Restores a consistent state after a failed step."""

    def counts(self) -> StepFailures:
        """Failures since start, for status."""
        ...

    def step_built(self) -> None:
        """Building a step succeeded, or there was nothing to build."""
        ...

    def build_failed(self, failure: "Failure") -> None:
        """An attempt to build a step has failed; no step became in flight by it."""
        ...

    def step_failed(self, batch: Any, failure: "Failure", later: Any | None) -> None:
        """Roll back ``batch``, whose results are lost, and ``later``, which was launched after it."""
        ...

    def output_processing(self, batch: Any, number: int) -> AbstractContextManager[None]:
        """Context in which the output of a step is processed; an exception ends its samples."""
        ...


class StepOutbox(Protocol):
    """Collects results, and sends them after the step that made them."""

    @property
    def has_undelivered(self) -> bool:
        """Whether any output has not been sent yet."""
        ...

    def deliver(self, step: int) -> None:
        """Send what was collected; ``step`` is the last processed step."""
        ...


class Admission(Protocol):
    """Makes samples of a message that asks for some."""

    def admit(self, message: Any, buffers: list[memoryview], client: bytes, waiting: int) -> list[Any]:
        """Check a message and make its samples, to be queued; changes no state.

        Raises:
            CaesuraError: the engine will not do it.
        """
        ...


class StepQueue(Protocol):
    """The samples that wait."""

    def __len__(self) -> int: ...

    def append(self, request: Any, /) -> None:
        """Add a new sample at the back."""
        ...
