"""What `/rollout/generate` holds for one request."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from caesura.client.connection.images import ImageOutput, ImageTensor
from caesura.client.exceptions import InvalidRequest
from caesura.client.serve.context import FrontEnd, ServeOptions
from caesura.client.serve.sglang import rollout
from caesura.io_struct import FinishReason

SIDE, STEPS = 1024, 28
IMAGE = 3 * SIDE * SIDE


class Engine:
    """In place of the client: the output of seed 0 comes at once with ``embeds`` bytes of embeddings, no
    other ever.
    """

    def __init__(self, embeds: int) -> None:
        self.asked: list[int] = []
        self.abandoned: list[int] = []
        self._embeds = ImageTensor("U8", (embeds,), bytes(embeds))

    async def generate_images(self, prompt: str, *, seed: int, **options: Any) -> ImageOutput:
        self.asked.append(seed)
        try:
            if seed:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.abandoned.append(seed)
            raise
        return output_with(prompt_embeds=self._embeds)


def output_with(**embeds: ImageTensor) -> ImageOutput:
    return ImageOutput(
        rid="r", index=0, finish_reason=FinishReason(type="length"), weight_versions=[], seed=0, steps=0,
        steps_done=0,
        step_indices=[], latent_indices=[], log_probs=[], noise_stds=[], timesteps=[], sigmas=[],
        latents=None, image=None,
        final_latents=None, embeds=embeds, num_retractions=0, queue_time=0.0, e2e_latency=0.0,
    )  # fmt: skip


def run(engine: Engine, latent_bytes_per_pixel: float = 1.0, **fields: Any) -> Any:
    options = ServeOptions(latent_bytes_per_pixel=latent_bytes_per_pixel)
    front = cast(FrontEnd, SimpleNamespace(client=engine, options=options))
    body = rollout.RolloutBody(
        prompt="a", seed=0, width=SIDE, height=SIDE, num_inference_steps=STEPS, **fields
    )
    return asyncio.run(rollout._outputs(front, body, "r"))


@pytest.mark.parametrize("per_pixel", [0.25, 1.0, 4.0])
def test_latents_count_what_this_engines_have(per_pixel):
    each = IMAGE + int((STEPS + 1) * per_pixel * SIDE * SIDE)
    most = rollout.MAX_ANSWER_BYTES // each
    engine = Engine(embeds=rollout.MAX_ANSWER_BYTES + 1)
    with pytest.raises(InvalidRequest, match=f"with their latents {(most + 1) * each} bytes"):
        run(engine, per_pixel, num_outputs_per_prompt=most + 1)
    assert engine.asked == []
    with pytest.raises(InvalidRequest, match="have more than"):
        run(engine, per_pixel, num_outputs_per_prompt=most)
    assert len(engine.asked) == most


def test_a_window_of_returned_steps_counts_its_latents_alone():
    engine = Engine(embeds=8)
    found = run(engine, 64.0, num_outputs_per_prompt=1, rollout_return_step_indices=[0, 1, 2])
    assert len(found[1]) == 1
    with pytest.raises(InvalidRequest, match="with their latents"):
        run(engine, 64.0, num_outputs_per_prompt=1)


def test_bytes_that_come_are_counted_whatever_they_are_and_the_other_outputs_are_aborted(monkeypatch):
    monkeypatch.setattr(rollout, "MAX_ANSWER_BYTES", 4 * IMAGE)
    engine = Engine(embeds=4 * IMAGE + 1)
    with pytest.raises(InvalidRequest, match="have more than") as raised:
        run(engine, num_outputs_per_prompt=3, rollout=False)
    assert raised.value.detail["field"] == "num_outputs_per_prompt"
    assert sorted(engine.abandoned) == [1, 2]


def test_largest_message_is_answered(monkeypatch):
    monkeypatch.setattr(rollout, "MAX_ANSWER_BYTES", 4 * IMAGE)
    seeds, (found,) = run(Engine(embeds=4 * IMAGE), num_outputs_per_prompt=1, rollout=False)
    assert seeds == [0]
    assert len(found.embeds["prompt_embeds"].data) == 4 * IMAGE
