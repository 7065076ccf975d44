"""Updates of an image engine's components: a cold load at any moment, poisoned parts, sessions, restarts."""

import numpy as np
import pytest
from safetensors.torch import load_file
from support.scripted import EngineDriver

from caesura.io_struct import SdeParams, TensorSpec, UpdateWeightsFromTensorReqInput

pytest.importorskip("diffusers")
from support.image_requests import STEPS, image, request, run
from support.pipelines import tensors_of

from caesura.scheduler.images import traced_module


@pytest.fixture
def driver(sd3):
    with EngineDriver(str(sd3), scripted=False, max_running_requests=8) as driver:
        yield driver


def test_an_update_is_a_cold_load(driver, other_sd3, monkeypatch):
    monkeypatch.setattr(traced_module, "TRACE_AFTER", 1)
    monkeypatch.setattr(traced_module, "WORTH_S", float("inf"))
    before = driver.check_weights()
    rid = driver.send(request(sde=SdeParams(type="sde")))
    driver.tick(3)
    driver.pause("in_place")
    done = driver.engine.live.samples(rid)[0].step
    reply = driver.update(other_sd3, flush_cache=False, weight_version="v2")
    assert (reply.committed, reply.weights_epoch) == (True, 1)
    driver.go_on()
    driver.run_until_idle()
    spans = image(driver, rid).weight_versions
    assert [(each.start, each.end, each.epoch) for each in spans] == [(0, done, 0), (done, STEPS, 1)]
    after = driver.check_weights()
    changed = {
        name.partition(".")[0] for name in after.checksums if after.checksums[name] != before.checksums[name]
    }
    assert changed == {"transformer"}
    for component in ("vae", "text_encoder", "text_encoder_2", "text_encoder_3"):
        path = str(other_sd3 / component)
        assert driver.update(path, component=component).committed
    updated = tensors_of(run(driver, request(sde=SdeParams(type="sde")))[0])
    checksums = driver.check_weights()
    with EngineDriver(str(other_sd3), scripted=False, max_running_requests=8) as cold:
        assert cold.check_weights().checksums == checksums.checksums
        expected = tensors_of(run(cold, request(sde=SdeParams(type="sde")))[0])
    assert all(np.array_equal(updated[name], expected[name]) for name in expected)


def test_a_running_engine_begins_its_samples_again(driver, other_sd3):
    rid = driver.send(request(n=2))
    driver.tick(4)
    assert driver.update(other_sd3).flushed
    driver.run_until_idle()
    for index in range(2):
        result = image(driver, rid, index)
        assert [(each.start, each.end, each.epoch) for each in result.weight_versions] == [(0, STEPS, 1)]
        assert result.num_retractions == 1


def test_a_changed_text_encoder_encodes_waiting_prompts_again(driver, other_sd3):
    begun = driver.send(request())
    driver.tick(3)
    driver.pause("in_place")
    waiting = driver.send(request())
    path = str(other_sd3 / "text_encoder")
    assert driver.update(path, component="text_encoder", flush_cache=False).committed
    driver.go_on()
    driver.run_until_idle()
    old, new = (tensors_of(image(driver, rid))["prompt_embeds"] for rid in (begun, waiting))
    assert not np.array_equal(old, new)


def test_a_changed_text_encoder_leaves_a_prompt_that_a_sample_began_with(driver, other_sd3):
    rid = driver.send(request(n=10))  # 8 run at once
    driver.tick(3)
    driver.pause("in_place")
    path = str(other_sd3 / "text_encoder")
    assert driver.update(path, component="text_encoder", flush_cache=False).committed
    driver.go_on()
    driver.run_until_idle()
    embeds = [tensors_of(image(driver, rid, index))["prompt_embeds"] for index in range(10)]
    assert all(np.array_equal(each, embeds[0]) for each in embeds)


def test_poisoned_weights_make_nothing_until_their_component_is_complete(driver, sd3, other_sd3):
    rid = driver.send(request())
    driver.tick(2)
    driver.check_weights("reset_tensors")
    assert driver.status().weights == "poisoned"
    components = driver.engine.model.components
    for component in components:
        step = driver.status().step
        driver.tick(3)
        assert driver.status().step == step
        path = str(sd3 / component)
        driver.update(path, component=component)
    assert driver.status().weights == "valid"
    driver.run_until_idle()
    assert image(driver, rid).finish_reason.type == "length"


def send_tensors(driver, tensors, **fields):
    specs = [
        TensorSpec(name=name, dtype="F32", shape=list(each.shape), nbytes=each.nbytes, buffer=number)
        for number, (name, each) in enumerate(tensors.items())
    ]
    message = UpdateWeightsFromTensorReqInput(specs=specs, flush_cache=False, **fields)
    return driver.call(message, buffers=[each.numpy().tobytes() for each in tensors.values()])


def halves(path):
    tensors = load_file(path / "transformer" / "diffusion_pytorch_model.safetensors")
    names = sorted(tensors)
    middle = len(names) // 2
    return [{name: tensors[name] for name in some} for some in (names[:middle], names[middle:])]


def test_a_failed_session_poisons_its_component_alone(driver, sd3, other_sd3):
    before = driver.check_weights().checksums
    first, _ = halves(other_sd3)
    session = driver.begin()
    assert not send_tensors(driver, first, session_id=session).committed
    driver.end(session_id=session, commit=False)
    assert driver.status().weights == "poisoned"
    assert not driver.update(sd3 / "vae", component="vae").committed
    assert driver.status().weights == "poisoned", "the transformer is what is broken"
    assert driver.update(sd3).committed
    assert driver.check_weights().checksums == before
    assert driver.status().weights == "valid"


def test_a_paused_update_commits_with_its_last_tensor(driver, other_sd3):
    driver.pause()
    first, second = halves(other_sd3)
    assert not send_tensors(driver, first).committed
    reply = send_tensors(driver, second)
    assert (reply.committed, reply.weights_epoch) == (True, 1)


def test_a_session_may_write_several_components(driver, other_sd3):
    session = driver.begin()
    for component in ("transformer", "vae"):
        assert not driver.update(other_sd3 / component, component=component, session_id=session).committed
    assert driver.end(session_id=session).weights_epoch == 1
    with EngineDriver(str(other_sd3), scripted=False) as cold:
        expected = cold.check_weights().checksums
    found = driver.check_weights().checksums
    assert all(found[name] == expected[name] for name in found if name.startswith(("transformer.", "vae.")))


def test_a_restart_goes_on_with_the_transformer_of_the_last_update(sd3, other_sd3, tmp_path):
    state = str(tmp_path / "state.json")
    with EngineDriver(str(sd3), scripted=False, state_file=state) as driver:
        driver.update(other_sd3, weight_version="v5")
        before = driver.check_weights().checksums
    with EngineDriver(str(sd3), scripted=False, state_file=state) as driver:
        status = driver.status()
        assert (status.weights, status.weight_version, status.weights_epoch) == ("valid", "v5", 2)
        assert driver.check_weights().checksums == before
        path = str(other_sd3 / "vae")
        driver.update(path, component="vae")
    with EngineDriver(str(sd3), scripted=False, state_file=state) as driver:
        assert driver.status().weights == "invalid", "the VAE's update is in no record"
        assert driver.update(sd3).weights == "valid"


def test_a_restart_does_not_take_other_components_for_those_that_were_committed(sd3, other_sd3, tmp_path):
    state = str(tmp_path / "state.json")
    with EngineDriver(str(sd3), scripted=False, state_file=state) as driver:
        driver.update(other_sd3 / "vae", component="vae")
        reply = driver.update(other_sd3, weight_version="v5")
        assert (reply.committed, reply.durable) == (True, True)
    with EngineDriver(str(sd3), scripted=False, state_file=state) as driver:
        assert driver.status().weights == "invalid"
        driver.update(other_sd3, weight_version="v6")
    with EngineDriver(str(sd3), scripted=False, state_file=state) as driver:
        assert (driver.status().weights, driver.status().weight_version) == ("valid", "v6")
