"""Failures as OpenAI clients see them."""

import asyncio
from collections.abc import Iterable

import httpx
import msgspec
import pytest
from support.fake_scheduler import (
    FakeScheduler,
    VanishError,
    answer,
    delta,
    finished,
    floats,
    results,
    rid_of,
)
from support.http_server import front_end

from caesura.client import AsyncSchedulerClient
from caesura.client.serve.app import create_app
from caesura.client.serve.pages.metrics import Metrics
from caesura.io_struct import (
    ErrorCode,
    ErrorReply,
    FinishReason,
    GenerateReqInput,
    Message,
    Request,
    WeightVersionSpan,
)

PROMPT = {"prompt": [5, 6, 7], "max_tokens": 4, "return_token_ids": True}


class CountingMetrics(Metrics):
    def __init__(self) -> None:
        super().__init__()
        self.begun = 0
        self.ended: list[tuple[int, str]] = []
        self.codes: list[str] = []

    def request_started(self) -> None:
        self.begun += 1

    def request_finished(
        self, tokens: int, seconds: float, first_token_s: float | None, finish_type: str
    ) -> None:
        self.ended.append((tokens, finish_type))

    def error(self, code: str) -> None:
        self.codes.append(code)


def post(tmp_path, handler, body: dict[str, object], path: str = "/v1/completions"):
    endpoint = f"ipc://{tmp_path}/engine"
    metrics = CountingMetrics()

    async def run() -> httpx.Response:
        async with AsyncSchedulerClient(endpoint, connect_timeout=None) as client:
            app = create_app(front_end(client, metrics=metrics, model_path="/models/tiny"))
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                return await http.post(path, content=msgspec.json.encode(body), timeout=None)

    with FakeScheduler(endpoint, handler):
        return asyncio.run(run()), metrics


def refusing(code: ErrorCode, **detail: object):
    def handler(request: Request) -> Iterable[Message]:
        if isinstance(request, GenerateReqInput):
            return [ErrorReply(id=request.id, code=code, message="because", detail=detail)]
        return answer(request)

    return handler


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (ErrorCode.INVALID_REQUEST, 400, "invalid_request_error"),
        (ErrorCode.DUPLICATE_RID, 400, "invalid_request_error"),
        (ErrorCode.QUEUE_FULL, 503, "server_error"),
        (ErrorCode.SHUTTING_DOWN, 503, "server_error"),
        (ErrorCode.WEIGHTS_POISONED, 503, "server_error"),
        (ErrorCode.INTERNAL, 500, "server_error"),
    ],
)
def test_a_refusal_has_its_status(tmp_path, code, status, kind, stream):
    response, metrics = post(
        tmp_path, refusing(code, field="sampling_params.max_new_tokens"), {**PROMPT, "stream": stream}
    )
    assert response.status_code == status
    retryable = {"retryable": True} if status == 503 else {}
    assert ("retry-after" in response.headers) == bool(retryable)
    assert response.json() == {
        "error": {"message": "because", "type": kind, "param": "max_tokens", "code": str(code), **retryable}
    }
    assert (metrics.begun, metrics.ended, metrics.codes) == (1, [(0, "error")], [code])


@pytest.mark.parametrize(
    ("code", "retryable"),
    [
        (ErrorCode.QUEUE_FULL, True),
        (ErrorCode.WEIGHTS_INVALID, True),
        (ErrorCode.OUT_OF_MEMORY, False),
        (ErrorCode.VERSION_MISMATCH, False),
    ],
)
def test_a_native_refusal_says_whether_it_passes(tmp_path, code, retryable):
    response, _ = post(tmp_path, refusing(code), {"input_ids": [5]}, "/generate")
    body = response.json()
    assert response.status_code == 503
    assert (body.get("retryable", False), body["error"].get("retryable", False)) == (retryable, retryable)


def test_one_refused_prompt_refuses_all(tmp_path):
    def handler(request: Request) -> Iterable[Message]:
        if isinstance(request, GenerateReqInput) and request.input_ids == [2]:
            return [ErrorReply(id=request.id, code=ErrorCode.PROMPT_TOO_LONG, message="too long")]
        return [] if isinstance(request, GenerateReqInput) else answer(request)

    for stream in (False, True):
        body = {**PROMPT, "prompt": [[1], [2], [3]], "stream": stream}
        response, metrics = post(tmp_path, handler, body)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert (metrics.begun, len(metrics.ended)) == (3, 3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine_is_unavailable(tmp_path, stream):
    def vanish(request: Request) -> Iterable[Message]:
        raise VanishError

    response, metrics = post(tmp_path, vanish, {**PROMPT, "stream": stream})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_died"
    assert metrics.ended == [(0, "error")]


def events(response: httpx.Response) -> list[bytes]:
    parts = response.content.split(b"\n\n")
    assert parts.pop() == b""
    assert all(part.startswith(b"data: ") for part in parts)
    return [part[len(b"data: ") :] for part in parts]


def test_a_stream_that_cannot_go_on_ends_with_the_error(tmp_path):
    def handler(request: Request) -> Iterable[Message]:
        if not isinstance(request, GenerateReqInput):
            return answer(request)
        rid = rid_of(request)
        failure = FinishReason(type="error", code="out_of_memory", message="no room")
        return [delta((rid, 0, 0, [8, 9])), results(finished(rid, [8, 9, 10], finish_reason=failure))]

    response, metrics = post(tmp_path, handler, {**PROMPT, "stream": True})
    assert response.status_code == 200
    *chunks, error, done = events(response)
    tokens = [token for chunk in chunks for token in msgspec.json.decode(chunk)["choices"][0]["token_ids"]]
    assert tokens[:2] == [8, 9]
    assert msgspec.json.decode(error)["error"] == {
        "message": "no room", "type": "server_error", "param": None, "code": "out_of_memory",
    }  # fmt: skip
    assert done == b"[DONE]"
    assert (metrics.ended, metrics.codes) == ([(0, "error")], ["out_of_memory"])


@pytest.mark.parametrize(
    ("code", "retryable"), [("out_of_memory", False), ("deadline_exceeded", False), ("shutting_down", True)]
)
def test_a_native_stream_that_cannot_go_on_says_whether_that_passes(tmp_path, code, retryable):
    def handler(request: Request) -> Iterable[Message]:
        if not isinstance(request, GenerateReqInput):
            return answer(request)
        rid = rid_of(request)
        failure = FinishReason(type="error", code=code, message="no")
        return [delta((rid, 0, 0, [8, 9])), results(finished(rid, [8, 9, 10], finish_reason=failure))]

    response, _ = post(tmp_path, handler, {"input_ids": [5], "stream": True}, "/generate")
    *_, error, _ = events(response)
    assert msgspec.json.decode(error)["error"]["retryable"] is retryable


def test_without_a_tokenizer_ids_are_taken_and_given(tmp_path):
    def handler(request: Request) -> Iterable[Message]:
        if not isinstance(request, GenerateReqInput):
            return answer(request)
        assert request.return_logprob
        logprobs = floats([-0.5, float("-inf")])
        return [results(finished(rid_of(request), [8, 9], output_logprobs=logprobs))]

    response, metrics = post(tmp_path, handler, {**PROMPT, "logprobs": 0})
    [choice] = response.json()["choices"]
    assert (choice["text"], choice["token_ids"], choice["prompt_token_ids"]) == ("", [8, 9], [5, 6, 7])
    assert choice["logprobs"]["tokens"] == ["token_id:8", "token_id:9"]
    assert choice["logprobs"]["token_logprobs"] == [-0.5, -9999.0]
    assert choice["finish_reason"] == "length"
    assert response.json()["model"] == "/models/tiny"
    assert metrics.ended == [(2, "length")]
    refused, _ = post(tmp_path, handler, {"prompt": "text"})
    assert refused.status_code == 400
    chat, _ = post(
        tmp_path, handler, {"messages": [{"role": "user", "content": "x"}]}, "/v1/chat/completions"
    )
    assert chat.json()["error"]["param"] == "messages"


def test_a_sample_that_never_ran_has_the_engines_version(tmp_path):
    def handler(request: Request) -> Iterable[Message]:
        if not isinstance(request, GenerateReqInput):
            return answer(request)
        reason = FinishReason(type="abort", message="Aborted")
        return [results(finished(rid_of(request), [], finish_reason=reason))]

    for stream in (False, True):
        response, metrics = post(tmp_path, handler, {**PROMPT, "stream": stream})
        body = msgspec.json.decode(events(response)[0]) if stream else response.json()
        assert body["choices"][0]["finish_reason"] == "abort"
        assert body["choices"][0]["matched_stop"] is None
        assert body["metadata"] == {"weight_version": "v0"}
        assert body["choices"][0]["weight_versions"] == []
        assert metrics.ended == [(0, "abort")]


def test_versions_of_several_choices(tmp_path):
    def handler(request: Request) -> Iterable[Message]:
        if not isinstance(request, GenerateReqInput):
            return answer(request)
        spans = [WeightVersionSpan(version=f"v{epoch}", epoch=epoch, start=0, end=4) for epoch in (3, 2)]
        outputs = [
            finished(rid_of(request), [8] * 4, i, weight_versions=[span]) for i, span in enumerate(spans)
        ]
        return [results(*outputs)]

    response, _ = post(tmp_path, handler, {**PROMPT, "n": 2})
    body = response.json()
    assert body["metadata"] == {"weight_version": "v3"}
    assert [each["weight_versions"][0]["version"] for each in body["choices"]] == ["v3", "v2"]
    response, _ = post(tmp_path, handler, {**PROMPT, "n": 2, "return_meta_info": True})
    body = response.json()
    assert body["metadata"]["weight_version"] == "v3"
    assert [[span["version"] for span in spans] for spans in body["metadata"]["weight_versions"]] == [
        ["v3"],
        ["v2"],
    ]
    assert body["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
