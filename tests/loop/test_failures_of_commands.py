"""Commands that fail at any of their stages, beside requests that wait for them."""

from collections.abc import Callable

import pytest
from support.faults import BUG, NO_MEMORY, Fault, check_everybody, submit
from support.scripted import EngineDriver, assert_error

from caesura.io_struct import ErrorReply, ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput


@pytest.fixture(params=[0, 1], ids=["depth0", "depth1"])
def driver(tiny_model, request):
    with EngineDriver(str(tiny_model), pipeline_depth=request.param, chunked_prefill_size=32) as driver:
        yield driver


UPDATE_STAGES: dict[str, Callable[[EngineDriver], tuple[object, str]]] = {
    "open": lambda driver: (driver.engine, "open_folder"),
    "check": lambda driver: (driver.engine.loader, "check"),
    "write": lambda driver: (driver.engine.loader, "write"),
    "derive": lambda driver: (driver.engine.model, "finalize_weights"),
    "synchronize": lambda driver: (driver.runner, "synchronize"),
    "retract": lambda driver: (driver.engine.batcher, "retract_all"),
    "commit": lambda driver: (driver.engine.state, "commit_weights"),
    "epoch": lambda driver: (driver.engine.cache, "commit_epoch"),
    "restart": lambda driver: (driver.engine.batcher, "restart_prefills"),
    "flush": lambda driver: (driver.engine.cache, "flush"),
}
BEFORE_THE_FIRST_BYTE = ("open", "check", "synchronize", "retract")
"""Stages of an update before its first write, on a running engine, whose steps it stops first."""


@pytest.mark.parametrize("error", [BUG, NO_MEMORY[1]], ids=["bug", "memory"])
@pytest.mark.parametrize("stage", UPDATE_STAGES)
def test_an_update_that_fails(driver, monkeypatch, tiny_model, other_model, stage, error):
    rids = submit(driver, new_tokens=25)
    driver.tick(5)
    with monkeypatch.context() as patch:
        fault = Fault(patch, *UPDATE_STAGES[stage](driver), error, {0})
        reply = driver.update(other_model)
        assert_error(reply, "internal" if error is BUG else "out_of_memory")
        assert fault.raised == 1
    status = driver.status()
    assert status.session is None
    assert status.weights == ("valid" if stage in BEFORE_THE_FIRST_BYTE else "poisoned")
    if status.weights == "poisoned":
        assert driver.update(tiny_model).committed
    results = check_everybody(driver, rids)
    assert {result.finish_reason.type for result in results} == {"length"}


def test_an_explicit_session_whose_commit_fails(driver, monkeypatch, other_model):
    session_id = driver.begin()
    driver.update(other_model, session_id=session_id)
    with monkeypatch.context() as patch:
        Fault(patch, driver.engine.state, "commit_weights", BUG, {0})
        assert_error(driver.end(session_id=session_id), "internal")
    assert driver.status().weights == "poisoned"
    assert driver.update(other_model).committed
    check_everybody(driver, submit(driver))


OCCUPATION_STAGES: dict[str, Callable[[EngineDriver], tuple[object, str]]] = {
    "flush": lambda driver: (driver.engine.cache, "flush"),
    "forget": lambda driver: (driver.engine.updates, "forget"),
    "release": lambda driver: (driver.engine.residency, "release"),
    "resume": lambda driver: (driver.engine.residency, "resume"),
    "synchronize": lambda driver: (driver.runner, "synchronize"),
}
Release = ReleaseMemoryOccupationReqInput


@pytest.mark.parametrize("error", [BUG, NO_MEMORY[0]], ids=["bug", "memory"])
@pytest.mark.parametrize("call", [0, 1])
@pytest.mark.parametrize("stage", OCCUPATION_STAGES)
def test_a_release_or_a_resume_that_fails(driver, monkeypatch, tiny_model, stage, call, error):
    """No step is launched on memory that may not be there, and the same command sent again repairs it."""
    rids = submit(driver, new_tokens=25)
    driver.tick(5)
    driver.pause("retract")
    with monkeypatch.context() as patch:
        fault = Fault(patch, *OCCUPATION_STAGES[stage](driver), error, {call})
        for command in (ReleaseMemoryOccupationReqInput(), ResumeMemoryOccupationReqInput()):
            reply = driver.call(command)
            if isinstance(reply, ErrorReply):
                assert reply.code == ("internal" if error is BUG else "out_of_memory")
                driver.tick(3)
                assert not driver.engine.batcher.in_flight
                command = type(command)()
                reply = driver.call(command)
            assert not isinstance(reply, ErrorReply), reply
        assert fault.raised or call == 1, "the stage was not reached"
    status = driver.status()
    assert (status.memory, status.weights) == ("resident", "invalid")
    assert driver.update(tiny_model).committed
    driver.go_on(torch_empty_cache=False)
    results = check_everybody(driver, rids)
    assert {result.finish_reason.type for result in results} == {"length"}
