"""Streams over a socket: one event for each message of the engine, slow readers, and events that fail."""

import contextlib
import json
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.fake_scheduler import answer, delta, finished, results, rid_of
from support.faults import Fault

from caesura.client.serve.sglang.generate import EventWriter
from caesura.io_struct import GenerateReqInput, GetStatusReqInput, Message, Request


class Script:
    """An engine that sends ``messages``, made for the rids of all generations, one with each status."""

    def __init__(self, generations: int, messages: Callable[[list[str]], list[Message]]) -> None:
        self.left: list[Message] | None = None
        """Messages that were not sent yet. None until all generations are here."""
        self._rids: list[str] = []
        self._generations = generations
        self._messages = messages

    def __call__(self, request: Request) -> Iterable[Message | bytes]:
        if isinstance(request, GenerateReqInput):
            self._rids.append(rid_of(request))
            if len(self._rids) == self._generations:
                self.left = self._messages(self._rids)
            return []
        due = [self.left.pop(0)] if self.left and isinstance(request, GetStatusReqInput) else []
        return [*due, *answer(request)]


def steps(rids: list[str], count: int, size: int = 1) -> list[Message]:
    """Return messages of ``size`` tokens, 0, 1, 2, …, for each rid, the last with the ends."""
    tokens = list(range(count * size))
    parts = [(at, tokens[at : at + size]) for at in range(0, len(tokens), size)]
    sent: list[Message] = [delta(*((rid, 0, at, part) for rid in rids)) for at, part in parts[:-1]]
    return [*sent, results(*(finished(rid, tokens) for rid in rids))]


def body(**fields: Any) -> dict[str, Any]:
    return {"input_ids": [5], "stream": True, "sampling_params": {"max_new_tokens": None}, **fields}


def events(lines: Iterator[str]) -> Iterator[Any]:
    data = (line.removeprefix("data: ") for line in lines if line)
    return (each if each == "[DONE]" else json.loads(each) for each in data)


def test_each_message_of_the_engine_makes_an_event(serve):
    script = Script(1, lambda rids: steps(rids, 6))
    _, server = serve(script)
    with httpx.Client(base_url=server.url, timeout=None) as client:
        with client.stream("POST", "/generate", json=body()) as response:  # which asks for a status itself
            found = events(response.iter_lines())
            for length in range(1, 6):
                while len(script.left or ()) > 6 - length:
                    client.get("/health")
                assert next(found)["output_ids"] == list(range(length))
            client.get("/health")
            last, done = found
        assert (last["output_ids"], done) == (list(range(6)), "[DONE]")
        assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 6}


@pytest.mark.parametrize("asked", [3, None])
def test_tokens_of_an_interval_make_an_event(serve, asked):
    script = Script(1, lambda rids: steps(rids, 6))
    _, server = serve(script, stream_interval=3 if asked is None else 5)
    sampling = {"max_new_tokens": None, "stream_interval": asked}
    with (
        httpx.Client(base_url=server.url, timeout=None) as client,
        client.stream("POST", "/generate", json=body(sampling_params=sampling)) as response,
    ):
        found = events(response.iter_lines())
        while script.left != []:
            client.get("/health")
        *counts, done = [each if each == "[DONE]" else len(each["output_ids"]) for each in found]
    assert (counts, done) == ([1, 4, 6], "[DONE]")


def test_a_slow_reader_gets_every_token_in_few_events(serve):
    script = Script(1, lambda rids: steps(rids, 200, 100))
    _, server = serve(script)
    raw = json.dumps(body()).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(raw)}"
    with socket.socket() as peer, httpx.Client(base_url=server.url) as client:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.connect(server.address)
        peer.sendall(f"{head}\r\n\r\n".encode() + raw)
        while script.left != []:
            client.get("/health")
        with peer.makefile("rb") as file:
            found = [line for line in file if line.startswith(b"data: {")]
    assert json.loads(found[-1].removeprefix(b"data: "))["output_ids"] == list(range(20_000))
    assert len(found) < 150


def test_an_event_that_fails_ends_its_stream_only(serve):
    def third_of_bad(writer: EventWriter, _: Any) -> bool:
        return writer.count == 2 and writer.request.rid == "bad"

    script = Script(2, lambda rids: steps(rids, 5))
    _, server = serve(script)

    def read(rid: str) -> list[str]:
        lines: list[str] = []
        with (
            contextlib.suppress(httpx.RemoteProtocolError),
            httpx.Client(base_url=server.url, timeout=None) as client,
            client.stream("POST", "/generate", json=body(rid=rid)) as response,
        ):
            lines.extend(response.iter_lines())
        return lines

    fault = Fault(EventWriter, "_take", ZeroDivisionError(), only=third_of_bad)
    with fault, ThreadPoolExecutor() as pool, httpx.Client(base_url=server.url) as client:
        bad, good = (pool.submit(read, rid) for rid in ("bad", "good"))
        while script.left != []:
            client.get("/health")
        *_, last, done = events(iter(good.result()))
        assert (last["output_ids"], done) == (list(range(5)), "[DONE]")
        *_, last = events(iter(bad.result()))
        assert last["output_ids"] == [0, 1]
