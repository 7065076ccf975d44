"""The trainer that answers the training half of Tinker's API, at the address of ``--tinker-trainer``.

Invariant: requests are passed on unread, without keys; so are answers, but for redirects and headers.
"""

import asyncio
from typing import Any
from urllib.parse import unquote

import httpx
import msgspec
from litestar import Response
from litestar.exceptions import ServiceUnavailableException

from ...exceptions import InvalidRequest
from ..bodies import HTTPRequest
from ..error_responses import printable
from .promises import TinkerError

PATIENCE_S = 60.0
"""Seconds for one answer, which is longer than the trainer's own long polls."""
POLL_S = 0.05
RETRIEVE = "/api/v1/retrieve_future"
_PASSED_ON = ("accept", "content-encoding", "content-type")


class UpstreamTrainer:
    def __init__(self, url: str) -> None:
        self.sessions: dict[str, str] = {}
        """Session of each model."""
        self._url = url
        self._base = httpx.URL(url)
        limits = httpx.Limits(max_connections=None)  # long polls must not keep others waiting
        self._http = httpx.AsyncClient(timeout=PATIENCE_S, limits=limits)

    async def pass_on(self, request: HTTPRequest) -> Response[bytes]:
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        path, query = request.scope["raw_path"], request.scope["query_string"]
        if {".", ".."} & {*unquote(path.decode("latin-1")).split("/")}:
            raise InvalidRequest("a path with . or .. is not passed on", field="path")
        target = path.partition(b"?")[0] + (b"?" + query if query else b"")
        answer = await self._answer(request.method, target, await request.body(), headers)
        if not 200 <= answer.status_code < 600:
            raise ServiceUnavailableException(f"the trainer answered with status {answer.status_code}")
        kind = answer.headers.get("content-type")
        return Response(answer.content, status_code=answer.status_code, media_type=kind)

    async def result(self, path: str, body: bytes) -> dict[str, Any]:
        """Return the result of a request, for which the trainer may give a promise; raise TinkerError."""
        found = await self._asked(path, body)
        name = found.get("request_id")
        while name is not None and (found.get("type") == "try_again" or "request_id" in found):
            await asyncio.sleep(POLL_S)
            found = await self._asked(RETRIEVE, msgspec.json.encode({"request_id": name}))
        if "error" in found:
            raise TinkerError(str(found["error"]), str(found.get("category", "server")))
        return found

    async def _asked(self, path: str, body: bytes) -> dict[str, Any]:
        answer = await self._answer("POST", path.encode(), body, {"content-type": "application/json"})
        if answer.status_code == 408:  # a long poll without a result
            return {"type": "try_again"}
        try:
            found = msgspec.json.decode(answer.content, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError):
            found = {}
        if answer.status_code != 200 or not found:
            said = f"{answer.status_code} {printable(answer.text)}"
            raise TinkerError(f"the trainer answered {path} with {said}")
        return found

    async def _answer(
        self, method: str, target: bytes, body: bytes, headers: dict[str, str]
    ) -> httpx.Response:
        url = self._base.copy_with(raw_path=self._base.raw_path.rstrip(b"/") + target)  # not normalised
        try:
            return await self._http.request(method, url, content=body, headers=headers)
        except httpx.HTTPError as error:
            reason = f"the trainer at {self._url} does not answer: {type(error).__name__} {error}"
            raise ServiceUnavailableException(reason) from error
