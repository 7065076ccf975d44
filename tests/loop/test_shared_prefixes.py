"""Requests that attend to the pages of a prompt together, against each of them alone."""

from typing import Any

import pytest
from support.scripted import EngineDriver, prompt_of, tokens_of

from caesura.io_struct import SamplingParams


def results_of(driver: EngineDriver, asked: list[tuple[int, int]], *, pausing: bool) -> tuple[list[Any], int]:
    """Return the results of (prompt, seed), and how many requests attended together at most."""
    rids = []
    for prompt, seed in asked:
        params = SamplingParams(max_new_tokens=40 + seed, seed=seed, ignore_eos=True, temperature=1.0)
        rids.append(driver.generate(prompt_of(150, prompt), sampling_params=params))
    most = 0
    for number in range(30):
        driver.tick(1)
        paged = driver.engine.runner.backend.paged
        most = max(most, 0 if paged is None else int(paged.tasks[:, 4].max()))
        if pausing and number % 10 == 9:
            driver.pause("retract" if number == 19 else "in_place")
            driver.go_on()
    driver.run_until_idle()
    results = [driver.result(rid) for rid in rids]
    return [(tokens_of(each), each.output_logprobs) for each in results], most


@pytest.mark.parametrize("depth", [0, 1])
def test_samples_are_those_of_each_alone(tiny_model, depth):
    asked = [(prompt, seed) for seed in range(4) for prompt in range(3)]
    with EngineDriver(tiny_model, scripted=False, pipeline_depth=depth) as driver:
        expected = []
        for each in asked:
            found, most = results_of(driver, [each], pausing=False)
            assert most == 1
            expected += found
        found, most = results_of(driver, asked, pausing=True)
    assert found == expected
    assert most > 1
