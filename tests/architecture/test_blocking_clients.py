"""The blocking clients are what the generator makes of the asyncio ones."""

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

import pytest

from caesura.client import AsyncSchedulerClient, SchedulerClient
from caesura.client.connection.options import GenerateOptions
from caesura.io_struct import GenerateReqInput

CLIENT = Path(__file__).parents[2] / "client"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    for needed in ("ruff", "unasync"):
        pytest.importorskip(needed, reason=f"{needed} comes with the extra `dev`")
    spec = importlib.util.spec_from_file_location("generate_blocking", CLIENT / "_blocking" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source(name: str) -> str:
    return (CLIENT / name).read_text(encoding="utf-8")


def test_the_blocking_clients_are_those_of_the_generator(generator):
    stale = [
        target
        for name, target in generator.SOURCES.items()
        if generator.generate(name, source(name)) != source(target)
    ]
    assert stale == [], f"run: {generator.COMMAND}"


def test_a_change_of_a_source_is_noticed(generator):
    changed = source("connection/async_client.py").replace(
        "return self._future.done()", "return not self._future.done()"
    )
    written = generator.generate("connection/async_client.py", changed)
    assert written != source("connection/scheduler_client.py")
    assert written == source("connection/scheduler_client.py").replace(
        "return self._future.done()", "return not self._future.done()"
    )


@pytest.mark.parametrize(
    "line", ["import asyncio", "x: AsyncThing", "# in a coroutine", "def f(): LoopChannel"]
)
def test_code_without_a_blocking_form_is_refused(generator, line):
    with pytest.raises(ValueError, match=r"async_client\.py: .* has no blocking form"):
        generator.generate("connection/async_client.py", f"{source('connection/async_client.py')}\n{line}\n")


def test_every_word_of_the_table_is_used(generator):
    everything = "".join(source(name) for name in generator.SOURCES)
    assert [word for word in generator.WORDS if word not in everything] == []


def test_every_option_of_a_generation_is_a_keyword_of_both_clients():
    explicit = {"id", "rid", "input_ids", "sampling_params", "stream"}
    assert set(GenerateReqInput.__struct_fields__) - explicit == set(GenerateOptions.__annotations__)
    for client in (SchedulerClient, AsyncSchedulerClient):
        for method in (client.generate, client.submit):
            given = inspect.signature(method).parameters
            assert given["options"].kind is inspect.Parameter.VAR_KEYWORD
            assert given.keys() & GenerateOptions.__annotations__.keys() == set()
