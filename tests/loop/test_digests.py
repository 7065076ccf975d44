"""The digest of the weights: in status, in replies to updates, and with the tokens that they sampled."""

import pytest
from safetensors.torch import load_file
from support.buckets_by_hand import Sender
from support.lora import ALL_LINEAR, make_adapter
from support.scripted import EngineDriver, ok

from caesura.io_struct import GetStatusReqInput, LoadAdapterReqInput
from caesura.transfer.weight_digest import digest_of

PROMPT = [5, 6, 7, 8]


def digest_of_folder(path) -> str:
    return digest_of(load_file(path / "model.safetensors"))


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["one rank", "two ranks"])
def engine(request, tiny_model):
    with EngineDriver(str(tiny_model), scripted=False, tp=request.param) as driver:
        yield driver


def test_every_transport_ends_in_the_digest_of_the_checkpoint(engine, tiny_model, other_model):
    old, new = digest_of_folder(tiny_model), digest_of_folder(other_model)
    assert engine.status().digest == old != new
    assert engine.update(other_model).digest == new
    engine.pause("abort")
    replies = Sender(engine, tiny_model).send_all()
    assert [reply.digest for reply in replies] == [new] * (len(replies) - 1) + [old]
    assert engine.status().digest == old


def test_spans_have_the_digest_that_sampled_them(driver, tiny_model, other_model):
    rid = driver.generate(PROMPT, 20)
    driver.tick(8)
    ok(driver.update(other_model, flush_cache=False))
    driver.run_until_idle()
    first, second = driver.result(rid).weight_versions
    assert (first.digest, second.digest) == (digest_of_folder(tiny_model), digest_of_folder(other_model))
    assert driver.end(session_id=driver.begin(), weight_version="8").digest == second.digest, "a label alone"


def test_a_failed_update_leaves_the_digest_of_the_commit(driver, tiny_model, other_model):
    driver.pause("abort")
    Sender(driver, other_model).send(3)
    driver.end(commit=False, force=True)
    assert (driver.status().weights, driver.status().digest) == ("poisoned", digest_of_folder(tiny_model))
    assert driver.update(other_model).digest == digest_of_folder(other_model)


def test_spans_have_the_digest_of_the_adapter(tiny_model, tmp_path):
    path = make_adapter(tiny_model, tmp_path / "adapter", ALL_LINEAR)
    with EngineDriver(str(tiny_model), scripted=False, enable_lora=True, max_lora_rank=8) as driver:
        loaded = driver.call(LoadAdapterReqInput(name="a", path=str(path)))
        (own,) = driver.complete(PROMPT, 2).weight_versions
        (adapted,) = driver.complete(PROMPT, 2, adapter="a").weight_versions
        assert (own.adapter_digest, adapted.adapter_digest) == ("", loaded.digest)
        assert own.digest == adapted.digest == driver.call(GetStatusReqInput()).digest


def test_without_the_option_there_is_none(tiny_model, other_model):
    with EngineDriver(str(tiny_model), weights_digest=False) as driver:
        assert (driver.status().digest, driver.update(other_model).digest) == ("", "")
        assert driver.complete(PROMPT, 2).weight_versions[0].digest == ""
