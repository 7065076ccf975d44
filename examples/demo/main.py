"""The command: options in, a run, a summary and a report out."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from caesura.client import CaesuraError

from .agent.settings import AgentSettings
from .display import open_display
from .history import History
from .images.settings import ImageSettings
from .loop import StalledError, run
from .settings import (
    ADAPTER_TRANSPORTS,
    HTTP_TRANSPORTS,
    POLICIES,
    TRANSPORTS,
    LoraSettings,
    RunSettings,
    Settings,
)
from .trainer import TrainerError

IMAGE = "image"
"""The policy that paints: Stable Diffusion 3."""
LORA = "lora"
"""Policies that are adapters of one base."""
AGENT = "agent"
"""A policy that learns to use a tool, by OpenAI's API."""
INTERRUPTED = 130
"""The shell's exit status for SIGINT."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit status."""
    settings, console = parse(arguments), Console()
    settings.out_dir.mkdir(parents=True, exist_ok=True)
    history: History | None = None
    try:
        match settings:
            case ImageSettings():
                _run_images(console, settings)
            case AgentSettings():
                _run_agent(console, settings)
            case LoraSettings():
                _run_adapters(console, settings)
            case Settings():
                history = History(updates_planned=settings.updates, transport=settings.transport)
                display = open_display(console, history)
                with display:
                    run(settings, history, display.changed)
                _finish(console, settings, history)
    except KeyboardInterrupt:
        if history is None:
            console.print("interrupted; the engine has stopped")
        else:
            console.print(
                f"interrupted after {len(history.updates)} updates; engine and trainer have stopped"
            )
        return INTERRUPTED
    except CaesuraError as error:
        return _failed(console, f"engine: {error}", settings.out_dir / "engine.log")
    except (TrainerError, StalledError) as error:
        return _failed(console, str(error), settings.out_dir / "engine.log")
    return 0


def _run_images(console: Console, settings: ImageSettings) -> None:
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()  # of what is not installed, and not needed here
    from .images.main import run_images  # diffusers is an extra

    run_images(console, settings)


def _run_adapters(console: Console, settings: LoraSettings) -> None:
    from .lora.history import LoraHistory
    from .lora.loop import run

    history = LoraHistory(updates_planned=settings.updates, transport=settings.transport)
    run(settings, history, partial(console.print, highlight=False, markup=False, soft_wrap=True))
    from .lora.report import write_report  # matplotlib

    _tell(console, history.summary(), settings, write_report(history, settings, settings.out_dir))


def _run_agent(console: Console, settings: AgentSettings) -> None:
    from transformers.utils.logging import disable_progress_bar

    from .agent.loop import AgentHistory, run

    disable_progress_bar()
    history = AgentHistory(updates_planned=settings.updates, transport=settings.transport)
    run(settings, history, partial(console.print, highlight=False, markup=False, soft_wrap=True))
    from .agent.report import write_report  # matplotlib

    _tell(console, history.summary(), settings, write_report(history, settings, settings.out_dir))


def parse(arguments: Sequence[str] | None) -> Settings | ImageSettings:
    """Return the settings of the command line."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few updates: walks every path, learns little")
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for the report (demo_out)")
    parser.add_argument("--updates", type=int, help="updates to make")
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--transport", choices=TRANSPORTS, help=f"how weights reach the engine ({Settings.transport})"
    )
    parser.add_argument(
        "--policy", choices=(*POLICIES, IMAGE, LORA, AGENT), help=f"what is trained ({Settings.policy})"
    )
    parser.add_argument("--replicas", type=int, default=1, help="engines that sample, behind one port (1)")
    options = parser.parse_args(arguments)
    changes: dict[str, Any] = {"out_dir": options.out}
    if options.seed is not None:
        changes["seed"] = options.seed
    if options.updates is not None:
        if options.updates < 1:
            parser.error("--updates must be at least 1")
        changes["updates"] = options.updates
    if options.transport is not None:
        changes["transport"] = options.transport
    if options.replicas < 1 or (options.replicas > 1 and options.policy in (IMAGE, LORA, AGENT)):
        parser.error("--replicas must be at least 1, and 1 for images, adapters and the agent")
    if options.replicas > 1:
        changes |= {"replicas": options.replicas, "transport": options.transport or "tensor"}
        if changes["transport"] not in HTTP_TRANSPORTS:
            parser.error(f"--transport with --replicas: {' or '.join(HTTP_TRANSPORTS)}")
    kind: type[Settings | ImageSettings] = Settings
    if options.policy in (IMAGE, LORA, AGENT):
        kind = {IMAGE: ImageSettings, LORA: LoraSettings, AGENT: AgentSettings}[options.policy]
        transports = {LORA: ADAPTER_TRANSPORTS, AGENT: HTTP_TRANSPORTS}.get(options.policy, TRANSPORTS)
        if options.transport not in (None, *transports):
            parser.error(f"--transport of {options.policy}: {' or '.join(transports)}")
    elif options.policy is not None:
        changes["policy"] = options.policy
    return kind.quick(**changes) if options.quick else kind(**changes)


def _failed(console: Console, reason: str, log: Path) -> int:
    console.print(f"error: {reason}", style="bold red", markup=False, soft_wrap=True)
    console.print(f"the engine's log is {log}", markup=False, soft_wrap=True)
    return 1


def _finish(console: Console, settings: Settings, history: History) -> None:
    from .report import write_report  # matplotlib's import is a second that the run need not wait for

    _tell(console, history.summary(), settings, write_report(history, settings, settings.out_dir))


def _tell(console: Console, summary: dict[str, Any], settings: RunSettings, report: Path) -> None:
    from .report import write_summary

    path = write_summary(summary, settings.out_dir)
    for name, value in summary.items():
        console.print(f"  {name:18} {value}", highlight=False, soft_wrap=True)
    console.print(f"{path}\n{report}", highlight=False, soft_wrap=True)
