"""A trainer's end of a process group, against engines in processes of their own."""

from collections.abc import Iterator

import pytest
import torch
from support.lanes import quick
from support.plain_trainer import PlainTrainer, update_message, weights_of
from support.waiting import PATIENCE_S, eventually

from caesura.client import (
    EngineError,
    GroupError,
    SamplingParams,
    SchedulerClient,
    SessionOpen,
    Unsupported,
    WeightMismatch,
    launch_scheduler,
)
from caesura.client.trainer import WeightUpdateGroup
from caesura.io_struct import InitWeightsUpdateGroupReqOutput, WeightUpdateReqOutput


@pytest.fixture(scope="module")
def engine(tiny_model) -> Iterator[SchedulerClient]:
    with launch_scheduler(str(tiny_model), dtype="float32", num_threads=1, kv_pool_tokens=1024) as client:
        yield client


@pytest.fixture(scope="module")
def group(engine) -> Iterator[WeightUpdateGroup]:
    with WeightUpdateGroup.create([engine], timeout_s=PATIENCE_S) as group:
        yield group


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_our_half_with_buckets_of_any_size(engine, group, tiny_model, other_model, load_format, paused):
    params = SamplingParams(max_new_tokens=200, temperature=1.0, seed=3, ignore_eos=True)
    handle = engine.submit([5, 6, 7], sampling_params=params)
    if paused:
        engine.pause("in_place")
    for bucket_bytes in (1, 20_000, 1 << 26):
        for path in (other_model, tiny_model):
            epoch = engine.status().weights_epoch
            (reply,) = group.update(
                weights_of(path).items(),
                bucket_bytes=bucket_bytes,
                load_format=load_format,
                flush_cache=False,
                weight_version=path.name,
            )
            assert (reply.committed, reply.weights_epoch, reply.weight_version) == (
                True,
                epoch + 1,
                path.name,
            )
            total = engine.check_weights().total
            assert engine.update_weights_from_disk(path, flush_cache=False).changed_tensors == 0
            assert engine.check_weights().total == total
    engine.continue_generation()
    assert handle.result().finish_reason.type == "length"


def test_the_client_method_and_a_session_of_the_trainers_own(engine, group, other_model):
    weights = weights_of(other_model)
    assert engine.update_weights_from_distributed(weights.items(), group=group, bucket_bytes=4096).committed
    with engine.weight_update(weight_version="mine") as session:
        reply = engine.update_weights_from_distributed(weights.items(), group=group, bucket_bytes=4096)
        assert not reply.committed
    assert session.result is not None
    assert session.result.weight_version == "mine"


def test_an_engine_that_refuses_ends_the_wait(engine, tiny_model, other_model):
    big = torch.zeros(1 << 20)
    with WeightUpdateGroup.create([engine], group_name="refused", timeout_s=PATIENCE_S) as group:
        with pytest.raises(WeightMismatch) as caught:
            group.update([("nobody", big)])
        assert caught.value.detail["unexpected"] == ["nobody"]
        with pytest.raises(GroupError, match="create it again"):
            group.update(weights_of(other_model).items())
    assert engine.status().weights == "valid"
    with WeightUpdateGroup.create([engine], group_name="refused", timeout_s=PATIENCE_S) as group:
        assert group.update(weights_of(tiny_model).items())[0].committed


def test_a_manifest_that_is_refused_costs_no_group(engine, group, other_model):
    tensors = [*weights_of(other_model).items(), ("nobody", torch.zeros(3))]
    with pytest.raises(WeightMismatch):
        group.update(tensors, bucket_bytes=4096)
    assert group.update(weights_of(other_model).items())[0].committed
    assert engine.status().session is None


def test_a_group_that_cannot_be_made_fails_at_once(engine):
    with pytest.raises(GroupError, match="other parameters"):
        WeightUpdateGroup.create([engine, engine], group_name="never", timeout_s=PATIENCE_S)
    with pytest.raises(Unsupported):
        WeightUpdateGroup.create([engine], backend="nccl", group_name="never", timeout_s=PATIENCE_S)
    with pytest.raises(GroupError):  # nothing is left of it
        engine.destroy_weights_update_group("never")


def test_a_group_that_an_earlier_trainer_left_behind_is_replaced(engine, other_model):
    with (
        WeightUpdateGroup.create([engine], group_name="left", timeout_s=PATIENCE_S) as first,
        WeightUpdateGroup.create([engine], group_name="left", timeout_s=PATIENCE_S) as second,
    ):
        assert second.update(weights_of(other_model).items())[0].committed
        first.clients = []  # its close would have the engine leave the new one


def test_a_process_group_that_the_trainer_has_already(engine, other_model):
    trainer = PlainTrainer("existing")
    init = engine.start(trainer.init_message(), InitWeightsUpdateGroupReqOutput)
    trainer.join()
    assert init.result().rank == 1
    group = WeightUpdateGroup(trainer.group, group_name="existing", clients=[engine])
    assert group.update(weights_of(other_model).items())[0].committed
    group.close()
    trainer.close()


def test_several_engines_with_one_broadcast(engine, tiny_model, other_model):
    with (
        launch_scheduler(str(tiny_model), dtype="float32", num_threads=1, kv_pool_tokens=256) as second,
        WeightUpdateGroup.create([engine, second], group_name="both", timeout_s=PATIENCE_S) as group,
    ):
        for path, bucket_bytes in ((other_model, 4096), (tiny_model, 1 << 26)):
            replies = group.update(weights_of(path).items(), bucket_bytes=bucket_bytes)
            assert [reply.committed for reply in replies] == [True, True]
            assert engine.check_weights().total == second.check_weights().total
        second.begin_weight_update()
        with pytest.raises(SessionOpen):
            group.update(weights_of(other_model).items(), bucket_bytes=4096)
        assert engine.status().session is None
        second.end_weight_update(commit=False)
        second.pause("in_place")
        handle = second.submit([5, 6, 7])
        second.continue_generation()
        handle.result()
        with pytest.raises(EngineError):
            group.update([("nobody", torch.zeros(1 << 20))])
        assert second.status().weights == engine.status().weights == "valid"


@pytest.mark.parametrize("doing", quick(["receiving", "joining"]))
def test_shutdown_does_not_wait_for_a_trainer(tiny_model, doing):
    trainer = PlainTrainer(f"shutdown-{doing}", timeout_s=PATIENCE_S)
    launched = launch_scheduler(str(tiny_model), dtype="float32", num_threads=1, kv_pool_tokens=256)
    with launched as client:
        if doing == "receiving":
            trainer.beside(trainer.join)
        init = client.start(trainer.init_message(timeout_s=PATIENCE_S), InitWeightsUpdateGroupReqOutput)
        pending = init
        if doing == "receiving":
            init.result()
            trainer.finish()
            message = update_message(weights_of(tiny_model), group_name=trainer.name)
            pending = client.start(message, WeightUpdateReqOutput)
            while client.status().update is None:
                assert not pending.done()
        client.shutdown()
        with pytest.raises(EngineError):
            pending.result()
        assert eventually(lambda: launched.returncode is not None)
        assert launched.returncode == 0
    trainer.close()
