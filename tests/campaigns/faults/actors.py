"""Processes that faults happen to: trainers, clients, and clients that misbehave.

Invariants:
- An actor tells the campaign through its pipe where it is (``("at", phase)``) and how it ended: ``("done",
  facts)``, ``("refused", code, message)`` for a typed error, ``("crashed", traceback)`` for any other.
- A trainer's pause has a lease and its sessions a deadline, so an engine gets over its death by itself.
- Calls have a timeout and are repeated under the same message id, as docs/reference/wire.md tells clients to.
"""

import ctypes
import errno
import http.client
import json
import os
import resource
import shutil
import signal
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import zmq
from safetensors.torch import load_file
from support.client_updates import update_by

from caesura.client import EngineDied, SamplingParams, SchedulerClient, TimedOut
from caesura.client.trainer import WeightUpdateGroup
from caesura.io_struct import CaesuraError, GenerateReqInput, PauseMode, encode, new_id

Transport = Literal["disk", "tensor", "ipc", "distributed"]
T = TypeVar("T")

GROUP_TIMEOUT_S = 5.0
CONNECT_S = 10.0
"""Seconds that a client waits for an engine that restarts."""
BUCKET_BYTES = 128 << 10
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000


@dataclass(frozen=True, kw_only=True)
class Errand:
    """Instructions of one actor."""

    endpoint: str
    work: Literal["update", "pause", "release", "stream", "mute", "write", "http", "http-update"]
    seed: int = 0
    mode: PauseMode | None = "in_place"
    """Mode of the pause around the work, or None to let the engine go on."""
    transport: Transport = "disk"
    folder: Path | None = None
    label: str = ""
    explicit: bool = False
    """True if the trainer begins and ends a session around the work."""
    lease_s: float = 1.0
    hold_s: float = 0.0
    """Seconds that a pause or a release lasts."""
    timeout_s: float = 20.0
    attempts: int = 3
    prompt: tuple[int, ...] = (5,)
    new_tokens: int = 200
    samples: int = 1
    file_bytes: int | None = None
    """Largest size of a file or of shared memory in bytes, or None without a limit."""
    descriptors: int | None = None
    """Number of descriptors that may be opened beyond those at the start, or None without a limit."""
    disk_bytes: int | None = None
    """Size of the private file system that a checkpoint is written to."""


def perform(errand: Errand, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        _limit(errand)
        facts = _WORK[errand.work](errand, pipe)
    except CaesuraError as error:
        _tell(pipe, "refused", str(error.code), error.message)
    except (OSError, zmq.ZMQError, MemoryError, http.client.HTTPException) as error:
        _tell(pipe, "refused", type(error).__name__, str(error))
    except BaseException:  # noqa: BLE001  the campaign judges it
        _tell(pipe, "crashed", traceback.format_exc())
    else:
        _tell(pipe, "done", facts)
    os._exit(0)  # as a process whose threads a fault may have left in any state


def _tell(pipe: Connection, *event: Any) -> None:
    with suppress(OSError):
        pipe.send(event)


def _limit(errand: Errand) -> None:
    if errand.file_bytes is not None:
        _lower(resource.RLIMIT_FSIZE, errand.file_bytes)
    if errand.descriptors is not None:
        used = max(int(name) for name in os.listdir("/proc/self/fd"))
        _lower(resource.RLIMIT_NOFILE, used + errand.descriptors)


def _lower(limit: int, value: int) -> None:
    resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))


def _again(errand: Errand, call: Callable[[str], T]) -> T:
    message_id = new_id()
    for _ in range(errand.attempts - 1):
        with suppress(TimedOut, EngineDied):
            return call(message_id)
    return call(message_id)


def _trainer(errand: Errand) -> SchedulerClient:
    return SchedulerClient(errand.endpoint, owner=f"trainer {os.getpid()}", connect_timeout=CONNECT_S)


@contextmanager
def _paused(errand: Errand, client: SchedulerClient, pipe: Connection) -> Iterator[None]:
    """Pause the engine, and let it go on after a block that succeeds."""
    mode, options = errand.mode, {"timeout": errand.timeout_s}
    _tell(pipe, "at", "pause")
    if mode is not None:
        _again(errand, lambda mid: client.pause(mode, lease_s=errand.lease_s, message_id=mid, **options))
    yield
    _tell(pipe, "at", "continue")
    if mode is not None:
        _again(errand, lambda mid: client.continue_generation(message_id=mid, **options))


def _update(errand: Errand, pipe: Connection) -> dict[str, Any]:
    with (
        _trainer(errand) as client,
        _group(errand, client) as group,
        _paused(errand, client, pipe),
        _session(errand, client),
    ):
        _tell(pipe, "at", "update")
        _push(errand, client, group)
    return {}


def _group(errand: Errand, client: SchedulerClient) -> AbstractContextManager[WeightUpdateGroup | None]:
    if errand.transport != "distributed":
        return nullcontext()
    return WeightUpdateGroup.create([client], timeout_s=GROUP_TIMEOUT_S)


def _session(errand: Errand, client: SchedulerClient) -> AbstractContextManager[object]:
    if not errand.explicit:
        return nullcontext()
    return client.weight_update(
        weight_version=errand.label, deadline_s=errand.lease_s, timeout=errand.timeout_s
    )


def _push(errand: Errand, client: SchedulerClient, group: WeightUpdateGroup | None) -> None:
    options = {"weight_version": errand.label, "flush_cache": errand.mode != "in_place"}
    options |= {"timeout": errand.timeout_s, "bucket_bytes": BUCKET_BYTES}
    if errand.transport == "disk":
        _again(errand, lambda mid: update_by(client, "disk", {}, errand.folder, message_id=mid, **options))
    else:
        tensors = load_file(f"{errand.folder}/model.safetensors")
        update_by(client, errand.transport, tensors, group=group, **options)


def _only_pause(errand: Errand, pipe: Connection) -> dict[str, Any]:
    with _trainer(errand) as client, _paused(errand, client, pipe):
        _tell(pipe, "at", "paused")
        time.sleep(errand.hold_s)
    return {}


def _release(errand: Errand, pipe: Connection) -> dict[str, Any]:
    with _trainer(errand) as client, _paused(errand, client, pipe):
        _tell(pipe, "at", "release")
        _again(errand, lambda mid: client.release_memory(message_id=mid, timeout=errand.timeout_s))
        _tell(pipe, "at", "released")
        time.sleep(errand.hold_s)
        _tell(pipe, "at", "resume")
        _again(errand, lambda mid: client.resume_memory(message_id=mid, timeout=errand.timeout_s))
        _tell(pipe, "at", "update")
        _push(replace(errand, transport="disk"), client, None)
    return {}


def _greedy(errand: Errand) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=errand.new_tokens, temperature=0.0, ignore_eos=True, n=errand.samples
    )


def _stream(errand: Errand, pipe: Connection) -> dict[str, Any]:
    client = SchedulerClient(errand.endpoint, connect_timeout=CONNECT_S)
    handle = client.submit(list(errand.prompt), _greedy(errand), stream=True)
    _tell(pipe, "at", "submitted")
    streamed: dict[int, list[int]] = {index: [] for index in range(errand.samples)}
    for delta in handle.deltas(timeout=errand.timeout_s):
        if not any(streamed.values()):
            _tell(pipe, "at", "streaming")
        if delta.start != len(streamed[delta.index]):
            raise AssertionError(f"a delta starts at {delta.start} after {len(streamed[delta.index])} tokens")
        streamed[delta.index] += delta.output_ids
    outputs = handle.results(errand.timeout_s)
    client.close()
    if any(output.output_ids != streamed[output.index] for output in outputs):
        raise AssertionError("the streamed tokens are not the result's")
    samples = [
        (o.output_ids, [(s.version, s.start, s.end) for s in o.weight_versions], o.finish_reason.type)
        for o in outputs
    ]
    return {"samples": samples}


def _mute(errand: Errand, pipe: Connection) -> dict[str, Any]:
    dealer = zmq.Context().socket(zmq.DEALER)
    dealer.rcvhwm, dealer.linger = 1, 0
    dealer.setsockopt(zmq.RCVBUF, 4096)
    dealer.connect(errand.endpoint)
    prompt, params = list(errand.prompt), _greedy(errand)
    for _ in range(4):
        dealer.send(encode(GenerateReqInput(input_ids=prompt, sampling_params=params, stream=True)))
    dealer.poll(round(errand.timeout_s * 1000))
    _tell(pipe, "at", "streaming")
    time.sleep(errand.hold_s)
    return {}


def _write(errand: Errand, pipe: Connection) -> dict[str, Any]:
    assert errand.folder is not None
    target = Path(errand.endpoint.removeprefix("ipc://")).with_name(f"written-{os.getpid()}")
    target.mkdir()
    seen_by_engine = target
    try:
        if errand.disk_bytes is not None and _private_disk(target, errand.disk_bytes):
            seen_by_engine = Path(f"/proc/{os.getpid()}/root{target}")
        with suppress(OSError):
            shutil.copytree(errand.folder, target, dirs_exist_ok=True)
        errand = replace(errand, folder=seen_by_engine, transport="disk", file_bytes=None)
        return _update(errand, pipe)
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _private_disk(folder: Path, nbytes: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0:
        return False
    if libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={nbytes}".encode()) != 0:
        code = ctypes.get_errno()
        if code in (errno.EPERM, errno.ENODEV):
            return False
        raise OSError(code, os.strerror(code))
    return True


def _http(errand: Errand, pipe: Connection) -> dict[str, Any]:
    sampling = {"max_new_tokens": errand.new_tokens, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": list(errand.prompt), "sampling_params": sampling, "stream": True}
    last: dict[str, Any] = {}
    with _post(errand, "/generate", body) as response:
        for line in response:
            if not last:
                _tell(pipe, "at", "streaming")
            if line.startswith(b"data: {"):
                last = json.loads(line[6:])
    if "error" in last or "meta_info" not in last:
        raise EngineDied(f"the stream ended with {json.dumps(last)[:300]}")
    spans = [(s["version"], s["start"], s["end"]) for s in last["meta_info"].get("weight_versions") or ()]
    reason = (last["meta_info"]["finish_reason"] or {"type": "cut"})["type"]
    if reason == "cut":
        raise EngineDied("the stream ended before its result")
    return {"samples": [(last["output_ids"], spans, reason)]}


def _http_update(errand: Errand, pipe: Connection) -> dict[str, Any]:
    flush = errand.mode != "in_place"
    update = {"model_path": str(errand.folder), "weight_version": errand.label, "flush_cache": flush}
    for phase, path, body in (
        ("pause", "/pause_generation", {"mode": errand.mode, "lease_s": errand.lease_s}),
        ("update", "/update_weights_from_disk", update),
        ("continue", "/continue_generation", {}),
    ):
        _tell(pipe, "at", phase)
        with _post(errand, path, body) as response:
            response.read()
    return {}


def _post(errand: Errand, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        errand.endpoint + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=errand.timeout_s)


_WORK: dict[str, Callable[[Errand, Connection], dict[str, Any]]] = {
    "update": _update,
    "pause": _only_pause,
    "release": _release,
    "stream": _stream,
    "mute": _mute,
    "write": _write,
    "http": _http,
    "http-update": _http_update,
}
