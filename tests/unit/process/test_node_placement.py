"""Places of ranks: from options, torchrun, Slurm and LeaderWorkerSet, and what contradicts itself."""

import dataclasses

import pytest
import zmq

from caesura.io_struct import CaesuraError
from caesura.process.curve import NODES_VARIABLE, shared_key_pair
from caesura.process.engine_options import EngineOptions
from caesura.process.placement import DEFAULT_PORT, Placement, first_host, place_of

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu[08-09]",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
"""Variables of a task, as set by ``srun`` of Slurm 22.05."""
BATCH = {name: value for name, value in SLURM.items() if "STEP" not in name} | {"SLURM_PROCID": "0"}
TASK_A_RANK = SLURM | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "6", "SLURM_LOCALID": "2"}
LWS = {"LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3", "LWS_LEADER_ADDRESS": "engine-0.engine.default"}
LEADER = f"engine-0.engine.default:{DEFAULT_PORT}"


def place(tp: int = 8, environment: dict[str, str] | None = None, **given: object) -> Placement | None:
    options = {each.name: each.default for each in dataclasses.fields(EngineOptions)}
    return place_of(options | {"tp": tp} | given, environment or {})


@pytest.mark.parametrize(
    ("environment", "given", "expected"),
    [
        ({}, {}, None),
        ({}, {"nnodes": 1, "node_rank": 0, "master_addr": "10.0.0.1"}, None),
        (
            {},
            {"nnodes": 2, "node_rank": 1, "master_addr": "10.0.0.1"},
            Placement(2, 1, f"10.0.0.1:{DEFAULT_PORT}"),
        ),
        ({}, {"nnodes": 2, "node_rank": 0, "master_addr": "[::1]:7"}, Placement(2, 0, "[::1]:7")),
        (TORCHRUN, {}, Placement(8, 5, "node0:29501", 1)),
        (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, {}, Placement(8, 5, "node0:29501", 1)),
        (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "1"}, {}, Placement(8, 5, "node0:29501")),
        (TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}, {}, Placement(8, 5, "node0:29500", 1)),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, {}, Placement(8, 5, "127.0.0.1:29501", 1)),
        (
            TORCHRUN | {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_WORLD_SIZE": "1"},
            {},
            Placement(2, 1, "node0:29501"),
        ),
        (TORCHRUN, {"master_addr": "10.0.0.9:5"}, Placement(8, 5, "10.0.0.9:5", 1)),
        (TORCHRUN, {"node_rank": 2}, Placement(8, 2, "node0:29501", 1)),
        (TORCHRUN, {"nnodes": 1}, None),
        (TORCHRUN, {"tp": 1}, None),
        (TORCHRUN, {"tp_joined": 4, "tp_address": "tcp://a:1"}, None),
        (
            TORCHRUN,
            {"nnodes": 2, "node_rank": 1, "master_addr": "10.0.0.1:5"},
            Placement(2, 1, "10.0.0.1:5"),
        ),
        (
            TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_WORLD_SIZE": "1"} | LWS,
            {},
            Placement(4, 3, LEADER),
        ),
        (TORCHRUN | SLURM | LWS, {}, Placement(8, 5, "node0:29501", 1)),
        (SLURM, {}, Placement(2, 1, "gpu08:24711")),
        (SLURM | LWS, {}, Placement(2, 1, "gpu08:24711")),
        (TASK_A_RANK, {}, Placement(8, 6, "gpu08:24711", 2)),
        (TASK_A_RANK | {"CUDA_VISIBLE_DEVICES": "0"}, {}, Placement(8, 6, "gpu08:24711")),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}, {}, None),
        (TASK_A_RANK | {"SLURM_STEP_NUM_NODES": "1"}, {}, Placement(8, 6, "127.0.0.1:24711", 2)),
        (BATCH, {}, None),
        (LWS, {}, Placement(4, 3, LEADER)),
        (LWS | {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"}, {}, None),
    ],
)
def test_a_place_from_options_and_environment(environment, given, expected):
    assert place(environment=environment, **given) == expected


@pytest.mark.parametrize(
    ("environment", "given", "reason"),
    [
        ({}, {"node_rank": 1}, "node_rank = 1 needs nnodes"),
        ({}, {"master_addr": "a"}, "master_addr = 'a' needs nnodes"),
        ({}, {"nnodes": 1, "node_rank": 1}, "node_rank = 1 must be below nnodes = 1"),
        ({}, {"nnodes": 2, "master_addr": "a"}, "node_rank = None must be"),
        ({}, {"nnodes": 2, "node_rank": 0}, "master_addr = None must be"),
        ({}, {"nnodes": 3, "node_rank": 0, "master_addr": "a"}, "nnodes = 3 must divide tp = 8"),
        ({}, {"nnodes": 0, "node_rank": 0, "master_addr": "a"}, "nnodes = 0 must divide"),
        ({}, {"nnodes": 2, "node_rank": 0, "master_addr": "a", "tp": 1}, "nnodes = 2 must divide tp = 1"),
        ({}, {"nnodes": 2, "node_rank": 2, "master_addr": "a"}, "node_rank = 2 must be from 0 to 1"),
        ({}, {"nnodes": 2, "node_rank": -1, "master_addr": "a"}, "node_rank = -1 must be from 0 to 1"),
        ({}, {"nnodes": 2, "node_rank": 0, "master_addr": "a", "tp_joined": 4}, "tp_joined = 4"),
        ({}, {"nnodes": 2, "node_rank": 0, "master_addr": "a", "tp_address": "tcp://a:1"}, "tp_address"),
        *(
            ({}, {"nnodes": 2, "node_rank": 0, "master_addr": address}, "is no address HOST:PORT")
            for address in ("", ":5", "a:b", "a/b", "u@a", "tcp://a:5", "a:99999", "::1")
        ),
        (TORCHRUN, {"nnodes": 2}, "nnodes = 2 contradicts WORLD_SIZE = 8"),
        (TORCHRUN, {"tp": 16}, r"tp = 16 contradicts WORLD_SIZE = 8 on 2 nodes.*nnodes = 1"),
        (TORCHRUN, {"tp": 4}, "tp = 4 contradicts WORLD_SIZE = 8"),
        (TORCHRUN | {"RANK": "x"}, {}, "RANK = 'x' is no number"),
        (TASK_A_RANK, {"tp": 16}, "tp = 16 contradicts SLURM_STEP_NUM_TASKS = 8 on 2 nodes"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, {}, "SLURM_STEP_NUM_NODES = '' is no number"),
        (SLURM, {"nnodes": 4}, "nnodes = 4 contradicts SLURM_STEP_NUM_TASKS = 2"),
        (LWS, {"tp": 6}, "tp = 6 contradicts LWS_GROUP_SIZE = 4"),
        (LWS | {"LWS_LEADER_ADDRESS": ""}, {}, "is no address HOST:PORT"),
    ],
)
def test_a_contradiction_is_refused_by_name(environment, given, reason):
    with pytest.raises(CaesuraError, match=reason) as caught:
        place(environment=environment, **given)
    assert caught.value.code == "invalid_request"


def test_nodes_have_all_ranks_once():
    options = {"nnodes": 4, "master_addr": "a:1"}
    places = [place(8, node_rank=index, **options) for index in range(4)]
    assert [rank for each in places for rank in each.ranks(8)] == list(range(8))
    assert places[0].options(8) == options | {"node_rank": 0, "tp_joined": 6, "tp_address": "tcp://a:1"}


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu08", "gpu08"),
        ("gpu[08-11,14],login", "gpu08"),
        ("gpu[3,7-9]", "gpu3"),
        ("login,gpu[1-2]", "login"),
        ("rack[1-2]n[03-04].example", "rack1n03.example"),
        ("", ""),
    ],
)
def test_first_host_of_a_list(hosts, first):
    assert first_host(hosts) == first


def test_a_secret_makes_one_key_pair_everywhere():
    secret = {NODES_VARIABLE: "s" * 32}
    made = shared_key_pair(secret)
    assert made == shared_key_pair(secret) != shared_key_pair({NODES_VARIABLE: "t" * 32})
    assert zmq.curve_public(made.secret) == made.public
    assert shared_key_pair({}) is None
    with pytest.raises(CaesuraError, match="32 characters"):
        shared_key_pair({NODES_VARIABLE: "s" * 31})
