"""Keys that open each route, and limits of bodies, over every route of the application."""

import re
from pathlib import Path
from typing import Any

import pytest
from litestar import Response, post
from support.http_server import client_of, front_end, routes_served

from caesura.client import AsyncSchedulerClient
from caesura.client.serve.middleware import ACCESS_CLASSES

CHANGES_THE_ENGINE = re.compile(
    "pause|profile|continue|flush|release|resume|update|begin|/end|init|destroy|weights_checker|post_process"
    "|weight_checker|rollback|pull|fetch_weights|lora|sleep|wake|reset|start|finish|shutdown|collective_rpc"
    "|external_corp|workers"
    "|/api/v1/(create_model|save_weights|x$)"
)


HARMLESS = "/is_", "/api/v1/sessions/", "/finish_session"


def test_every_route_has_its_access_class():
    for method, path, handler in routes_served():
        access = handler.opt.get("access")
        assert access in ACCESS_CLASSES, f"{method} {path} has no access class"
        if CHANGES_THE_ENGINE.search(path) and not path.startswith(HARMLESS):
            assert access == "admin", f"{method} {path}"
        elif access == "admin" and path != "/rollout/drift":  # which tells of everybody's samples
            raise AssertionError(f"{method} {path} is for admins, but changes nothing")


def test_the_curl_example_shows_every_route():
    script = (Path(__file__).parents[4] / "examples" / "curl.sh").read_text()
    shown = set(re.findall(r"(?:get|post|POST) '?(/[a-z0-9_/.]+)", script))
    shown |= set(re.findall(r"\$URL(/[a-z0-9_/]+)", script))
    aliases = {"/v1/tokenize", "/v1/detokenize", "/v1/models/x", "/skyrl/v1/generate", "/end_profile"}
    paths = {path for _, path, _ in routes_served() if path != "/" and not path.startswith("/dashboard")}
    assert paths - aliases == shown


EVERY = {"user", "admin"}


@pytest.mark.parametrize(
    ("options", "closed"),
    [
        ({}, {None: set()}),
        ({"api_key": "u"}, {None: EVERY, "u": set(), "x": EVERY}),
        ({"admin_key": "a"}, {None: {"admin"}, "a": set()}),
        ({"api_key": "u", "admin_key": "a"}, {None: EVERY, "u": {"admin"}, "a": set(), "ua": EVERY}),
    ],
)
def test_keys_open_the_routes_of_their_class(agreeing_engine, options, closed):
    """``closed`` has the classes that a key does not open; every route of a class must behave alike."""
    front = front_end(AsyncSchedulerClient(agreeing_engine.endpoint), **options)
    with client_of(front, raise_server_exceptions=False) as client:
        for key, expected in closed.items():
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            verdicts = {
                (
                    handler.opt["access"],
                    client.request(method, path, headers=headers, content=b"{}").status_code == 401,
                )
                for method, path, handler in routes_served()
            }
            assert len(verdicts) == len(ACCESS_CLASSES), verdicts
            assert {kind for kind, is_refused in verdicts if is_refused} == expected, key


def test_only_bearer_keys_and_tinkers_header_count():
    with client_of(front_end(api_key="u")) as client:
        for header in ("u", "Basic u", "Bearer", "Bearer  ", "Bearer uu", "bearer u x"):
            response = client.get("/server_info", headers={"authorization": header})
            assert response.status_code == 401, header
            assert response.json() == {"error": "Unauthorized"}
            assert response.headers["www-authenticate"] == "Bearer"
        for key, status in (("u", 200), ("x", 401), ("", 401)):
            headers = {"x-api-key": key}
            assert client.get("/api/v1/get_server_capabilities", headers=headers).status_code == status
            both = {**headers, "authorization": "Bearer x"}
            assert client.get("/api/v1/get_server_capabilities", headers=both).status_code == 401


SITES = [
    ({}, True),
    ({"origin": "http://localhost:3000"}, True),
    ({"origin": "http://127.0.0.1"}, True),
    ({"origin": "http://[::1]:8"}, True),
    ({"origin": "https://evil.example"}, False),
    ({"origin": "http://localhost.evil.example"}, False),
    ({"origin": "null"}, False),
    ({"sec-fetch-site": "cross-site"}, False),
    ({"sec-fetch-site": "same-origin"}, True),
]


def test_pages_of_other_sites_are_refused():
    with client_of(front_end()) as client, client_of(front_end(api_key="k")) as keyed:
        for headers, allowed in SITES:
            assert (client.post("/post_process_weights", headers=headers).status_code == 200) == allowed, (
                headers
            )
            headers = {**headers, "authorization": "Bearer k"}
            assert keyed.post("/post_process_weights", headers=headers).status_code == 200, headers


OWN_HOSTS = [
    "localhost:30000", "LOCALHOST", "127.0.0.1:30000", "127.8.0.1", "[::1]:30000", "engine.internal:30000",
]  # fmt: skip
"""Names of loopback, and what the server was told to listen on."""
OTHERS = ["evil.example:30000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "[::1", ""]


def test_rebound_host_names_are_refused_without_keys():
    with (
        client_of(front_end(host="Engine.internal")) as client,
        client_of(front_end(api_key="k")) as keyed,
        client_of(front_end(api_key="k", admin_key="k")) as twice_keyed,
        client_of(front_end(host="engine.internal", admin_key="a")) as for_admins,  # users need no key
    ):
        for host in OWN_HOSTS + OTHERS:
            allowed = host in OWN_HOSTS
            for path in ("/post_process_weights", "/v1/completions"):
                response = client.post(path, headers={"host": host}, content=b"[]")
                assert (response.status_code != 403) == allowed, (host, path)
            assert client.get("/dashboard", headers={"host": host}).status_code == 200
            root = client.get("/", headers={"host": host}, follow_redirects=False)
            assert (root.status_code, root.headers["location"], root.content) == (307, "dashboard", b"")
            bearer = {"host": host, "authorization": "Bearer k"}
            for each in (keyed, twice_keyed):
                assert each.post("/post_process_weights", headers=bearer).status_code == 200
            assert (for_admins.post("/tokenize", headers={"host": host}).status_code != 403) == allowed, host


def test_refusals_have_the_form_of_their_route():
    def kinds(path: str, **request: Any) -> tuple[int, set[str]]:
        response = client.request("POST", path, **request)
        error = response.json().get("error")
        return response.status_code, set(error) if isinstance(error, dict) else set(response.json())

    openai, native = {"message", "type", "param", "code"}, {"object", "message", "type", "param", "code"}
    bearer = {"authorization": "Bearer k"}
    with client_of(front_end(api_key="k", max_body_bytes=100)) as client:
        for path in ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/pause"):
            assert kinds(path) == (401, openai)
            assert kinds(path, headers=bearer, content=b" " * 101) == (413, openai)
            assert kinds(path, headers=bearer, content=iter([b" " * 101])) == (413, openai)
        assert client.get("/v1/models").json()["error"]["code"] == "invalid_api_key"
        assert kinds("/v1/embeddings", headers=bearer) == (404, openai)
        assert kinds("/v1/models", headers=bearer) == (405, openai)
        for path in ("/v1/tokenize", "/v1/detokenize", "/generate"):
            assert kinds(path) == (401, {"error"})
            assert kinds(path, headers=bearer, content=b" " * 101) == (413, native)
        assert kinds("/nowhere", headers=bearer) == (404, native)
    with client_of(front_end()) as client:
        assert kinds("/v1/completions", headers={"host": "evil.example"}) == (403, openai)


def test_a_route_without_a_class_is_closed():
    @post("/forgotten", status_code=200)
    async def forgotten() -> Response[bytes]:
        return Response(b"x", media_type="text/plain")

    with client_of(front_end(api_key="u", admin_key="a"), [forgotten]) as client:
        assert client.post("/forgotten", headers={"authorization": "Bearer u"}).status_code == 401
        assert client.post("/forgotten", headers={"authorization": "Bearer a"}).status_code == 200


def test_bodies_are_bounded_announced_or_not():
    def pieces():
        for _ in range(5):
            yield b" " * 50

    with client_of(front_end(max_body_bytes=100, max_update_bytes=200)) as client:
        for content in (b" " * 101, pieces()):
            response = client.post("/pause_generation", content=content)
            assert response.status_code == 413
            assert response.json()["code"] == 413
        headers = {"content-type": "application/octet-stream"}
        path = "/update_weights_from_tensor"
        assert client.post(path, content=b" " * 101, headers=headers).status_code == 400  # read, and no file
        assert client.post(path, content=pieces(), headers=headers).status_code == 413
