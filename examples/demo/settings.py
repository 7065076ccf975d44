"""Everything one run is told, in one frozen value."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from caesura.io_struct import OnRunning

from . import task

Transport = Literal["disk", "tensor", "ipc", "distributed"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
"""Transports of weights: files, the socket, shared memory, a gloo broadcast."""

ADAPTER_TRANSPORTS: tuple[Transport, ...] = ("disk", "tensor", "ipc")
"""Transports of adapters."""

HTTP_TRANSPORTS: tuple[Transport, ...] = ("disk", "tensor")
"""Transports that need nothing but HTTP."""

Policy = Literal["dense", "moe", "mla"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
"""Policies: Qwen3, Qwen3 with experts, DeepSeek V3 (experts and latent attention)."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings that both demos have."""

    out_dir: Path = Path("demo_out")
    seed: int = 0
    transport: Transport = "ipc"
    """Transport of weights; the default is the fastest on one host."""

    def as_dict(self) -> dict[str, Any]:
        """Return the settings for the report."""
        return {
            name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()
        }


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """Settings of a run; the defaults are the full one, under three minutes on two cores."""

    policy: Policy = "dense"
    targets: tuple[str, ...] = (task.BACKWARDS,)
    """Spellings that the warm-up shows, each as often; the first one is trained."""

    # Warm-up (trainer)
    warmup_max_steps: int = 400
    warmup_batch: int = 128
    warmup_lr: float = 1e-3
    warmup_exact: float = 0.14
    """The warm-up ends once this share of fresh training words is right: a poor policy, but not a blind one.
    """

    # Policy gradient (trainer)
    updates: int = 120
    lr: float = 5e-4
    lr_rampup: int = 20
    """Updates over which the learning rate rises."""
    lr_final: float = 0.2
    """Share of ``lr`` at the last update; linear in between."""
    max_grad_norm: float = 1.0
    entropy_bonus: float = 0.01
    ratio_cap: float = 2.0
    """Limit at which importance ratios are truncated."""
    trainer_threads: int = 1

    # Rollouts (engine)
    groups_per_update: int = 64
    """Prompts per update, at least one sample of each unlike the others in reward."""
    samples_per_prompt: int = 8
    temperature: float = 0.7
    """Temperature of the rollouts, and so of the policy that is trained."""
    groups_in_flight: int = 64
    """Prompts that the engine always has to work on."""
    max_lag: int = 3
    """Groups whose first token is more updates old than this are not trained on."""
    max_running_requests: int = 128
    """Samples per engine step: what a step, and so a pause, can cost."""
    kv_pool_tokens: int = 8192
    engine_threads: int = 1
    replicas: int = 1
    """Engines that sample; several stand behind one port and get their weights by HTTP."""

    # Held-out evaluation (engine, greedy)
    eval_every: int = 10
    held_out_prompts: int = 256

    @property
    def target(self) -> str:
        """The spelling that is rewarded."""
        return self.targets[0]

    @classmethod
    def quick(cls, **changes: Any) -> Self:
        """Return a run of seconds that walks every path, and learns little."""
        small = {
            "updates": 6,
            "eval_every": 3,
            "groups_per_update": 8,
            "groups_in_flight": 32,
            "held_out_prompts": 32,
            "warmup_max_steps": 30,
            "warmup_batch": 32,
        }
        return cls(**(small | changes))


@dataclass(frozen=True, kw_only=True)
class LoraSettings(Settings):
    """Settings of adapters that learn side by side; the figures of updates and rollouts are each one's."""

    targets: tuple[str, ...] = tuple(task.TARGETS)
    """Spellings that the base has seen, one for each adapter."""
    rank: int = 8
    alpha: int = 16
    on_running: OnRunning = "retract"
    """Fate of samples in mid-answer at a swap: they go on with the new version, their KV computed again."""

    warmup_max_steps: int = 600
    warmup_exact: float = 0.25
    lr: float = 1.2e-3
    lr_rampup: int = 10
    updates: int = 90
    groups_per_update: int = 32
    groups_in_flight: int = 24
    held_out_prompts: int = 128

    def of(self, target: str) -> Self:
        """Return the settings of the adapter that learns ``target``."""
        return replace(self, targets=(target,))
