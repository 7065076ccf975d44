"""Failures injected into an engine, and what must be true of it afterwards."""

import resource
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Self

import pytest
import torch
from support.scripted import EngineDriver, expected_tokens, tokens_of

from caesura.io_struct import GenerateReqOutput
from caesura.scheduler.scheduling import batcher, sampling

VOCAB = 97
PROMPTS = [
    [3 + (i * 7 + number) % 90 for i in range(length)] for number, length in enumerate([5, 75, 17, 40])
]
BUG = RuntimeError("an injected defect")
NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"),
    MemoryError(),
]

STAGES: dict[str, Callable[[EngineDriver], tuple[object, str]]] = {
    "schedule": lambda driver: (driver.engine.batcher, "schedule"),
    "open": lambda driver: (driver.engine.cache, "open"),
    "extend": lambda driver: (driver.engine.cache, "extend"),
    "bind": lambda driver: (driver.engine.batcher.table, "bind"),
    "noise": lambda driver: (sampling, "noise"),
    "build": lambda driver: (driver.engine.batcher, "_build"),
    "arrays": lambda driver: (batcher.StepArrays, "of"),
    "repeat": lambda driver: (batcher.Batcher, "_repeated"),
    "execute": lambda driver: (driver.runner, "before"),
    "outputs": lambda driver: (driver.runner, "after"),
    "fetch": lambda driver: (driver.runner, "on_fetch"),
    "record": lambda driver: (driver.engine.outputs, "record"),
    "spans": lambda driver: (driver.engine.outputs, "_open_spans"),
    "ends": lambda driver: (driver.engine.outputs, "_end_finished"),
    "stream": lambda driver: (driver.engine.outputs, "_stream"),
    "result": lambda driver: (driver.engine.outputs, "_result"),
    "donate": lambda driver: (driver.engine.cache, "donate"),
    "send": lambda driver: (driver.engine.outbox, "_send"),
}
"""Owner and name of what each stage of a step calls."""


def submit(driver: EngineDriver, new_tokens: int = 12, **fields: object) -> dict[str, list[int]]:
    """Submit all prompts at once: a step then decodes, finishes prompts and begins others."""
    rids = {driver.generate(prompt, new_tokens, stream=True, **fields): prompt for prompt in PROMPTS}
    driver.hear()
    return rids


def check_everybody(driver: EngineDriver, rids: dict[str, list[int]]) -> list[GenerateReqOutput]:
    """Check that each sample has ended once, with the model's tokens, and nothing is held any more."""
    found = results_of(driver, rids)
    again = driver.generate(PROMPTS[1], 5)
    driver.run_until_idle()
    assert tokens_of(driver.result(again)) == expected_tokens(PROMPTS[1], driver.result(again), VOCAB)
    assert driver.result(again).finish_reason.type == "length"
    check_nothing_is_left(driver)
    return found


def results_of(driver: EngineDriver, rids: dict[str, list[int]]) -> list[GenerateReqOutput]:
    """Run until all have ended, and return their results, whose tokens are the model's."""
    driver.run_until_idle()
    found = [driver.result(rid) for rid in rids]
    for prompt, result in zip(rids.values(), found, strict=True):
        assert tokens_of(result) == expected_tokens(prompt, result, VOCAB)
    return found


def check_nothing_is_left(driver: EngineDriver) -> None:
    driver.engine.cache.check()
    status = driver.status()
    assert (status.kv.held, status.running_requests, status.prefilling_requests) == (0, 0, 0)
    assert status.waiting_requests == 0
    assert not driver.engine.live
    assert not driver.engine.batcher._deferred_releases
    assert not driver.engine.batcher._prefixes_in_progress
    assert not driver.engine.batcher.in_flight
    table = driver.engine.batcher.table
    assert table.num_free == table.slots


def another(error: BaseException) -> BaseException:
    """Return an error like it: what is raised again and again gathers the frames of each time."""
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    return copy


class Fault:
    """Failures of calls of ``owner.name`` within the block: those in ``calls``, from 0, of those with
    arguments that ``only`` accepts; before or after what they do.
    """

    def __init__(
        self,
        owner: object,
        name: str,
        error: BaseException,
        calls: Collection[int] = (0,),
        *,
        after: bool = False,
        only: Callable[..., bool] = lambda *_: True,
    ) -> None:
        self.count = self.raised = 0
        self._owner, self._name, self._original = owner, name, getattr(owner, name)
        self._error, self._calls, self._after, self._only = error, calls, after, only
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Self:
        # A function, so that it is a method where the owner is a class.
        self._patch.setattr(self._owner, self._name, lambda *args, **kwargs: self(*args, **kwargs))
        return self

    def __exit__(self, *exc: object) -> None:
        self._patch.undo()

    def __call__(self, *args: object, **kwargs: object) -> object:
        if not self._only(*args):
            return self._original(*args, **kwargs)
        number, self.count = self.count, self.count + 1
        result = None
        if self._after or number not in self._calls:
            result = self._original(*args, **kwargs)
        if number in self._calls:
            self.raised += 1
            raise another(self._error)
        return result


@contextmanager
def full_disk(limit: int = 64) -> Iterator[None]:
    """Limit every file that this process writes to ``limit`` bytes; needs no privileges."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
