"""Devices, threads and memory of each replica on a host."""

import pytest

from caesura.client import InvalidRequest
from caesura.client.group.processes import VISIBLE, _cores, cuda_devices, placed, ranks_of

CPU = {"OMP_NUM_THREADS": "8", VISIBLE: ""}
FOUR = {"OMP_NUM_THREADS": "8", VISIBLE: "4,5,GPU-x,7"}


def option(arguments: list[str], name: str) -> str | None:
    return arguments[arguments.index(name) + 1] if name in arguments else None


@pytest.mark.parametrize(
    ("given", "threads"), [([], "4"), (["--tp", "2"], "2"), (["--num-threads", "3"], "3")]
)
def test_threads_are_divided_unless_given(given, threads):
    places = placed(["--model", "m", *given], 2, CPU)
    assert [option(place.arguments, "--num-threads") for place in places] == [threads, threads]
    assert [place.environment for place in places] == [{}, {}]


def test_replicas_have_devices_or_share_the_named_one():
    assert [place.environment[VISIBLE] for place in placed([], 4, FOUR)] == ["4", "5", "GPU-x", "7"]
    assert [place.environment[VISIBLE] for place in placed(["--tp=2"], 2, FOUR)] == ["4,5", "GPU-x,7"]
    for device in ("cuda:0", "cpu", "xpu"):
        assert [place.environment for place in placed(["--device", device], 2, FOUR)] == [{}, {}]
    with pytest.raises(InvalidRequest, match="need 6 CUDA devices, 2 each"):
        placed(["--tp", "2"], 3, FOUR)


def test_shared_memory_is_divided_unless_a_size_is_given():
    assert option(placed([], 4, CPU)[0].arguments, "--kv-memory-fraction") == "0.125"
    assert option(placed([], 4, FOUR)[0].arguments, "--kv-memory-fraction") is None
    assert option(placed(["--device", "cuda:1"], 2, FOUR)[0].arguments, "--kv-memory-fraction") == "0.25"
    for given in ("--kv-pool-tokens=64", "--kv-memory-fraction=0.3"):
        assert placed([given], 2, CPU)[0].arguments.count("--kv-memory-fraction") == 0


@pytest.mark.parametrize("name", ["--endpoint", "--state-file", "--tp-joined", "--tp-address", "--nnodes"])
def test_options_unfit_for_replicas_are_refused_by_name(name):
    with pytest.raises(InvalidRequest, match=name):
        placed([name, "x"], 2, CPU)


def test_devices_are_those_visible_to_torch():
    assert cuda_devices({VISIBLE: "1, 0,-1,2"}) == ["1", "0"]
    assert cuda_devices({VISIBLE: "-1"}) == []
    assert ranks_of(["--tp", "no number"]) == 1  # the scheduler refuses it


def test_more_processes_than_cores_are_refused():
    cores = _cores()
    assert len(placed([], 4 * cores, CPU)) == 4 * cores
    for given, count in (
        ([], 4 * cores + 1),
        (["--tp", "2"], 2 * cores + 1),
        (["--device", "cuda:0"], 10**6),
    ):
        with pytest.raises(InvalidRequest, match=f"{cores} cores: at most 4"):
            placed(given, count, CPU)
    assert len(placed([], 4, FOUR)) == 4
