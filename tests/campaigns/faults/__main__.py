"""Faults while an engine works: processes that die or stand still, connections that break, disks and memory
that are full.

Real processes; at random points of pauses, updates by every transport, releases, resumes and generations.
After each fault every accepted request must have ended exactly once, the weights must be one whole known
version (or honestly refuse to serve), every token must be the one that the version in its span gives, and the
engine must hold no more than before. The table counts what was not so. Exit status 1 if anything was not.

    make faults FAULTS_ARGS="--faults 2000 --seed 1 --json faults.json"
    make faults FAULTS_ARGS="--seed 1 --first 137 --faults 1"          # just that fault again
"""

import argparse
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from harness.cycles import distribution
from harness.machine import machine_facts
from harness.script import markdown, parser, write_json

from .campaign import Campaign, Outcome
from .kinds import KINDS
from .known import make_versions
from .ledger import HARMS, count_harms

COLUMNS = ("kind", "count", *HARMS, "recovery p50", "p99")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--faults", type=int, default=200, help="how many (default: %(default)s)")
    made.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    made.add_argument("--first", type=int, default=0, help="number of the first fault (default: %(default)s)")
    made.add_argument("--only", nargs="+", choices=tuple(KINDS), metavar="KIND", help=", ".join(KINDS))
    made.add_argument("--skip", nargs="+", choices=tuple(KINDS), metavar="KIND", default=[])
    made.add_argument("--log", type=Path, help="append what the engines log there")
    made.add_argument("--verbose", action="store_true", help="a line for each fault")
    options = made.parse_args(argv)
    options.kinds = [name for name in options.only or KINDS if name not in options.skip]
    if not options.kinds:
        made.error("no kind of fault is left")
    return options


def again(options: argparse.Namespace, outcome: Outcome) -> str:
    only = f" --only {' '.join(options.kinds)}" if len(options.kinds) < len(KINDS) else ""
    return f'make faults FAULTS_ARGS="--seed {options.seed} --first {outcome.number} --faults 1{only}"'


def table(outcomes: Iterable[Outcome]) -> str:
    groups: defaultdict[str, list[Outcome]] = defaultdict(list)
    everything = list(outcomes)
    for outcome in everything:
        groups[outcome.kind].append(outcome)
    rows = []
    for name, group in [*sorted(groups.items()), ("all", everything)]:
        if group:
            harms = count_harms([problem for outcome in group for problem in outcome.problems])
            recovery = distribution([outcome.recovery for outcome in group])
            times = [f"{recovery[share]:.2f} s" for share in ("p50", "p99")]
            rows.append([name, str(len(group)), *(str(harms[harm]) for harm in HARMS), *times])
    return markdown(COLUMNS, rows)


def run(options: argparse.Namespace, versions_in: Path, outcomes: list[Outcome]) -> None:
    """Run all faults; each goes to ``outcomes`` and, if there is something to say, to the terminal."""
    campaign = Campaign(make_versions(versions_in), seed=options.seed, kinds=options.kinds, log=options.log)
    try:
        for outcome in campaign.run(options.first, options.faults):
            outcomes.append(outcome)
            if options.verbose or outcome.problems:
                facts = " ".join(f"{name}={value}" for name, value in outcome.facts.items())
                print(f"{outcome.number} {outcome.kind} {outcome.seconds:.2f} s {facts}", flush=True)
            for problem in outcome.problems:
                print(f"  {problem.harm}: {problem.text}", flush=True)
            if outcome.problems:
                print(f"  again: {again(options, outcome)}", flush=True)
    except KeyboardInterrupt:
        print("interrupted; this is what there is")
    finally:
        campaign.close()


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    # a run of hours that is stopped prints its table
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    outcomes: list[Outcome] = []
    try:
        with tempfile.TemporaryDirectory(prefix="caesura-faults-") as folder:
            run(options, Path(folder), outcomes)
    finally:  # a run of hours that ends with a defect of its own has found something too
        if outcomes:
            print(table(outcomes), flush=True)
        faults = [asdict(outcome) for outcome in outcomes]
        drawn = {"seed": options.seed, "first": options.first, "kinds": options.kinds}
        write_json(options.json, {**drawn, "machine": machine_facts(), "faults": faults})
    return int(any(outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
