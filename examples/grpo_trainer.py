"""An asynchronous GRPO trainer: rollouts stay in flight while the weights change.

docs/tutorial/grpo.md explains it.

python examples/grpo_trainer.py
"""

import asyncio
import random
import sys
import tempfile
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from caesura.client import (
    AsyncSchedulerClient,
    GenerateOutput,
    SamplingParams,
    launch_scheduler,
    oldest_epoch,
)
from caesura.client.trainer import checkpoint_tensors, importance_weights

VOCABULARY, LENGTHS, SAMPLES, TEMPERATURE = 8, (16, 16, 16, 192), 8, 1.0
IN_FLIGHT, GROUPS_PER_STEP, MAX_STALENESS = 8, 8, 4


def build_policy() -> PreTrainedModel:
    """Return two layers with random weights. The task: repeat the first token of the prompt."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.1,
    )
    return Qwen3ForCausalLM(config)


@dataclass
class Group:
    """One prompt and its samples."""

    prompt: list[int]
    outputs: list[GenerateOutput]

    def rewards(self) -> torch.Tensor:
        """Return [samples]: the share of output tokens that are the first token of the prompt."""
        tokens = torch.tensor([output.output_ids for output in self.outputs])
        return (tokens == self.prompt[0]).float().mean(1)


async def roll_out(client: AsyncSchedulerClient, groups: asyncio.Queue[Group], rng: random.Random) -> None:
    """Generate one group after the other, without an end."""
    while True:
        prompt = [rng.randrange(VOCABULARY), 0]
        params = SamplingParams(
            n=SAMPLES, max_new_tokens=rng.choice(LENGTHS), temperature=TEMPERATURE, ignore_eos=True
        )
        outputs = await client.generate([prompt], params, return_logprob=True)
        if all(output.finish_reason.type == "length" for output in outputs):  # none was aborted
            await groups.put(Group(prompt, outputs))


def learner_logprobs(policy: PreTrainedModel, group: Group) -> torch.Tensor:
    """Return [samples, tokens]: what the engine's ``output_logprobs`` are, under the learner's weights."""
    tokens = torch.tensor([group.prompt + output.output_ids for output in group.outputs])
    logits = policy(tokens[:, :-1]).logits[:, len(group.prompt) - 1 :] / TEMPERATURE
    sampled = tokens[:, len(group.prompt) :, None]
    return torch.log_softmax(logits, -1).gather(-1, sampled)[..., 0]


def loss_of(policy: PreTrainedModel, group: Group, epoch: int) -> torch.Tensor:
    """Return the policy gradient's loss: advantages relative to the group, each token weighted by its
    importance.
    """
    rewards = group.rewards()
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    logprobs = learner_logprobs(policy, group)
    weights = importance_weights(logprobs, group.outputs, epoch=epoch, max_staleness=MAX_STALENESS)
    return -(weights * advantages[:, None] * logprobs).mean()


def learn(
    policy: PreTrainedModel, optimizer: torch.optim.Optimizer, groups: list[Group], epoch: int
) -> float:
    """Run one step of the optimizer and return the mean reward of its samples."""
    optimizer.zero_grad()
    for group in groups:
        (loss_of(policy, group, epoch) / len(groups)).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return torch.cat([group.rewards() for group in groups]).mean().item()


async def push(client: AsyncSchedulerClient, policy: PreTrainedModel, step: int) -> int:
    """Push the learner's weights into the engine amid its requests; return the new weights epoch."""
    await client.pause("in_place", lease_s=60)
    reply = await client.update_weights_from_tensor(
        checkpoint_tensors(policy), weight_version=f"step-{step}", flush_cache=False
    )
    await client.continue_generation()
    return reply.weights_epoch


async def train(endpoint: str, policy: PreTrainedModel, steps: int) -> list[float]:
    """Return the mean reward of each step."""
    optimizer, rng = torch.optim.Adam(policy.parameters(), lr=2e-3), random.Random(0)
    ready: asyncio.Queue[Group] = asyncio.Queue(maxsize=GROUPS_PER_STEP)
    rewards: list[float] = []
    async with AsyncSchedulerClient(endpoint, owner="grpo") as client, asyncio.TaskGroup() as tasks:
        epoch = (await client.status()).weights_epoch
        workers = [tasks.create_task(roll_out(client, ready, rng)) for _ in range(IN_FLIGHT)]
        for step in range(1, steps + 1):
            groups = [await ready.get() for _ in range(GROUPS_PER_STEP)]
            rewards.append(await asyncio.to_thread(learn, policy, optimizer, groups, epoch))
            age = max(epoch - oldest_epoch(output) for group in groups for output in group.outputs)
            spans = max(len(output.weight_versions) for group in groups for output in group.outputs)
            epoch = await push(client, policy, step)
            print(f"step {step:3d}  reward {rewards[-1]:.3f}  oldest {age} epochs  versions up to {spans}")
        for worker in workers:
            worker.cancel()
    return rewards


def main(steps: int = 60) -> list[float]:
    """Train against an engine that ends with this function."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # leave the other core to the engine
    policy = build_policy()
    with tempfile.TemporaryDirectory() as folder:
        policy.save_pretrained(folder)
        with launch_scheduler(folder, dtype="float32", num_threads=1, log_level="WARNING") as engine:
            return asyncio.run(train(engine.endpoint, policy, steps))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
