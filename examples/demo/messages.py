"""Messages between the run and its trainer process: msgpack structs, nothing pickled.

Order: ``Initialised``, then ``WarmupProgress`` …, then ``WarmupDone``, all unasked. Then the run says
``Connect``; from then on there is one ``StepDone`` for each ``TrainBatch`` and one ``Pushed`` for each
``Push``. The trainer of an adapter says nothing before ``Connect``. The end of the pipe ends the trainer.
"""

import msgspec

from caesura.io_struct import LoadAdapterReqOutput, WeightUpdateReqOutput


class Message(msgspec.Struct, kw_only=True, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages of this pipe."""


class Span(msgspec.Struct, kw_only=True, frozen=True):
    """Output tokens ``[start, end)`` were sampled under the weights of update ``version``."""

    version: int
    start: int
    end: int
    stale_kv: bool
    """True on a KV cache that older weights have written in part."""


class Sample(msgspec.Struct, kw_only=True, frozen=True):
    """One answer; ``output_ids``, ``logprobs`` and ``rewards`` have one entry per output token."""

    output_ids: list[int]
    logprobs: list[float]
    """Log-probabilities of the engine at sampling time: the behaviour policy."""
    rewards: list[float]
    spans: list[Span]


class Group(msgspec.Struct, kw_only=True, frozen=True):
    """All samples of one prompt."""

    prompt_ids: list[int]
    samples: list[Sample]


class TrainBatch(Message, kw_only=True, frozen=True):
    """Make update number ``update`` (1 is the first) from these groups."""

    update: int
    groups: list[Group]


class Connect(Message, kw_only=True, frozen=True):
    """The engine that weights go to."""

    endpoint: str
    base: str = ""
    """Folder of the model that an adapter is for."""


class Push(Message, kw_only=True, frozen=True):
    """Bring the policy as it is now into the engine as ``version``."""

    version: int
    flush_cache: bool


class Initialised(Message, kw_only=True, frozen=True):
    """The untrained policy lies at ``path``; the warm-up begins."""

    path: str
    parameters: int


class WarmupProgress(Message, kw_only=True, frozen=True):
    """One supervised step: loss in nats per token, and the exact share of that batch's fresh words."""

    step: int
    loss: float
    exact: float


class WarmupDone(Message, kw_only=True, frozen=True):
    """The policy that reinforcement learning starts from, version 0, lies at ``path``."""

    path: str
    seconds: float


class StepStats(msgspec.Struct, kw_only=True, frozen=True):
    """Measurements of one policy-gradient step."""

    loss: float
    entropy: float
    """Nats per token."""
    grad_norm: float
    """Norm before clipping."""
    ess: float
    """Effective sample size of the importance ratios, as a share of the tokens."""
    ratio_max: float
    """The largest ratio, before truncation."""
    tokens: int


class GapStats(msgspec.Struct, kw_only=True, frozen=True):
    """Engine's logprobs against the trainer's under the weights that sampled each token (nats)."""

    first_max: float
    """Largest absolute difference over first spans: KV and weights of one epoch."""
    first_tokens: int
    later_max: float
    """The same over later spans, sampled on KV of mixed epochs; 0 where there were none."""
    later_mean: float
    later_tokens: int


class StepDone(Message, kw_only=True, frozen=True):
    """Update ``update`` is done and can be pushed."""

    update: int
    step: StepStats
    gap: GapStats
    train_s: float
    verify_s: float
    save_s: float
    """Seconds of writing the checkpoint; 0 if the transport needs none."""


class Pushed(Message, kw_only=True, frozen=True):
    """The engine serves the new weights."""

    reply: WeightUpdateReqOutput | LoadAdapterReqOutput


ToTrainer = Connect | TrainBatch | Push
FromTrainer = Initialised | WarmupProgress | WarmupDone | StepDone | Pushed
