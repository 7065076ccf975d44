"""The demo of an agent, quick: warm-up, episodes over OpenAI's client, updates and report."""

import random
import re

import pytest
from bench.test_demo import finish_demo, summary_in
from demo.agent import world
from demo.agent.episodes import Episode, Turn


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return finish_demo(tmp_path_factory.mktemp("agent"), "--policy", "agent")


@pytest.mark.slow
def test_episodes_of_several_turns_are_sampled_and_learned(finished):
    summary = summary_in(finished)
    assert summary["updates"] == 3
    assert summary["later_turns"] > 0
    assert summary["turns_that_extend_their_ids"] == summary["later_turns"]
    assert summary["turns_that_extend_their_ids"] > 0
    assert 0 < summary["prefix_hits"] <= summary["later_turns"]
    assert 0.0 < summary["max_logprob_gap"] <= 1e-4


@pytest.mark.slow
def test_the_report_needs_no_network(finished):
    page = (finished / "report.html").read_text()
    assert not re.findall(r"https?:|@import|url\((?!#)|<script|<link|(?:src|href)=[\"'](?!#)", page)
    for chart in ("reward", "turns", "gap", "time", "warmup"):
        assert f'aria-label="{chart}"' in page


def test_numbers_are_the_only_full_reward():
    number = world.number_of("pause")
    assert world.answer_reward("pause", number) == pytest.approx(1 - world.CALL_REWARD)
    assert 0 < world.answer_reward("pause", number[:3]) < world.answer_reward("pause", number + "1")
    assert world.answer_reward("pause", "x" + number) == 0.0


def test_the_template_writes_what_demonstrations_show():
    parts, called = world.demonstration("pause", random.Random(0), calls=1.0)
    assert called
    ids = [token for text, _ in parts for token in world.build_tokenizer().encode(text).ids]
    assert ids == world.build_tokenizer().encode("".join(text for text, _ in parts)).ids
    assert len(ids) < world.CONTEXT_LEN


def turn(prompt, output, reward=0.0):
    return Turn(
        prompt_ids=prompt, output_ids=output, logprobs=[-1.0] * len(output), cached_tokens=0, reward=reward,
        asked=None, text="", malformed=False,
    )  # fmt: skip


def test_a_turn_that_does_not_go_on_ends_what_is_trained():
    first, second = turn([1, 2], [3, 4], 0.2), turn([1, 2, 3, 4, 9], [5], 0.8)
    sample = Episode("pause", [first, second]).sample(version=7)
    assert sample.output_ids == [3, 4, 9, 5]
    assert sample.rewards == [0.0, 0.2, 0.0, 0.8]
    assert [(span.start, span.end) for span in sample.spans] == [(0, 2), (3, 4)]
    broken = Episode("pause", [first, turn([1, 2, 3, 8, 9], [5], 0.8)])
    assert broken.extended == [False]
    assert broken.sample(version=7).output_ids == [3, 4]
