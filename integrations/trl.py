"""TRL's trainers with Caesura in the place of vLLM (``pip install '.[trl]'``).

- :class:`Rollouts` is the ``rollout_func`` of ``trl.GRPOTrainer``.
- :class:`WeightTransfer` is the ``weight_transfer`` of ``trl.experimental.async_grpo.AsyncGRPOTrainer``.

Invariants:
- The log-probabilities that leave here are those of the distribution that TRL's loss recomputes: logits
  divided by the temperature, softmax over the full vocabulary, before top-k, top-p and min-p.
- Weights are labelled ``step-N`` with the trainer's step, in spans, status and logs.
- A pause has an owner and a lease: an engine does not stay paused for a trainer that has died.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Any

from ..client import SamplingParams, SchedulerClient

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

LEASE_S = 600.0
"""Seconds that a pause outlives its trainer."""


class Rollouts:
    """``GRPOTrainer(..., rollout_func=Rollouts(client))``: completions under the trainer's weights.

    Before a batch of another step than the last one, the trainer's parameters are sent through shared memory.
    A distributed trainer calls this on each rank; only the main process sends weights, the others wait.
    """

    def __init__(
        self,
        client: SchedulerClient,
        *,
        sync_weights: bool = True,
        timeout: float | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            sync_weights: False: somebody else keeps the engine's weights up to date.
            timeout: seconds for one batch, or None.
            chat_template_kwargs: go to the tokenizer's ``apply_chat_template``.
        """
        self._client = client
        self._sync_weights = sync_weights
        self._timeout = timeout
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        self._sent_step: int | None = None

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return one completion per prompt: the trainer's sampler repeats each ``num_generations`` times.

        TRL reads the lists; reward functions get ``weight_versions``, a list of spans for each, as a keyword.
        """
        if self._sync_weights:
            self._send_weights(trainer)
        ids = [prompt_ids(trainer.processing_class, each, **self._chat_template_kwargs) for each in prompts]
        outputs = self._client.generate(
            ids, sampling_params(trainer.args), return_logprob=True, timeout=self._timeout
        )
        return {
            "prompt_ids": ids,
            "completion_ids": [output.output_ids for output in outputs],
            "logprobs": [output.output_logprobs for output in outputs],
            "weight_versions": [output.weight_versions for output in outputs],
        }

    def _send_weights(self, trainer: Any) -> None:
        step = int(trainer.state.global_step)
        if step == self._sent_step:
            return
        accelerator = trainer.accelerator
        if accelerator.is_main_process:
            model = accelerator.unwrap_model(trainer.model)
            self._client.update_weights_from_ipc(checkpoint_tensors(model), weight_version=f"step-{step}")
        accelerator.wait_for_everyone()
        self._sent_step = step


class WeightTransfer:
    """``AsyncGRPOTrainer(..., weight_transfer=WeightTransfer(client))``: TRL's protocol over pause and
    update.

    Requests in flight keep their KV (``in_place``) and go on under the new weights, as their spans tell.
    """

    def __init__(self, client: SchedulerClient, *, lease_s: float = LEASE_S) -> None:
        """Make an owner if needed; after ``lease_s`` seconds without the trainer the engine continues."""
        if client.owner is None:
            client.owner = f"trl-{os.getpid()}-{secrets.token_hex(4)}"
        self._client = client
        self._lease_s = lease_s
        self._sent = 0

    def init_weight_transfer(self) -> None:
        """Fail before the training where the engine cannot be reached."""
        self._client.status()

    def pause(self) -> None:
        self._client.pause("in_place", lease_s=self._lease_s)

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Send all parameters, by their names in the checkpoint; they serve from :meth:`resume` on."""
        self._client.update_weights_from_tensor(
            iterator, weight_version=f"step-{self._sent}", flush_cache=False
        )
        self._sent += 1

    def resume(self) -> None:
        """Commit what was sent, empty the device cache, go on."""
        self._client.continue_generation()

    def destroy(self) -> None:
        pass


def prompt_ids(tokenizer: Any, prompt: Any, **chat_template_kwargs: Any) -> list[int]:
    """Return token ids of a plain prompt, or of a conversation by the tokenizer's chat template."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    made = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **chat_template_kwargs
    )
    return list(made["input_ids"])


def sampling_params(args: Any) -> SamplingParams:
    """Return the sampling parameters of a ``GRPOConfig``, in which ``min_p = None`` means off."""
    return SamplingParams(
        max_new_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p or 0.0,
        repetition_penalty=args.repetition_penalty,
    )


def checkpoint_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a transformers model by their names in the checkpoint; tied ones once."""
    for name, parameter in model.named_parameters():
        yield name.removeprefix("_orig_mod.").replace("._orig_mod.", "."), parameter.detach()
