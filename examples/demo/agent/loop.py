"""The run: a warm-up, then episodes, a step of the trainer and new weights, until the last update."""

import asyncio
import random
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import torch

from caesura.client.trainer import checkpoint_tensors

from .. import task
from ..history import RunHistory
from ..learner import Learner, collate
from ..messages import GapStats, Push, StepStats, WarmupProgress
from ..policy import build_policy
from ..replicas import Server
from ..sender import HttpSender
from . import world
from .episodes import Episode, grouped, run_episodes
from .settings import AgentSettings

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Update:
    """One turn of the loop; shares are of its episodes."""

    update: int
    reward: float
    exact: float
    called: float
    """Share that asked the tool first."""
    turns: float
    malformed: int
    step: StepStats | None
    """None if no word's episodes differed in reward."""
    gap: GapStats | None
    rollout_s: float
    train_s: float
    update_ms: float


@dataclass(frozen=True)
class Evaluation:
    """Greedy episodes of held-out words."""

    update: int
    episodes: list[Episode] = field(repr=False)

    @property
    def exact(self) -> float:
        return sum(each.exact for each in self.episodes) / len(self.episodes)


@dataclass(kw_only=True)
class AgentHistory(RunHistory):
    updates: list[Update] = field(default_factory=list)
    evals: list[Evaluation] = field(default_factory=list)
    episodes: int = 0
    requests: int = 0
    later_turns: int = 0
    """Turns after the first of an episode."""
    extended: int = 0
    """Later turns whose prompt goes on from the tokens of the turn before."""
    hits: int = 0
    """Later turns that found a part of their prompt in the prefix cache."""
    cached_tokens: int = 0
    later_prompt_tokens: int = 0

    def add(self, episodes: list[Episode]) -> None:
        """Count episodes."""
        self.episodes += len(episodes)
        for episode in episodes:
            self.requests += len(episode.turns)
            self.extended += sum(episode.extended)
            for turn in episode.turns[1:]:
                self.later_turns += 1
                self.hits += turn.cached_tokens > 0
                self.cached_tokens += turn.cached_tokens
                self.later_prompt_tokens += len(turn.prompt_ids)

    def summary(self) -> dict[str, Any]:
        """Return the figures of ``summary.json``."""
        gaps = [max(row.gap.first_max, row.gap.later_max) for row in self.updates if row.gap is not None]
        return {
            "reward_first": round(self.evals[0].exact, 4),
            "reward_last": round(self.evals[-1].exact, 4),
            "called_first": round(self.updates[0].called, 4),
            "called_last": round(self.updates[-1].called, 4),
            "turns_last": round(self.updates[-1].turns, 3),
            "updates": len(self.updates),
            "episodes": self.episodes,
            "requests": self.requests,
            "later_turns": self.later_turns,
            "turns_that_extend_their_ids": self.extended,
            "turns_retokenised": self.later_turns - self.extended,
            "prefix_hits": self.hits,
            "prefix_hit_share": round(self.cached_tokens / max(self.later_prompt_tokens, 1), 4),
            "max_logprob_gap": max(gaps, default=0.0),
            "requests_per_s": round(self.requests / self.rl_s, 1),
            "transport": self.transport,
        }


def run(settings: AgentSettings, history: AgentHistory, say: Say) -> None:
    """Run everything and fill ``history``."""
    began = time.perf_counter()
    torch.set_num_threads(settings.trainer_threads)
    torch.manual_seed(settings.seed)
    model = build_policy(
        vocab_size=world.VOCAB_SIZE, max_position_embeddings=world.CONTEXT_LEN, eos_token_id=world.END
    )
    history.parameters = sum(value.numel() for value in model.parameters())
    learner = Learner(model, settings)
    say("supervised warm-up: some chats call the tool, most guess")
    warm_up(learner, settings, history)
    history.warmup_s = time.perf_counter() - began
    folder = settings.out_dir / "model"
    shutil.rmtree(folder, ignore_errors=True)
    save(model, folder)
    say("starting the engine")
    launched = time.perf_counter()
    options = {
        "--model": folder,
        "--weights-root": settings.out_dir,
        "--context-len": world.CONTEXT_LEN,
        "--kv-pool-tokens": settings.kv_pool_tokens,
        "--max-running-requests": settings.max_running_requests,
        "--num-threads": settings.engine_threads,
    }
    with closing(Server(options, settings.out_dir / "engine.log")) as server:
        history.engine_start_s = time.perf_counter() - launched
        say("reinforcement learning")
        asyncio.run(learn(server.url, learner, settings, history, say))
    save(model, folder)
    history.wall_s = time.perf_counter() - began


def save(model: Any, folder: Path) -> None:
    """Save the policy as a folder that can be served."""
    model.save_pretrained(folder)
    world.save_tokenizer(folder)


def warm_up(learner: Learner, settings: AgentSettings, history: AgentHistory) -> None:
    """Run supervised steps until enough calls and answers are right."""
    rng, tokenizer = random.Random(f"warm-up {settings.seed}"), world.build_tokenizer()
    window = [0.0, 0.0]
    while len(history.warmup) < settings.warmup_max_steps and min(window) < settings.warmup_exact:
        rows = [
            world.demonstration(task.training_word(rng), rng, settings.warmup_calls)
            for _ in range(settings.warmup_batch)
        ]
        encoded = [
            [(token, said) for text, said in parts for token in tokenizer.encode(text).ids]
            for parts, _ in rows
        ]
        width = max(map(len, encoded))
        tokens = torch.full((len(rows), width), task.PAD)
        mask = torch.zeros(len(rows), width, dtype=torch.bool)
        for row, pairs in enumerate(encoded):
            tokens[row, : len(pairs)] = torch.tensor([token for token, _ in pairs])
            mask[row, : len(pairs)] = torch.tensor([said for _, said in pairs])
        mask = mask[:, 1:]
        logits = learner.model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[mask], tokens[:, 1:][mask])
        right = (logits.argmax(-1) == tokens[:, 1:]) | ~mask
        right[torch.arange(len(rows)), mask.float().argmax(1)] = True  # to call or to guess is a choice
        calls = torch.tensor([called for _, called in rows])
        exact = right.all(dim=1)[calls].float().mean().item() if calls.any() else 0.0
        learner.descend(loss, settings.warmup_lr * min(1.0, (len(history.warmup) + 1) / 20))
        window = [window[1], exact]
        history.warmup.append(WarmupProgress(step=len(history.warmup) + 1, loss=loss.item(), exact=exact))


async def learn(url: str, learner: Learner, settings: AgentSettings, history: AgentHistory, say: Say) -> None:
    """Run all updates, each on episodes of the weights that it changes, and the evaluations."""
    rng = random.Random(f"episodes {settings.seed}")
    sender = HttpSender(settings.transport, url, lambda: settings.out_dir / "model")
    held_out = task.held_out_words(settings.held_out_prompts, settings.seed)
    learner.remember(0)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:

        async def evaluate(update: int) -> None:
            found = Evaluation(update, await run_episodes(client, held_out, 0.0, seed=0))
            history.add(found.episodes)
            history.evals.append(found)
            say(f"update {update:3d}  held-out answers {found.exact:.3f}")

        await evaluate(0)
        began = time.perf_counter()
        for update in range(1, settings.updates + 1):
            times = [time.perf_counter()]
            words = [task.training_word(rng) for _ in range(settings.groups_per_update)]
            episodes = await run_episodes(
                client, words * settings.samples_per_prompt, settings.temperature, seed=rng.getrandbits(48)
            )
            history.add(episodes)
            times.append(time.perf_counter())
            step, gap = train(learner, episodes, update)
            times.append(time.perf_counter())
            sender.push(checkpoint_tensors(learner.model), Push(version=update, flush_cache=True))
            times.append(time.perf_counter())
            history.updates.append(measured(update, episodes, step, gap, times))
            history.rl_s = times[-1] - began
            if update % settings.eval_every == 0 or update == settings.updates:
                await evaluate(update)


def train(learner: Learner, episodes: list[Episode], update: int) -> tuple[StepStats | None, GapStats | None]:
    """Make an update of episodes; what the tool said is no part of the loss."""
    groups = grouped(episodes, update - 1)
    step = gap = None
    if groups:
        batch = collate(groups)
        batch.mask.copy_(batch.versions >= 0)
        gap = learner.verify(batch)
        step = learner.step(update, batch)
    learner.remember(update)
    return step, gap


def measured(
    update: int, episodes: list[Episode], step: StepStats | None, gap: GapStats | None, times: list[float]
) -> Update:
    """Return the record of a turn of the loop."""
    count = len(episodes)
    return Update(
        update=update,
        reward=sum(each.reward for each in episodes) / count,
        exact=sum(each.exact for each in episodes) / count,
        called=sum(each.turns[0].asked is not None for each in episodes) / count,
        turns=sum(len(each.turns) for each in episodes) / count,
        malformed=sum(turn.malformed for each in episodes for turn in each.turns),
        step=step,
        gap=gap,
        rollout_s=times[1] - times[0],
        train_s=times[2] - times[1],
        update_ms=1e3 * (times[3] - times[2]),
    )
