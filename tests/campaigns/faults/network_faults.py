"""Connections that stall, slow down or break, and messages that are lost, doubled, late or cut.

The wire has no checksums and no acknowledgements of its own: a message that is lost is answered by nobody,
and its sender's timeout and repetition must suffice. What is judged is the engine, and that no client waits
for ever.
"""

from .kinds import kind
from .proxies import ByteProxy, Damage, Direction, FrameProxy, Harmful
from .scene import Scene

SHORT_PATIENCE_S = 1.5
"""Seconds that an actor waits whose answers may be lost; it asks three times."""
DELAYS_S = (0.001, 0.01, 0.05)


@kind("bytes-delay", 4)
def bytes_delay(scene: Scene) -> None:
    proxy = _byte_proxy(scene)
    try:
        actor = scene.somebody(endpoint=proxy.endpoint)
        scene.meet(actor)
        proxy.delay_s = scene.rng.choice(DELAYS_S)
        scene.hold()
        proxy.delay_s = 0.0
        scene.cleared()
        scene.must_end(actor)
    finally:
        proxy.close()


@kind("bytes-stall", 6)
def bytes_stall(scene: Scene) -> None:
    proxy = _byte_proxy(scene)
    try:
        actor = scene.somebody(endpoint=proxy.endpoint)
        scene.meet(actor)
        proxy.stall()
        scene.hold()
        proxy.resume()
        scene.cleared()
        scene.must_end(actor)
    finally:
        proxy.close()


@kind("bytes-cut", 10)
def bytes_cut(scene: Scene) -> None:
    proxy = _byte_proxy(scene)
    try:
        actor = scene.somebody(endpoint=proxy.endpoint)
        scene.meet(actor)
        proxy.cut()
        scene.cleared()
        scene.must_end(actor)
    finally:
        proxy.close()


@kind("frames-drop", 6)
def frames_drop(scene: Scene) -> None:
    _damage(scene, "drop")


@kind("frames-duplicate", 8)
def frames_duplicate(scene: Scene) -> None:
    _damage(scene, "duplicate")


@kind("frames-delay", 4)
def frames_delay(scene: Scene) -> None:
    _damage(scene, "delay")


@kind("frames-truncate", 8)
def frames_truncate(scene: Scene) -> None:
    _damage(scene, "truncate")


def _byte_proxy(scene: Scene) -> ByteProxy:
    return ByteProxy(f"ipc://{scene.life.directory}/b{scene.number}", scene.life.endpoint)


def _damage(scene: Scene, damage: Damage) -> None:
    """Damage the next messages of one direction; the actor's own patience ends its wait."""
    direction: Direction = scene.rng.choice(("to_engine", "to_client"))
    harmful = Harmful(damage, direction, scene.rng, left=scene.rng.choice((1, 1, 2, 5)))
    scene.facts |= {"direction": direction, "messages": harmful.left}
    proxy = FrameProxy(f"ipc://{scene.life.directory}/f{scene.number}", scene.life.endpoint)
    try:
        actor = scene.somebody(endpoint=proxy.endpoint, timeout_s=SHORT_PATIENCE_S)
        if scene.rng.random() < 0.5:
            scene.meet(actor)
        proxy.harm(harmful)
        scene.life.wait(lambda: not harmful.left or actor.outcome is not None)
        proxy.harm(None)
        scene.cleared()
        scene.must_end(actor)
    finally:
        proxy.close()
