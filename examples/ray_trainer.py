"""The asynchronous GRPO trainer on a fleet of engines that Ray places: docs/howto/fleet.md explains it.

    python examples/ray_trainer.py --replicas 2 --steps 60

Rollouts stay in flight while the weights change, on every replica at once; a replica that dies costs no
rollout. No sample is begun on weights that are more than ``MAX_STALENESS`` updates old, and tokens that have
become older meanwhile get weight 0 (grpo_trainer.py).
"""

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence

import torch
from grpo_trainer import (
    GROUPS_PER_STEP,
    IN_FLIGHT,
    LENGTHS,
    MAX_STALENESS,
    SAMPLES,
    TEMPERATURE,
    VOCABULARY,
    Group,
    build_policy,
    learn,
)
from transformers import PreTrainedModel

from caesura.client import SamplingParams, oldest_epoch
from caesura.client.group import Fleet
from caesura.client.group.ray_fleet import Placement, RolloutFleet
from caesura.client.trainer import checkpoint_tensors


async def roll_out(fleet: Fleet, groups: asyncio.Queue[Group], rng: random.Random) -> None:
    """Generate one group after the other, without an end."""
    while True:
        prompt = [rng.randrange(VOCABULARY), 0]
        params = SamplingParams(
            n=SAMPLES, max_new_tokens=rng.choice(LENGTHS), temperature=TEMPERATURE, ignore_eos=True
        )
        oldest = max(0, fleet.weights_epoch - MAX_STALENESS)
        outputs = await fleet.generate([prompt], params, return_logprob=True, min_weights_epoch=oldest)
        await groups.put(Group(prompt, outputs))


async def train(fleet: Fleet, policy: PreTrainedModel, steps: int) -> list[float]:
    """Return the mean reward of each step."""
    optimizer, rng = torch.optim.Adam(policy.parameters(), lr=2e-3), random.Random(0)
    ready: asyncio.Queue[Group] = asyncio.Queue(maxsize=GROUPS_PER_STEP)
    rewards: list[float] = []
    async with asyncio.TaskGroup() as tasks:
        workers = [tasks.create_task(roll_out(fleet, ready, rng)) for _ in range(IN_FLIGHT)]
        for step in range(1, steps + 1):
            groups = [await ready.get() for _ in range(GROUPS_PER_STEP)]
            epoch = fleet.weights_epoch
            rewards.append(await asyncio.to_thread(learn, policy, optimizer, groups, epoch))
            age = max(epoch - oldest_epoch(output) for group in groups for output in group.outputs)
            await fleet.update(checkpoint_tensors(policy), weight_version=f"step-{step}")
            serving = sum(member.serves for member in fleet.members)
            print(f"step {step:3d}  reward {rewards[-1]:.3f}  oldest {age} epochs  {serving} replicas")
        for worker in workers:
            worker.cancel()
    return rewards


async def run(options: argparse.Namespace) -> list[float]:
    """Run a fleet, and a policy that learns with it."""
    torch.manual_seed(0)
    policy = build_policy()
    with tempfile.TemporaryDirectory(dir=options.shared_folder) as folder:
        policy.save_pretrained(folder)
        placement = Placement(num_cpus=options.cpus, num_gpus=options.gpus, strategy="SPREAD")
        engine = {"dtype": "float32", "log_level": "WARNING"}
        async with RolloutFleet(
            folder, options.replicas, placement=placement, engine_options=engine
        ) as fleet:
            return await train(fleet, policy, options.steps)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2, help="engines (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="(default: %(default)s)")
    parser.add_argument(
        "--cpus", type=float, default=1.0, help="CPU cores of a replica (default: %(default)s)"
    )
    parser.add_argument("--gpus", type=float, default=0.0, help="GPUs of a replica (default: %(default)s)")
    parser.add_argument("--shared-folder", help="where every node finds the model (default: this host's own)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train on a fleet that ends with this function."""
    return asyncio.run(run(parse(argv)))


if __name__ == "__main__":
    main()
