"""Ends of a scheduler process: by signals, at once or drained, hung, without memory."""

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

import pytest
from support.engine_template import Process
from support.lanes import quick
from support.raw_client import RawClient
from support.waiting import PATIENCE_S as PATIENCE
from support.waiting import eventually

from caesura.client import EngineError, SamplingParams, SchedulerClient, ShuttingDown, launch_scheduler
from caesura.client.connection.client_options import this_process
from caesura.io_struct import ShutdownReqInput
from caesura.process.contract import EXIT_HUNG

pytestmark = pytest.mark.slow

ENDLESS = SamplingParams(max_new_tokens=240, temperature=0.0, ignore_eos=True)
MAIN = "from caesura.scheduler.__main__ import main; main()"


class Started:
    """A scheduler process whose stderr is kept."""

    def __init__(
        self, model: Path, *options: str, prelude: str = "", lifeline: int | None = None, **popen: object
    ) -> None:
        self._ready, writer = os.pipe()
        inherited = [writer] if lifeline is None else [writer, lifeline]
        command = [sys.executable, "-c", textwrap.dedent(prelude) + "\n" + MAIN]
        command += ["--model", str(model), "--num-threads", "1", "--kv-pool-tokens", "2048", "--no-autotune"]
        command += [*options, "--ready-fd", str(writer)]
        command += [] if lifeline is None else ["--lifeline-fd", str(lifeline)]
        self.process = Process(
            command, stderr=subprocess.PIPE, text=True, pass_fds=inherited, process_group=0, **popen
        )
        os.close(writer)

    def heard(self) -> dict:
        assert select.select([self._ready], [], [], PATIENCE)[0]
        return json.loads(os.read(self._ready, 65536))

    def ready(self) -> str:
        return self.heard()["endpoint"]

    def end(self) -> tuple[int, str]:
        _, error = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, error

    def stop_listening(self) -> None:
        os.close(self._ready)
        self._ready = -1

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        if self._ready >= 0:
            os.close(self._ready)


@contextmanager
def started(model: Path, *options: str, **more: object) -> Iterator[Started]:
    engine = Started(model, *options, **more)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture
def endpoint(tmp_path_factory):
    return f"ipc://{tmp_path_factory.mktemp('e')}/s"


def socket_of(endpoint: str) -> Path:
    return Path(endpoint.removeprefix("ipc://"))


def held(client: SchedulerClient):
    client.pause("in_place")
    handle = client.submit([5, 6, 7], ENDLESS)
    eventually(lambda: client.status(timeout=PATIENCE).waiting_requests)
    return handle


@pytest.mark.executed
@pytest.mark.parametrize("number", quick([signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
def test_a_signal_ends_every_request_and_leaves_no_socket(tiny_model, endpoint, number):
    with started(tiny_model, "--endpoint", endpoint) as engine:
        with SchedulerClient(engine.ready()) as client:
            handle = held(client)
            engine.process.send_signal(number)
            assert handle.result(timeout=PATIENCE).finish_reason.type == "abort"
        status, error = engine.end()
    assert status == 0
    assert f"the engine ends: signal {number.name} (exit status 0)" in error
    assert not socket_of(endpoint).exists()


@pytest.mark.long
def test_a_hangup_that_is_ignored_stays_ignored(tiny_model, endpoint):
    prelude = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    with started(tiny_model, "--endpoint", endpoint, prelude=prelude) as engine:
        with SchedulerClient(engine.ready()) as client:
            engine.process.send_signal(signal.SIGHUP)
            assert client.generate([5], SamplingParams(max_new_tokens=2), timeout=PATIENCE).output_ids
        engine.process.send_signal(signal.SIGTERM)
        assert engine.end()[0] == 0


def test_drained_by_a_signal_and_by_a_second_one_ended(tiny_model, endpoint):
    options = ("--shutdown-mode", "drain", "--drain-timeout-s", "3600")
    with started(tiny_model, "--endpoint", endpoint, *options) as engine:
        with SchedulerClient(engine.ready()) as client:
            handle = held(client)
            engine.process.send_signal(signal.SIGTERM)

            def refused() -> bool:
                extra = client.submit([5], ENDLESS)
                client.status(timeout=PATIENCE)  # answered after it
                if not extra.done():  # it came before the signal was heard
                    extra.abort(timeout=PATIENCE)
                    return False
                with pytest.raises(ShuttingDown):
                    extra.result(timeout=PATIENCE)
                return True

            eventually(refused)
            assert not handle.done()
            engine.process.send_signal(signal.SIGTERM)
            assert handle.result(timeout=PATIENCE).finish_reason.type == "abort"
        assert engine.end()[0] == 0


@pytest.mark.long
def test_drained_means_that_requests_end_by_themselves(tiny_model, endpoint):
    with started(tiny_model, "--endpoint", endpoint) as engine:
        with SchedulerClient(engine.ready()) as client:
            handle = held(client)
            assert client.shutdown(drain=True, drain_s=3600.0, timeout=PATIENCE).drain_s > 0
            client.continue_generation()
            assert handle.result(timeout=PATIENCE).finish_reason.type == "length"
        status, error = engine.end()
    asked = f"the engine ends: shutdown message from {this_process()} (exit status 0)"
    assert (status, asked in error) == (0, True)
    assert f"pid {os.getpid()} on " in asked


@pytest.mark.long
def test_a_foreign_client_shuts_down_without_an_identity(tiny_model, endpoint):
    with started(tiny_model, "--endpoint", endpoint) as engine, RawClient(engine.ready()) as client:
        client.send(ShutdownReqInput(id="end"))
        status, error = engine.end()
    assert status == 0
    assert "the engine ends: shutdown message from a client that does not say who it is" in error


@pytest.mark.long
def test_a_clone_in_the_folder_does_not_hide_the_package(tiny_model, tmp_path):
    (tmp_path / "caesura").mkdir()
    (tmp_path / "caesura" / "__init__.py").write_text("raise RuntimeError('the clone')")
    options = {"num_threads": 1, "kv_pool_tokens": 2048, "autotune": False}
    with chdir(tmp_path), launch_scheduler(tiny_model, **options) as client:
        assert client.generate([5, 6, 7], SamplingParams(max_new_tokens=3), timeout=PATIENCE).output_ids


def test_the_launchers_death_is_named_and_means_now(tiny_model, endpoint):
    reader, writer = os.pipe()
    with started(tiny_model, "--endpoint", endpoint, "--shutdown-mode", "drain", lifeline=reader) as engine:
        os.close(reader)
        with SchedulerClient(engine.ready()) as client:
            handle = held(client)
            os.close(writer)
            assert handle.result(timeout=PATIENCE).finish_reason.type == "abort"
        status, error = engine.end()
    launcher = f"the engine ends: its launcher (pid {os.getpid()}) has ended (exit status 0)"
    assert (status, launcher in error) == (0, True)


def loading(work: str, end_s: float = 30.0, before: str = "") -> str:
    """Return the prelude of a start that never ends, after ``work``, and whose end may take ``end_s``."""
    return f"""
        import os, signal, threading
        from caesura.scheduler.execution import build
        from caesura.scheduler.runtime import process
        process.END_S = {end_s}
        {before}
        class Finalized:
            def __del__(self):
                signal.raise_signal(signal.SIGTERM)
        def load_model(*given):
            {work}
            threading.Event().wait()
        build.load_model = load_model
    """


TELLS = r"os.write(2, b'loading\n')"
WAKES = "os.write(signal.set_wakeup_fd(-1), bytes([signal.SIGTERM]))"


@pytest.mark.parametrize("work", quick([TELLS, WAKES]), ids=["waiting", "about to wait"])
def test_a_signal_during_the_start_ends_it(tiny_model, endpoint, work):
    with started(tiny_model, "--endpoint", endpoint, prelude=loading(work)) as engine:
        if work == TELLS:
            assert "loading\n" in engine.process.stderr, "it reads as far as that line"
            engine.process.send_signal(signal.SIGTERM)
        status, error = engine.end()
    assert status == 128 + signal.SIGTERM
    assert "the engine ends: signal SIGTERM at start (exit status 143)" in error
    assert not socket_of(endpoint).exists()


@pytest.mark.long
def test_a_signal_that_meets_a_finalizer_ends_the_start(tiny_model, endpoint):
    """An error that a handler raises there is lost, and the start would go on, here for ever."""
    with started(tiny_model, "--endpoint", endpoint, prelude=loading("Finalized()", 1.0)) as engine:
        assert engine.end()[0] == EXIT_HUNG


@pytest.mark.parametrize("number", quick([signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
def test_a_signal_during_the_imports_is_named(tmp_path, number):
    (tmp_path / "torch.py").write_text(
        "import os, threading; os.write(2, b'importing\\n'); threading.Event().wait()"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "caesura.scheduler", "--model", "/nowhere"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr.readline() == "importing\n"
        process.send_signal(number)
        _, error = process.communicate(timeout=PATIENCE)
    status = 128 + number
    assert process.returncode == status
    assert error == f"the engine ends: signal {number.name} at start (exit status {status})\n"


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGUSR1, signal.SIGXCPU, signal.SIGALRM])
def test_an_unexpected_signal_is_named_before_it_kills(tiny_model, endpoint, number):
    with started(tiny_model, "--endpoint", endpoint) as engine:
        engine.ready()
        engine.process.send_signal(number)
        status, error = engine.end()
    assert status == -number
    assert error.splitlines()[-1].endswith(
        f"CRITICAL scheduler.runtime.process: the engine ends: signal {number.name}"
    )


def test_a_crash_prints_its_cause(tiny_model, endpoint):
    with started(tiny_model, "--endpoint", endpoint) as engine:
        engine.ready()
        engine.process.send_signal(signal.SIGSEGV)
        status, error = engine.end()
    assert status == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in error


SLOW_TELL = """
    import os, threading
    from caesura.scheduler.runtime import process
    def tell(ready_fd, line, tell=process.tell):
        os.write(2, b"telling\\n")
        os.read(0, 1)
        tell(ready_fd, line)
    process.tell = tell
"""


@pytest.mark.long
def test_a_signal_changes_nothing_of_a_refused_start(tmp_path):
    with started(tmp_path / "no model", prelude=SLOW_TELL, stdin=subprocess.PIPE) as engine:
        for line in engine.process.stderr:
            if line == "telling\n":
                break
        engine.process.send_signal(signal.SIGTERM)
        eventually(lambda: signal.SIGTERM not in pending_signals(engine.process.pid))
        engine.process.stdin.write("x")
        engine.process.stdin.flush()
        assert engine.heard()["ready"] is False
        status, error = engine.end()
    assert (status, "Traceback" in error) == (1, False)


def pending_signals(pid: int) -> set[int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    bits = int(next(line.split()[1] for line in lines if line.startswith("ShdPnd:")), 16)
    return {number for number in range(1, 64) if bits >> (number - 1) & 1}


@pytest.mark.long
def test_a_launcher_that_dies_during_the_start_is_named(tiny_model, endpoint):
    reader, writer = os.pipe()
    with started(tiny_model, "--endpoint", endpoint, lifeline=reader) as engine:
        os.close(reader)
        os.close(writer)
        engine.stop_listening()
        status, error = engine.end()
    assert (status, "the engine ends: its launcher (pid" in error) == (0, True)


@pytest.mark.long
def test_a_cancelled_start_whose_cleanup_hangs_is_cut_off(tiny_model, endpoint):
    hangs = "process.private_directory.remove = lambda path: threading.Event().wait()"
    with started(tiny_model, prelude=loading(TELLS, 1.0, hangs)) as engine:
        assert "loading\n" in iter(engine.process.stderr.readline, "")
        engine.process.send_signal(signal.SIGTERM)
        assert engine.end()[0] == EXIT_HUNG


HANGS = """
    import ctypes, threading
    from caesura.scheduler.execution.model_runner import ModelRunner
    def execute(self, batch):
        {}
    ModelRunner.execute = execute
"""


@pytest.mark.parametrize("how", quick(["threading.Event().wait()", "ctypes.PyDLL(None).sleep(3600)"]))
def test_an_engine_that_hangs_ends_itself(tiny_model, endpoint, how):
    options = ("--endpoint", endpoint, "--watchdog-timeout-s", "1")
    with started(tiny_model, *options, prelude=HANGS.format(how)) as engine:
        client = SchedulerClient(engine.ready())
        client.submit([5, 6, 7], ENDLESS)
        status, error = engine.end()
        client.close()
    assert status == EXIT_HUNG
    assert "in execute" in error


@pytest.mark.long
@pytest.mark.parametrize("timeout", ["inf", "1e300", "9e9"])
def test_a_watchdog_without_a_limit_is_none(tiny_model, endpoint, timeout):
    with started(tiny_model, "--endpoint", endpoint, "--watchdog-timeout-s", timeout) as engine:
        with SchedulerClient(engine.ready()) as client:
            assert client.generate([5], SamplingParams(max_new_tokens=2), timeout=PATIENCE).output_ids
        engine.process.send_signal(signal.SIGTERM)
        assert engine.end()[0] == 0


@pytest.mark.long
def test_an_idle_engine_is_not_taken_for_a_hung_one(tiny_model, endpoint):
    options = ("--endpoint", endpoint, "--watchdog-timeout-s", "0.4")
    with started(tiny_model, *options) as engine:
        with SchedulerClient(engine.ready()) as client:
            with pytest.raises(subprocess.TimeoutExpired):
                engine.process.wait(2.0)
            assert client.generate([5], SamplingParams(max_new_tokens=2), timeout=PATIENCE).output_ids
        engine.process.send_signal(signal.SIGTERM)
        status, error = engine.end()
    assert (status, "has not ticked" in error) == (0, False)


def test_a_loop_that_fails_tells_everybody_and_why(tiny_model, endpoint):
    prelude = """
        from caesura.scheduler.runtime.loop import Scheduler
        def tick(self, ongoing, tick=Scheduler.tick):
            if self._engine.live:
                raise MemoryError("no more")
            return tick(self, ongoing)
        Scheduler.tick = tick
    """
    with started(tiny_model, "--endpoint", endpoint, prelude=prelude) as engine:
        with SchedulerClient(engine.ready()) as client:
            with pytest.raises(EngineError, match="the engine has failed: MemoryError: no more") as caught:
                client.submit([5, 6, 7], ENDLESS).result(timeout=PATIENCE)
            assert caught.value.output.finish_reason.type == "error"
        status, error = engine.end()
    assert status == 1
    assert "the engine ends: its loop has failed: MemoryError (exit status 1)" in error
    assert not socket_of(endpoint).exists()


def test_a_thread_that_fails_ends_the_engine(tiny_model, endpoint):
    prelude = """
        import threading
        from caesura.scheduler.messaging.message_dispatcher import Dispatcher
        def reap(self):
            if self._engine.live:
                def fail(): raise MemoryError("no more")
                threading.Thread(target=fail, name="caesura-x").start()
                Dispatcher.reap = lambda self: None
        Dispatcher.reap = reap
    """
    with started(tiny_model, "--endpoint", endpoint, prelude=prelude) as engine:
        with SchedulerClient(engine.ready()) as client:
            client.submit([5, 6, 7], ENDLESS).result(timeout=PATIENCE)
        status, error = engine.end()
    assert status == 1
    assert "the engine ends: thread caesura-x has failed: MemoryError" in error


@pytest.mark.long
def test_an_end_that_hangs_is_cut_off(tiny_model, endpoint):
    prelude = """
        import threading
        from caesura.scheduler.runtime import process
        process.END_S = 1.0
        def close(self):
            threading.Event().wait()
        process.Engine.close = close
    """
    with started(tiny_model, "--endpoint", endpoint, prelude=prelude) as engine:
        engine.ready()
        engine.process.send_signal(signal.SIGTERM)
        status, error = engine.end()
    assert status == EXIT_HUNG
    assert "the engine ends: signal SIGTERM (exit status 0)" in error, "which was what it meant to do"
    assert "the engine ends: its shutdown has taken more than 1 s (exit status 70)" in error
    assert error.index("in close") < error.index("its shutdown has taken"), "where it hung"


@pytest.mark.executed
def test_too_little_memory_to_start_is_an_end_too(tiny_model, endpoint):
    prelude = """
        import resource
        from caesura.scheduler.execution import build
        load_model = build.load_model
        def load_with_little_left(*given):
            with open("/proc/self/statm") as statm:
                limit = int(statm.read().split()[0]) * resource.getpagesize() + (512 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            return load_model(*given)
        build.load_model = load_with_little_left
    """
    options = ("--endpoint", endpoint, "--load-bucket-bytes", str(1 << 30))
    with started(tiny_model, *options, prelude=prelude) as engine:
        message = engine.heard()
        status, error = engine.end()
    assert (message["ready"], message["code"]) == (False, "out_of_memory")
    assert status == 1
    assert "the engine ends: cannot start: " in error
    assert "[out_of_memory] (exit status 1)" in error
    assert not socket_of(endpoint).exists()


REFUSED = """
    import sys
    import psutil
    from caesura.client import CheckpointError, launch_scheduler
    try:
        launch_scheduler(sys.argv[1])
    except CheckpointError as error:
        print(error.detail["path"], psutil.Process().children())
"""


@pytest.mark.long
def test_a_refused_start_leaves_no_process_and_no_directory(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(REFUSED), str(tmp_path / "no model")]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == f"{tmp_path / 'no model'} []\n", done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_remains_of_a_killed_engine_are_removed(tiny_model, tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with started(tiny_model, env=environment) as engine:
        ready = engine.heard()
        assert ready == {"ready": True, "endpoint": ready["endpoint"], "pid": engine.process.pid}
        left = socket_of(ready["endpoint"]).parent
        assert (left.parent, left.stat().st_mode & 0o777) == (tmp_path, 0o700)
        engine.process.kill()
        engine.end()
    assert left.exists()
    with started(tiny_model, env=environment) as again:
        own = socket_of(again.ready()).parent
        assert [path for path in tmp_path.iterdir() if path.name.startswith("caesura-")] == [own]
        again.process.send_signal(signal.SIGTERM)
        assert again.end()[0] == 0
    assert not list(tmp_path.glob("caesura-*"))
