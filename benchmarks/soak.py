"""Cycles of pause, update and continue by the thousand under load: everything must stay flat.

Scenarios: ``updates`` (memory over updates in place, by every transport), ``emptying`` (what the empty-cache
step prevents and costs), ``rollouts`` (three processes over HTTP; rollouts are scored again by transformers).
Tables are Markdown. ``--read`` makes tables and picture again from what ``--json`` wrote.

    python benchmarks/soak.py updates --updates 1000 --plot docs/images/memory_over_updates.svg
    python benchmarks/soak.py emptying --cycles 1000 --json soak.json --plot docs/images/memory_soak.svg
    python benchmarks/soak.py rollouts --minutes 30 --plot rollouts.svg
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
from harness import soak_emptying, soak_rollouts, soak_updates
from harness.machine import describe
from harness.script import begin, write_json
from rich.console import Console

SCENARIOS: dict[str, ModuleType] = {
    "updates": soak_updates,
    "emptying": soak_emptying,
    "rollouts": soak_rollouts,
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    scenarios = parser.add_subparsers(dest="scenario", required=True)
    for name, module in SCENARIOS.items():
        scenario = scenarios.add_parser(name, description=(module.__doc__ or "").partition("\n")[0])
        module.add_options(scenario)
        scenario.add_argument("--json", type=Path, help="write every reading to this file")
        scenario.add_argument("--read", type=Path, help="measure nothing: take what --json has written")
        scenario.add_argument("--markdown", type=Path, help="also write the tables to this file")
        scenario.add_argument(
            "--plot", type=Path, help="draw memory to this file (.svg or .png; needs matplotlib)"
        )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    scenario = SCENARIOS[options.scenario]
    torch.set_num_threads(1)  # the trainer's
    console = Console(width=120, stderr=True)
    if options.read is not None:
        document = json.loads(options.read.read_text(encoding="utf-8"))
    else:
        machine = begin(console)
        with tempfile.TemporaryDirectory() as scratch:
            document = {"machine": machine, "found": scenario.run(options, console, Path(scratch))}
        write_json(options.json, document)
    text = f"{describe(document['machine'])}\n\n{scenario.report(document['found'])}"
    print(text)
    if options.markdown is not None:
        options.markdown.write_text(text, encoding="utf-8")
    if options.plot is not None:
        scenario.plot(document["found"], options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
