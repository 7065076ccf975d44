"""The tables of docs/reference/states.md: read, and driven cell by cell on an engine."""

from pathlib import Path

from caesura.io_struct import (
    AbortReq,
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    ErrorReply,
    FlushCacheReqInput,
    GenerateReqInput,
    GetMemoryHistoryReqInput,
    GetStatusReqInput,
    GetStatusReqOutput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    RollbackWeightsReqInput,
    SamplingParams,
    ScoreReqInput,
    SendWeightsReqInput,
    UpdateWeightFromDiskReqInput,
    WeightsCheckerReqInput,
)

from .scripted import EngineDriver
from .waiting import eventually

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "states.md"
PROMPT = [5, 6, 7, 8]


def read_tables() -> tuple[list[str], dict[str, dict[str, str]]]:
    """Return (states, command -> state -> "reply → state afterwards") of the tables headed "command".

    A cell without an arrow leaves the state as it is: the last column of the table whose first header is
    "state" says which.
    """
    tables: list[list[list[str]]] = [[]]
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            tables[-1].append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
        elif tables[-1]:
            tables.append([])
    unchanged: dict[str, str] = {}
    commands: dict[str, dict[str, str]] = {}
    for header, _, *rows in filter(None, tables):
        if header[0] == "state":
            unchanged = {row[0]: row[-1] for row in rows}
        if header[0] == "command":
            for command, *cells in rows:
                for state, cell in zip(header[1:], cells, strict=True):
                    text = cell if "→" in cell else f"{cell} → {unchanged[state]}"
                    assert commands.setdefault(command, {}).setdefault(state, text) is text, (
                        f"{command} in {state}: twice"
                    )
    return list(unchanged), commands


STATES, TABLE = read_tables()
FOREIGN = ("update, foreign", "end, foreign", "end, force")
"""Sent by somebody else than who brought the engine into its state."""


class Recipes:
    """Recipes to get an engine into each state, and the messages of each command."""

    def __init__(self, driver: EngineDriver, other_model: Path, broken_model: Path) -> None:
        self.driver = driver
        self.other, self.broken = str(other_model), str(broken_model)
        self.session_id: str | None = None
        """Id that calls and ends of the open session carry, or None without a session."""

    def enter(self, state: str) -> None:
        driver = self.driver
        if state in ("busy", "paused retract", "paused in_place", "session written", "paused session"):
            driver.generate(PROMPT, 200)
            driver.tick(3)
        if state.startswith("paused "):
            mode = "in_place" if state == "paused session" else state.removeprefix("paused ")
            driver.pause(mode)
        if "session" in state:
            self.session_id = driver.begin()
        if state in ("session written", "paused session"):
            driver.update(self.other, flush_cache=False, session_id=self.session_id)
        if state == "updating":
            driver.send(UpdateWeightFromDiskReqInput(model_path=self.other))
            eventually(lambda: driver.status().update)  # its headers are read beside the loop
        if state.startswith("poisoned"):
            if state == "poisoned paused":
                driver.pause("abort")
            driver.check_weights("reset_tensors")
        if state == "kv released":
            driver.release("kv_cache")
        if state in ("weights released", "weights resumed"):
            driver.pause("abort")
            driver.release()
        if state == "weights resumed":
            driver.resume()

    def update(self, path: str, **fields: object) -> UpdateWeightFromDiskReqInput:
        return UpdateWeightFromDiskReqInput(model_path=path, **{"session_id": self.session_id, **fields})

    def message(self, command: str):
        return {
            "generate": lambda: GenerateReqInput(
                input_ids=PROMPT,
                sampling_params=SamplingParams(max_new_tokens=200, temperature=0.0, ignore_eos=True),
            ),
            "abort all": lambda: AbortReq(abort_all=True),
            "pause abort": lambda: PauseGenerationReqInput(mode="abort"),
            "pause retract": lambda: PauseGenerationReqInput(mode="retract"),
            "pause in_place": lambda: PauseGenerationReqInput(mode="in_place"),
            "continue": ContinueGenerationReqInput,
            "flush_cache": FlushCacheReqInput,
            "score": lambda: ScoreReqInput(input_ids=[PROMPT], start=[1]),
            "status": GetStatusReqInput,
            "memory history": GetMemoryHistoryReqInput,
            "begin": BeginWeightUpdateReqInput,
            "end commit": lambda: EndWeightUpdateReqInput(session_id=self.session_id),
            "end abort": lambda: EndWeightUpdateReqInput(commit=False, session_id=self.session_id),
            "end, foreign": lambda: EndWeightUpdateReqInput(commit=False),
            "end, expired id": lambda: EndWeightUpdateReqInput(commit=False, session_id="expired"),
            "end, force": lambda: EndWeightUpdateReqInput(commit=False, force=True),
            "update, flush": lambda: self.update(self.other),
            "update, no flush": lambda: self.update(self.other, flush_cache=False),
            "update, broken": lambda: self.update(self.broken, flush_cache=False),
            "update, foreign": lambda: self.update(self.other, flush_cache=False, session_id=None),
            "update, expired id": lambda: self.update(self.other, flush_cache=False, session_id="expired"),
            "rollback": RollbackWeightsReqInput,
            "release kv_cache": lambda: ReleaseMemoryOccupationReqInput(tags=["kv_cache"]),
            "release weights": lambda: ReleaseMemoryOccupationReqInput(tags=["weights"]),
            "resume all": ResumeMemoryOccupationReqInput,
            "send weights": lambda: SendWeightsReqInput(specs=[]),
            "checksum": WeightsCheckerReqInput,
            "reset_tensors": lambda: WeightsCheckerReqInput(action="reset_tensors"),
        }[command]()

    def observe(self, command: str) -> str:
        """Send ``command``; the reply and the state it leaves, in the table's words."""
        driver = self.driver
        message = self.message(command)
        waiting = driver.status().waiting_requests
        message_id = driver.send(message, "other" if command in FOREIGN else "main")
        ticks = 0
        while ticks < 2000:
            driver.tick()
            if message_id in driver.replies or command == "generate":
                break
            ticks += not driver.awaited_others()
        driver.tick()
        reply = driver.replies.pop(message_id, None)
        while driver.engine.commands.is_busy:
            driver.awaited_others()
            driver.tick()
        status = driver.status()
        if isinstance(reply, GetStatusReqOutput):
            status = reply
        if reply is None:
            result = "waits" if status.waiting_requests > waiting else "runs"
        else:
            result = str(reply.code) if isinstance(reply, ErrorReply) else "ok"
        generation = f"paused {status.pause_mode}" if status.generation == "paused" else status.generation
        session = ", session" if status.session is not None else ""
        released = ", released" if status.memory == "released" else ""
        return f"{result} → {generation}, {status.weights}{session}{released}"


def clear(driver: EngineDriver, model: Path) -> None:
    """Bring the engine back to running on the weights of ``model``."""
    status = driver.status()
    if status.running_requests or status.waiting_requests or status.prefilling_requests:
        driver.abort(abort_all=True)
    if status.session is not None:
        driver.end(commit=False, force=True)
    if status.released_tags:
        driver.pause("abort")
        driver.resume()
    if driver.status().weights != "valid":
        assert driver.update(model).committed
    driver.go_on(force=True, torch_empty_cache=False)
    driver.assert_status(generation="running", weights="valid", session=None)
    driver.engine.cache.check()
