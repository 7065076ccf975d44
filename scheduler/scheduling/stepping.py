"""What the loop, the commands and the status ask of an engine's steps, whatever a step is: tokens of a
language model, or denoising.

Invariants:
- Who builds a batch, who executes it and who records its output belong to one kind of engine and know its
  batches. The loop hands batches and outputs from one to the next and looks into none of them.
- Each protocol is the smallest that its users need. An engine's own modules work with their own types.
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol

from ...io_struct import ImageLoad


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
    """Prompt tokens of all samples that have started, since the engine's start; 0 where prompts are no
    tokens.
    """
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

    @property
    def step_limit(self) -> int | None:
        """Most tokens or samples of a step after one ran out of memory, or None."""
        ...

    def schedule(self) -> Batch | None:
        """Build the next step; None if there is nothing to run, or if a step in flight must be completed
        first.
        """
        ...

    def complete_step(self, batch: Any, seconds: float) -> None:
        """Complete a step whose output has been recorded; it took ``seconds``."""
        ...

    def roll_back_step(self, batch: Any) -> None:
        """Roll back a step whose results are lost, so that it is scheduled again."""
        ...

    def halve(self, batch: Any) -> bool:
        """Limit steps to half of ``batch``, which ran out of memory; False if it is as small as can be and
        failed before.
        """
        ...

    def requests_of(self, batch: Any) -> list[Any]:
        """Return the samples that cannot go on without ``batch``."""
        ...

    def schedule_failure_candidates(self) -> list[Any]:
        """Return the samples to fail when :meth:`schedule` raises again and again."""
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
