"""``python -m caesura.scheduler``: one option per field of :class:`~.config.EngineConfig`."""

import ast
import contextlib
import dataclasses
import inspect
import os
import sys
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from .runtime.shutdown import end_on_stop_signals

if __name__ == "__main__":
    end_on_stop_signals()  # importing torch takes seconds

from .memory.host import HOST
from .runtime.libraries import settings

os.environ.update(settings())
if "MALLOC_ARENA_MAX" not in os.environ:
    HOST.share_arena()

from ..io_struct import CaesuraError
from ..io_struct.field_errors import advice, other_name
from ..process import log
from ..process.engine_options import EngineOptions
from ..process.placement import place_of
from .executor.node import run_node
from .executor.workers import turn_away
from .runtime.engine_config import EngineConfig
from .runtime.process import refusal, run, tell

_RENAMED = {"model_path": "model"}
_OF_WORKERS = (
    *("model_path", "tp", "tp_joined", "tp_address"),
    *("curve_secret_key_file", "curve_authorized_clients"),
)
_ALSO = {"weights_cpu_backup": "--enable-weights-cpu-backup", "master_addr": "--dist-init-addr"}
"""SGLang's spelling, where it is another one."""


def _field_help() -> dict[str, str]:
    """Return the docstring below each field of the configuration, read from the source."""
    classes: list[Any] = [
        ast.parse(inspect.getsource(part)).body[0] for part in (EngineOptions, EngineConfig)
    ]
    return {
        field.target.id: str(ast.literal_eval(text.value)).strip()
        for made in classes
        for field, text in pairwise(made.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
    }


def _option(field: dataclasses.Field[Any], annotation: Any, text: str) -> click.Option:
    name = "--" + _RENAMED.get(field.name, field.name).replace("_", "-")
    required = field.default is dataclasses.MISSING
    choices = get_args(annotation) if get_origin(annotation) is Literal else ()
    also = filter(None, [_ALSO.get(field.name)])
    if annotation is bool:
        names = [f"{name}/--no-{name[2:]}", *also, field.name]
        return click.Option(names, default=field.default, show_default=True, help=text)
    kind = next((k for k in get_args(annotation) if k is not type(None)), annotation)
    # An explicit default of None would satisfy click in place of a required value.
    default: dict[str, Any] = (
        {} if required else {"default": field.default, "show_default": field.default is not None}
    )
    type_ = click.Choice(choices) if choices else kind
    return click.Option([name, *also, field.name], type=type_, required=required, help=text, **default)


def _serve(ready_fd: int | None, lifeline_fd: int | None, **fields: Any) -> None:
    place = None
    try:
        # who launches an engine says all itself: its environment is about its own processes
        place = place_of(fields, os.environ if ready_fd is None else {})
        if place is not None:
            fields |= place.options(fields["tp"])
        config = EngineConfig(**fields)
    except CaesuraError as error:
        if place is None or place.node_rank == 0:
            _turn_away(fields, error)
        tell(ready_fd, refusal(error))
        raise click.UsageError(str(error)) from error
    if place is None or place.node_rank == 0:
        sys.exit(run(config, ready_fd, lifeline_fd))
    tell(ready_fd, {"ready": True, "endpoint": "", "pid": os.getpid()})
    sys.exit(run_node(config, place, lifeline_fd))


def _turn_away(fields: dict[str, Any], error: CaesuraError) -> None:
    """Have the workers that are started by hand end with the engine, whose other options are refused."""
    with contextlib.suppress(CaesuraError):
        config = EngineConfig(**{name: fields[name] for name in _OF_WORKERS})
        if config.tp_joined:
            turn_away(config, error.message)


class _Command(click.Command):
    """A command that knows what other engines call its options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            given = error.option_name.lstrip("-").replace("-", "_")
            names = [option.lstrip("-").replace("-", "_") for each in self.params for option in each.opts]
            if (hint := advice(given, names)) is None and (meant := other_name(given, names)) is not None:
                hint = f"did you mean --{meant.replace('_', '-')}?"
            if hint is None:
                raise
            raise click.UsageError(f"No such option {error.option_name!r}: {hint}", ctx) from error


def command() -> click.Command:
    """``caesura scheduler``, whose options are the fields of the configuration."""
    texts, hints = _field_help(), get_type_hints(EngineConfig)
    fields = sorted(
        dataclasses.fields(EngineConfig), key=lambda field: field.default is not dataclasses.MISSING
    )
    options: list[click.Parameter] = [_option(each, hints[each.name], texts[each.name]) for each in fields]
    options += [
        click.Option(["--ready-fd"], type=int, hidden=True),
        click.Option(["--lifeline-fd"], type=int, hidden=True),
    ]
    return _Command("caesura scheduler", params=options, callback=_serve, help="Run a scheduler process.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command as all that this process does; ``arguments`` None means those of the process."""
    try:
        command()(arguments, prog_name="caesura scheduler")
    except SystemExit as end:
        if any(thread.name.startswith("caesura-") for thread in threading.enumerate()):
            # The interpreter's exit would unwind threads inside torch or libzmq, which aborts the process.
            log.flush()
            os._exit(end.code if isinstance(end.code, int) else 1)
        raise


if __name__ == "__main__":
    main()
