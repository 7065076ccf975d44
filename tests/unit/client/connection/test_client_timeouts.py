"""Seconds that no clock can count: refused before anything is sent, or meaning now or for ever."""

import numpy as np
import pytest
import torch
from support.fake_scheduler import FakeScheduler, silent
from support.waiting import PATIENCE_S as PATIENCE

from caesura.client import (
    AsyncControlClient,
    AsyncSchedulerClient,
    ControlClient,
    InvalidRequest,
    SchedulerClient,
    TimedOut,
    launch_scheduler,
)
from caesura.io_struct import GetStatusReqInput

NO_TIME = [float("nan"), "5", True, [1]]
PAST = [-1.0, float("-inf"), 0, -(2**63), np.float32(-1)]
FOR_EVER = [float("inf"), 2**63, 2.0**63, 1e300, 10**400, None, np.float64(1e300)]


def uses(client):
    tensors = [("w", torch.ones(2))]
    return [
        lambda timeout: client.status(timeout=timeout),
        lambda timeout: client.generate([1], timeout=timeout),
        lambda timeout: client.update_weights_from_tensor(tensors, timeout=timeout),
    ]


@pytest.mark.parametrize("timeout", NO_TIME)
def test_invalid_times_are_refused_before_sending(endpoint, timeout, connect):
    with FakeScheduler(endpoint) as fake, connect(endpoint) as client:
        for use in uses(client):
            with pytest.raises(InvalidRequest, match=r"timeout = .* must be a number of seconds, or None"):
                use(timeout)
        client.status(timeout=PATIENCE)
        assert isinstance(fake.next_request(), GetStatusReqInput)
        assert fake.requests.empty()
        handle = client.submit([1], stream=True)
        for wait in (handle.result, handle.abort, lambda timeout: list(handle.deltas(timeout))):
            with pytest.raises(InvalidRequest, match="timeout"):
                wait(timeout)


@pytest.mark.parametrize("timeout", PAST)
def test_past_deadlines_mean_no_waiting(endpoint, timeout, connect):
    with FakeScheduler(endpoint, silent), connect(endpoint) as client:
        for use in uses(client)[:2]:
            with pytest.raises(TimedOut):
                use(timeout)
        handle = client.submit([1], stream=True)
        for wait in (handle.result, handle.abort, lambda timeout: list(handle.deltas(timeout))):
            with pytest.raises(TimedOut):
                wait(timeout)


@pytest.mark.parametrize("timeout", FOR_EVER)
def test_uncountable_times_mean_for_ever(endpoint, timeout, connect):
    times = {"connect_timeout": timeout, "keepalive_timeout": timeout}
    with FakeScheduler(endpoint), connect(endpoint, **times) as client:
        assert client.status(timeout=timeout).step == 12
        assert client.generate([1], timeout=timeout).output_ids == [1, 0]
        handle = client.submit([1], stream=True)
        assert handle.result(timeout).output_ids == [1, 0]
        assert [delta.output_ids for delta in handle.deltas(timeout)] == [[1, 0]]


@pytest.mark.parametrize("kind", [SchedulerClient, AsyncSchedulerClient, ControlClient, AsyncControlClient])
@pytest.mark.parametrize("option", ["connect_timeout", "keepalive_timeout"])
def test_a_clients_own_times_are_checked(endpoint, kind, option):
    with pytest.raises(InvalidRequest, match=f"{option} = nan must be"):
        kind(endpoint, **{option: float("nan")})


@pytest.mark.parametrize("kind", [SchedulerClient, AsyncSchedulerClient, ControlClient, AsyncControlClient])
def test_unknown_client_options_are_refused(endpoint, kind):
    with pytest.raises(TypeError, match="connect_timout"):
        kind(endpoint, connect_timout=1.0)


def test_the_start_timeout_is_checked_before_anything_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(InvalidRequest, match="startup_timeout"):
        launch_scheduler("/model", startup_timeout=float("nan"))
    assert list(tmp_path.iterdir()) == []
