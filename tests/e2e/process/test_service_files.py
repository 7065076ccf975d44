"""The systemd units and the compose file: what they say is right, and what they run works."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.http_serve import served
from support.lanes import quick
from support.supervised import PATIENCE, supervised

pytestmark = [pytest.mark.slow, pytest.mark.executed]  # its engines take seconds to start

ROOT = Path(__file__).parents[3]
UNITS = sorted((ROOT / "examples/systemd").glob("*.service"))
yaml = pytest.importorskip("yaml", reason="PyYAML comes with transformers")


def command_of(unit: Path) -> list[str]:
    (line,) = [line for line in unit.read_text().splitlines() if line.startswith("ExecStart=")]
    return shlex.split(line.removeprefix("ExecStart="))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_the_unit(unit, tmp_path):
    # verify wants a program that is there
    text = unit.read_text().replace(command_of(unit)[0], sys.executable)
    copy = tmp_path / unit.name
    copy.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=PATIENCE
    )
    complaints = [line for line in done.stderr.splitlines() if unit.name in line]
    assert (done.returncode, complaints) == (0, []), done.stderr


@pytest.mark.parametrize("unit", quick(UNITS), ids=lambda unit: unit.stem)
def test_the_commands_of_the_units_are_ours(unit, tiny_model, tmp_path):
    _, verb, *arguments = command_of(unit)
    (tmp_path / "key").write_text("a key\n")
    places = {
        "--model": str(tiny_model),
        "--state-file": str(tmp_path / "weights.json"),
        "--endpoint": f"ipc://{tmp_path}/s",
        "--api-key-file": str(tmp_path / "key"),
    }
    given = [places.get(before, each) for before, each in zip(["", *arguments], arguments, strict=False)]
    with (supervised if verb == "supervise" else served)(*given):
        assert (tmp_path / "weights.json").exists()


@pytest.mark.long
def test_the_health_checks_of_the_compose_file_tell_well_from_ill(tiny_model):
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    kind, *command = services["scheduler"]["healthcheck"]["test"]
    assert (kind, command[0]) == ("CMD", "caesura")
    code = "from caesura.client.cli import main; main()"
    with supervised("--model", str(tiny_model)) as running:
        ask = [sys.executable, "-c", code, *command[1:], "--endpoint", running.endpoint]
        assert subprocess.run(ask, capture_output=True, timeout=PATIENCE).returncode == 0
    assert subprocess.run(ask, capture_output=True, timeout=PATIENCE).returncode == 1

    kind, python, *command = services["http"]["healthcheck"]["test"]
    assert (kind, python) == ("CMD", "python")
    with served("--model", str(tiny_model)) as engine:
        ask = [each.replace("http://127.0.0.1:30000", engine.url) for each in [sys.executable, *command]]
        assert ask[-1] != command[-1]
        assert subprocess.run(ask, capture_output=True, timeout=PATIENCE).returncode == 0
    assert subprocess.run(ask, capture_output=True, timeout=PATIENCE).returncode == 1


def dockerfile() -> list[str]:
    text = (ROOT / "docker/Dockerfile").read_text().replace("\\\n", "")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def stages() -> dict[str, tuple[str, list[str]]]:
    found: dict[str, tuple[str, list[str]]] = {}
    for line in dockerfile():
        if line.startswith("FROM "):
            _, origin, _, name = line.split()
            found[name] = (origin, [])
        elif found:
            found[name][1].append(line)
    return found


def test_the_compose_file_builds_stages_that_there_are_with_arguments_that_they_take():
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    built = {name: service for name, service in services.items() if "build" in service}
    assert {service["build"]["target"] for service in built.values()} == {"engine", "serve", "demo"}
    taken = {line.split()[1] for line in stages()["builder"][1] if line.startswith("ARG ")}
    for name, service in built.items():
        build = service["build"]
        assert build["target"] in stages(), name
        assert service["image"] == f"caesura:{build['target']}", name
        assert set(build["args"]) == taken, name
        assert (ROOT / "docker" / build["context"] / build["dockerfile"]).is_file(), name
    images = {service["image"] for service in built.values()}
    assert {service["image"] for service in services.values() if "caesura" in service["image"]} == images


def test_only_the_stage_that_builds_has_a_compiler_and_it_fails_without_kernels():
    origin, build = stages()["builder"]
    install = next(i for i, line in enumerate(build) if "apt-get install" in line and "g++" in line)
    wheel = next(i for i, line in enumerate(build) if "pip wheel" in line)
    check = next(i for i, line in enumerate(build) if "-m caesura.scheduler.kernels" in line)
    assert install < wheel < check
    base, *_ = stages()["base"]
    assert base == origin
    for name in ("engine", "serve", "demo"):
        assert stages()[name][0] == "base"
    runtime = [line for name in ("base", "engine", "serve", "demo") for line in stages()[name][1]]
    assert not any("apt-get" in line for line in runtime)
    assert [line for line in runtime if line.startswith("USER ")] == ["USER caesura"]


def test_the_images_run_serve_and_supervise():
    lines = dockerfile()
    commands = [yaml.safe_load(line.removeprefix("CMD ")) for line in lines if line.startswith("CMD ")]
    assert [command[0] for command in commands] == ["serve", "supervise"]
    assert "--state-file" in commands[1]
