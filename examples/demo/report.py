"""``summary.json`` and ``report.html``: the run, told once for programs and once for people.

Invariant: the page needs no network and no other file; :func:`write_report` refuses to write one that names
an address.
"""

import json
import math
import os
import platform
import re
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2

from . import task
from .charts import all_charts
from .history import EvalRecord, History
from .messages import Sample
from .settings import Settings

ROADS = {
    "disk": "is read from the checkpoint that the trainer has written",
    "tensor": "comes over the trainer's own socket",
    "ipc": "is copied from memory that the trainer shares",
    "distributed": "is broadcast by the trainer over gloo",
}
"""Words of the page for each transport's delivery."""
OVER_HTTP = {
    "tensor": "is sent over HTTP to every engine",
    "disk": "is read by every engine from the checkpoint that the trainer has written",
}
"""Words for several engines behind one port."""
FAMILIES = {"dense": "Qwen3", "moe": "Qwen3-MoE", "mla": "DeepSeek V3"}
"""Words for each policy."""
SHOWN_EACH = 6
"""Random held-out words in the before/after table, beside the showcase."""


@dataclass(frozen=True)
class Tile:
    """One figure at the top of the page."""

    value: str
    label: str
    note: str = ""
    accent: bool = False


@dataclass(frozen=True)
class Answer:
    """One row of the before/after table."""

    word: str
    right: str
    before: str
    after: str
    before_exact: bool
    after_exact: bool


@dataclass(frozen=True)
class Token:
    """One character of the exemplar, and which of its spans it belongs to."""

    text: str
    span: int
    probability: float


def write_summary(summary: dict[str, Any], out_dir: Path) -> Path:
    """Write ``summary.json``."""
    path = out_dir / "summary.json"
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return path


def write_report(history: History, settings: Settings, out_dir: Path) -> Path:
    """Write ``report.html``."""
    page = template("report.html.j2").render(
        summary=history.summary(),
        tiles=tiles(history, settings),
        road=(ROADS if settings.replicas == 1 else OVER_HTTP)[history.transport],
        engines=engines(settings),
        charts=all_charts(history),
        answers=answers(history.evals[0], history.evals[-1]),
        held_out=len(history.evals[0].answers),
        exemplar=exemplar(history.exemplar),
        history=history,
        last=history.updates[-1],
        tokens_checked=sum(record.gap.first_tokens for record in history.updates),
        later_tokens=sum(record.gap.later_tokens for record in history.updates),
        later_max=max(record.gap.later_max for record in history.updates),
        task=task,
        settings=settings.as_dict(),
        family=FAMILIES[settings.policy],
        machine=machine(),
    )
    return written(page, out_dir)


def template(name: str) -> jinja2.Template:
    """Return a template of this package by its path below it."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def written(page: str, out_dir: Path) -> Path:
    """Write ``report.html`` after checking that ``page`` names no address."""
    found = re.search(r"(https?:)?//[\w.-]+\.\w|(?:src|href)=[\"'](?!#|data:image/png;base64,)", page)
    assert found is None, f"the report names an address: {found.group() if found else ''}"
    path = out_dir / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def tiles(history: History, settings: Settings) -> list[Tile]:
    """Return the figures at the top."""
    summary = history.summary()
    pauses = f"max {summary['pause_ms_max']:.1f} ms"
    reserved_first, reserved_last = float(summary["reserved_mb_first"]), float(summary["reserved_mb_last"])
    settled = history.updates[min(10, len(history.updates)) - 1].reserved_after_mb
    crossed = history.counts.crossed
    return [
        Tile(
            f"{summary['reward_first']:.2f} → {summary['reward_last']:.2f}",
            "held-out reward",
            "exact answers to words never trained on",
            accent=True,
        ),
        Tile(f"{summary['pause_ms_p50']:.1f} ms", "pause, median", f"{pauses}, in place, under load"),
        Tile(
            f"{summary['update_ms_p50']:.1f} ms",
            "weight update, median",
            f"{summary['updates']} by {summary['transport']}: {_stages(summary['update_stages_ms'])}",
        ),
        Tile(
            f"{summary['tokens_per_s']:,.0f}",
            "tokens per second",
            f"{history.tokens:,} sampled, {engines(settings)}",
        ),
        Tile(
            f"{reserved_last:.1f} MB",
            "reserved at the end",
            f"{reserved_first:.1f} first, {settled:.1f} at the tenth update"
            + ("" if settings.replicas == 1 else ", all engines together"),
        ),
        Tile(
            f"{summary['max_logprob_gap']:.0e}", "largest logprob gap", "engine against trainer, first spans"
        ),
        Tile(f"{summary['ess_min']:.2f}", "smallest ESS", "share, over all updates"),
        Tile(f"{crossed:,}", "answers across an update", f"of {history.counts.finished:,} sampled"),
        Tile(f"{summary['requests_lost']}", "requests lost", f"of {history.ledger.submitted:,} submitted"),
    ]


def engines(settings: Settings) -> str:
    """Return the words for what samples."""
    threads = "one thread" if settings.engine_threads == 1 else f"{settings.engine_threads} threads"
    return threads if settings.replicas == 1 else f"{settings.replicas} engines of {threads} each"


def _stages(stages_ms: dict[str, float]) -> str:
    """Return the engine's stages in ms without those that round to nothing."""
    return ", ".join(f"{stage} {value:.1f}" for stage, value in stages_ms.items() if value >= 0.05) + " ms"


def shown_words(record: EvalRecord) -> list[str]:
    """Return the showcase, then some random words."""
    words = [word for word in record.answers if word in task.SHOWCASE]
    random_words = [word for word in record.answers if word not in task.SHOWCASE]
    return words + random_words[:SHOWN_EACH]


def answers(first: EvalRecord, last: EvalRecord) -> list[Answer]:
    """Return the rows of the before/after table."""
    return [
        Answer(
            word=word,
            right=word[::-1],
            before=shown(first.answers[word]),
            after=shown(last.answers[word]),
            before_exact=task.is_exact(word, first.answers[word]),
            after_exact=task.is_exact(word, last.answers[word]),
        )
        for word in shown_words(last)
    ]


def shown(output_ids: list[int]) -> str:
    """Return the answer's text, with an ellipsis if it was cut at the limit."""
    return task.decode(output_ids) + ("" if output_ids[-1:] == [task.END] else "…")


def exemplar(found: tuple[str, Sample] | None) -> dict[str, Any] | None:
    """Return a right answer that lived across an update token by token, or None."""
    if found is None:
        return None
    word, sample = found
    tokens = [
        Token(
            text="end" if sample.output_ids[place] == task.END else task.TOKENS[sample.output_ids[place]],
            span=index,
            probability=math.exp(sample.logprobs[place]),
        )
        for index, span in enumerate(sample.spans)
        for place in range(span.start, span.end)
    ]
    return {"word": word, "tokens": tokens, "spans": sample.spans}


def machine(*further: str) -> dict[str, str]:
    """Describe the machine and the packages; ``further`` are more to name."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        model = found.group(1).strip() if found else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    packages = ("caesura", "torch", "transformers", "pyzmq", "msgspec", *further)
    return {
        "Processor": f"{model}, {cores} cores",
        "System": f"{platform.system()} {platform.release()}",
        "Python": sys.version.split()[0],
        **{name: version(name) for name in packages},
    }
