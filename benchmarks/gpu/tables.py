"""Tables of a run's results; a section that is missing or has failed is a row that says so."""

from collections.abc import Sequence
from typing import Any

from harness.limits import Ceilings
from harness.report import DASH
from rich.markup import escape
from rich.table import Table


def tables(found: dict[str, Any]) -> list[Table]:
    """Return tables of decoding, updates, the rest, and how each section ended."""
    made = (_decode(found), _transports(found), _rest(found), _sections(found))
    return [table for table in made if table.row_count]


def _decode(found: dict[str, Any]) -> Table:
    title = "decode"
    if "flops" in found.get("ceilings", {}):
        names = ("read_bytes_per_s", "copy_bytes_per_s", "flops")
        bandwidth = Ceilings(*(found["ceilings"][name] for name in names)).bandwidth
        title = f"decode, limit at {bandwidth / 1e12:.2f} TB/s measured"
    table = Table(title=title, title_justify="left")
    for column in ("model", "batch", "step", "limit", "of the limit", "tok/s", "transformers step"):
        table.add_column(column, justify="right")
    theirs = found.get("transformers", {}).get("eager", {}).get("step_s", {})
    served = found.get("serving", {})
    rows = {
        "8B": served.get("decode"),
        "8B filtered": served.get("filtered"),
        "8B raw logprobs": served.get("raw"),
    }
    rows |= {name: found.get(name, {}).get("decode") for name in ("experts", "fp8")}
    for name, measured in rows.items():
        for row in measured or ():
            step = theirs.get(str(row["batch"])) if name == "8B" else None
            table.add_row(
                name, str(row["batch"]), _ms(row["step_s"]), _ms(row["limit_s"]), f"{row['share']:.0%}",
                f"{row['batch'] / row['step_s']:,.0f}", DASH if step is None else _ms(step),
            )  # fmt: skip
    return table


def _transports(found: dict[str, Any]) -> Table:
    table = Table(title="weight updates", title_justify="left")
    for column in ("transport", "GB/s", "of the link"):
        table.add_column(column, justify="right")
    for name, value in found.get("transports", {}).items():
        if isinstance(value, dict) and "share" in value:
            table.add_row(name, f"{value['bytes_per_s'] / 1e9:.1f}", f"{value['share']:.0%}")
    return table


def _rest(found: dict[str, Any]) -> Table:
    table = Table(title="the rest", title_justify="left", show_header=False)
    _add_serving(table, found)
    for section in ("transformers", "servers"):
        for kind, result in found.get(section, {}).items():
            if isinstance(result, dict):
                rate = result.get("rollout_tokens_per_s")
                why = result.get("error") or result.get("left_out", "")
                table.add_row(f"rollout, {section} {kind}", why if rate is None else f"{rate:,.0f} tok/s")
    if "growth_bytes" in found.get("growth", {}):
        grown = found["growth"]
        table.add_row(
            f"reserved growth, update 10 to {grown['updates']}", f"{grown['growth_bytes'] / 2**20:.2f} MB"
        )
    for batch, value in found.get("graphs", {}).items():
        if isinstance(value, dict):
            said = "equal" if value["equal"] else f"{value['agreed']} of {value['tokens']} tokens agree"
            table.add_row(f"captured against eager, {batch} rows", said)
    if "kernels_per_step" in found.get("profile", {}):
        seen = found["profile"]
        idle = DASH if seen["idle_share"] is None else f"{seen['idle_share']:.0%}"
        table.add_row(
            "a step",
            f"{seen['kernels_per_step']:.0f} kernels, {seen['waits_per_step']:.1f} waits, idle {idle}",
        )
    return table


def _sections(found: dict[str, Any]) -> Table:
    table = Table("section", "seconds", "result", title="sections", title_justify="left")
    for name, value in found.items():
        if name in ("machine", "seconds"):
            continue
        seconds, end = found["seconds"].get(name), "done"
        if isinstance(value, dict):
            end = next(
                (f"{key}: {value[key]}"[:200] for key in ("error", "left_out", "why_not") if key in value),
                end,
            )
        table.add_row(name, DASH if seconds is None else f"{seconds:.1f}", escape(end))
    return table


def _add_serving(table: Table, found: dict[str, Any]) -> None:
    served = found.get("serving", {})
    if "prefill" not in served:
        return
    done, peak = served["prefill"], found.get("ceilings", {}).get("flops", 0.0) / 1e12
    speed = f"{done['tokens_per_s']:,.0f} tok/s, {done['share']:.0%} of {peak:,.1f} TFLOP/s measured"
    table.add_row(f"prefill, {done['prompts']} prompts of {done['length']}", speed)
    table.add_row("rollout", f"{served['rollout']:,.0f} tok/s")
    pauses, updates = served["pauses"], served["updates"]
    table.add_row("pause acknowledged", spread(pauses["pause_s"]))
    for variant, values in pauses["resume_s"].items():
        table.add_row(f"resume to next token, {variant}", spread(values))
    table.add_row("disk update", spread(updates["update_s"]))
    table.add_row("pause, update, resume to next token", spread(updates["gap_s"]))
    for line in served["engine_says"]:
        table.add_row("the engine says", line)


def spread(seconds: Sequence[float]) -> str:
    """Return the median, 99th percentile and maximum."""
    ordered = sorted(seconds)
    p50, p99 = (ordered[round(q * (len(ordered) - 1))] for q in (0.5, 0.99))
    return f"p50 {_ms(p50)}, p99 {_ms(p99)}, max {_ms(ordered[-1])} ({len(ordered)})"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms"
