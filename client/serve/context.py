"""State that every handler uses: connection, tokenizer manager, settings and counters.

Invariants: a :class:`ServeOptions` never prints its keys; a :class:`FrontEnd` is made once, before the first request.
"""

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from litestar.di import NamedDependency

from ..connection.async_client import AsyncSchedulerClient
from ..text.tokenizer_manager import TokenizerManager
from .admission import Admission
from .health import EngineHealth
from .pages.last_image import LastImage
from .unknown_keys import UnknownKeys
from .workers import Workers

if TYPE_CHECKING:
    from ..group.replicas import ReplicaFleet
    from .pages.metrics import Metrics

OWNER = "http"
"""Under which token the front end pauses and sends commands: all HTTP clients count as one owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Settings of one front end."""

    host: str = "127.0.0.1"
    any_host: bool = False
    """Without keys, the ``Host`` of requests is not checked (``--insecure-bind``)."""
    port: int = 30000
    api_key: str | None = field(default=None, repr=False)
    """Key of user routes. None means that they need none."""
    admin_key: str | None = field(default=None, repr=False)
    """Key of admin routes. None means ``api_key``, if there is one."""
    weights_root: str | None = None
    """Folder that must contain every ``model_path`` of an update. None means the default of
    :attr:`update_root`."""
    enable_memory_saver: bool = False
    """Release the engine's memory when a client of this server asks for it."""
    allow_pickled_tensors: bool = False
    """Read the base64 pickles of ``/update_weights_from_tensor`` (they are parsed, never unpickled)."""
    max_body_bytes: int = 32 << 20
    """Maximum size of a request body, except for weight updates."""
    max_update_bytes: int = 2 << 30
    """Maximum size of a request body with weights."""
    max_batch: int = 4096
    """Maximum number of samples of one request: prompts times ``n``."""
    incremental_streaming: bool = False
    """Native streams carry only what is new, instead of everything so far."""
    served_model_name: str = ""
    """Empty: ``model_path``."""
    model_path: str = ""
    tokenizer_path: str = ""
    context_length: int = 0
    makes_images: bool = False
    """The engine serves a diffusion pipeline, not a language model."""
    latent_bytes_per_pixel: float = 0.0
    """Of a latent in a result, for each pixel of its image."""
    vocab_size: int = 0

    @property
    def update_root(self) -> str:
        """The weights root that is enforced; empty: nothing is loaded from disk. By default it is the
        directory that the model's own folder lies in, or that folder alone where the directory is the root of
        the file system."""
        if self.weights_root or not self.model_path:
            return self.weights_root or ""
        folder = os.path.realpath(self.model_path)
        parent = os.path.dirname(folder)
        return folder if parent == os.path.dirname(parent) else parent

    @property
    def model_name(self) -> str:
        """The id of the model for OpenAI clients."""
        return self.served_model_name or self.model_path


class FrontEnd:
    """Everything that handlers need; ``front: Front`` in a handler's signature."""

    __slots__ = (
        "admission",
        "client",
        "fleet",
        "health",
        "last_image",
        "manager",
        "metrics",
        "options",
        "unknown_keys",
        "workers",
    )

    def __init__(
        self,
        *,
        manager: TokenizerManager,
        options: ServeOptions,
        metrics: "Metrics",
        client: AsyncSchedulerClient | None = None,
        fleet: "ReplicaFleet | None" = None,
    ) -> None:
        self.manager = manager
        self.fleet = fleet
        """The replicas behind ``client``; None: it is one engine's."""
        self.client: AsyncSchedulerClient = manager.client if client is None else client
        self.options = options
        self.metrics = metrics
        metrics.engine.fleet = fleet
        self.workers = Workers()
        self.last_image = LastImage()
        self.unknown_keys = UnknownKeys()
        self.health = EngineHealth(self.client, lambda: metrics.under_way > 0)
        self.admission = Admission(self.health)


Front = NamedDependency[FrontEnd]
"""For handlers' signatures."""
