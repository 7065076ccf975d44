"""The floors that ``pyproject.toml`` states have what the engine uses."""

import tomllib

import pytest
from support.torch_floor import ROOT, missing, recorded, sources

VERSIONS, KNOWN = recorded()


def test_the_oldest_versions_have_every_name():
    found = {path.name: sorted(missing(path.read_text(encoding="utf-8"), KNOWN)) for path in sources()}
    assert {name: names for name, names in found.items() if names} == {}


def test_the_floors_are_the_recorded_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    stated = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    for library, version in VERSIONS.items():
        floors = [each.partition(";")[0] for each in stated if each.startswith(f"{library}>=")]
        assert floors == [f"{library}>={'.'.join(version.split('.')[:2])}"]


@pytest.mark.parametrize("source,found", [
    ("import torch\ntorch.zeros(1).float()", []),
    ("import torch\ntorch.of_tomorrow()", ["torch.of_tomorrow"]),
    ("import torch.distributed as dist\ndist.of_tomorrow", ["torch.distributed.of_tomorrow"]),
    ("from torch.nn import functional as f\nf.silu(f.of_tomorrow)", ["torch.nn.functional.of_tomorrow"]),
    ("from torch.nn.functional import of_tomorrow", ["torch.nn.functional.of_tomorrow"]),
    ("import triton.language as tl\ntl.dot(tl.of_tomorrow)", ["triton.language.of_tomorrow"]),
    ("import torch.of_tomorrow", ["torch.of_tomorrow"]),
    ("from .torch import anything", []),
])  # fmt: skip
def test_the_rule_itself(source, found):
    assert list(missing(source, KNOWN)) == found


def test_methods_of_newer_tensors_are_found():
    older = {**KNOWN, "torch.Tensor": KNOWN["torch.Tensor"] - {"relu"}}
    assert list(missing("x.relu()", older)) == ["torch.Tensor.relu"]
