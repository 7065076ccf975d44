"""Displays of a running demo: a live panel on a terminal, plain lines elsewhere.

Invariant: displays only read the history; the run goes the same way with any of them.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .history import History

BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 44


class Display(Protocol):
    """A context manager around the run; ``changed`` is called after every change of the history."""

    def changed(self) -> None:
        """Show a change of the history."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_display(console: Console, history: History) -> Display:
    """Return the display that suits ``console``."""
    return LiveDisplay(console, history) if console.is_terminal else PlainDisplay(console, history)


class PlainDisplay:
    """A line for every phase, and one for every evaluation."""

    def __init__(self, console: Console, history: History) -> None:
        self._console = console
        self._history = history
        self._phase = ""
        self._evals = 0

    def changed(self) -> None:
        """Print what is new."""
        history = self._history
        if history.phase != self._phase:
            self._phase = history.phase
            self._line(self._phase)
        if len(history.evals) > self._evals:
            self._evals = len(history.evals)
            self._line(_progress_line(history))

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return


def _progress_line(history: History) -> str:
    last = history.evals[-1]
    line = f"update {last.update:3d}  held-out reward {last.reward:.3f}"
    if history.updates:
        record = history.updates[-1]
        line += (
            f"  sampled {record.train_exact:.3f}  {record.tokens_per_s:,.0f} tokens/s"
            f"  pause {record.pause_ms:.1f} ms  update {record.update_ms:.1f} ms"
            f"  reserved {record.reserved_after_mb:.1f} MB"
        )
    return line


class LiveDisplay:
    """One panel, redrawn four times a second by rich's own thread."""

    def __init__(self, console: Console, history: History) -> None:
        self._history = history
        self._live = Live(
            console=console,
            get_renderable=lambda: render(history),
            refresh_per_second=4,
            transient=False,
        )

    def changed(self) -> None:
        """Do nothing: the panel reads the history when it is drawn."""

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)


def render(history: History) -> RenderableType:
    """Return the panel for the history as it stands."""
    done = len(history.updates)
    head = Table.grid(padding=(0, 1), expand=True)
    head.add_column(ratio=1)
    head.add_column(justify="right")
    head.add_row(Text(history.phase, style="bold cyan"), f"update {done}/{history.updates_planned}")
    bar = ProgressBar(
        total=history.updates_planned, completed=done, complete_style="cyan", finished_style="cyan"
    )
    body: list[RenderableType] = [head, bar, Text("\n", end="")]
    body.append(_curves(history))
    if history.updates:
        body += [Text(), _figures(history)]
    return Panel(
        Group(*body), title="[bold]Caesura ‖[/bold] a policy learns while it is being served", padding=(1, 2)
    )


def _curves(history: History) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right", min_width=16)
    table.add_column()
    table.add_column(justify="right", style="bold")
    if history.warmup and not history.evals:
        loss = [progress.loss for progress in history.warmup]
        exact = [progress.exact for progress in history.warmup]
        table.add_row("warm-up loss", sparkline(loss, 0.0, max(loss)), f"{loss[-1]:.2f}")
        table.add_row("warm-up exact", sparkline(exact, 0.0, 1.0), f"{exact[-1]:.2f}")
    if history.evals:
        held_out = [record.reward for record in history.evals]
        row = Text(sparkline(held_out, 0.0, 1.0), style="green")
        table.add_row("held-out reward", row, f"{held_out[0]:.2f} → {held_out[-1]:.2f}")
    if history.updates:
        sampled = [record.train_exact for record in history.updates]
        table.add_row("sampled reward", sparkline(sampled, 0.0, 1.0), f"{sampled[-1]:.2f}")
        speed = [record.tokens_per_s for record in history.updates]
        table.add_row("tokens/s", sparkline(speed, 0.0, max(speed)), f"{speed[-1]:,.0f}")
        pause = [record.pause_ms for record in history.updates]
        table.add_row("pause ms", sparkline(pause, 0.0, max(pause)), f"{pause[-1]:.1f}")
        reserved = [record.reserved_after_mb for record in history.updates]
        row = Text(sparkline(reserved, 0.0, max(reserved)), style="magenta")
        table.add_row("reserved MB", row, f"{reserved[-1]:.1f}")
    return table


def _figures(history: History) -> Table:
    record, counts = history.updates[-1], history.counts
    table = Table.grid(padding=(0, 3))
    table.add_row(
        f"update [bold]{record.update_ms:.1f}[/bold] ms by {history.transport}",
        f"in mid-answer at the pause [bold]{record.held_requests}[/bold]",
        f"answers across an update [bold]{counts.crossed:,}[/bold]",
    )
    table.add_row(
        f"ESS [bold]{record.step.ess:.2f}[/bold]",
        f"logprob gap [bold]{max(item.gap.first_max for item in history.updates):.0e}[/bold]",
        f"answers sampled [bold]{counts.finished:,}[/bold]",
    )
    return table


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """Draw ``values`` between ``low`` and ``high`` as at most ``SPARK_WIDTH`` block characters."""
    count = len(values)
    width = min(count, SPARK_WIDTH)
    line = []
    for cell in range(width):
        piece = values[cell * count // width : (cell + 1) * count // width]
        share = (sum(piece) / len(piece) - low) / (high - low) if high > low else 0.0
        line.append(BARS[min(max(int(share * len(BARS)), 0), len(BARS) - 1)])
    return "".join(line)
