"""The floors that ``pyproject.toml`` states have what the engine uses."""

import tomllib

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
