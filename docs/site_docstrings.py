"""A griffe extension: references of docstrings (``:meth:`x```) become code, and functions get parameters that
are listed elsewhere.
"""

import re
from typing import Any

import griffe

ROLE = re.compile(r":\w+:`~?\.?([^`]*)`")


class House(griffe.Extension):
    """Completes what was read from the sources."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the references of a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(
                lambda role: f"`{role[1].rpartition('.')[2]}`", obj.docstring.value
            )

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Leave out options that are not described, or twice: ``unpack_typeddict`` adds all to the list."""
        if func.docstring is not None:
            for section in [each for each in func.docstring.parsed if each.kind.value == "parameters"]:
                section.value = [each for each in section.value if each.description]
                if not section.value:
                    func.docstring.parsed.remove(section)

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Give ``launch_scheduler`` its parameters, the fields of a dataclass."""
        launcher = pkg["client.launch.launcher"]
        _, *fields = launcher["LaunchOptions"].parameters
        launcher["launch_scheduler"].parameters = griffe.Parameters(*fields)
