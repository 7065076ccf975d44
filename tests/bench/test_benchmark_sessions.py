"""Cached prompts of agents with and without sessions."""

import json
import subprocess
import sys

import sessions


def test_sessions_keep_what_odd_answers_lose(tmp_path):
    path = tmp_path / "sessions.json"
    sizes = [
        "--agents",
        "2",
        "--turns",
        "3",
        "--repeats",
        "1",
        "--words",
        "20",
        "--others",
        "0",
        "--odd",
        "1",
    ]
    subprocess.run([sys.executable, sessions.__file__, *sizes, "--odd", "1", "--json", str(path)], check=True)
    found = json.loads(path.read_text())["turns"]
    shares = {
        name: [sum(cached for _, cached, _ in turn) / sum(prompt for prompt, _, _ in turn) for turn in turns]
        for name, [turns] in found.items()
    }
    assert shares["sessions"][0] == shares["without"][0] == 0
    assert all(a > b for a, b in zip(shares["sessions"][1:], shares["without"][1:], strict=True))
