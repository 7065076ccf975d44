"""docs/reference/states.md is executable: every cell of its tables is driven against a real engine."""

import re
from itertools import product

import pytest
from support.lanes import every
from support.scripted import EngineDriver, one_piece_per_slice
from support.state_table import STATES, TABLE, Recipes

CELLS = list(product(TABLE, STATES))


@pytest.mark.parametrize(
    ("command", "state", "depth"),
    [*((*cell, 0) for cell in CELLS), *every([(*cell, 1) for cell in CELLS], 3)],
)
def test_cell(tiny_model, other_model, broken_model, command, state, depth, monkeypatch):
    one_piece_per_slice(monkeypatch, writes=True)  # one bucket per tick: "updating" can be met
    reference = {"reference_model_path": str(other_model)} if command == "score" else {}
    with EngineDriver(str(tiny_model), pipeline_depth=depth, **reference) as driver:
        recipes = Recipes(driver, other_model, broken_model)
        recipes.enter(state)
        observed = recipes.observe(command)
        driver.engine.cache.check()
    assert observed == TABLE[command][state], f"{command} in {state}"


def test_the_table_is_complete():
    assert len(TABLE) == 28
    assert all(list(row) == STATES for row in TABLE.values())
    assert STATES == [
        "running", "busy", "paused abort", "paused retract", "paused in_place", "session", "session written",
        "paused session", "updating", "poisoned", "poisoned paused", "kv released", "weights released",
        "weights resumed",
    ]  # fmt: skip
    assert all(
        re.fullmatch(r"[a-z_]+ → (running|paused \w+), \w+(, session)?(, released)?", cell)
        for row in TABLE.values()
        for cell in row.values()
    )
