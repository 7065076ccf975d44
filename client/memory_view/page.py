"""The memory page: one HTML file with its style, script, charts and data inside.

Invariants: the page asks for nothing, from the network or from disk; what clients have sent (labels, error texts) is
escaped wherever it stands. It is complete without its script, which adds the cross-hair and the choice of views.
"""

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from string import Template

import msgspec

from ...io_struct import MemoryEvent
from . import chart
from .chart import LEFT, RIGHT, WIDTH, Scale, X
from .record import TAGS, MemoryRecord
from .text import MIB, cause, clock, size, span

FOLDER = Path(__file__).parent
ROWS = 200
"""Events in the table."""
CLOSE = 48
"""Events of the closest view."""
DENSE = 500
"""Events beyond which a chart shows the whole rather than each."""
TAG_WORDS = {
    "weights": ("weights", "parameters of the policy"),
    "derived": ("derived", "what layers derive from them at commit"),
    "kv": ("KV cache", "pages of the pool that have been used"),
    "reference": ("reference", "other models, as far as they are on the device"),
    "graphs": ("graphs", "captured decode steps"),
    "workspace": ("workspace", "what else the engine has asked of the allocator"),
    "runtime": ("runtime", "what the process held before: Python, torch"),
    "other": ("other", "unused blocks of the allocator"),
}


@dataclass(frozen=True)
class View:
    """Some of the events, laid out along one axis."""

    name: str
    label: str
    record: MemoryRecord
    axis: X
    ticks: str
    """Of the axis, at the height 0."""

    def x(self, event: MemoryEvent) -> float:
        """Where an event is."""
        return self.axis(event.at, event.seq - self.record.events[0].seq)

    def x_end(self, event: MemoryEvent) -> float:
        """Where a look that was extended ends."""
        return max(self.x(event), self.axis(event.until, event.seq - self.record.events[0].seq))


def write_page(record: MemoryRecord, path: Path) -> None:
    """Write the page about ``record`` to ``path``.

    Raises:
        ValueError: the record is empty: an engine that serves has at least the event of its start.
    """
    path.write_text(render(record), encoding="utf-8")


def render(record: MemoryRecord) -> str:
    """The page as text; see :func:`write_page`."""
    if not record.events:
        raise ValueError("the engine has told of no event")
    chosen = views(record)
    status = record.status
    return Template((FOLDER / "page.html").read_text(encoding="utf-8")).substitute(
        css=(FOLDER / "page.css").read_text(encoding="utf-8"),
        script=(FOLDER / "page.js").read_text(encoding="utf-8"),
        title=escape(f"Memory of engine {status.pid}"),
        engine=escape(
            f"{status.model_path} ({status.dtype} on {status.device}), pid {status.pid}, up {span(status.uptime_s)}, "
            f"version {status.version}. Seen at {clock(record.events[-1].until)}."
        ),
        tiles="".join(_tile(*tile) for tile in tiles(record)),
        views="".join(
            f'<button type="button" data-view="{view.name}" aria-pressed="{str(view is chosen[0]).lower()}">{view.label}</button>'
            for view in chosen
        ),
        timeline=_each(chosen, timeline),
        returned=_each(chosen, returned),
        parts=_each(chosen, parts),
        legend="".join(
            f'<span><i class="fill-{tag}"></i>{TAG_WORDS[tag][0]}</span>' for tag in _used(record)
        ),
        tags="".join(_tag_row(record, tag) for tag in _used(record)),
        rows="".join(_row(event) for event in reversed(record.events[-ROWS:])),
        shown=f"the last {min(ROWS, len(record.events)):,} of {record.events[-1].seq:,}",
        data=_data(chosen),
    )


def views(record: MemoryRecord) -> list[View]:
    """By time and by event, and of many events the last ones."""
    first, count = record.events[0].seq, len(record.events)
    end = record.events[-1].until
    found = [
        View(
            "time",
            "by time",
            record,
            chart.time_axis(record.start, end),
            chart.time_ticks(record.start, end, 0),
        ),
        View("event", "by event", record, chart.event_axis(count), chart.event_ticks(first, count, 0)),
    ]
    if count > 2 * CLOSE:
        last = MemoryRecord(record.status, record.events[-CLOSE:])
        seq = last.events[0].seq
        ticks = chart.event_ticks(seq, CLOSE, 0)
        found.append(View("last", f"last {CLOSE} events", last, chart.event_axis(CLOSE), ticks))
    return found


def tiles(record: MemoryRecord) -> list[tuple[str, str, str]]:
    """(figure, what it is, what to know about it) for the top of the page."""
    last, ends = record.events[-1], record.continues
    growth = record.growth
    gave = [event.returned for event in ends if event.returned is not None]
    done = [pause.seconds for pause in record.pauses if pause.seconds is not None]
    left = [event.residual for event in ends if event.residual is not None]
    commits = [end for _, end in record.updates if end.cause == "update_commit"]
    found = [(size(last.reserved), "reserved", f"{size(last.allocated)} allocated")]
    if growth is None:
        found.append(("\N{EN DASH}", "growth", "needs two cycles of pause and continue"))
    else:
        note = f"over the last {growth.cycles:,} cycles; KV pages {size(growth.kv, sign=True)} of it"
        found.append((size(growth.reserved, sign=True), "growth", note))
    if gave:
        found.append(
            (size(sum(gave)), "returned at continue", f"{size(median(gave))} in the median of {len(gave):,}")
        )
    if left:
        worst = size(max(left), sign=True)
        found.append((worst, "largest residual", "reserved after a continue, over the start of its pause"))
    if done:
        found.append(
            (span(median(done)), "paused, median", f"{len(done):,} times, longest {span(max(done))}")
        )
    found.append(
        (f"{len(commits):,}", "weight updates", f"last: {commits[-1].detail}" if commits else "none yet")
    )
    return found


def timeline(view: View) -> str:
    """Reserved and allocated, each close up, with everything that happened."""
    record, events = view.record, view.record.events
    older = record.older
    bounds = [s.reserved_min for s in older] + [s.reserved_max for s in older] if view.name == "time" else []
    before = [e.reserved + e.returned for e in events if e.returned is not None and e.returned > 0]
    upper = chart.close_up([e.reserved for e in events] + before + bounds, 52, 236)
    lower = chart.close_up([e.allocated for e in events], 270, 340)
    marks = _marks(view, upper.top, lower.bottom)
    inner = [
        marks,
        chart.y_axis(upper),
        chart.y_axis(lower, 3),
        chart.label(0, upper.top - 6, "reserved, MB", "name"),
        chart.label(0, lower.top - 6, "allocated, MB", "name"),
    ]
    if bounds:
        tops = [(view.axis(at, 0), upper(s.reserved_max)) for s in older for at in (s.start, s.end)]
        bottoms = [(view.axis(at, 0), upper(s.reserved_min)) for s in older for at in (s.start, s.end)]
        inner.append(chart.path(chart.band(tops, bottoms), "folded"))
    inner.append(chart.path(chart.line(_levels(view, upper)), "line-reserved"))
    if record.continues:
        floor = [(view.x(event), upper(event.reserved)) for event in record.continues]
        inner.append(chart.path(chart.line(floor), "line-floor"))
    kept = chart.thinned([e.allocated for e in events])
    points = [(x, lower(events[i].allocated)) for i in kept for x in _xs(view, events[i])]
    inner.append(chart.path(chart.line(points), "line-allocated"))
    text = f"Reserved memory between {size(min(e.reserved for e in events))} and {size(max(e.reserved for e in events))}"
    return chart.svg("timeline", 366, "".join(inner) + _shifted(view.ticks, 360), text, dense=_dense(view))


def returned(view: View) -> str:
    """What each emptying gave back, and what each pause left."""
    gave = [e for e in view.record.events if e.returned is not None]
    left = [e for e in view.record.events if e.residual is not None]
    values = [0, *(e.returned or 0 for e in gave), *(e.residual or 0 for e in left)]
    low, high = min(values), max(values)
    room = max(0.12 * (high - low), MIB / 16)
    scale = Scale(low - room, high + room, 8, 120)
    width = max(1.5, min(9.0, 0.5 * (WIDTH - LEFT - RIGHT) / max(1, len(view.record.events))))
    inner = [chart.y_axis(scale, 5, sign=True)]
    for event in gave:
        y, zero = scale(event.returned or 0), scale(0)
        kind = "bar" if event.cause == "continue" else "bar elsewhere"
        title = f"{cause(event)}: {size(event.returned or 0)} returned"
        inner.append(chart.rect(view.x(event) - width / 2, min(y, zero), width, abs(zero - y), kind, title))
    inner += [
        f'<circle class="left" cx="{view.x(event):.1f}" cy="{scale(event.residual or 0):.1f}" r="2.6"/>'
        for event in left
    ]
    inner.append(
        f'<line class="zero" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{scale(0):.1f}" y2="{scale(0):.1f}"/>'
    )
    text = f"{len(gave)} emptyings returned {size(sum(e.returned or 0 for e in gave))} in all"
    return chart.svg("returned", 146, "".join(inner) + _shifted(view.ticks, 140), text, dense=_dense(view))


def parts(view: View) -> str:
    """Reserved memory by tag, stacked from zero."""
    events = view.record.events
    kept = [events[index] for index in chart.thinned([e.reserved for e in events], chart.MAX_POINTS // 2)]
    scale = Scale(0, 1.06 * max(e.reserved for e in events), 10, 220)
    inner = [chart.y_axis(scale)]
    points = [(x, e) for e in kept for x in _xs(view, e)]
    below = [0] * len(points)
    for tag in _used(view.record):
        above = [height + getattr(e.by_tag, tag) for height, (_, e) in zip(below, points, strict=True)]
        edges = [
            [(x, scale(h)) for h, (x, _) in zip(heights, points, strict=True)] for heights in (above, below)
        ]
        inner.append(chart.path(chart.band(*edges), f"fill-{tag}"))
        below = above
    text = "Reserved memory by tag, last: " + ", ".join(
        f"{TAG_WORDS[tag][0]} {size(getattr(events[-1].by_tag, tag))}" for tag in _used(view.record)
    )
    return chart.svg("parts", 246, "".join(inner) + _shifted(view.ticks, 240), text)


def _dense(view: View) -> bool:
    """So many events that single ones cannot be told apart."""
    return len(view.record.events) > DENSE


def _levels(view: View, scale: Scale) -> list[tuple[float, float]]:
    """Reserved memory, with the drop at each emptying."""
    events = view.record.events
    found = []
    for index in chart.thinned([e.reserved for e in events]):
        event = events[index]
        if event.returned is not None and event.returned > 0:
            found.append((view.x(event), scale(event.reserved + event.returned)))
        found += [(x, scale(event.reserved)) for x in _xs(view, event)]
    return found


def _xs(view: View, event: MemoryEvent) -> list[float]:
    begin, end = view.x(event), view.x_end(event)
    return [begin] if end == begin else [begin, end]


def _marks(view: View, top: float, bottom: float) -> str:
    """Pauses as bands, updates as bands above them, everything else as a tick above."""
    record = view.record
    found = []
    for pause in record.pauses:
        end = WIDTH - RIGHT if pause.end is None else view.x(pause.end)
        left = view.x(pause.begin)
        lasted = "lasts" if pause.seconds is None else f"lasted {span(pause.seconds)}"
        title = f"pause {pause.begin.detail}: {lasted}"
        found.append(chart.rect(left, top, max(end - left, 1.2), bottom - top, "paused", title))
        found.append(chart.rect(left, 22, max(end - left, 1.6), 6, "pause", title))
    for begin, end_event in record.updates:
        right = view.x(end_event)
        left = right if begin is None else view.x(begin)
        kind = "update" if end_event.cause == "update_commit" else "update failed"
        found.append(
            chart.rect(left, 12, max(right - left, 1.6), 6, kind, f"{cause(end_event)}: {end_event.detail}")
        )
    found += [
        chart.rect(view.x(event) - 0.8, 22, 1.6, 6, "continue", f"continue {event.detail}")
        for event in record.continues
    ]
    for event in record.events:
        if event.cause in ("flush", "release", "resume", "idle", "failure", "start"):
            x = view.x(event)
            found.append(
                f'<path class="mark {event.cause}" d="M{x - 3.5:.1f},2h7l-3.5,6z"><title>{escape(f"{cause(event)} {event.detail}")}</title></path>'
            )
    return "".join(found)


def _shifted(ticks: str, y: float) -> str:
    return f'<g transform="translate(0 {y:g})">{ticks}</g>'


def _each(chosen: list[View], draw: Callable[[View], str]) -> str:
    return "".join(
        f'<div data-view="{view.name}"{"" if view is chosen[0] else " hidden"}>{draw(view)}</div>'
        for view in chosen
    )


def _used(record: MemoryRecord) -> list[str]:
    """Tags that were ever more than nothing."""
    return [tag for tag in TAGS if any(getattr(event.by_tag, tag) for event in record.events)]


def _tile(figure: str, name: str, note: str) -> str:
    return f"<div><b>{escape(figure)}</b><span>{escape(name)}</span><small>{escape(note)}</small></div>"


def _tag_row(record: MemoryRecord, tag: str) -> str:
    name, meaning = TAG_WORDS[tag]
    values = [getattr(event.by_tag, tag) for event in record.events]
    share = values[-1] / max(record.events[-1].reserved, 1)
    cells = "".join(f"<td class=n>{size(value)}</td>" for value in (values[-1], min(values), max(values)))
    return (
        f'<tr><td><i class="fill-{tag}"></i>{name}<small>{meaning}</small></td>{cells}'
        f'<td class=share><i class="fill-{tag}" style="width:{100 * share:.1f}%"></i></td></tr>'
    )


def _row(event: MemoryEvent) -> str:
    at = clock(event.at)
    if event.until - event.at >= 0.1:
        at += f" + {span(event.until - event.at)}"
    optional = [
        "" if event.returned is None else size(event.returned),
        "" if event.residual is None else size(event.residual, sign=True),
    ]
    cells = "".join(
        f"<td class=n>{text}</td>" for text in (size(event.reserved), size(event.allocated), *optional)
    )
    return (
        f'<tr><td class=n>{event.seq}</td><td>{at}</td><td><b class="tag {event.cause}">{cause(event)}</b> '
        f"{escape(event.detail)}</td><td class=n>{event.step:,}</td><td class=n>{event.weights_epoch}</td>{cells}</tr>"
    )


def _data(chosen: list[View]) -> str:
    """Where each view's events are and what they say, for the cross-hair; safe inside a script element."""
    found = {
        view.name: [
            [
                round(view.x(event), 1),
                f"{cause(event)}{' ' if event.detail else ''}{event.detail}",
                f"#{event.seq} at {clock(event.at)}, step {event.step:,}, epoch {event.weights_epoch}",
                f"{size(event.reserved)} reserved, {size(event.allocated)} allocated",
                "" if event.returned is None else f"{size(event.returned)} returned",
                "" if event.residual is None else f"{size(event.residual, sign=True)} since the pause began",
            ]
            for event in view.record.events
        ]
        for view in chosen
    }
    return msgspec.json.encode(found).decode().replace("<", "\\u003c").replace("&", "\\u0026")
