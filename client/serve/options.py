"""Options of ``caesura serve``: its command line, keys, address and TLS.

Invariants: each option is stated once, as a field of :class:`CommandLine`. Keys come from files or the
environment, never from the command line; no child process inherits them, and no repr shows them. Invalid
files are reported before anything starts; nothing asks for a password at a terminal.
"""

import ast
import errno
import inspect
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import click

from ...process.contract import is_loopback
from ..connection.endpoints import CLIENT_KEY_VARIABLE, SERVER_KEY_VARIABLE

API_KEY, ADMIN_KEY = "CAESURA_API_KEY", "CAESURA_ADMIN_KEY"
OPEN_TO_ALL = (
    "generate, abort the generations of others, pause, replace the weights, have the scheduler connect to "
    "any address and have files under --weights-root read"
)
"""Actions open to anyone who can reach a server without keys."""
Backend = Literal["nccl", "sparse_nccl", "ipc", "delta", "gloo", "shared_memory", "disk"]
"""How weights arrive by vLLM's routes; ``delta`` is SkyRL's, the last three are Caesura's own."""
_BACKENDS = click.Choice(get_args(Backend))
CommandT = TypeVar("CommandT", bound=Callable[..., Any])
PATH = click.Path()


def _option(default: Any, kind: Any = None, **more: Any) -> Any:
    return field(default=default, metadata={"type": kind, **more})


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """The command line's options, in their order; the docstring of each is its help."""

    model: str | None = _option(None, PATH)
    """Hugging Face model folder. Required unless --endpoint is given."""
    replicas: int = _option(1, click.IntRange(1))
    """Number of schedulers to start behind this port. Each has its own CUDA devices if there are any, else a
    part of the CPU threads. A request goes to the least loaded one, a command to all, and one that dies is
    restarted."""
    endpoint: str | None = _option(None)
    """Address of a running scheduler to serve, instead of starting one."""
    worker_urls: str | None = _option(None)
    """Addresses of running schedulers to serve as replicas, with commas between them; more of them can be
    added over HTTP (/workers)."""
    curve_server_key: str | None = _option(None, envvar=SERVER_KEY_VARIABLE)
    """The scheduler's CURVE public key, or a file that contains it; needed for a scheduler with keys."""
    curve_client_key_file: str | None = _option(None, envvar=CLIENT_KEY_VARIABLE)
    """File with this server's CURVE key pair; needed for a scheduler with keys."""
    host: str = _option("127.0.0.1")
    """Address to listen on. Beyond loopback it needs --api-key-file or --insecure-bind."""
    port: int = _option(30000, click.IntRange(0, 65535))
    """Port to listen on; 0: any free port."""
    api_key_file: str | None = _option(None, PATH)
    """File with the API key that clients must send.  [env: CAESURA_API_KEY (the key itself)]"""
    admin_key_file: str | None = _option(None, PATH)
    """File with the key for routes that change the engine (pause, update, ...).  [env: CAESURA_ADMIN_KEY (the
    key itself)]"""
    insecure_bind: bool = _option(False)
    """Allow listening beyond loopback without an API key. Anyone who can reach the port can then
    {OPEN_TO_ALL}. For private networks only."""
    ssl_certfile: str | None = _option(None, PATH)
    """Certificate for HTTPS, in PEM format."""
    ssl_keyfile: str | None = _option(None, PATH)
    """Private key of the certificate, in PEM format, unless --ssl-certfile contains it."""
    ssl_keyfile_password_file: str | None = _option(None, PATH)
    """File with the password of the private key."""
    ssl_ca_certs: str | None = _option(None, PATH)
    """CA certificates in PEM format. Clients must present a certificate signed by one of them."""
    weights_root: str | None = _option(None, PATH)
    """Weight updates from disk must be in this folder.  [default: the parent folder of the model, unless that
    is /]"""
    pause_lease: float | None = _option(None, click.FloatRange(min=0, min_open=True))
    """A pause by HTTP that names no lease ends after so many seconds without a command by HTTP: its trainer
    is gone then.  [default: it lasts until a continue]"""
    enable_memory_saver: bool = _option(False)
    """Let clients release the engine's memory (weights, KV cache, CUDA graphs) and resume it, as colocated
    trainers do."""
    weight_transfer_backend: str = _option("nccl", _BACKENDS)
    """How weights arrive by vLLM's /init_weight_transfer_engine, unless the trainer says it: over a process
    group, in shared memory, or in a folder under --weights-root."""
    tinker_trainer: str | None = _option(None)
    """Address of a trainer that answers the training half of Tinker's API. Adapters that it saves for
    sampling are loaded from folders under --weights-root."""
    vllm_metrics: bool = _option(False)
    """Add metrics by vLLM's names (vllm:num_requests_running, ...) to /metrics, as prime-rl reads them."""
    allow_pickled_tensors: bool = _option(False)
    """Accept weights in SGLang's pickle format. They are parsed, never unpickled."""
    incremental_streaming: bool = _option(False)
    """Send only new text and tokens in each event of a /generate stream, not the whole output so far."""
    stream_interval: int = _option(1, click.IntRange(1))
    """Number of tokens of each event of a stream after the first, which has one. A larger one costs less."""
    max_sessions: int = _option(4096, click.IntRange(1))
    """Number of sessions of turns that are kept; the least recently used one gives way."""
    session_tokens: int = _option(1 << 25, click.IntRange(1))
    """Tokens and log-probabilities of all sessions together; the least recently used one gives way."""
    session_lease_s: float = _option(3600.0, click.FloatRange(min=0, min_open=True))
    """Seconds without a call after which a session expires."""
    served_model_name: str = _option("")
    """Model name in the OpenAI API.  [default: the model path]"""
    tokenizer: str | None = _option(None, PATH)
    """Tokenizer folder; "none": token ids only.  [default: the model folder]"""
    tool_call_parser: str = _option("auto")
    """Format of tool calls in chats with tools: "auto", by the tokenizer's response or chat template; "none",
    calls stay in the text; or a name that SGLang or vLLM has for it, such as hermes."""
    reasoning_parser: str = _option("none")
    """Format of the reasoning that chats return apart from the content: "none", it stays there; "auto"; or a
    name, such as qwen3."""
    max_body_bytes: int = _option(32 << 20, click.IntRange(1))
    """Maximum size of a request body."""
    max_update_bytes: int = _option(2 << 30, click.IntRange(1))
    """Maximum size of a request body with weights."""
    max_batch: int = _option(4096, click.IntRange(1))
    """Maximum number of samples in one request: prompts times n."""
    max_connections: int = _option(4096, click.IntRange(1))
    """Maximum number of connections; lower if the limit on open files is."""
    startup_timeout: float = _option(600.0, float)
    """Maximum seconds for the scheduler to become ready."""
    restart: bool = _option(False)
    """Restart the scheduler when it dies or hangs."""

    # Options that `caesura supervise` shares: restart_options and log_format_option
    max_restarts: int = 5
    restart_window_s: float = 600.0
    hang_timeout_s: float = 120.0
    log_format: str = "text"


def command_line_options(command: CommandT) -> CommandT:
    (definition,) = ast.parse(inspect.getsource(CommandLine)).body
    assert isinstance(definition, ast.ClassDef)
    helps = {
        ast.unparse(option.target): inspect.cleandoc(ast.literal_eval(text.value)).replace("\n", " ")
        for option, text in pairwise(definition.body)
        if isinstance(option, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    for each in reversed(fields(CommandLine)):
        if each.metadata:
            given: dict[str, Any] = {"is_flag": True} if each.default is False else dict(each.metadata)
            command = click.option(
                "--" + each.name.replace("_", "-"),
                **given,
                help=helps[each.name].replace("{OPEN_TO_ALL}", OPEN_TO_ALL),
                default=each.default,
                show_default=each.default not in (None, "", False),
            )(command)
    return command


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(CommandLine):
    """Settings of one front end: the command line, the keys, and facts about the engine's model."""

    api_key: str | None = field(default=None, repr=False)
    """Key of user routes, or None."""
    admin_key: str | None = field(default=None, repr=False)
    """Key of admin routes. None means ``api_key``."""
    model_path: str = ""
    tokenizer_path: str = ""
    """Empty without a tokenizer."""
    context_length: int = 0
    makes_images: bool = False
    latent_bytes_per_pixel: float = 0.0
    """Bytes of a result's latent, for each pixel of its image."""
    vocab_size: int = 0
    max_loras: int = 0
    """Adapters that can be loaded; 0: none are served."""

    @property
    def update_root(self) -> str:
        """The enforced weights root; empty if nothing is loaded from disk.

        By default the parent of the model's folder, or that folder alone if its parent is the file system's
        root.
        """
        if self.weights_root or not self.model_path:
            return self.weights_root or ""
        folder = os.path.realpath(self.model_path)
        parent = os.path.dirname(folder)
        return folder if parent == os.path.dirname(parent) else parent

    @property
    def model_name(self) -> str:
        """Id of the model for OpenAI clients."""
        return self.served_model_name or self.model_path


def take_key(variable: str, file: str | None) -> str | None:
    """Return the key in ``file``, else in the environment variable, which is removed; None without either."""
    key = os.environ.pop(variable, None)
    if file is not None:
        try:
            key = Path(file).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:  # an error must not quote the file
            reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
            raise click.UsageError(f"cannot read the key file {file}: {reason}") from None
    if key is None:
        return None
    key = key.strip()
    if not key:
        raise click.UsageError(f"the key in {file or variable} is empty")
    return key


def check_host(host: str, api_key: str | None, *, insecure: bool) -> None:
    """Refuse to listen where others can connect without a key."""
    if not is_loopback(host) and api_key is None and not insecure:
        raise click.UsageError(
            f"--host {host} can be reached from other machines: it needs --api-key-file (or {API_KEY}) and "
            "preferably an admin key, or --insecure-bind, which gives full access to anyone who can reach it"
        )


def warn(host: str, api_key: str | None, tls: ssl.SSLContext | None) -> None:
    """Warn on stderr about what others can do or read."""
    if is_loopback(host) or (api_key is not None and tls is not None):
        return
    if api_key is None:
        risk = f"no API key: anyone who can reach it can {OPEN_TO_ALL}"
    else:
        risk = "no TLS: keys, prompts and outputs are sent unencrypted"
    click.echo(f"warning: insecure: {host} can be reached from other machines, and there is {risk}", err=True)


def listener(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to the address but does not listen yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        other = "; give another --port (0: any free one)" if error.errno == errno.EADDRINUSE else ""
        raise click.ClickException(f"cannot listen on {host}:{port}: {error.strerror}{other}") from error
    bound.set_inheritable(False)
    return bound


def tls_context(options: CommandLine) -> ssl.SSLContext | None:
    """Return the TLS context, for TLS 1.2 or later, or None without a certificate."""
    certfile, keyfile, ca_certs = options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs
    password_file = options.ssl_keyfile_password_file
    if certfile is None:
        if keyfile or password_file or ca_certs:
            raise click.UsageError("TLS needs --ssl-certfile")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        password = "" if password_file is None else Path(password_file).read_text("utf-8").strip()
        context.load_cert_chain(certfile, keyfile, password=lambda: password)
        if ca_certs is not None:
            context.load_verify_locations(ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:  # ssl's are OSErrors
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        names = ", ".join(name for name in (certfile, keyfile, password_file, ca_certs) if name)
        raise click.UsageError(f"TLS cannot be set up with {names}: {reason}") from error
    return context
