"""The ``caesura`` command against a fake scheduler."""

import contextlib
import json
import re
import socket
import sys
from functools import partial
from typing import get_args

import msgspec
import pytest
from support import engine_template
from support.command_line import run_command
from support.fake_scheduler import FakeScheduler, answer, status_reply

from caesura.io_struct import (
    PAUSE_MODES,
    AbortReq,
    ComponentStatus,
    ContinueGenerationReqInput,
    ErrorCode,
    ErrorReply,
    FlushCacheReqInput,
    ImageLoad,
    PauseGenerationReqInput,
    PauseMode,
    RenewPauseLeaseReqInput,
    RenewPauseLeaseReqOutput,
    StartProfileReqInput,
    StepFailures,
    StopProfileReqInput,
    StopProfileReqOutput,
    UpdateWeightFromDiskReqInput,
)


@pytest.fixture
def serve(endpoint):
    """Starts an engine at the address of the environment; ``handler`` answers."""
    with contextlib.ExitStack() as engines:
        yield lambda handler=answer: engines.enter_context(FakeScheduler(endpoint, handler))


@pytest.fixture
def fake(serve):
    return serve()


@pytest.fixture
def caesura(endpoint):
    return partial(run_command, CAESURA_ENDPOINT=endpoint)


def replying(**fields):
    return lambda request: [msgspec.structs.replace(status_reply(request), **fields)]


def test_status_is_readable(fake, caesura):
    code, out, err = caesura("status")
    assert (code, err) == (0, "")
    since = r"paused \(in_place, for 1.5 s, since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d, no owner, no lease\)"
    assert re.search(since, out)
    assert "throughput  0.0 tokens/s in the last seconds" in out
    assert "64 free + 16 cached + 32 held = 112" in out
    assert "3.0 MiB reserved" in out
    assert "avx2: linear, sampler; torch: attention (attention_backend = 'sdpa')" in out


def test_status_shows_the_owner_and_the_lease_of_a_pause(serve, caesura):
    serve(replying(pause_owner="trainer 7", lease_left_s=12.34, gen_throughput=1234.56))
    code, out, _ = caesura("status")
    words = " ".join(out.split())  # wherever the table breaks a line
    assert code == 0
    assert "owner trainer 7, lease ends in 12.3 s)" in words
    assert "throughput 1234.6 tokens/s in the last seconds" in words


def test_status_of_an_image_engine_has_no_tokens(serve, caesura):
    vae = ComponentStatus(name="vae", residency="offload", nbytes=5 << 20, device_bytes=1 << 20)
    images = ImageLoad(encoding=1, denoising=7, decoding=2)
    failures = StepFailures(failed=3, retried=2, splits=2, token_limit=4)
    serve(replying(images=images, step_failures=failures, components=[vae]))
    code, out, _ = caesura("status")
    assert code == 0
    assert "1 encoding, 7 denoising, 2 decoding, " in out
    assert "at most 4 samples for now" in out
    assert "offload, 1.0 of 5.0 MiB on the device" in out
    assert not re.search("token|KV|prefill|context|vocabulary", out), out


def test_status_as_json_is_the_reply(fake, caesura):
    code, out, _ = caesura("status", "--json")
    assert code == 0
    reply = json.loads(out)
    assert (reply["type"], reply["step"], reply["kv"]["held"]) == ("GetStatusReqOutput", 12, 32)


def test_pause_and_continue(fake, caesura):
    code, out, _ = caesura("pause", "--mode", "retract", "--owner", "me")
    assert code == 0
    assert "retract" in out
    request = fake.next_request(PauseGenerationReqInput)
    assert (request.mode, request.owner) == ("retract", "me")
    code, out, _ = caesura("continue", "--no-torch-empty-cache", "--force")
    assert code == 0
    assert "4.0 MiB" in out
    assert "ranks" not in out, "an engine of one process has no others"
    request = fake.next_request(ContinueGenerationReqInput)
    assert (request.torch_empty_cache, request.force) == (False, True)


def test_every_mode_of_a_pause_is_offered(caesura):
    _, out, _ = caesura("pause", "--help")
    said = " ".join(out.split())
    assert all(f"{mode}: {PAUSE_MODES[mode]}" in said for mode in get_args(PauseMode))


def test_a_pause_shows_the_end_of_its_lease(fake, caesura):
    given = {"mode": "in_place", "owner": "me", "lease_s": 90.0, "on_lease_expiry": "stay"}
    code, out, _ = caesura(
        "pause", "--owner", "me", "--lease", "90", "--mode", "in_place", "--on-lease-expiry", "stay"
    )
    request = fake.next_request(PauseGenerationReqInput)
    assert {name: getattr(request, name) for name in given} == given
    until = r"lease\s+until \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \(for 60.0 s\), then stay"
    assert code == 0
    assert re.search(until, " ".join(out.split()))
    assert fake.next_request(RenewPauseLeaseReqInput).owner == "me"


def test_a_lease_refused_for_another_owner_is_not_promised(serve, caesura):
    def others(request):
        if isinstance(request, RenewPauseLeaseReqInput):
            return [RenewPauseLeaseReqOutput(id=request.id, renewed=False)]
        return answer(request)

    serve(others)
    code, out, _ = caesura("pause", "--owner", "me", "--lease", "60")
    assert (code, "lease             none: the pause is another owner's" in out) == (0, True)


def test_profile_waits_for_its_steps_and_names_the_file(fake, caesura):
    code, out, err = caesura("profile", "--num-steps", "7", "--record-shapes", "--output-dir", "today")
    assert (code, err) == (0, "")
    assert "/traces/t.json.gz" in out
    request = fake.next_request(StartProfileReqInput)
    assert (request.num_steps, request.record_shapes, request.with_stack) == (7, True, False)
    assert request.output_dir == "today"
    assert fake.next_request(StopProfileReqInput).wait


def test_a_long_path_is_shown_whole(serve, caesura):
    path = "/traces/" + "x" * 80 + ".json.gz"

    def far(request):
        if isinstance(request, StopProfileReqInput):
            return [StopProfileReqOutput(id=request.id, path=path, steps=20)]
        return answer(request)

    serve(far)
    code, out, _ = caesura("profile", COLUMNS="60")
    assert code == 0
    assert path in "".join(line.removeprefix("path").strip() for line in out.splitlines())


def test_flush_update_and_abort(fake, caesura, tmp_path):
    assert caesura("flush", "--wait", "3")[0] == 0
    assert fake.next_request(FlushCacheReqInput).timeout_s == 3.0
    with contextlib.chdir(tmp_path):
        code, out, _ = caesura("update", "new", "--weight-version", "7", "--no-flush-cache")
    assert code == 0
    assert "weight_version" in out
    request = fake.next_request(UpdateWeightFromDiskReqInput)
    assert (request.model_path, request.weight_version) == (str(tmp_path / "new"), "7")
    assert not request.flush_cache
    assert caesura("abort", "r1")[0] == 0
    assert fake.next_request(AbortReq).rid == "r1"
    assert caesura("abort", "--all")[0] == 0
    assert fake.next_request(AbortReq).abort_all


HOSTILE = "\x1b[2J\x9b31m[red]mine[/red]\u202e\r\n"
SHOWN = r"\x1b[2J\x9b31m[red]mine[/red]\u202e\r\n"


def test_foreign_strings_are_text_and_errors_one_line(serve, caesura):
    def hostile(request):
        if isinstance(request, FlushCacheReqInput):
            return [ErrorReply(id=request.id, code=ErrorCode.NOT_IDLE, message=f"held by {HOSTILE}")]
        return replying(pause_owner=HOSTILE, weight_version=HOSTILE, model_path=HOSTILE)(request)

    serve(hostile)
    code, out, err = caesura("status", COLUMNS="200")
    refused = caesura("flush", COLUMNS="200")
    assert (code, err, out.count(SHOWN)) == (0, "", 3)
    assert all(char.isprintable() or char == "\n" for char in out)
    assert refused == (1, "", f"error: held by {SHOWN} [not_idle]\n")


@pytest.mark.parametrize(
    "arguments,said",
    [
        (
            ["status"],
            "Give --endpoint, or set CAESURA_ENDPOINT, to its address: ipc://PATH or tcp://HOST:PORT",
        ),
        (["pause", "--endpoint", "ipc:///x", "--mode", "slowly"], "slowly"),
        (["pause", "--endpoint", "ipc:///x", "--lease", "60"], "--lease needs --owner"),
        (["pause", "--endpoint", "ipc:///x", "--owner", "me", "--lease", "0"], "0.0<x<=86400.0"),
        (["abort", "--endpoint", "ipc:///x"], ""),
        (["abort", "--endpoint", "ipc:///x", "r", "--all"], ""),
        (["dance"], "dance"),
    ],
)
def test_a_wrong_command_line_is_status_two(arguments, said):
    code, out, err = run_command(*arguments, CAESURA_ENDPOINT=None)
    assert (code, out) == (2, "")
    assert "Usage:" in err
    assert said in err
    assert "Traceback" not in err


def test_an_impossible_endpoint_is_one_line(caesura):
    code, _, err = caesura("status", "--endpoint", "nowhere")
    assert code == 1
    assert err.startswith("error: endpoint = 'nowhere'")
    assert err.count("\n") == 1


@pytest.mark.parametrize("verb", [["status"], ["pause"], ["serve", "--port", "0"]])
def test_a_missing_scheduler_is_reported_in_a_line(caesura, tmp_path, verb):
    endpoint = f"ipc://{tmp_path}/nobody"
    code, _, err = caesura(*verb, "--endpoint", endpoint)
    assert code == 1
    starts = f"`caesura scheduler --endpoint {endpoint}` starts one"
    missing = f"no scheduler answers at {endpoint}: there is no such socket file"
    assert err == f"error: {missing}; {starts} [engine_died]\n"


def test_a_taken_port_error_names_the_option(caesura):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        code, _, err = caesura("serve", "--model", "/m", "--port", str(port))
    assert code == 1
    assert err == (
        f"Error: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "give another --port (0: any free one)\n"
    )


def test_scheduler_becomes_the_engine_with_every_argument():
    code = "import os, sys; from caesura.client import cli; os.execv = print; cli.main(sys.argv[1:])"
    options = ["--model", "/m", "--dtype=float32", "--no-prefix-cache", "--help"]
    done = engine_template.run(code, "scheduler", *options)
    command = [sys.executable, "-P", "-m", "caesura.scheduler", *options]
    assert done.stdout == f"{sys.executable} {command}\n", done.stderr
