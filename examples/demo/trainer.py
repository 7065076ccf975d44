"""The trainer's process, and the run's end of its pipe.

Invariants:
- The trainer talks to the run, in the order that :mod:`.messages` states, and sends weights to the engine
  when the run says so; the end of the pipe ends it.
- Ctrl-C is the run's to handle: the trainer ignores it and leaves when the pipe closes.
- A trainer that dies is an error with its log's last line, never a wait without end.
"""

import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

import msgspec

from .messages import (
    Connect,
    FromTrainer,
    Initialised,
    Push,
    Pushed,
    StepDone,
    ToTrainer,
    TrainBatch,
    WarmupDone,
    WarmupProgress,
)
from .settings import Settings

if TYPE_CHECKING:
    from caesura.client.trainer import NamedTensors

    from .learner import Learner
    from .sender import Sender

Serve: TypeAlias = Callable[[Connection, Any, Path], None]
"""Life of a trainer, given its pipe, the run's settings and a folder for checkpoints in transit."""
MessageT = TypeVar("MessageT", bound=FromTrainer)
JOIN_S = 5.0


class TrainerError(RuntimeError):
    """The trainer process has ended or is out of step."""


class TrainerProcess:
    """Starts the trainer; as a context manager it also ends it and removes its checkpoints."""

    def __init__(self, settings: Settings, serve: "Serve | None" = None, name: str = "trainer") -> None:
        self._log = settings.out_dir / f"{name}.log"
        self._checkpoints = checkpoint_directory()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=trainer_main,
            args=(theirs, settings, self._checkpoints, self._log, serve or serve_policy),
            name=f"demo-{name}",
            daemon=True,
        )
        self._process.start()
        theirs.close()
        self._decoder: msgspec.msgpack.Decoder[FromTrainer] = msgspec.msgpack.Decoder(FromTrainer)

    def send(self, message: ToTrainer) -> None:
        """Hand over a message; the trainer works on it while the caller goes on."""
        try:
            self._pipe.send_bytes(msgspec.msgpack.encode(message))
        except OSError:
            raise TrainerError(self._reason()) from None

    def poll(self, seconds: float) -> bool:
        """Return True if a message (or the end) is there within ``seconds``."""
        return self._pipe.poll(seconds)

    def receive_any(self) -> FromTrainer:
        """Wait for the next message."""
        try:
            return self._decoder.decode(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise TrainerError(self._reason()) from None

    def receive(self, expected: type[MessageT]) -> MessageT:
        """Wait for the next message, which must be an ``expected``."""
        message = self.receive_any()
        if not isinstance(message, expected):
            raise TrainerError(f"{type(message).__name__} where {expected.__name__} was due")
        return message

    def close(self) -> None:
        """End the trainer; its checkpoints stay until the context ends. Idempotent."""
        self._pipe.close()
        self._process.join(JOIN_S)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(JOIN_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        shutil.rmtree(self._checkpoints, ignore_errors=True)

    def _reason(self) -> str:
        self._process.join(JOIN_S)
        lines = self._log.read_text().strip().splitlines() if self._log.exists() else []
        last = f": {lines[-1]}" if lines else ""
        return f"the trainer process ended (exit code {self._process.exitcode}){last} (see {self._log})"


def checkpoint_directory() -> Path:
    """Make a folder for the checkpoints in transit, in memory where the system has such a place."""
    memory = "/dev/shm"  # noqa: S108 (a private folder is made inside)
    parent = memory if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 1 << 28 else None
    return Path(tempfile.mkdtemp(prefix="caesura-demo-", dir=parent))


def trainer_main(pipe: Connection, settings: Settings, checkpoints: Path, log: Path, serve: "Serve") -> None:
    """Run the trainer process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(log, "w", buffering=1) as stream:
        os.dup2(stream.fileno(), sys.stdout.fileno())  # a live display owns the terminal
        os.dup2(stream.fileno(), sys.stderr.fileno())
    try:
        serve(pipe, settings, checkpoints)
    except (EOFError, BrokenPipeError):
        return  # the run is over


def serve_policy(pipe: Connection, settings: Settings, checkpoints: Path) -> None:
    """Warm up a new policy, and train it as long as the run asks for updates."""
    # Imported here: the run's own process never needs torch, and this module is shared.
    import torch
    from transformers.utils.logging import disable_progress_bar

    from caesura.client.trainer import checkpoint_tensors

    from .learner import Learner
    from .policy import CheckpointWriter, build_policy, save_policy
    from .sender import weight_sender

    disable_progress_bar()
    torch.set_num_threads(settings.trainer_threads)
    torch.manual_seed(settings.seed)
    model = build_policy(settings.policy)
    writer = CheckpointWriter(checkpoints, save_policy)
    learner = Learner(model, settings)
    parameters = sum(value.numel() for value in model.parameters())
    answer(pipe, Initialised(path=str(writer.write(model)), parameters=parameters))
    seconds = _warm_up(pipe, learner, settings)
    answer(pipe, WarmupDone(path=str(writer.write(model)), seconds=seconds))
    connect = connected(pipe)
    with weight_sender(settings.transport, connect.endpoint, lambda: writer.write(model)) as sender:
        train(
            pipe,
            learner,
            sender,
            tensors=lambda: checkpoint_tensors(model),
            keep=lambda: save_policy(model, settings.out_dir / "model"),
        )


def connected(pipe: Connection) -> Connect:
    """Wait for the run's first word."""
    return msgspec.msgpack.decode(pipe.recv_bytes(), type=Connect)


def train(
    pipe: Connection,
    learner: "Learner",
    sender: "Sender",
    *,
    tensors: Callable[[], "NamedTensors"],
    keep: Callable[[], None],
) -> None:
    """Make updates and push them until the pipe ends; after the last one ``keep`` saves the policy."""
    decoder: msgspec.msgpack.Decoder[ToTrainer] = msgspec.msgpack.Decoder(ToTrainer)
    sender.prepare()
    while True:
        match decoder.decode(pipe.recv_bytes()):
            case TrainBatch() as batch:
                done = _update(batch, learner, sender)
                if batch.update == learner.settings.updates:
                    keep()
                answer(pipe, done)
            case Push() as push:
                answer(pipe, Pushed(reply=sender.push(tensors(), push)))


def answer(pipe: Connection, message: FromTrainer) -> None:
    """Send ``message`` to the run."""
    pipe.send_bytes(msgspec.msgpack.encode(message))


def _warm_up(pipe: Connection, learner: "Learner", settings: Settings) -> float:
    """Run supervised steps until the policy is worth sampling from; return their seconds."""
    began = time.perf_counter()
    rng = random.Random(f"warm-up {settings.seed}")
    steps, window = 0, [0.0, 0.0]
    while steps < settings.warmup_max_steps and min(window) < settings.warmup_exact:
        loss, exact = learner.warmup_step(steps, rng)
        steps, window = steps + 1, [window[1], exact]
        answer(pipe, WarmupProgress(step=steps, loss=loss, exact=exact))
    learner.remember(0)
    return time.perf_counter() - began


def _update(job: TrainBatch, learner: "Learner", sender: "Sender") -> StepDone:
    """Check the batch, step, and get ready to push."""
    from .learner import collate

    times = [time.perf_counter()]
    batch = collate(job.groups)
    gap = learner.verify(batch)
    times.append(time.perf_counter())
    step = learner.step(job.update, batch)
    learner.remember(job.update)
    times.append(time.perf_counter())
    sender.prepare()
    times.append(time.perf_counter())
    verify_s, train_s, save_s = (after - before for before, after in pairwise(times))
    return StepDone(update=job.update, step=step, gap=gap, train_s=train_s, verify_s=verify_s, save_s=save_s)
