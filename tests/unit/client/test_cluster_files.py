"""Files of ``examples/cluster``: other programs' schemas accept them, and what they run is ours."""

import dataclasses
import re
import shlex
import subprocess
from pathlib import Path

import msgspec
import pytest
from support.kubernetes import Container, LeaderWorkerSet, Service, read

from caesura.client.keygen import keygen
from caesura.client.launch.supervise import supervise
from caesura.process.curve import NODES_VARIABLE
from caesura.process.placement import DEFAULT_PORT
from caesura.scheduler.runtime.engine_config import EngineConfig

ROOT = Path(__file__).parents[3]
CLUSTER = ROOT / "examples" / "cluster"
SCRIPT = CLUSTER / "engines.sbatch"
DEVICES = "nvidia.com/gpu"
OPTIONS = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(EngineConfig)} | {"--model"}


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
    assert {"--model", "--nnodes", "--curve-secret-key-file"} <= of_the_engine <= OPTIONS
    made_here = tmp_path / "keys"
    keygen.callback(made_here, ())
    names = {f"$RUN/keys/{path.relative_to(made_here)}" for path in made_here.rglob("*")}
    assert {argument for argument in given if argument.startswith("$RUN/keys/")} <= names


@pytest.mark.parametrize(
    ("name", "right", "wrong", "reason"),
    [
        ("rayjob", "kind: RayJob", "kind: RayJob", None),
        ("rayjob", "groupName:", "name:", "unknown field `name`"),
        ("rayjob", "memory: 64Gi", "memory: 64 GiB", "matching regex"),
        ("rayjob", "maxReplicas: 8", "maxReplicas: 2", "minReplicas to maxReplicas"),
        ("leaderworkerset", "kind: Service", "kind: Service", None),
        ("leaderworkerset", "restartPolicy: None", "restartPolicy: Never", "Invalid enum value"),
        ("leaderworkerset", "path: /ready", "path: ready", "matching regex"),
        ("leaderworkerset", "{name: shm, mountPath", "{name: tmp, mountPath", "mounts no volume"),
        ("leaderworkerset", "timeoutSeconds: 5", "timeout: 5", "unknown field `timeout`"),
    ],
)
def test_manifests_have_the_fields_of_their_kinds(name, right, wrong, reason, tmp_path):
    text = (CLUSTER / f"{name}.yaml").read_text()
    assert right in text
    changed = tmp_path / "changed.yaml"
    changed.write_text(text.replace(right, wrong))
    if reason is None:
        assert read(changed)
    else:
        with pytest.raises(msgspec.ValidationError, match=reason):
            read(changed)


def stages() -> dict[str, str]:
    parts = re.split(r"^FROM \S+ AS (\S+)$", (ROOT / "docker" / "Dockerfile").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_set_starts_one_engine_in_each_group():
    found, service = read(CLUSTER / "leaderworkerset.yaml")
    assert isinstance(found, LeaderWorkerSet)
    assert isinstance(service, Service)
    group = found.spec.leader_worker_template
    engine, http = group.leader_template.spec.containers
    (ranks,) = group.worker_template.spec.containers
    assert found.spec.startup_policy == "LeaderCreated", "the leader is ready only with its workers"
    for container in (engine, ranks):
        verb, *given = container.args
        context = supervise.make_context(verb, list(given))
        options = dict(zip(context.args[::2], context.args[1::2], strict=True))
        assert options.keys() <= OPTIONS
        assert int(options["--tp"]) == group.size * int(container.resources.limits[DEVICES])
        assert options["--model"] == "/models/current"
        (secret,) = container.env
        assert secret.name == NODES_VARIABLE
        assert container.image == "caesura:engine"
    assert [port.container_port for port in engine.ports] == [DEFAULT_PORT]
    assert http.image == "caesura:serve"
    assert f'"{engine.args[-1]}"' in stages()["serve"], "the server asks the socket of the engine"
    assert f"EXPOSE {http.ports[0].container_port}" in stages()["serve"]
    assert service.spec.selector == group.leader_template.metadata.labels
    assert {port.target_port for port in service.spec.ports} <= {port.name for port in http.ports}


def test_the_ray_job_requests_the_resources_of_the_trainer():
    (job,) = read(CLUSTER / "rayjob.yaml")
    pytest.importorskip("ray")
    import ray_trainer  # needs ray

    program, script, *arguments = shlex.split(job.spec.entrypoint)
    assert (program, script) == ("python", "examples/ray_trainer.py")
    options = ray_trainer.parse(arguments)
    cluster = job.spec.ray_cluster_spec
    (workers,) = cluster.worker_group_specs
    assert workers.replicas == options.replicas
    for group in (cluster.head_group_spec, workers):
        (container,) = group.template.spec.containers
        assert options.gpus <= int(container.resources.limits[DEVICES])
        assert options.cpus <= int(container.resources.limits["cpu"])
        assert {each.mount_path for each in container.volume_mounts} == {options.shared_folder}
        assert_probes_of_ray(container)


def assert_probes_of_ray(container: Container) -> None:
    """Assert that no probe is KubeRay's, which call wget, and that the image can run each."""
    assert len(container.probes) == 2
    for probe in container.probes:
        python, flag, program = probe.exec.command
        assert (python, flag) == ("/opt/caesura/bin/python", "-c")
        compile(program, "probe", "exec")
    assert "ray[default]" in stages()["ray-builder"], "its agent answers the probes"


def test_the_image_has_the_version_of_ray_in_the_job():
    (job,) = read(CLUSTER / "rayjob.yaml")
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    assert job.spec.ray_cluster_spec.ray_version == pinned["ray"]
