"""Starting the process: what its command line accepts, and what its launcher hears when it does not start."""

import contextlib
import dataclasses
import json
import logging
import os

import pytest
from click.testing import CliRunner
from support import engine_template
from support.faults import Fault

from caesura.io_struct import CaesuraError, ErrorCode
from caesura.scheduler import __main__ as command_line
from caesura.scheduler.execution import build
from caesura.scheduler.runtime.engine_config import EngineConfig
from caesura.scheduler.runtime.process import _start, refusal
from caesura.scheduler.runtime.shutdown import Shutdown


@pytest.fixture
def served(monkeypatch):
    """Return the list of the runs that the command line would have made, as their arguments."""
    runs = []
    monkeypatch.setattr(command_line, "run", lambda *arguments: runs.append(arguments) or 0)
    return runs


def invoke(*arguments: str):
    return CliRunner().invoke(command_line.command(), list(arguments))


@pytest.fixture(autouse=True)
def logger():
    logger = logging.getLogger("caesura")
    before = logger.level, logger.propagate, list(logger.handlers)
    yield
    logger.level, logger.propagate = before[:2]
    logger.handlers[:] = before[2]


def test_a_launcher_may_end_a_refused_start(tmp_path):
    program = (
        "import os, signal, sys\n"
        "from caesura.scheduler.runtime import process\n"
        "from caesura.scheduler.runtime.engine_config import EngineConfig\n"
        "process.tell = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.exit(process.run(EngineConfig(model_path=sys.argv[1]), None, None))\n"
    )
    done = engine_template.run(program, str(tmp_path / "absent"))
    assert done.returncode == 1
    assert "there is no such folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_field_has_an_option_with_its_docstring():
    options = {option.name: option for option in command_line.command().params}
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    assert fields == options.keys() - {"ready_fd", "lifeline_fd"}
    assert all(options[name].help for name in fields)
    assert "Hugging Face folder" in invoke("--help").output


def test_values_arrive_with_their_types(served):
    arguments = [
        "--model", "/m", "--endpoint", "tcp://127.0.0.1:5", "--dtype", "bfloat16", "--kv-pool-tokens", "64",
        "--kv-memory-fraction", "0.25", "--no-prefix-cache", "--check-ledger", "--pipeline-depth", "1",
        "--requests-while-paused", "refuse", "--ready-fd", "7", "--lifeline-fd", "8",
    ]  # fmt: skip
    assert invoke(*arguments).exit_code == 0
    assert invoke("--model", "/m").exit_code == 0
    (config, *descriptors), defaults = served
    assert defaults == (EngineConfig(model_path="/m"), None, None)
    assert descriptors == [7, 8]
    assert config == EngineConfig(
        model_path="/m",
        endpoint="tcp://127.0.0.1:5",
        dtype="bfloat16",
        kv_pool_tokens=64,
        kv_memory_fraction=0.25,
        prefix_cache=False,
        check_ledger=True,
        pipeline_depth=1,
        requests_while_paused="refuse",
    )
    served.clear()
    for option in ("--enable-weights-cpu-backup", "--weights-cpu-backup"):  # the first is SGLang's
        assert invoke("--model", "m", option).exit_code == 0
    assert [config.weights_cpu_backup for config, *_ in served] == [True, True]


def test_a_wrong_command_line_is_status_two(served):
    for wrong in (
        ["--dtype", "float8"], ["--kv-pool-tokens", "many"], ["--requests-while-paused", "sometimes"],
        ["--no-such-option"], ["surplus"],
    ):  # fmt: skip
        assert invoke("--model", "/m", *wrong).exit_code == 2
    assert invoke().exit_code == 2
    assert not served


def test_an_impossible_value_is_reported_to_the_launcher(served):
    """The values are those of test_engine_config.py."""
    reader, writer = os.pipe()
    result = invoke("--model", "/m", "--kv-memory-fraction", "nan", "--ready-fd", str(writer))
    with os.fdopen(reader) as pipe:
        line = json.loads(pipe.read())
    assert (result.exit_code, served) == (2, [])
    assert (line["ready"], line["code"]) == (False, "invalid_request")
    assert line["detail"]["field"] == "kv_memory_fraction"


def start_error(**fields: object) -> CaesuraError:
    with contextlib.ExitStack() as cleanup, pytest.raises(CaesuraError) as caught:
        _start(EngineConfig(**fields), Shutdown(), cleanup)
    json.dumps(refusal(caught.value))
    return caught.value


def test_failed_start_says_why(tiny_model):
    for field, value in (
        ("device", "nonsense"), ("device", "cuda:1000"), ("log_level", "loud"),
        ("endpoint", "tcp://0.0.0.0:0"),
    ):  # fmt: skip
        error = start_error(model_path=str(tiny_model), **{field: value})
        assert (error.code, error.detail["field"]) == (ErrorCode.INVALID_REQUEST, field)
    error = start_error(model_path=str(tiny_model), kv_pool_tokens=10**12)
    assert error.code == ErrorCode.OUT_OF_MEMORY
    assert error.detail["needed_bytes"] > error.detail["free_bytes"] > 0


@pytest.mark.parametrize(
    ("failure", "code", "told"),
    [
        (KeyError("defect"), ErrorCode.INTERNAL, "KeyError: 'defect'"),
        (MemoryError("17 GB"), ErrorCode.OUT_OF_MEMORY, ""),
    ],
)
def test_an_unforeseen_failure_at_start_is_told(tiny_model, failure, code, told):
    with Fault(build, "load_model", failure):
        error = start_error(model_path=str(tiny_model))
    assert (error.code, told in error.detail.get("traceback", "")) == (code, True)


def test_a_private_directory_goes_with_the_engine(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    start_error(model_path=str(tmp_path / "no model"))
    assert list(tmp_path.iterdir()) == []
    with contextlib.ExitStack() as cleanup:
        engine = _start(EngineConfig(model_path=str(tiny_model), kv_pool_tokens=64), Shutdown(), cleanup)
        cleanup.callback(engine.router.close)
        (directory,) = tmp_path.iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").write_text("precious")
    start_error(model_path=str(tmp_path / "no model"), endpoint=f"ipc://{tmp_path}/s.sock")
    assert (tmp_path / "mine").exists()


def test_an_option_of_another_engine_is_refused_with_ours(served):
    for option, meant in (
        ("--tensor-parallel-size", ": did you mean --tp?"),
        ("--mem-fraction-static", ": did you mean --kv-memory-fraction?"),
        ("--model-path", ": did you mean --model?"),
        ("--disable-radix-cache", ": turn prefix_cache off"),
    ):
        done = invoke("--model", "m", option, "1")
        assert done.exit_code == 2
        assert f"No such option '{option}'" in done.output
        assert meant in done.output
