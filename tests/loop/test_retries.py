"""Messages sent again: an answered generation is never generated twice."""

import pytest
from support.scripted import EngineDriver, assert_error, tokens_of

from caesura.io_struct import GenerateReqInput, SamplingParams, encode

PARAMS = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)


def batch(count: int, params: SamplingParams = PARAMS) -> list[GenerateReqInput]:
    return [
        GenerateReqInput(input_ids=[5, 6, 7 + number % 80], sampling_params=params) for number in range(count)
    ]


def generate(driver: EngineDriver, messages: list[GenerateReqInput], client: str = "main") -> None:
    for message in messages:
        driver.send(encode(message), client)
    driver.run_until_idle()


def test_a_large_batch_sent_again_is_answered_and_not_generated(tiny_model):
    with EngineDriver(str(tiny_model)) as driver:
        messages = batch(1500)
        generate(driver, messages)
        first = {message.id: tokens_of(driver.result(message.id)) for message in messages}
        steps = driver.status().step
        driver.results.clear()
        generate(driver, messages)
        assert {message.id: tokens_of(driver.result(message.id)) for message in messages} == first
        assert driver.status().step == steps, "nothing was computed again"


def test_an_answer_that_is_not_stored_any_more_is_no_second_generation(tiny_model):
    with EngineDriver(str(tiny_model), result_bytes=8 << 10) as driver:
        messages = batch(40)
        generate(driver, messages)
        steps, generated = driver.status().step, driver.status().generated_tokens
        driver.results.clear()
        for message in messages[:16]:
            assert_error(driver.call(message), "answer_forgotten")
        generate(driver, messages[-10:])
        assert len(driver.results) == 10
        status = driver.status()
        assert (status.step, status.generated_tokens) == (steps, generated)
        pause = driver.pause(id="a new one")
        assert pause.step == steps


@pytest.mark.parametrize(("limit", "fewest", "most"), [(0, 0, 0), (4 << 10, 4, 12)])
def test_answers_are_stored_within_the_configured_bytes(tiny_model, limit, fewest, most):
    with EngineDriver(str(tiny_model), result_bytes=limit) as driver:
        messages = batch(20)
        for message in messages:
            generate(driver, [message])
        driver.results.clear()
        generate(driver, messages)
        assert fewest <= len(driver.results) <= most
        assert len(driver.results) + len(driver.replies) == 20
        assert {reply.code for reply in driver.replies.values()} == {"answer_forgotten"}


@pytest.mark.parametrize("live", [True, False])
def test_a_message_that_joined_a_generation_is_answered_again_as_well(tiny_model, live):
    with EngineDriver(str(tiny_model)) as driver:
        params = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True, n=2)
        messages = [GenerateReqInput(rid="r", input_ids=[5, 6, 7], sampling_params=params) for _ in range(2)]
        driver.client("second")
        driver.send(messages[0])
        driver.tick(3)
        driver.send(messages[1], "second")
        if not live:
            driver.run_until_idle()
        else:
            driver.tick(1)
        driver.send(messages[1], "second")
        driver.run_until_idle()
        steps = driver.status().step
        for message in messages:
            driver.results.clear()
            driver.send(message, "second")
            driver.run_until_idle()
            assert {key: len(found) for key, found in driver.results.items()} == {("r", 0): 1, ("r", 1): 1}
        assert driver.status().step == steps
