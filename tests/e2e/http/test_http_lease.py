"""Whoever only looks at an engine through the front end is no sign of life of a trainer that has paused it."""

from support.http_serve import served


def test_probes_and_scrapes_do_not_renew_the_lease_of_a_pause(tiny_model):
    with served("--model", str(tiny_model)) as server:
        server.ok("/pause_generation", {"mode": "in_place", "lease_s": 1.0, "on_lease_expiry": "continue"})
        while server.get("/server_info").json()["internal_states"][0]["generation"] == "paused":
            for path in ("/health", "/metrics", "/dashboard/data"):
                server.get(path)
