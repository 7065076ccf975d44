"""What the client package may depend on, and where it mirrors the engine."""

import dataclasses
import inspect
import subprocess
import sys

from caesura.client import AsyncSchedulerClient, SchedulerClient, launch_scheduler
from caesura.client.connection.options import GenerateOptions
from caesura.io_struct import GenerateReqInput
from caesura.scheduler.runtime.config import EngineConfig


def test_the_client_imports_neither_torch_nor_the_engine():
    program = (
        "import sys, caesura.client, caesura.client.cli\n"
        "heavy = {name for name in sys.modules if name.split('.')[0] in ('torch', 'numpy', 'transformers')}\n"
        "engine = {name for name in sys.modules if name.startswith('caesura.scheduler')}\n"
        "print(sorted(heavy | engine))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_launcher_offers_every_option_of_the_engine():
    offered = set(inspect.signature(launch_scheduler).parameters)
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    of_the_launcher = {"startup_timeout", "log_path", "model", "curve_server_key", "curve_client_key_file"}
    assert offered - of_the_launcher == fields - {"model_path"}


def test_every_option_of_a_generation_is_a_keyword_of_both_clients():
    explicit = {"id", "rid", "input_ids", "sampling_params", "stream"}
    assert set(GenerateReqInput.__struct_fields__) - explicit == set(GenerateOptions.__annotations__)
    for client in (SchedulerClient, AsyncSchedulerClient):
        for method in (client.generate, client.submit):
            given = inspect.signature(method).parameters
            assert given["options"].kind is inspect.Parameter.VAR_KEYWORD
            assert given.keys() & GenerateOptions.__annotations__.keys() == set()
