"""``caesura serve`` as a process: how it starts, ends, guards itself and tells what went wrong."""

import fcntl
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import click
import httpx
import pytest
from support import engine_template
from support.http_serve import ServedEngine, served
from support.lanes import quick
from support.waiting import eventually

from caesura.client import SchedulerClient, ShuttingDown, launch_scheduler
from caesura.client.serve.app import interrupted_by_signals
from caesura.client.serve.options import OPEN_TO_ALL

pytestmark = pytest.mark.slow  # its engines take seconds to start

API, ADMIN = "user-key-7f3a", "admin-key-91bc"


def in_background(call) -> tuple[threading.Thread, list]:
    found: list = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    return thread, found


def wait_until_queued(server: ServedEngine, requests: int = 1) -> None:
    eventually(lambda: server.get("/get_load").json()[0]["num_waiting_reqs"] == requests)


def fails(*arguments: str, **options) -> str:
    """Return the stderr of a command that must fail soon."""
    done = engine_template.run(engine_template.CLI, "serve", *arguments, **options)
    assert done.returncode != 0
    return done.stderr


LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w.]+): ")


@pytest.mark.long
def test_all_processes_begin_their_log_lines_alike(tiny_model):
    with served("--model", str(tiny_model), "--restart") as engine:
        first = engine.engine_pid
        os.kill(first, signal.SIGKILL)
        eventually(lambda: engine.get("/health").status_code == 200 and engine.engine_pid != first)
        _, error = engine.stop()
    dated = [line for line in error.splitlines() if re.match(r"\d{4}-", line)]
    assert [line for line in dated if not LOG_LINE.match(line)] == []
    writers = {found[2].split(".")[0] for line in dated if (found := LOG_LINE.match(line))}
    assert {"scheduler", "caesura"} <= writers


@pytest.mark.parametrize("number", quick([signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
def test_a_signal_answers_every_request_and_ends_all(tiny_model, number):
    with served("--model", str(tiny_model)) as engine:
        pid = engine.engine_pid
        folder = Path(engine.announced.split("ipc://")[1].split("/scheduler.sock")[0])
        assert folder.is_dir()
        engine.ok("/pause_generation", {"mode": "in_place"})
        thread, found = in_background(
            lambda: httpx.post(f"{engine.url}/generate", json={"input_ids": [5]}, timeout=None)
        )
        wait_until_queued(engine)
        status, _ = engine.stop(number)
        thread.join()
    assert status == 0
    (answer,) = found
    assert answer.status_code == 200
    assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not folder.exists()


@pytest.mark.long
def test_a_second_signal_ends_a_drain(tiny_model):
    options = ("--shutdown-mode", "drain", "--drain-timeout-s", "3600")
    for signals, reason in ((1, "length"), (2, "abort")):
        with served("--model", str(tiny_model), *options) as engine:
            engine.ok("/pause_generation", {"mode": "in_place"})
            body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
            thread, found = in_background(
                lambda engine=engine, body=body: httpx.post(f"{engine.url}/generate", json=body, timeout=None)
            )
            wait_until_queued(engine)
            engine.process.send_signal(signal.SIGTERM)
            with SchedulerClient(engine.announced.split("engine ")[1].strip().rstrip(")")) as client:
                eventually(lambda client=client: refuses(client))
                if signals == 1:
                    client.continue_generation(force=True)
                else:
                    engine.process.send_signal(signal.SIGTERM)
                thread.join()
                assert found[0].json()["meta_info"]["finish_reason"]["type"] == reason
            engine.http.close()
            engine.process.communicate()
            assert engine.process.returncode == 0


def refuses(client: SchedulerClient) -> bool:
    handle = client.submit([5])
    client.status()  # answered after it
    if handle.done():
        with pytest.raises(ShuttingDown):
            handle.result()
        return True
    handle.abort()
    return False


def test_every_client_hears_of_a_dead_scheduler(tiny_model):
    with served("--model", str(tiny_model)) as engine:
        pid = engine.engine_pid
        engine.ok("/pause_generation", {"mode": "in_place"})
        bodies = [{"input_ids": [5], "stream": streamed} for streamed in (False, True)]
        calls = [
            in_background(lambda body=body: httpx.post(f"{engine.url}/generate", json=body, timeout=None))
            for body in bodies
        ]
        wait_until_queued(engine, len(bodies))
        os.kill(pid, signal.SIGKILL)
        for thread, _ in calls:
            thread.join()
        engine.http.close()
        _, error = engine.process.communicate()
    assert engine.process.returncode == 1
    assert "the scheduler process has ended" in error
    for _, (answer,) in calls:
        assert answer.status_code == 503
        assert "lost" in answer.json()["message"] or "ended" in answer.json()["message"]


ENGINE_THAT_IS_NEVER_ASKED = """
import asyncio, os, sys, tempfile
from caesura.client.connection.async_client import AsyncSchedulerClient
tempfile.tempdir = sys.argv.pop(1)
async def status(self, **options):
    os.write(2, b"asking\\n")
    await asyncio.Event().wait()
AsyncSchedulerClient.status = status
from caesura.client.cli import main
main()
"""


@pytest.mark.parametrize("number", quick([signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
@pytest.mark.parametrize("restart", [(), ("--restart",)])
def test_a_signal_before_listening_cancels_the_start(tiny_model, tmp_path, number, restart):
    command = [sys.executable, "-c", ENGINE_THAT_IS_NEVER_ASKED, str(tmp_path), "serve", "--port", "0"]
    command += ["--model", str(tiny_model), *restart]
    process = engine_template.Process(command, stderr=subprocess.PIPE, text=True)
    try:
        assert any(line == "asking\n" for line in process.stderr)
        process.send_signal(number)
        _, error = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert f"the server ends: {number.name} at start" in error
    assert "Traceback" not in error
    assert not list(tmp_path.glob("caesura-*"))


def test_a_second_signal_does_not_interrupt_the_cleanup():
    before, cleaned = signal.getsignal(signal.SIGTERM), []
    with pytest.raises(click.exceptions.Exit) as caught, interrupted_by_signals():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGINT)
            cleaned.append(signal.getsignal(signal.SIGTERM))
    assert cleaned == [signal.SIG_DFL]  # a third one would end the process
    assert caught.value.exit_code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_running_engine_is_served_and_left_alone(tiny_model):
    with launch_scheduler(tiny_model, num_threads=1) as client:
        with served("--endpoint", client.endpoint) as engine:
            assert len(engine.generate([5])["output_ids"]) == 8
            engine.ok("/pause_generation", {})
            assert client.status().pause_owner == "http"
            assert engine.stop()[0] == 0
        assert client.status().generation == "paused"
        client.continue_generation(force=True)


@pytest.mark.executed
def test_keys(tiny_model, tmp_path):
    (tmp_path / "api").write_text(API + "\n")
    arguments = ("--model", str(tiny_model), "--api-key-file", str(tmp_path / "api"))
    with served(*arguments, env={"CAESURA_ADMIN_KEY": ADMIN}) as engine:

        def status(path: str, key: str | None) -> int:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            method = "GET" if path in ("/server_info", "/health") else "POST"
            return engine.http.request(method, path, headers=headers, content="{}").status_code

        assert [status("/health", key) for key in (None, API)] == [200, 200]
        assert [status("/server_info", key) for key in (None, "x", API, ADMIN)] == [401, 401, 200, 200]
        paused = [status("/pause_generation", key) for key in (None, API, ADMIN[:-1], ADMIN)]
        assert paused == [401, 401, 401, 200]
        assert [status("/continue_generation", key) for key in (API, ADMIN)] == [401, 200]
        headers = {"authorization": f"Bearer {API}"}
        info = engine.get("/server_info", headers=headers)
        pid = info.json()["internal_states"][0]["pid"]
        inherited = Path(f"/proc/{pid}/environ").read_text() + Path(f"/proc/{pid}/cmdline").read_text()
        own = Path(f"/proc/{engine.process.pid}/cmdline").read_text()
        metrics = engine.get("/metrics", headers=headers).text
        _, error = engine.stop()
        for key in (API, ADMIN):
            for text in (info.text, inherited, own, metrics, engine.announced, error):
                assert key not in text


def test_an_address_beyond_loopback_needs_a_key(tiny_model, tmp_path):
    (tmp_path / "empty").write_text("\n")
    model = ("--model", str(tiny_model))
    assert "--api-key-file" in fails(*model, "--host", "0.0.0.0")
    assert "--api-key-file" in fails(*model, "--host", "::", env={**os.environ, "CAESURA_ADMIN_KEY": "x"})
    assert "empty" in fails(*model, "--api-key-file", str(tmp_path / "empty"))
    assert "cannot read" in fails(*model, "--api-key-file", str(tmp_path / "missing"))


def test_wrong_command_lines_say_why(tiny_model, tmp_path):
    assert "either --model or --endpoint" in fails()
    assert "cannot be used with --endpoint" in fails("--endpoint", "ipc:///x", "--num-threads", "1")
    assert "missing: there is no such folder" in fails("--model", str(tmp_path / "missing"), "--port", "0")
    assert "`hf download Qwen/Qwen3-0.6B --local-dir FOLDER`" in fails(
        "--model", "Qwen/Qwen3-0.6B", "--port", "0"
    )
    assert "no-such-option" in fails("--model", str(tiny_model), "--port", "0", "--no-such-option", "1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "cannot listen" in fails("--model", str(tiny_model), "--port", port)


def test_a_missing_extra_is_named():
    code = "import sys; sys.modules['litestar'] = None; from caesura.client.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "serve", "--model", "x"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "caesura[serve]" in done.stderr


def test_the_client_needs_no_web_server():
    code = (
        "import sys, caesura.client, caesura.client.cli; "
        "print([n for n in ('litestar', 'uvicorn', 'tokenizers', 'torch') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.long
def test_beyond_loopback_without_a_key_needs_an_option(tiny_model):
    with served("--model", str(tiny_model), "--host", "0.0.0.0", "--insecure-bind") as engine:
        url = engine.url.replace("0.0.0.0", "127.0.0.1")
        named = httpx.get(f"{url}/server_info", headers={"host": "rollout-3.cluster"})  # as trainers call it
        foreign = httpx.get(f"{url}/server_info", headers={"origin": "https://evil.example"})
        assert (named.status_code, foreign.status_code) == (200, 403)
        _, error = engine.stop()
    assert "warning: insecure: 0.0.0.0" in error
    assert OPEN_TO_ALL in error
    assert "no API key" in error


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    command += " -addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder / "cert.pem", folder / "key.pem"


@pytest.mark.long
def test_tls(tiny_model, certificate, tmp_path):
    cert, key = map(str, certificate)
    (tmp_path / "api").write_text(API)
    files = ("--ssl-certfile", cert, "--ssl-keyfile", key)
    keys = ("--api-key-file", str(tmp_path / "api"))
    headers = {"authorization": f"Bearer {API}"}
    with served("--model", str(tiny_model), *files, *keys, "--host", "0.0.0.0") as engine:
        url = engine.url.replace("0.0.0.0", "127.0.0.1")
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=cert)
        with httpx.Client(verify=context, headers=headers) as http:
            body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
            assert len(http.post(f"{url}/generate", json=body).json()["output_ids"]) == 3
        with pytest.raises(httpx.TransportError):
            httpx.get(url.replace("https", "http") + "/health")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/health")
        silent = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))  # no handshake
        status, error = engine.stop()
        silent.close()
    assert status == 0
    assert "warning" not in error
    with served("--model", str(tiny_model), *files, "--ssl-ca-certs", cert) as engine:
        context = ssl.create_default_context(cafile=cert)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{engine.url}/health", verify=context)
        context = ssl.create_default_context(cafile=cert)
        context.load_cert_chain(cert, key)
        assert httpx.get(f"{engine.url}/health", verify=context).status_code == 200


@pytest.mark.long
def test_wrong_files_for_tls_say_why(tiny_model, certificate, tmp_path):
    cert, key = map(str, certificate)
    locked = tmp_path / "locked.pem"
    command = ["openssl", "rsa", "-in", key, "-aes128", "-passout", "pass:x", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    model = ("--model", str(tiny_model))
    assert "needs --ssl-certfile" in fails(*model, "--ssl-keyfile", key)
    assert "missing.pem" in fails(*model, "--ssl-certfile", "missing.pem")
    assert "TLS cannot be set up" in fails(*model, "--ssl-certfile", cert)  # has no key in it
    assert "TLS cannot be set up" in fails(
        *model, "--ssl-certfile", cert, "--ssl-keyfile", str(locked), stdin=subprocess.DEVNULL
    )


def test_a_hung_engine_is_unhealthy_a_dead_one_refuses(tiny_model):
    with (
        launch_scheduler(tiny_model, num_threads=1) as client,
        served("--endpoint", client.endpoint) as engine,
    ):
        pid = client.status().pid
        assert engine.get("/health").status_code == 200
        os.kill(pid, signal.SIGSTOP)
        try:
            for path in ("/health", "/health_generate", "/ready"):
                assert engine.get(path).status_code == 503
        finally:
            os.kill(pid, signal.SIGCONT)
        assert engine.get("/health").status_code == 200
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: engine.get("/health").status_code == 503)
        refused = engine.post("/generate", {"input_ids": [5]})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert engine.stop()[0] == 0


@pytest.mark.long
def test_an_unread_stderr_stops_nothing(tiny_model):
    with served("--model", str(tiny_model), "--restart") as engine:
        assert engine.process.stderr is not None
        fcntl.fcntl(engine.process.stderr, fcntl.F_SETPIPE_SZ, 4096)
        for _ in range(60):
            engine.ok("/pause_generation")
            engine.ok("/continue_generation")
        host, _, port = engine.url.removeprefix("http://").partition(":")
        for _ in range(3):
            with socket.create_connection((host, int(port))) as peer:
                peer.sendall(b"garbage\r\n\r\n")
                assert peer.recv(65536).startswith(b"HTTP/1.1 400 ")
        pid = engine.engine_pid
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: engine.get("/health").status_code == 503)
        eventually(lambda: engine.get("/health").status_code == 200)
        assert engine.engine_pid != pid
