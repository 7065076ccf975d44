"""Grafana's dashboard and Prometheus' alerts name metrics and labels that a running server has."""

import json
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.http_serve import served
from support.waiting import eventually

ROOT = Path(__file__).parents[3]
yaml = pytest.importorskip("yaml", reason="PyYAML comes with transformers")
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


@pytest.mark.slow
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
