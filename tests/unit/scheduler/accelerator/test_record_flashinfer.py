"""Signatures of FlashInfer, which every call of its stand-ins binds to, as they are read from a wheel."""

import zipfile

import pytest
from support import record_flashinfer

SOURCES = {
    "flashinfer/__init__.py": "from .decode import Wrapper as Wrapper\nfrom .page import *\n",
    "flashinfer/page.py": "@traced(x=1)\ndef append(k, v: int, *, layout: str = 'NHD') -> None: ...\n",
    "flashinfer/decode.py": """
def make():
    class Wrapper: ...
class Base:
    def reset(self, buffer, /, more=None): ...
class Wrapper(Base):
    @overload
    def run(self, q): ...
    def run(self, q, *args, out=None): ...
    def plan(self, a, *old, **options):
        return self._plan(a, **merged(options)) if old else self._plan(a, **options)
    def _plan(self, a, *, scale=None): ...
""",
}


@pytest.fixture
def sources(tmp_path):
    wheel = tmp_path / "flashinfer_python-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in SOURCES.items():
            archive.writestr(path, text)
    return record_flashinfer.Sources(str(wheel))


@pytest.mark.parametrize("name,parameters", [
    ("append", "k, v, *, layout=..."),
    ("Wrapper.run", "q, *args, out=..."),
    ("Wrapper.plan", "a, *, scale=..."),
    ("Wrapper.reset", "buffer, /, more=..."),
])  # fmt: skip
def test_signatures_are_read_from_a_wheel(sources, name, parameters):
    assert sources.version == "1.2.3"
    assert sources.signature("flashinfer", name) == parameters


def test_a_missing_name_is_reported(sources):
    with pytest.raises(LookupError, match="gone"):
        sources.signature("flashinfer", "Wrapper.gone")
