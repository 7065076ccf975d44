"""A griffe extension: references of the docstrings (``:meth:`x```) as code, as in Markdown."""

import re
from typing import Any

import griffe

ROLE = re.compile(r":\w+:`~?\.?([^`]*)`")


class Roles(griffe.Extension):
    """Rewrites the docstring of every object that is read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change an object that has been read from its source."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(
                lambda role: f"`{role[1].rpartition('.')[2]}`", obj.docstring.value
            )
