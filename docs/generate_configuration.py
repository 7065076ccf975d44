"""Writes the tables of docs/reference/configuration.md from the command lines themselves.

Invariant: an option's meaning is its ``--help``, which for the scheduler is the docstring of a field of
``EngineConfig``. Run ``python docs/generate_configuration.py`` after a change of an option (``--check``: see
:mod:`generated_parts`).
"""

import re
import sys
from pathlib import Path

import click
from generated_parts import update

from caesura.client.launch.supervise import supervise
from caesura.client.serve.command import serve
from caesura.scheduler.__main__ import command

DOCUMENT = Path(__file__).parent / "reference" / "configuration.md"
_STATED = re.compile(r"\s*\[(env|default): ([^\]]*)\]")
"""Default or variable that a help text states itself."""


def table(described: click.Command) -> str:
    """Return the table of all options that ``--help`` lists, in its order."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for option in described.params:
        if isinstance(option, click.Option) and not option.hidden:
            text = _STATED.sub("", option.help or "").replace("|", "\\|")
            variable = str(option.envvar or stated(option).get("env", "")).partition(" ")[0]
            named = f" Environment variable: `{variable}`." if variable else ""
            rows.append(f"| {names(option)} | {default(option)} | {' '.join(text.split())}{named} |")
    return "\n".join(rows)


def names(option: click.Option) -> str:
    """Return the option, with the values that it takes or its negative form."""
    spelled = [f"`{name}`" for name in (*option.opts, *option.secondary_opts)]
    if isinstance(option.type, click.Choice):
        spelled.append(", ".join(map(str, option.type.choices)))
    return " ".join(spelled)


def stated(option: click.Option) -> dict[str, str]:
    """Return the help text's words about ``env`` and ``default``."""
    return dict(_STATED.findall(option.help or ""))


def default(option: click.Option) -> str:
    """Return the default as it is typed on a command line; empty where there is none."""
    if option.required:
        return "required"
    if "default" in stated(option):
        return stated(option)["default"]
    value = option.to_info_dict()["default"]
    if value is None or value == "" or (value is False and not option.secondary_opts):
        return ""
    return (
        f"`{option.opts[0] if value else option.secondary_opts[0]}`"
        if isinstance(value, bool)
        else f"`{value}`"
    )


PARTS = {
    "scheduler": lambda: table(command()),
    "serve": lambda: table(serve),
    "supervise": lambda: table(supervise),
}


if __name__ == "__main__":
    sys.exit(update(DOCUMENT, PARTS))
