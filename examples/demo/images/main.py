"""``python -m demo --policy image``: a run, a summary and a report."""

from diffusers.utils.logging import set_verbosity_error
from rich.console import Console

from ..report import write_summary
from .history import ImageHistory
from .loop import run
from .report import write_report
from .settings import ImageSettings


def run_images(console: Console, settings: ImageSettings) -> None:
    """Run the whole demo; raise what the run raises."""
    set_verbosity_error()  # saving says of each part that there is none of it
    settings.out_dir.mkdir(parents=True, exist_ok=True)
    history = ImageHistory()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    run(settings, history, say)
    for name, value in history.summary().items():
        console.print(f"  {name:30} {value}", highlight=False, soft_wrap=True)
    summary = write_summary(history.summary(), settings.out_dir)
    say(f"{summary}\n{write_report(history, settings, settings.out_dir)}")
