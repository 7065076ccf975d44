"""``/openapi.json`` describes the routes that are served, with schemas that lead somewhere."""

import json
import re
from typing import Any

import httpx
import msgspec
import pytest
from support.http_server import listening, routes_served

from caesura.client.serve.vllm.control import PauseOptions


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    with listening() as server:
        return httpx.get(server.url + "/openapi.json").raise_for_status().json()


def test_every_route_is_described(document):
    found = {
        (method.upper(), re.sub(r"{.*?}", "x", path))
        for path, methods in document["paths"].items()
        for method in methods
    }
    assert found == {(method, path) for method, path, _ in routes_served()}
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)


def test_references_lead_to_schemas(document):
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert names == set(document["components"]["schemas"])


def test_schemas_are_those_of_the_structs(document):
    operation = document["paths"]["/pause"]["post"]
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][reference.rpartition("/")[2]]
    assert set(schema["properties"]) == set(PauseOptions.__struct_fields__)
    assert schema["properties"]["mode"] == {"enum": ["abort", "keep", "wait"], "default": "abort"}
    assert schema == msgspec.json.schema_components([PauseOptions])[1]["PauseOptions"]


def test_summaries_and_keys(document):
    start = document["paths"]["/start_weight_update"]["post"]
    assert start["summary"].startswith("Open a session")
    assert start["security"] == [{}, {"key": []}]
    assert "security" not in document["paths"]["/health"]["get"]
    names = [each["name"] for each in document["paths"]["/v1/loads"]["get"]["parameters"]]
    assert names == ["include", "dp_rank", "format"]
