"""The files of examples/cluster/: they parse, and the commands in them are ones that there are."""

import dataclasses
import shlex
import subprocess
from pathlib import Path

import click
import pytest
import yaml

from caesura.client.keygen import keygen
from caesura.client.launch.supervisor import supervise
from caesura.scheduler.runtime.config import EngineConfig

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


def test_the_commands_of_the_script_have_the_options_that_they_are_given(tmp_path):
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


def test_the_manifest_asks_ray_for_what_the_trainer_asks_for():
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


def test_an_option_that_there_is_not_would_be_found():
    with pytest.raises(click.UsageError):
        supervise.make_context("supervise", ["--max-restarts", "many"])
