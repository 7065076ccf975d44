"""The benchmark measures what it says, on engines whose behaviour is known."""

import asyncio
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
from harness.peer_process import PeerError, PeerProcess
from peers.measure import measure_pauses, measure_updates
from support.waiting import eventually

STEP_S = 0.004


class SteppingEngine:
    """Delivers one token per request and step; ``leaky`` ones deliver another after acknowledging a pause."""

    resume_variants = ("default", "plain")

    def __init__(self, *, leaky: bool = False, updates_do_nothing: bool = False) -> None:
        self.weights = "a"
        self.paused = asyncio.Event()
        self.running = asyncio.Event()
        self.running.set()
        self.live = 0
        self.most_live = 0
        self._leaky = leaky
        self._updates_do_nothing = updates_do_nothing

    async def generate(
        self,
        prompt: list[int],
        max_new_tokens: int,
        *,
        greedy: bool = False,
        on_tokens: Callable[[], None] | None = None,
    ) -> list[int]:
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        try:
            for _ in range(max_new_tokens):
                await asyncio.sleep(STEP_S)
                if not (self._leaky and self.paused.is_set()):
                    await self.running.wait()
                if on_tokens is not None:
                    on_tokens()
        finally:
            self.live -= 1
        return [ord(self.weights)] * max_new_tokens

    async def rollout(
        self, prompts: Sequence[list[int]], max_new_tokens: int, samples: int
    ) -> list[list[int]]:
        return [await self.generate(prompt, max_new_tokens) for prompt in prompts]

    async def pause(self) -> None:
        self.running.clear()
        self.paused.set()
        await asyncio.sleep(2 * STEP_S)

    async def resume(self, variant: str) -> None:
        self.paused.clear()
        self.running.set()

    async def update(self, path: str) -> None:
        await asyncio.sleep(STEP_S)
        self.weights = self.weights if self._updates_do_nothing else path

    async def abort_all(self) -> None:
        pass

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("leaky", [False, True])
def test_pauses_are_timed_and_late_tokens_counted(leaky: bool) -> None:
    async def run() -> tuple[SteppingEngine, dict]:
        engine = SteppingEngine(leaky=leaky)
        return engine, await measure_pauses(engine, [[1]] * 3, max_new_tokens=10, cycles=4, seed=0)

    engine, measured = asyncio.run(run())
    assert engine.most_live == 3
    assert engine.live == 0
    assert len(measured["pause_s"]) == 4
    assert min(measured["pause_s"]) >= 2 * STEP_S
    assert {variant: len(times) for variant, times in measured["resume_s"].items()} == {
        "default": 2,
        "plain": 2,
    }
    assert bool(measured["late_tokens"]) == leaky


@pytest.mark.parametrize("idle", [False, True])
def test_an_update_that_does_nothing_is_found_out(idle: bool) -> None:
    async def run() -> dict:
        engine = SteppingEngine(updates_do_nothing=idle)
        return await measure_updates(engine, [[1]] * 2, 50, current="a", other="b", repeats=2)

    measured = asyncio.run(run())
    assert measured["changed"] != idle
    assert measured["restored"]
    assert len(measured["update_s"]) == 3  # an odd number ends on the other weights
    assert all(gap > update for gap, update in zip(measured["gap_s"], measured["update_s"], strict=True))


def peer(tmp_path: Path, body: str) -> PeerProcess:
    script = tmp_path / "peer.py"
    script.write_text(textwrap.dedent(body))
    return PeerProcess([sys.executable, str(script)], os.environ, tmp_path / "log")


ECHO = """
    import sys
    sys.path.insert(0, {peers!r})
    import os
    from json_lines import claim_stdout, serve
    channel = claim_stdout()
    print("noise on stdout")
    os.system("echo noise of a child")
    serve(channel, {{"echo": lambda value: {{"value": value}}, "fail": lambda: 1 / 0}})
"""


def test_operations_are_answered_in_order_whatever_is_printed(tmp_path: Path) -> None:
    peers = str(Path(sys.modules["peers.measure"].__file__ or "").parent)
    with peer(tmp_path, ECHO.format(peers=peers)) as process:
        assert [process.call("echo", 20, value=value)["value"] for value in (1, "zwei")] == [1, "zwei"]
        with pytest.raises(PeerError, match="ZeroDivisionError"):
            process.call("fail", 20)
    assert "noise of a child" in (tmp_path / "log").read_text()


def test_a_silent_peer_and_its_children_are_ended(tmp_path: Path) -> None:
    body = """
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(child.pid, file=sys.stderr, flush=True)
        time.sleep(600)
    """
    with pytest.raises(PeerError, match="no answer to 'start'"), peer(tmp_path, body) as process:
        process.call("start", 2.0)
    child = int((tmp_path / "log").read_text())

    def living() -> list[int]:
        found = [each.info for each in psutil.process_iter(["pid", "status"])]
        return [each["pid"] for each in found if each["status"] != psutil.STATUS_ZOMBIE]

    eventually(lambda: child not in living())
