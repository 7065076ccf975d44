"""docs/reference/states.md is executable: every cell of its tables is driven against a real engine."""

import re

import pytest
from support.lanes import quick
from support.scripted import EngineDriver, one_piece_per_slice
from support.state_table import STATES, TABLE, Recipes, clear


@pytest.mark.parametrize("depth", quick([0, 1]))
@pytest.mark.parametrize("state", STATES)
def test_every_command(tiny_model, other_model, broken_model, state, depth, monkeypatch):
    one_piece_per_slice(monkeypatch, writes=True)  # one bucket per tick: "updating" can be met
    wrong = []
    for reference in ({}, {"reference_model_path": str(other_model)}):
        with EngineDriver(str(tiny_model), pipeline_depth=depth, **reference) as driver:
            for command in ("score",) if reference else sorted(TABLE.keys() - {"score"}):
                recipes = Recipes(driver, other_model, broken_model)
                recipes.enter(state)
                observed = recipes.observe(command)
                driver.engine.cache.check()
                if observed != TABLE[command][state]:
                    wrong.append(f"{command}: {observed}")
                clear(driver, tiny_model)
    assert not wrong


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
