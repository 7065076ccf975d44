"""Processes that die, end or stand still: clients, trainers, the HTTP front end, the scheduler."""

import signal

from .frontend import FrontEnd
from .kinds import kind
from .scene import Scene


@kind("client-kill", 12)
def client_kill(scene: Scene) -> None:
    _signal_client(scene, signal.SIGKILL)


@kind("client-term", 4)
def client_term(scene: Scene) -> None:
    _signal_client(scene, signal.SIGTERM)


@kind("client-stop", 6)
def client_stop(scene: Scene) -> None:
    actor = scene.client()
    scene.meet(actor)
    scene.stop_and_continue(actor.pid)
    scene.cleared()
    scene.must_end(actor, well=True)


@kind("trainer-kill", 24)
def trainer_kill(scene: Scene) -> None:
    _signal_trainer(scene, signal.SIGKILL)


@kind("trainer-term", 8)
def trainer_term(scene: Scene) -> None:
    _signal_trainer(scene, signal.SIGTERM)


@kind("trainer-stop", 12)
def trainer_stop(scene: Scene) -> None:
    actor = scene.trainer()
    scene.meet(actor)
    scene.stop_and_continue(actor.pid)
    scene.cleared()
    scene.must_end(actor)


@kind("scheduler-kill", 1)
def scheduler_kill(scene: Scene) -> None:
    actor = scene.somebody()
    scene.meet(actor)
    scene.ends_engine = True
    scene.signal(scene.life.pid, signal.SIGKILL)
    scene.cleared()
    scene.must_end(actor)


@kind("scheduler-term", 1)
def scheduler_term(scene: Scene) -> None:
    actor = scene.somebody()
    scene.meet(actor)
    scene.ends_engine = scene.answers_all = True
    scene.signal(scene.life.pid, signal.SIGTERM)
    scene.cleared()
    scene.must_end(actor)


@kind("scheduler-stop", 8)
def scheduler_stop(scene: Scene) -> None:
    actor = scene.somebody()
    scene.meet(actor)
    scene.stop_and_continue(scene.life.pid)
    scene.cleared()
    scene.must_end(actor)


def _signal_client(scene: Scene, number: int) -> None:
    actor = scene.client(new_tokens=3000)
    scene.meet(actor)
    scene.signal(actor.pid, number)
    scene.cleared()


def _signal_trainer(scene: Scene, number: int) -> None:
    actor = scene.trainer()
    scene.meet(actor)
    scene.signal(actor.pid, number)
    scene.cleared()


@kind("frontend-kill", 1)
def frontend_kill(scene: Scene) -> None:
    """Kill a front end: its requests end, and the engine serves others."""
    _signal_front_end(scene, signal.SIGKILL)


@kind("frontend-term", 1)
def frontend_term(scene: Scene) -> None:
    _signal_front_end(scene, signal.SIGTERM)


@kind("frontend-stop", 2)
def frontend_stop(scene: Scene) -> None:
    with FrontEnd(scene.life.endpoint) as front:
        actor = scene.http_client(front)
        scene.meet(actor)
        scene.stop_and_continue(front.pid)
        scene.cleared()
        scene.must_end(actor, well=actor.errand.work == "http")


def _signal_front_end(scene: Scene, number: int) -> None:
    with FrontEnd(scene.life.endpoint) as front:
        actor = scene.http_client(front)
        scene.meet(actor)
        scene.signal(front.pid, number)
        scene.cleared()
        scene.must_end(actor)
