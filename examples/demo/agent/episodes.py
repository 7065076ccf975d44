"""Episodes: a plain agent loop over the ``openai`` client, and what of it is trained on.

Invariant: the tokens that are trained on are those that the engine sampled, and its log-probabilities those
of the sampling. A turn whose prompt does not go on from the turn before is counted, and ends what is trained.
"""

import asyncio
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import openai

from ..messages import Group, Sample, Span
from ..task import is_held_out
from .world import CALL_REWARD, MAX_NEW_TOKENS, MAX_TURNS, TOOLS, answer_reward, number_of


@dataclass(frozen=True)
class Turn:
    """One answer of the policy, with its exact tokens."""

    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    cached_tokens: int
    reward: float
    asked: str | None
    """Word that the tool was asked for, or None."""
    text: str
    malformed: bool


@dataclass(frozen=True)
class Episode:
    word: str
    turns: list[Turn]

    @property
    def reward(self) -> float:
        return sum(turn.reward for turn in self.turns)

    @property
    def exact(self) -> bool:
        return self.turns[-1].asked is None and self.turns[-1].text == number_of(self.word)

    @property
    def extended(self) -> list[bool]:
        """True for each turn after the first whose prompt begins with all tokens of the turn before."""
        pairs = zip(self.turns, self.turns[1:])
        return [
            after.prompt_ids[: len(before.prompt_ids) + len(before.output_ids)]
            == before.prompt_ids + before.output_ids
            for before, after in pairs
        ]

    def sample(self, version: int) -> Sample:
        """Return what follows the question as one sample, whose spans are what the policy said."""
        first, *later = self.turns
        ids, logprobs = list(first.output_ids), list(first.logprobs)
        rewards = _at_end(first)
        spans = [Span(version=version, start=0, end=len(ids), stale_kv=False)]
        for turn, extends in zip(later, self.extended):
            if not extends:
                break
            between = turn.prompt_ids[len(first.prompt_ids) + len(ids) :]
            start = len(ids) + len(between)
            ids += between + turn.output_ids
            logprobs += [0.0] * len(between) + turn.logprobs
            rewards += [0.0] * len(between) + _at_end(turn)
            spans.append(Span(version=version, start=start, end=len(ids), stale_kv=False))
        return Sample(output_ids=ids, logprobs=logprobs, rewards=rewards, spans=spans)


def _at_end(turn: Turn) -> list[float]:
    return [0.0] * (len(turn.output_ids) - 1) + [turn.reward]


async def run_episode(client: openai.AsyncOpenAI, word: str, temperature: float, seed: int) -> Episode:
    """Ask for a word's number; give the policy what its calls return, until it answers.

    Turn ``i`` is sampled with ``seed + i``.
    """
    messages: list[Any] = [{"role": "user", "content": word}]
    headers = {"X-Session-ID": uuid.uuid4().hex}
    turns: list[Turn] = []
    while True:
        answer = await client.chat.completions.create(
            model="default",
            messages=messages,
            tools=TOOLS,
            temperature=temperature,
            max_tokens=MAX_NEW_TOKENS,
            seed=seed + len(turns),
            logprobs=True,
            extra_headers=headers,
            extra_body={"return_token_ids": True},
        )
        turn = _turn(word, answer, first=not turns)
        turns.append(turn)
        message = answer.choices[0].message
        if not message.tool_calls or len(turns) == MAX_TURNS:
            return Episode(word, turns)
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            found = number_of(_asked(call))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})


def _asked(call: Any) -> str:
    return str(json.loads(call.function.arguments).get("word"))


def _turn(word: str, answer: Any, *, first: bool) -> Turn:
    [choice] = answer.choices
    calls, text = choice.message.tool_calls, choice.message.content or ""
    asked = _asked(calls[0]) if calls else None
    if asked is None:
        reward = answer_reward(word, text)
    else:
        reward = CALL_REWARD if first and len(calls) == 1 and asked == word else 0.0
    return Turn(
        prompt_ids=choice.prompt_token_ids,
        output_ids=choice.token_ids,
        logprobs=[token.logprob for token in choice.logprobs.content],
        cached_tokens=answer.usage.prompt_tokens_details.cached_tokens,
        reward=reward,
        asked=asked,
        text=text,
        malformed=bool((choice.model_extra or {}).get("malformed_tool_calls")),
    )


async def run_episodes(
    client: openai.AsyncOpenAI, words: Sequence[str], temperature: float, seed: int
) -> list[Episode]:
    """Run an episode of each word, all at once, each with seeds of its own."""
    return list(
        await asyncio.gather(
            *(
                run_episode(client, word, temperature, seed + MAX_TURNS * place)
                for place, word in enumerate(words)
            )
        )
    )


def grouped(episodes: Sequence[Episode], version: int) -> list[Group]:
    """Return the episodes of each word as a group, if their rewards differ."""
    by_word: dict[str, list[Episode]] = {}
    for episode in episodes:
        assert not is_held_out(episode.word)
        by_word.setdefault(episode.word, []).append(episode)
    return [
        Group(prompt_ids=found[0].turns[0].prompt_ids, samples=[each.sample(version) for each in found])
        for found in by_word.values()
        if len({each.reward for each in found}) > 1
    ]
