"""Disks, memory and descriptors that are full, checkpoints that change while they are read."""

import contextlib
import os
import shutil
import socket
from pathlib import Path

from .fault_engine import DAY_S
from .kinds import kind
from .known import Version
from .life import DEADLINE_S, ENGINE_DESCRIPTORS, PATIENT_LEASE_S
from .scene import Scene, outcome_text

MUTE_TOKENS = 3000
SHARES = (0.0, 0.01, 0.3, 0.9, 0.999)
FILE = "model.safetensors"


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
