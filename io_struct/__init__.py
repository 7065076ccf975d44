"""The wire contract: every message that crosses it, and how it is framed (docs/reference/wire.md)."""

from .base import *
from .codec import *
from .control import *
from .distribution import *
from .drift import *
from .errors import *
from .generate import *
from .images import *
from .memory import *
from .weights import *
