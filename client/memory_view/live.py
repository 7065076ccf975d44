"""The memory of a running engine in a terminal, refreshed; without a terminal, one line per look.

Invariants: looking disturbs the engine no more than status does; the parts by tag are those of the last
event, since the engine looks at them only then. It ends with Ctrl-C, and with an error when the engine ends.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from time import monotonic, sleep, time

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ...io_struct import GetStatusReqOutput, MemoryEvent
from ...io_struct.field_errors import printable
from ..connection.blocking import ControlClient
from .record import MIB, TAGS, MemoryRecord, cause, clock, fetch, model_label, size, span

LOOKS = 96
"""Width of the curve."""
LAST_EVENTS = 12
_FIGURES = (("reserved", 10), ("returned", 10), ("residual", 10))
_BLOCKS = " ▁▂▃▄▅▆▇█"
_ROWS = 3
_COLOURS = {
    "runtime": "bright_black", "weights": "green", "derived": "magenta", "kv": "blue", "reference": "yellow",
    "graphs": "bright_magenta", "answers": "white", "workspace": "cyan", "other": "red", "pause": "yellow",
    "continue": "green",
    "update_begin": "blue", "update_commit": "blue", "update_failed": "red", "failure": "red",
    "release": "magenta",
}  # fmt: skip
_COLUMNS = {
    "time": 10, "reserved MiB": 12, "allocated MiB": 13, "generation": 22, "weights": 8, "epoch": 6,
    "last event": 10,
}  # fmt: skip


def watch(
    client: ControlClient,
    console: Console,
    *,
    interval_s: float = 1.0,
    seconds: float | None = None,
    timeout: float | None = None,
) -> None:
    """Show the memory every ``interval_s`` seconds until Ctrl-C, or for ``seconds``."""
    looked = _looks(client, interval_s, seconds, timeout)
    with suppress(KeyboardInterrupt):
        if console.is_terminal:
            with Live(console=console, auto_refresh=False) as live:
                for record, looks in looked:
                    live.update(screen(record, looks), refresh=True)
        else:
            console.print(_aligned(_COLUMNS), soft_wrap=True, highlight=False)
            for record, _ in looked:
                console.print(line(record), soft_wrap=True, highlight=False, markup=False)


def _looks(
    client: ControlClient, interval_s: float, seconds: float | None, timeout: float | None
) -> Iterator[tuple[MemoryRecord, Sequence[int]]]:
    began, looks = monotonic(), deque[int](maxlen=LOOKS)
    record = None
    while True:
        record = fetch(client, record, timeout=timeout)
        looks.append(record.status.device_memory.reserved)
        yield record, looks
        if seconds is not None and monotonic() - began + interval_s > seconds:
            return
        sleep(interval_s)


def line(record: MemoryRecord) -> str:
    status = record.status
    memory, event = status.device_memory, record.events[-1]
    cells = (
        clock(time()),
        f"{memory.reserved / MIB:.1f}",
        f"{memory.allocated / MIB:.1f}",
        _generation(status),
        status.weights,
        str(status.weights_epoch),
        f"{event.seq} {cause(event)} {printable(event.detail)}".rstrip(),
    )
    return _aligned(cells)


def _aligned(cells: Iterable[str]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, _COLUMNS.values(), strict=True)).rstrip()


def screen(record: MemoryRecord, looks: Sequence[int]) -> RenderableType:
    status = record.status
    memory = status.device_memory
    head = Text.assemble(
        (_generation(status), "bold green" if status.generation == "running" else "bold yellow"),
        f"   weights {status.weights}, version {status.weight_version}, epoch {status.weights_epoch}",
        f"   step {status.step:,}   {status.running_requests} running, {status.waiting_requests} waiting",
    )
    figures = Text.assemble(
        (size(memory.reserved), "bold"), " reserved   ",
        (size(memory.allocated), "bold"), " allocated   ",
        ("?" if memory.available is None else size(memory.available), "bold"), " available", *_growth(record),
    )  # fmt: skip
    low, high = min(looks), max(looks)
    curve = Group(*curve_lines(looks, low, high))
    scale = Text(f"{size(low)} to {size(high)} in the last {len(looks)} looks", "dim")
    title = f"Memory of engine {status.pid}, {model_label(status.model_path)}"
    return Panel(
        Group(head, Text(), figures, curve, scale, Text(), parts(record), events(record)),
        title=Text(title),
        subtitle="Ctrl-C ends",
    )


def curve_lines(looks: Sequence[int], low: int, high: int) -> list[Text]:
    """Values between ``low`` and ``high`` as columns of block characters, the highest line first."""
    steps = _ROWS * (len(_BLOCKS) - 1)
    room = max(high - low, MIB)  # less than that is no curve
    heights = [1 + round((value - low) / room * (steps - 1)) for value in looks]
    return [
        Text("".join(_BLOCKS[max(0, min(8, height - 8 * row))] for height in heights), "cyan")
        for row in reversed(range(_ROWS))
    ]


def parts(record: MemoryRecord) -> RenderableType:
    event = record.events[-1]
    most = max((getattr(event.by_tag, tag) for tag in TAGS), default=1)
    table = Table.grid(padding=(0, 2))
    for tag in TAGS:
        nbytes = getattr(event.by_tag, tag)
        if nbytes:
            bar = Text("█" * max(1, round(48 * nbytes / most)), _COLOURS[tag])
            table.add_row(tag, Text(size(nbytes), justify="right"), bar)
    return table


def events(record: MemoryRecord, count: int = LAST_EVENTS) -> RenderableType:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, expand=True)
    for name, width in (("#", 4), ("time", 10), ("what", None), *_FIGURES):
        flexible = width is None
        table.add_column(
            name,
            justify="left" if name in ("time", "what") else "right",
            min_width=width,
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if flexible else None,
        )
    for event in reversed(record.events[-count:]):
        table.add_row(*_event_row(event))
    return table


def _event_row(event: MemoryEvent) -> tuple[Text, ...]:
    what = Text.assemble((cause(event), _COLOURS.get(event.cause, "")), f" {printable(event.detail)}")
    return (
        Text(str(event.seq)),
        Text(clock(event.at), "dim"),
        what,
        Text(size(event.reserved)),
        Text("" if event.returned is None else size(event.returned)),
        Text("" if event.residual is None else size(event.residual, sign=True)),
    )


def _growth(record: MemoryRecord) -> Sequence[str | tuple[str, str]]:
    growth = record.growth
    if growth is None:
        return ()
    grown = size(growth.reserved - growth.kv, sign=True)
    return ("   ", (grown, "bold"), f" without KV pages over {growth.cycles:,} cycles")


def _generation(status: GetStatusReqOutput) -> str:
    if status.pause_mode is None:
        return status.generation
    return f"{status.generation} {status.pause_mode} {span(status.pause_age_s or 0.0)}"
