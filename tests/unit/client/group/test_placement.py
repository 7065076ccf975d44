"""Devices, threads and memory of each replica on a host, and the scripts that start replicas."""

import dataclasses
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from caesura.client import InvalidRequest
from caesura.client.group.processes import VISIBLE, _cores, cuda_devices, placed, ranks_of
from caesura.client.keygen import keygen
from caesura.client.launch.supervise import supervise
from caesura.scheduler.runtime.engine_config import EngineConfig

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


@pytest.mark.parametrize("name", ["--endpoint", "--state-file", "--tp-joined", "--tp-address"])
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


CLUSTER = Path(__file__).parents[4] / "examples" / "cluster"
SCRIPT = CLUSTER / "engines.sbatch"


def commands(verb: str) -> list[list[str]]:
    text = SCRIPT.read_text().replace("\\\n", "")
    lines = [line.partition(f"caesura {verb} ")[2] for line in text.splitlines() if line[:1] != "#"]
    return [shlex.split(line) for line in lines if line]


def test_bash_reads_the_script():
    done = subprocess.run(["bash", "-n", str(SCRIPT)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    inner = SCRIPT.read_text().split("bash -c '")[1].rpartition("'")[0]
    done = subprocess.run(["bash", "-n", "-c", inner], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_commands_accept_the_options_in_the_script(tmp_path):
    (made,) = commands("keygen")
    assert keygen.make_context("keygen", list(made)).params["directory"] == Path("$RUN/keys")
    (given,) = commands("supervise")
    context = supervise.make_context("supervise", list(given))
    assert context.params["endpoint"] == "$ADDRESS"
    of_the_engine = {argument for argument in context.args if argument.startswith("--")}
    fields = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(EngineConfig)} | {"--model"}
    assert {"--model", "--curve-secret-key-file"} <= of_the_engine <= fields
    made_here = tmp_path / "keys"
    keygen.callback(made_here, ())
    names = {f"$RUN/keys/{path.relative_to(made_here)}" for path in made_here.rglob("*")}
    assert {argument for argument in given if argument.startswith("$RUN/keys/")} <= names


def test_the_manifest_requests_the_resources_of_the_trainer():
    job = yaml.safe_load((CLUSTER / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    pytest.importorskip("ray")
    import ray_trainer  # needs ray

    program, script, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert (program, script) == ("python", "examples/ray_trainer.py")
    options = ray_trainer.parse(arguments)
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == options.replicas
    for group in (cluster["headGroupSpec"], workers):
        (container,) = group["template"]["spec"]["containers"]
        assert options.gpus <= int(container["resources"]["limits"]["nvidia.com/gpu"])
        assert options.cpus <= int(container["resources"]["limits"]["cpu"])
        assert {each["mountPath"] for each in container["volumeMounts"]} == {options.shared_folder}
        for kind in ("livenessProbe", "readinessProbe"):  # else KubeRay's call wget
            python, flag, program = container[kind]["exec"]["command"]
            assert (python, flag) == ("/opt/caesura/bin/python", "-c")
            compile(program, kind, "exec")
