"""The ``caesura`` command in the test's process, with an environment of its own."""

import pytest
from click.testing import CliRunner

from caesura.client import cli


def run_command(*arguments: str, **environment: str | None) -> tuple[object, str, str]:
    """Return status, stdout and stderr; a variable that is None is not set."""
    with CliRunner().isolation(env={"COLUMNS": "160", **environment}) as (out, err, _):
        with pytest.raises(SystemExit) as exit:
            cli.main(arguments)
        return exit.value.code, out.getvalue().decode(), err.getvalue().decode()
