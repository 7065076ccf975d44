"""The command: options in, a run, a summary and a report out."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from caesura.client import CaesuraError

from .display import open_display
from .history import History
from .images.settings import ImageSettings
from .loop import StalledError, run
from .settings import HTTP_TRANSPORTS, POLICIES, TRANSPORTS, Settings
from .trainer import TrainerError

IMAGE = "image"
"""The policy that paints: Stable Diffusion 3."""
INTERRUPTED = 130
"""The shell's exit status for SIGINT."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit status."""
    settings, console = parse(arguments), Console()
    settings.out_dir.mkdir(parents=True, exist_ok=True)
    if isinstance(settings, ImageSettings):
        return _run_images(console, settings)
    history = History(settings.updates, settings.transport)
    display = open_display(console, history)
    try:
        with display:
            run(settings, history, display.changed)
    except KeyboardInterrupt:
        console.print(f"interrupted after {len(history.updates)} updates; engine and trainer have stopped")
        return INTERRUPTED
    except CaesuraError as error:
        return _failed(console, f"engine: {error}", settings.out_dir / "engine.log")
    except (TrainerError, StalledError) as error:
        return _failed(console, str(error), settings.out_dir / "engine.log")
    return _finish(console, settings, history)


def _run_images(console: Console, settings: ImageSettings) -> int:
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()  # of what is not installed, and not needed here
    from .images.main import run_images  # diffusers is an extra

    try:
        run_images(console, settings)
    except KeyboardInterrupt:
        console.print("interrupted; the engine has stopped")
        return INTERRUPTED
    except CaesuraError as error:
        return _failed(console, f"engine: {error}", settings.out_dir / "engine.log")
    return 0


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
    parser.add_argument("--policy", choices=(*POLICIES, IMAGE), help=f"what is trained ({Settings.policy})")
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
    if options.replicas < 1 or (options.replicas > 1 and options.policy == IMAGE):
        parser.error("--replicas must be at least 1, and 1 for images")
    if options.replicas > 1:
        changes |= {"replicas": options.replicas, "transport": options.transport or "tensor"}
        if changes["transport"] not in HTTP_TRANSPORTS:
            parser.error(f"--transport with --replicas: {' or '.join(HTTP_TRANSPORTS)}")
    if options.policy == IMAGE:
        return ImageSettings.quick(**changes) if options.quick else ImageSettings(**changes)
    if options.policy is not None:
        changes["policy"] = options.policy
    return Settings.quick(**changes) if options.quick else Settings(**changes)


def _failed(console: Console, reason: str, log: Path) -> int:
    console.print(f"error: {reason}", style="bold red", markup=False, soft_wrap=True)
    console.print(f"the engine's log is {log}", markup=False, soft_wrap=True)
    return 1


def _finish(console: Console, settings: Settings, history: History) -> int:
    # matplotlib's import is a second that the run need not wait for
    from .report import (
        write_report,
        write_summary,
    )

    summary = write_summary(history.summary(), settings.out_dir)
    report = write_report(history, settings, settings.out_dir)
    for name, value in history.summary().items():
        console.print(f"  {name:18} {value}", highlight=False, soft_wrap=True)
    console.print(f"{summary}\n{report}", highlight=False, soft_wrap=True)
    return 0
