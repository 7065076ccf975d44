"""The faults by name: processes, connections and resources.

A fault happens in a scene and leaves it cleared; what must be true afterwards is the campaign's to check. The
wire has no checksums and no acknowledgements of its own: a message that is lost is answered by nobody, and
its sender's timeout and repetition must suffice.
"""

import contextlib
import os
import shutil
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

from support.http_serve import served

from .fault_engine import DAY_S
from .known import Version
from .life import DEADLINE_S, ENGINE_DESCRIPTORS, PATIENT_LEASE_S
from .proxies import ByteProxy, Damage, Direction, FrameProxy, Harmful
from .scene import Scene, outcome_text

Happen = Callable[[Scene], None]
MUTE_TOKENS = 3000
SHARES = (0.0, 0.01, 0.3, 0.9, 0.999)
FILE = "model.safetensors"
SHORT_PATIENCE_S = 1.5
"""Seconds that an actor waits whose answers may be lost; it asks three times."""
DELAYS_S = (0.001, 0.01, 0.05)


@dataclass(frozen=True)
class Kind:
    name: str
    happen: Happen
    weight: int
    """Weight in the draw among all kinds; expensive ones are drawn seldom."""


KINDS: dict[str, Kind] = {}


def kind(name: str, weight: int) -> Callable[[Happen], Happen]:
    def register(happen: Happen) -> Happen:
        KINDS[name] = Kind(name, happen, weight)
        return happen

    return register


def strike(who: str, number: signal.Signals, scene: Scene) -> None:
    """Kill, end or stop a process that an actor is or works with; a stopped one goes on after a while."""
    stops = number is signal.SIGSTOP
    with contextlib.ExitStack() as stack:
        pid = scene.life.pid
        if who == "client":
            actor = scene.client(**({} if stops else {"new_tokens": MUTE_TOKENS}))
        elif who == "trainer":
            actor = scene.trainer()
        elif who == "scheduler":
            actor = scene.somebody()
        else:
            options = ("--endpoint", scene.life.endpoint, "--tokenizer", "none", "--weights-root", "/")
            front = stack.enter_context(served(*options))
            actor, pid = scene.http_client(front.url), front.process.pid
        if who in ("client", "trainer"):
            pid = actor.pid
        scene.meet(actor)
        if stops:
            scene.stop_and_continue(pid)
        else:
            scene.ends_engine = who == "scheduler"
            scene.answers_all = scene.ends_engine and number is signal.SIGTERM
            scene.signal(pid, number)
        scene.cleared()
        if stops or pid != actor.pid:
            scene.must_end(actor, well=stops and (who == "client" or actor.errand.work == "http"))


for who, weights in {
    "client": (12, 4, 6),
    "trainer": (24, 8, 12),
    "scheduler": (1, 1, 8),
    "frontend": (1, 1, 2),
}.items():
    for what, weight in zip((signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP), weights, strict=True):
        kind(f"{who}-{what.name.removeprefix('SIG').lower()}", weight)(partial(strike, who, what))


def harm_bytes(how: str, scene: Scene) -> None:
    with ByteProxy(f"ipc://{scene.life.directory}/b{scene.number}", scene.life.endpoint) as proxy:
        actor = scene.somebody(endpoint=proxy.endpoint)
        scene.meet(actor)
        if how == "cut":
            proxy.cut()
        elif how == "delay":
            proxy.delay_s = scene.rng.choice(DELAYS_S)
            scene.hold()
            proxy.delay_s = 0.0
        else:
            proxy.stall()
            scene.hold()
            proxy.resume()
        scene.cleared()
        scene.must_end(actor)


def harm_frames(damage: Damage, scene: Scene) -> None:
    """Damage the next messages of one direction; the actor's own patience ends its wait."""
    direction = scene.rng.choice(get_args(Direction))
    harmful = Harmful(damage, direction, scene.rng, left=scene.rng.choice((1, 1, 2, 5)))
    scene.facts |= {"direction": direction, "messages": harmful.left}
    with FrameProxy(f"ipc://{scene.life.directory}/f{scene.number}", scene.life.endpoint) as proxy:
        actor = scene.somebody(endpoint=proxy.endpoint, timeout_s=SHORT_PATIENCE_S)
        if scene.rng.random() < 0.5:
            scene.meet(actor)
        proxy.harmful = harmful
        scene.life.wait(lambda: not harmful.left or actor.outcome is not None)
        proxy.harmful = None
        scene.cleared()
        scene.must_end(actor)


for how, weight in {"delay": 4, "stall": 6, "cut": 10}.items():
    kind(f"bytes-{how}", weight)(partial(harm_bytes, how))
for damage, weight in zip(get_args(Damage), (6, 8, 4, 8), strict=True):
    kind(f"frames-{damage}", weight)(partial(harm_frames, damage))


@kind("disk-full", 6)
def disk_full(scene: Scene) -> None:
    """Have a trainer write to a disk that is too small, and have the engine load what is there."""
    version = scene.rng.choice(scene.life.versions)
    size = round((version.folder / FILE).stat().st_size * scene.rng.choice(SHARES))
    small = {"disk_bytes": max(size, 4096)} if scene.rng.random() < 0.5 else {"file_bytes": max(size, 4096)}
    scene.facts |= small
    actor = scene.trainer(work="write", transport="disk", folder=version.folder, label=version.label, **small)
    scene.must_end(actor)
    scene.cleared()


@kind("shm-full", 4)
def shm_full(scene: Scene) -> None:
    """Deny a trainer the shared memory that its update needs."""
    actor = scene.trainer(work="update", transport="ipc", file_bytes=scene.rng.choice((0, 4096, 100_000)))
    scene.must_end(actor)
    scene.cleared()


@kind("checkpoint-vanished", 8)
def checkpoint_vanished(scene: Scene) -> None:
    """Remove the folder while the engine reads it."""
    copy = _copy(scene)
    try:
        actor = scene.trainer(work="update", transport="disk", folder=copy.folder, label=copy.label)
        scene.meet(actor, ("update",))
        shutil.rmtree(copy.folder)
        scene.cleared()
        scene.must_end(actor)
    finally:
        shutil.rmtree(copy.folder, ignore_errors=True)


@kind("checkpoint-changed", 10)
def checkpoint_changed(scene: Scene) -> None:
    """Write another version over the folder, or cut a file short, while the engine reads it."""
    copy = _copy(scene)
    others = [version for version in scene.life.versions if version.label != copy.label]
    other = scene.rng.choice(others)
    file = copy.folder / FILE
    how = scene.rng.choice(("overwritten", "replaced", "truncated"))
    scene.facts["how"] = how
    label = f"{copy.label}-{scene.number}"  # of its own: what it means is known afterwards
    try:
        actor = scene.trainer(work="update", transport="disk", folder=copy.folder, label=label)
        scene.meet(actor, ("update",))
        _change(how, file, other.folder / FILE, scene)
        scene.cleared()
        scene.must_end(actor)
        _name_truly(scene, label)
    finally:
        shutil.rmtree(copy.folder, ignore_errors=True)


@kind("client-descriptors", 4)
def client_descriptors(scene: Scene) -> None:
    """Let an actor open hardly anything; whatever becomes of it, the engine must not mind."""
    actor = scene.somebody(descriptors=scene.rng.choice((0, 3, 8, 12, 20)))
    scene.life.wait(lambda: actor.outcome is not None or not actor.alive())
    scene.facts["outcome"] = outcome_text(actor)
    scene.cleared()


@kind("engine-descriptors", 4)
def engine_descriptors(scene: Scene) -> None:
    """Open more silent connections than the engine may have descriptors while an actor works with it."""
    actor = scene.somebody()
    scene.meet(actor)
    with contextlib.ExitStack() as crowd:
        for number in range(2 * ENGINE_DESCRIPTORS):
            if number % 32 == 0:  # quicker than the engine can look, a crowd wins (docs/howto/security.md)
                scene.life.sleep(0.02)
            stranger = crowd.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            stranger.setblocking(False)
            stranger.connect_ex(scene.life.endpoint.removeprefix("ipc://"))
        scene.hold()
    scene.cleared()
    scene.must_end(actor)


@kind("slow-reader", 6)
def slow_reader(scene: Scene) -> None:
    """Have a client ask for much, never read, and then go."""
    actor = scene.client(work="mute", samples=8, new_tokens=MUTE_TOKENS, hold_s=60.0)
    scene.meet(actor, ("streaming",))
    scene.hold()
    actor.kill()
    scene.cleared()


@kind("clock-jump", 8)
def clock_jump(scene: Scene) -> None:
    """Move the engine's wall clock by a day, forwards or backwards, and perhaps back again."""
    actor = scene.client() if scene.rng.random() < 0.3 else scene.trainer(lease_s=PATIENT_LEASE_S)
    scene.meet(actor)
    scene.life.set_clock(scene.rng.choice((DAY_S, -DAY_S, 0.0)))
    scene.cleared()
    scene.must_end(actor, well=True)


def _copy(scene: Scene) -> Version:
    version = scene.rng.choice(scene.life.versions)
    folder = scene.life.directory / f"checkpoint-{scene.number}"
    shutil.copytree(version.folder, folder)
    return Version(version.label, folder, version.successor)


def _change(how: str, file: Path, other: Path, scene: Scene) -> None:
    if how == "truncated":
        os.truncate(file, round(file.stat().st_size * scene.rng.random()))
    elif how == "replaced":
        fresh = file.with_name("fresh")
        shutil.copyfile(other, fresh)
        os.replace(fresh, file)
    else:
        with file.open("r+b") as target:
            target.write(other.read_bytes())


def _name_truly(scene: Scene, label: str) -> None:
    """Learn by checksum which version is served under ``label``: the one complete when it was read."""
    life = scene.life
    status = life.status()
    if status.weight_version != label:
        return
    found = life.version_of(life.client.check_weights(timeout=DEADLINE_S).total)
    if found is not None:
        life.by_label[label] = found
    elif status.weights == "valid":
        scene.problem("torn", f"{label!r} serves what is no known version")
