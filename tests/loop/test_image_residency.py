"""Components of image pipelines that come and go."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.faults import Fault
from support.lanes import quick
from support.scripted import EngineDriver, one_piece_per_slice

from caesura.io_struct import GenerateImagesReqInput, SdeParams

pytest.importorskip("diffusers")
from support.image_requests import send_tensors
from support.pipelines import make_flux, make_qwen_image, make_sd3, tensors_of

from caesura.scheduler.memory.offload import LayerwiseOffloadStrategy

STEPS = 3
ENCODERS = {"text_encoder", "text_encoder_2", "text_encoder_3"}
COMPONENTS = ("transformer", "vae", *sorted(ENCODERS))
MAKE = {
    "sd3": lambda path, seed=0: make_sd3(path, seed=seed, layers=4),
    "flux": make_flux,
    "qwen": make_qwen_image,
}
STRATEGIES = [
    ("layerwise", "offload"),
    ("offload", "resident"),
    ("resident", "layerwise"),
    ("layerwise", "layerwise"),
]


@pytest.fixture(scope="session")
def pipelines(tmp_path_factory):
    made = {}

    def folder(family, seed=0):
        if (family, seed) not in made:
            path = tmp_path_factory.mktemp("moving") / f"{family}-{seed}"
            made[family, seed] = MAKE[family](path, seed=seed)
        return made[family, seed]

    return folder


@pytest.fixture(scope="session")
def expected(pipelines):
    known = {}

    def of(family, seed=0, **options):
        key = family, seed, *options.values()
        if key not in known:
            with engine(pipelines(family, seed), **options) as driver:
                known[key] = checksums(driver), run(driver, *messages())
        return known[key]

    return of


def engine(folder, frozen="resident", transformer="resident", **options):
    options = {"max_running_requests": 8, **options}
    return EngineDriver(
        str(folder), scripted=False, frozen_residency=frozen, transformer_residency=transformer, **options
    )


def messages():
    options = {"num_inference_steps": STEPS, "seed": 5, "return_steps": None, "max_sequence_length": 6}
    return (
        GenerateImagesReqInput(
            prompt="a red", n=2, width=16, height=16, sde=SdeParams(type="sde"), **options
        ),
        GenerateImagesReqInput(prompt="a blue", width=24, height=16, **options),
    )


def run(driver, *asked):
    driver.run(*asked)
    return results(driver, *asked)


def results(driver, *asked):
    for message in asked:
        assert message.id not in driver.replies, driver.replies.get(message.id)
    return [
        tensors_of(driver.images[message.id, index][0]) for message in asked for index in range(message.n)
    ]


def checksums(driver):
    return driver.check_weights().checksums


def same(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)


def alike(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_allclose(
                one[name].astype(np.float32), other[name], rtol=0, atol=1 if name == "image" else 1e-5
            )


def on_device(driver):
    return {each.name: each.device_bytes for each in driver.status().components}


def watch(driver):
    """Return a list that each executed step extends by what it finds on the device: ``(kind, {component:
    bytes})``.
    """
    runner, seen = driver.engine.runner, []
    execute = runner.execute

    def watched(batch):
        launched = execute(batch)
        there = {name: nbytes for name, nbytes in on_device(driver).items() if nbytes}
        seen.append((batch.kind, there))
        return launched

    runner.execute = watched
    return seen


@pytest.mark.parametrize("transformer", ["offload", "layerwise"])
def test_traced_calls_find_weights_that_move(pipelines, expected, traced_at_once, transformer):
    first, second = pipelines("sd3"), pipelines("sd3", 1)
    with engine(first, "offload", transformer) as driver:
        for _ in range(2):
            same(run(driver, *messages()), expected("sd3")[1])
        for name in COMPONENTS:
            driver.update(second / name, component=name)
        for _ in range(2):
            same(run(driver, *messages()), expected("sd3", 1)[1])
        traced = driver.engine.runner.traced
        assert any(shape.agrees for shape in traced["vae"].shapes.values()), "the VAE comes as a whole"
        if transformer == "layerwise":
            assert "transformer" not in traced, "a trace would call no block"
        else:
            assert any(shape.agrees for shape in traced["transformer"].shapes.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("frozen", "transformer"), quick(STRATEGIES, 2))
def test_strategies_keep_images_within_their_memory(pipelines, expected, frozen, transformer, dtype):
    checks, images = expected("sd3", dtype=dtype)
    with engine(pipelines("sd3"), frozen, transformer, dtype=dtype) as driver:
        sizes = {each.name: each.nbytes for each in driver.status().components}
        moving = dict.fromkeys((*ENCODERS, "vae"), frozen) | {"transformer": transformer}
        moving = {name: how for name, how in moving.items() if how != "resident"}
        assert {each.name: each.residency for each in driver.status().components} == moving
        assert not any(on_device(driver).values()), "nobody has used them yet"
        assert checksums(driver) == checks
        seen = watch(driver)
        for _ in range(2):
            same(run(driver, *messages()), images)
            assert not any(on_device(driver).values()), "no sample is left"
        movables = driver.engine.runner._stages._residency.registered
        window = LayerwiseOffloadStrategy()
        allowed = {
            name: window.peak_bytes(movables[name]) if how == "layerwise" else sizes[name]
            for name, how in moving.items()
        }
        used = {"encode": ENCODERS, "denoise": {"transformer"}, "decode": {"vae"}}
        assert {kind for kind, _ in seen} == used.keys()
        for kind, there in seen:
            assert there.keys() == used[kind] & moving.keys()
            assert all(0 < nbytes <= allowed[name] for name, nbytes in there.items())
        for name in ("transformer", "vae"):
            assert (allowed.get(name) == sizes.get(name)) == (moving.get(name) != "layerwise")
        peak = max(sum(allowed[name] for name in used[kind] & moving.keys()) for kind in used)
        assert driver.status().device_memory.components_peak == peak


@pytest.mark.parametrize(
    ("family", "how"),
    quick([("flux", "layerwise"), ("qwen", "offload"), ("flux", "offload"), ("qwen", "layerwise")], 2),
)
def test_every_family_computes_with_moving_components(pipelines, expected, family, how):
    with engine(pipelines(family), how, how) as driver:
        same(run(driver, *messages()), expected(family)[1])
        assert driver.status().device_memory.components_peak < sum(
            each.nbytes for each in driver.status().components
        )


def tensors_in(path, component):
    name = "model" if component.startswith("text") else "diffusion_pytorch_model"
    return load_file(path / component / f"{name}.safetensors")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("frozen", "transformer", "ticks", "transport"),
    quick(
        [
            ("offload", "layerwise", 3, "tensor"),  # in the midst of denoising
            ("layerwise", "offload", 1, "disk"),  # in the midst of encoding
            ("offload", "layerwise", 0, "disk"),
            ("layerwise", "offload", 5, "tensor"),  # one of the images is decoded
            ("layerwise", "layerwise", 3, "disk"),
        ],
        2,
    ),
)
def test_an_update_of_offloaded_components_is_a_cold_load(
    pipelines, expected, frozen, transformer, ticks, transport, dtype
):
    other = pipelines("sd3", 20)
    with engine(pipelines("sd3"), frozen, transformer, dtype=dtype) as driver:
        waiting = messages() if ticks else ()
        for message in waiting:
            driver.send(message)
        driver.tick(ticks)
        driver.pause("retract")
        for component in COMPONENTS:
            if transport == "disk":
                reply = driver.update(other, component=component, flush_cache=False)
            else:
                reply = send_tensors(
                    driver, tensors_in(other, component), component=component, flush_cache=False
                )
            assert reply.committed, reply
        wanted, made = expected("sd3", 20, dtype=dtype)
        assert checksums(driver) == wanted
        driver.go_on()
        driver.run_until_idle()
        same(results(driver, *waiting), made[: sum(message.n for message in waiting)])
        same(run(driver, *messages()), made)
        assert checksums(driver) == wanted, "coming and going changes no value"


def test_checksums_are_of_the_weights_while_steps_run(pipelines, expected, monkeypatch):
    one_piece_per_slice(monkeypatch)
    with engine(pipelines("sd3"), "layerwise", "offload") as driver:
        seen = watch(driver)
        for message in messages():
            driver.send(message)
        assert checksums(driver) == expected("sd3")[0]
        assert {kind for kind, _ in seen} >= {"encode", "denoise"}


def test_a_release_loses_only_components_without_a_copy(pipelines, expected):
    with engine(pipelines("sd3"), "offload", "layerwise") as driver:
        driver.pause()
        driver.release("weights")
        driver.resume("weights")
        assert driver.status().weights == "valid", "every component has a copy"
        driver.go_on()
        same(run(driver, *messages()), expected("sd3")[1])
    with engine(pipelines("sd3"), "offload", "resident") as driver:
        driver.release("weights")
        driver.resume("weights")
        assert driver.status().weights == "invalid"
        assert driver.update(pipelines("sd3")).weights == "valid"
        same(run(driver, *messages()), expected("sd3")[1])


def test_a_release_heals_nothing(pipelines, expected):
    with engine(pipelines("sd3"), "offload", "layerwise") as driver:
        session = driver.begin()
        other = pipelines("sd3", 20)
        tensors = tensors_in(other, "text_encoder")
        fields = {"component": "text_encoder", "session_id": session, "flush_cache": False}
        assert not send_tensors(driver, tensors, **fields).committed
        driver.end(session_id=session, commit=False)
        assert driver.status().weights == "poisoned"
        driver.release("weights")
        driver.resume("weights")
        for component, weights in (("transformer", "poisoned"), ("text_encoder", "valid")):
            assert driver.update(pipelines("sd3"), component=component).weights == weights
        assert checksums(driver) == expected("sd3")[0]


def test_every_tensor_of_offloaded_components_is_written(pipelines, expected):
    with engine(pipelines("sd3"), "layerwise", "offload") as driver:
        run(driver, *messages())
        driver.check_weights("reset_tensors")
        slots = driver.engine.model.weight_slots().values()
        assert all(bool(slot.read().isnan().all()) for slot in slots if slot.dtype.is_floating_point)
        for component in COMPONENTS:
            driver.update(pipelines("sd3"), component=component)
        assert driver.status().weights == "valid"
        same(run(driver, *messages()), expected("sd3")[1])


def test_values_are_checked_in_offloaded_components(pipelines, tmp_path):
    with engine(pipelines("sd3"), "offload", "layerwise", check_finite=True) as driver:
        for component in ("vae", "transformer"):
            slots = driver.engine.model.weight_slots()
            name = next(name for name in slots if name.startswith(f"{component}."))
            rows = torch.full(slots[name].shape, torch.inf)
            reply = send_tensors(driver, {name.partition(".")[2]: rows}, component=component)
            assert (reply.code, reply.detail["non_finite"][0]["name"]) == ("weights_not_finite", name)
            assert driver.update(pipelines("sd3"), component=component).committed


def test_an_engine_outlives_what_does_not_fit(pipelines, expected):
    with engine(pipelines("sd3"), "offload", "layerwise") as driver:
        with Fault(driver.engine.runner.family, "encode", RuntimeError("out of memory")):
            alike(run(driver, *messages()), expected("sd3")[1])
        assert {each.place: each.count for each in driver.status().totals.emptied}["failure"] == 1
        driver.pause("abort")
        driver.go_on()
        vae = {"calls": range(1000), "only": lambda component: component.name == "vae"}
        asked = messages()
        with Fault(driver.engine.residency, "_require_room", MemoryError("no room"), **vae):
            driver.run(*asked)
        ended = [driver.images[m.id, i][0].finish_reason for m in asked for i in range(m.n)]
        assert {(reason.type, reason.code) for reason in ended} == {("error", "out_of_memory")}
        alike(run(driver, *messages()), expected("sd3")[1])


def test_stages_are_timed(pipelines):
    with engine(pipelines("sd3"), "offload") as driver:
        run(driver, messages()[1])
        counts = {stage.name: stage.count for stage in driver.status().stages}
        assert (counts["encode"], counts["denoise"], counts["decode"]) == (1, STEPS, 1)
        assert (counts["components.arrive"], counts["components.leave"]) == (2, 2)
