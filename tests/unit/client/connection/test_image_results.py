"""Image requests and results of the client: what it sends for arrays, and what it refuses of an engine."""

import msgspec
import numpy as np
import pytest
import torch

from caesura.client import ImageTensor, InternalError, InvalidRequest, SdeParams
from caesura.client.connection.images import decode_images, plan_images
from caesura.io_struct import FinishReason, GenerateImagesReqOutput, ResultTensor, WeightVersionSpan

LATENTS = np.arange(3 * 2 * 2, dtype="<f4").reshape(3, 2, 2)
FRAMES = [
    LATENTS.tobytes(),
    np.asarray([-1.5, 0.0], "<f4").tobytes(),
    np.asarray([0.5, 0.0], "<f4").tobytes(),
]
RESULT = GenerateImagesReqOutput(
    rid="r",
    index=0,
    finish_reason=FinishReason(type="abort"),
    weight_versions=[
        WeightVersionSpan(version="a", epoch=0, start=0, end=1),
        WeightVersionSpan(version="b", epoch=1, start=1, end=2),
    ],
    seed=1,
    steps=5,
    steps_done=2,
    step_indices=[0, 1],
    latent_indices=[0, 1, 2],
    tensors=[
        ResultTensor(name="latents", dtype="F32", shape=[3, 2, 2], buffer=0),
        ResultTensor(name="log_probs", dtype="F32", shape=[2], buffer=1),
        ResultTensor(name="noise_stds", dtype="F32", shape=[2], buffer=2),
    ],
)


def test_a_result_is_views_of_its_frames():
    output = decode_images(RESULT, FRAMES)
    assert np.array_equal(np.asarray(output.latents), LATENTS)
    assert (output.log_probs, output.noise_stds, output.timesteps) == ([-1.5, 0.0], [0.5, 0.0], [])
    assert (output.image, output.final_latents, output.embeds) == (None, None, {})
    assert not np.asarray(output.latents).flags.writeable


def changed(**fields):
    return msgspec.structs.replace(RESULT, **fields)


def tensor(name="latents", dtype="F32", shape=(3, 2, 2), buffer=0):
    return [ResultTensor(name=name, dtype=dtype, shape=list(shape), buffer=buffer), *RESULT.tensors[1:]]


@pytest.mark.parametrize(
    "result",
    [
        changed(step_indices=[0]),
        changed(latent_indices=[0, 1]),
        changed(steps_done=3),
        changed(weight_versions=[]),
        changed(tensors=tensor(buffer=3)),
        changed(tensors=tensor(buffer=-1)),
        changed(tensors=tensor(dtype="F7")),
        changed(tensors=tensor(shape=(3, 2, 3))),
        changed(tensors=tensor(shape=(-3, -2, 2))[:1] + RESULT.tensors[:1]),
    ],
)
def test_a_result_whose_parts_do_not_fit_is_refused(result):
    with pytest.raises(InternalError):
        decode_images(result, FRAMES)


def plan(prompt=None, embeds=None, **options):
    return plan_images(prompt, embeds, options, rid=None, message_id="m")


def test_a_list_of_prompts_is_a_request_for_each():
    work = plan(["a", "b"], n=2, sde={"type": "cps", "noise_level": 0.5})
    assert [(request.id, request.prompt, request.n) for request in work.requests] == [
        ("m-0", "a", 2),
        ("m-1", "b", 2),
    ]
    assert work.requests[0].sde == SdeParams(type="cps", noise_level=0.5)
    assert (work.single, plan("a").single) == (False, True)


def test_arrays_tensors_and_results_become_frames():
    values = np.asarray([[1.0, 2.0]], np.float32)
    given = {
        "numpy": values,
        "torch": torch.from_numpy(values),
        "half": torch.from_numpy(values).bfloat16(),
        "result": ImageTensor("BF16", (1, 2), b"1234"),
        "column": values.T,
    }
    work = plan(embeds=given)
    specs = {spec.name: (spec.dtype, spec.shape, spec.nbytes) for spec in work.requests[0].tensors}
    assert specs["numpy"] == specs["torch"] == specs["half"] == ("F32", [1, 2], 8)
    assert (specs["result"], specs["column"]) == (("BF16", [1, 2], 4), ("F32", [2, 1], 8))
    assert work.buffers[0] == work.buffers[1] == work.buffers[2] == work.buffers[4] == values.tobytes()


@pytest.mark.parametrize("embeds", [{"a": "text"}, {"a": [1.0]}, {"a": np.asarray(["x"])}, {"a": None}])
def test_embeddings_that_are_no_arrays_are_refused(embeds):
    with pytest.raises(InvalidRequest):
        plan(embeds=embeds)


@pytest.mark.parametrize("prompt", [[1], [None, 2], 3.5])
def test_a_prompt_that_is_no_text_is_refused(prompt):
    with pytest.raises(InvalidRequest):
        plan(prompt)


def test_numpy_has_no_bfloat16_and_is_told_so():
    with pytest.raises(AttributeError, match="BF16"):
        np.asarray(ImageTensor("BF16", (1,), b"12").__array_interface__)
