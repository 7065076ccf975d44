"""Files of operators (systemd, compose, Prometheus, Grafana): what they say is right, what they run works."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.http_serve import served
from support.kubernetes import read
from support.lanes import quick
from support.supervised import PATIENCE, supervised
from support.waiting import eventually

pytestmark = pytest.mark.slow

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
def test_compose_health_checks_tell_well_from_ill(tiny_model):
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


@pytest.mark.long
def test_probes_of_the_set_tell_well_from_ill(tiny_model):
    found, _ = read(ROOT / "examples" / "cluster" / "leaderworkerset.yaml")
    engine, http = found.spec.leader_worker_template.leader_template.spec.containers
    keys = {each.name: "a key of the manifest's secret" for each in http.env}
    code = "from caesura.client.cli import main; main()"
    with supervised("--model", str(tiny_model)) as running:

        def asked() -> set[int]:
            environment = {**os.environ, "CAESURA_ENDPOINT": running.endpoint}
            commands = [probe.exec.command for probe in engine.probes]
            assert {command[0] for command in commands} == {"caesura"}
            python = [sys.executable, "-c", code]
            run = [
                subprocess.run([*python, *each[1:]], env=environment, timeout=PATIENCE) for each in commands
            ]
            return {done.returncode for done in run}

        with served("--endpoint", running.endpoint, env=keys) as server:

            def got() -> set[int]:
                return {httpx.get(server.url + probe.http_get.path).status_code for probe in http.probes}

            assert (asked(), got()) == ({0}, {200})
            running.end()
            assert asked() == {1}
            eventually(lambda: got() == {503})


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


def test_the_compose_file_builds_existing_stages():
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


def test_only_the_build_stage_has_a_compiler():
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


# -- monitoring ----------------------------------------------------------------------------------------------

DASHBOARD = json.loads((ROOT / "docker/grafana/dashboards/caesura.json").read_text(encoding="utf-8"))
ALERTS = yaml.safe_load((ROOT / "docker/alerts.yml").read_text(encoding="utf-8"))["groups"]
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
EXPRESSIONS += [rule["expr"] for group in ALERTS for rule in group["rules"]]
EXPRESSIONS += [each["query"] for each in DASHBOARD["templating"]["list"]]


def scrape(url: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_expressions_name_metrics_of_a_running_server(tiny_model):
    arguments = ["--model", str(tiny_model), "--replicas", "2", "--kv-pool-tokens", "1024"]
    with served(*arguments) as server:
        server.ok("/generate", {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}})
        server.ok("/pause_generation", {"mode": "in_place"})
        server.ok("/update_weights_from_disk", {"model_path": str(tiny_model)})
        server.ok("/continue_generation")
        names = {name for expression in EXPRESSIONS for name in re.findall(r"caesura:\w+", expression)}
        eventually(lambda: "caesura:weight_updates_total" in scrape(server.url))
        exposed = scrape(server.url)
        assert names - set(exposed) == set()
        for expression in EXPRESSIONS:
            for name, matchers in re.findall(r"(caesura:\w+)\{([^}]*)\}", expression):
                assert set(re.findall(r"(\w+)=", matchers)) <= exposed[name], expression


def test_alerts_have_severity_and_model():
    rules = [rule for group in ALERTS for rule in group["rules"]]
    assert {rule["alert"] for rule in rules} >= {
        "PausedTooLong", "WeightsPoisoned", "EngineRestarts", "QueueTooLong", "MemoryGrows"
    }  # fmt: skip
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert "{{ $labels.model_name }}" in rule["annotations"]["summary"]


def test_compose_gives_prometheus_and_grafana_these_files():
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text(encoding="utf-8"))["services"]
    rules = yaml.safe_load((ROOT / "docker/prometheus.yml").read_text(encoding="utf-8"))["rule_files"]
    assert rules == ["alerts.yml"], "beside prometheus.yml"
    assert "./alerts.yml:/etc/prometheus/alerts.yml:ro" in services["prometheus"]["volumes"]
    assert "./grafana:/etc/grafana/provisioning:ro" in services["grafana"]["volumes"]
    assert services["grafana"]["ports"] == ["127.0.0.1:3000:3000"], "of this machine only"
    folder = ROOT / "docker/grafana"
    source = yaml.safe_load((folder / "datasources/prometheus.yml").read_text(encoding="utf-8"))
    (datasource,) = source["datasources"]
    assert datasource["url"] == "http://prometheus:9090"
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {datasource["uid"]}
