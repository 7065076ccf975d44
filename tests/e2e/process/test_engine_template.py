"""The template process that tests fork instead of executing engines."""

import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
from support import engine_template
from support.lanes import quick
from support.waiting import eventually

pytestmark = pytest.mark.skipif(
    not engine_template.is_wanted(), reason=f"{engine_template.VARIABLE} is not set: nothing is forked"
)

SELF_REPORT = """
import gc, json, os, resource, signal, sys, threading
status = open("/proc/self/status").read().splitlines()
print(json.dumps({
    "forked": "torch" in sys.modules,
    "arguments": [sys.argv, sys.orig_argv, __name__, sys.modules["__main__"].__dict__ is globals()],
    "environment": dict(os.environ),
    "folder": os.getcwd(),
    "processes": [os.getppid(), os.getpgrp() == os.getpid(), os.getsid(0)],
    "descriptors": {name: os.get_inheritable(int(name)) for name in os.listdir("/proc/self/fd")
                    if os.path.exists(f"/proc/self/fd/{name}")},
    "streams": [[s.encoding, s.errors, s.line_buffering, s.fileno()]
                for s in (sys.stdin, sys.stdout, sys.stderr)],
    "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")},
    "signals": [line for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt", "Umask"))],
    "handlers": [str(signal.getsignal(n)).partition(" at ")[0] for n in signal.valid_signals()],
    "threads": [t.name for t in threading.enumerate()] + os.listdir("/proc/self/task").__len__() * [""],
    "own number": os.getpid() == threading.get_native_id(),
    "collector": [gc.isenabled(), gc.get_threshold()],
}))
print(sys.stdin.read() + "that was the input", file=sys.stderr)
"""
"""A program that prints what it finds, and its input."""


@pytest.fixture(scope="module", autouse=True)
def new_template() -> None:
    engine_template.close()
    engine_template.install()


@pytest.fixture
def start():
    def start(code, *arguments, executed=False, **options):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        with engine_template.executing() if executed else nullcontext():
            return engine_template.Process([sys.executable, "-c", code, *arguments], **options)

    return start


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def forked(start, **options) -> bool:
    with start("import sys; print('torch' in sys.modules)", **options) as process:
        return process.communicate()[0] == "True\n"


@pytest.mark.parametrize("options", [{}, {"process_group": 0, "stdin": subprocess.DEVNULL}])
def test_a_forked_program_finds_the_same_process_state(start, tmp_path, options):
    reader, writer = os.pipe()
    found = []
    for executed in (False, True):
        process = start(
            SELF_REPORT,
            "serves",
            "é",
            executed=executed,
            pass_fds=(writer,),
            cwd=tmp_path,
            env=dict(os.environ),
            **{"stdin": subprocess.PIPE, **options},
        )
        output, error = process.communicate(None if "stdin" in options else "line\n")
        assert process.returncode == 0, error
        found.append((json.loads(output), error))
    os.close(reader)
    os.close(writer)
    (in_fork, told), (executed, expected) = found
    assert (in_fork.pop("forked"), executed.pop("forked")) == (True, False)
    for what, value in executed.items():
        assert in_fork[what] == value, what
    assert in_fork.keys() == executed.keys()
    assert str(writer) in in_fork["descriptors"]
    assert told == expected


@pytest.mark.parametrize("number", quick([signal.SIGKILL, signal.SIGTERM]))
def test_a_template_ends_with_the_process_that_uses_it(number):
    code = """
import sys, time
sys.path.append(sys.argv[1])
from support import engine_template
engine_template._ALWAYS = ()
template = engine_template.Template.start()
print(template.pid, flush=True)
time.sleep(600)
"""
    tests = str(Path(engine_template.__file__).parents[1])
    with subprocess.Popen([sys.executable, "-c", code, tests], stdout=subprocess.PIPE, text=True) as process:
        try:
            template = psutil.Process(int(process.stdout.readline()))
            assert template.status() != psutil.STATUS_ZOMBIE
        finally:
            process.send_signal(number)
        eventually(lambda: has_ended(template))
