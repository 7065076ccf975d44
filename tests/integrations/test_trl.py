"""TRL's own trainers, with the engine in the place of vLLM."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from support.checkpoints import make_checkpoint
from support.tokenizers import make_byte_level

from caesura.client import SamplingParams, SchedulerClient, launch_scheduler, oldest_epoch
from caesura.integrations.trl import Rollouts, WeightTransfer, checkpoint_tensors, sampling_params

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

trl = pytest.importorskip("trl", reason="trl comes with the extra `trl`")
datasets = pytest.importorskip("datasets", reason="datasets comes with the extra `trl`")

pytestmark = pytest.mark.filterwarnings("default")  # TRL and its libraries warn of one another
TEMPERATURE = 4.0
"""High: the random weights make sharp distributions, and samples that are all alike teach nothing."""
WIDE_OPEN = {"temperature": TEMPERATURE, "top_k": 0, "max_completion_length": 12}


PROMPTS = [{"prompt": [{"role": "user", "content": f"Count to {n}."}], "target": n} for n in range(8)]
SAMPLER = {"queue_maxsize": 8, "top_p": 1.0, "min_p": None, "repetition_penalty": 1.0, **WIDE_OPEN}


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trl") / "policy"
    make_checkpoint(folder, "qwen3", tied=True, seed=3, vocab_size=512, pad_token_id=0)
    make_byte_level(folder, pad_token="</s>")
    return folder


@pytest.fixture(scope="module")
def client(policy):
    with launch_scheduler(str(policy)) as scheduler, SchedulerClient(scheduler.endpoint) as client:
        yield client


def trainer_of(policy: Path, output: Path, rollouts: Rollouts, rewards, **options: object):
    config = trl.GRPOConfig(
        output_dir=str(output), per_device_train_batch_size=4, num_generations=4, max_steps=3,
        learning_rate=1e-3,
        logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, bf16=False, seed=1, beta=0.0,
        **(WIDE_OPEN | options),
    )  # fmt: skip
    return trl.GRPOTrainer(
        model=str(policy),
        reward_funcs=rewards,
        args=config,
        train_dataset=datasets.Dataset.from_list(PROMPTS),
        rollout_func=rollouts,
    )


def logprobs_of(model: torch.nn.Module, prompt: list[int], completion: list[int], temperature: float):
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def odd_tokens(completion_ids, **_):
    return [float(sum(token % 2 for token in ids)) for ids in completion_ids]


def test_a_grpo_trainer_samples_under_the_weights_that_it_has(policy, client, tmp_path):
    rollouts, gaps, labels = Rollouts(client), [], []

    def checked(prompts, trainer):
        output = rollouts(prompts, trainer)
        model = trainer.model.eval()
        columns = (output[name] for name in ("prompt_ids", "completion_ids", "logprobs"))
        for prompt, completion, logprobs in zip(*columns, strict=True):
            learner = logprobs_of(model, prompt, completion, TEMPERATURE)
            gaps.append(float((learner - torch.tensor(logprobs)).abs().max()))
        labels.append({span.version for spans in output["weight_versions"] for span in spans})
        model.train()
        return output

    def reward(completions, completion_ids, weight_versions, **_):
        assert [spans[-1].end for spans in weight_versions] == [len(ids) for ids in completion_ids]
        return odd_tokens(completion_ids)

    trainer = trainer_of(policy, tmp_path, checked, reward)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train()
    assert any(not torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True))
    assert labels == [{"step-0"}, {"step-1"}, {"step-2"}]
    assert len(gaps) == 12
    assert max(gaps) < 1e-4


def test_sampler_parameters_have_the_meaning_of_trl():
    config = trl.GRPOConfig(use_cpu=True, bf16=False, **WIDE_OPEN)
    assert sampling_params(config) == SamplingParams(max_new_tokens=12, temperature=TEMPERATURE, top_k=0)
    config = trl.GRPOConfig(use_cpu=True, bf16=False, top_k=5, min_p=0.1, top_p=0.9)
    assert (sampling_params(config).top_k, sampling_params(config).min_p) == (5, 0.1)
    assert sampling_params(config).top_p == 0.9


def test_plain_prompts_are_tokenized(policy, client, tmp_path):
    trainer = trainer_of(
        policy, tmp_path, Rollouts(client), lambda completions, **_: [0.0] * len(completions)
    )
    output = Rollouts(client, sync_weights=False)(["Count", "Stop"], trainer)
    assert output["prompt_ids"] == [trainer.processing_class(text)["input_ids"] for text in ("Count", "Stop")]


def test_weights_go_through_the_protocol_of_the_async_trainer(policy, client):
    model = make_checkpoint(policy.parent / "trained", "qwen3", tied=True, seed=4, vocab_size=512)
    transfer = WeightTransfer(client)
    transfer.init_weight_transfer()
    handle = client.submit(
        [5, 6, 7], SamplingParams(max_new_tokens=200, temperature=0.0, ignore_eos=True), stream=True
    )
    next(iter(handle))
    transfer.pause()
    status = client.status()
    assert (status.generation, status.pause_mode, status.pause_owner) == ("paused", "in_place", client.owner)
    assert status.lease_left_s > 0
    epoch = status.weights_epoch
    transfer.send_weights(checkpoint_tensors(model))
    transfer.resume()
    transfer.destroy()
    output = handle.result()
    assert [span.version for span in output.weight_versions][-1] == "step-0"
    assert output.weight_versions[-1].epoch == epoch + 1
    assert oldest_epoch(output) == epoch
    expected = logprobs_of(model, [5, 6, 7], [9, 10], 1.0)
    scored = client.generate(
        [5, 6, 7, 9, 10],
        SamplingParams(max_new_tokens=1, temperature=0.0),
        return_logprob=True,
        logprob_start_len=2,
    )
    assert torch.allclose(torch.tensor(scored.input_logprobs[-2:]), expected, atol=1e-4)


def test_async_rollouts_carry_their_oldest_weight_version(policy, client):
    from caesura.integrations.trl_async import RolloutWorker

    tokenizer = transformers.AutoTokenizer.from_pretrained(str(policy))
    config = SimpleNamespace(num_generations=4, **SAMPLER)
    models = {
        seed: make_checkpoint(policy.parent / f"v{seed}", "qwen3", tied=True, seed=seed, vocab_size=512)
        for seed in (1, 2)
    }
    targets = []

    def reward(completion_ids, target, **_):
        targets.append(target)
        return odd_tokens(completion_ids)

    worker = RolloutWorker(client.endpoint, PROMPTS, [reward], tokenizer, config, groups_in_flight=2)
    transfer = WeightTransfer(client)

    def sync(version: int) -> None:
        transfer.pause()
        transfer.send_weights(checkpoint_tensors(models[version]))
        transfer.resume()
        worker.update_model_version(version)

    sync(1)
    worker.start()
    try:
        seen = [worker.rollout_buffer.get() for _ in range(8)]
        sync(2)
        while seen[-1].model_version < 2:
            seen.append(worker.rollout_buffer.get())
        worker.check_health(stale_after_s=60)
    finally:
        worker.stop()
    assert {sample.model_version for sample in seen} == {1, 2}
    assert all(len(set(target)) == 1 and len(target) == 4 for target in targets), "a column of the dataset"
    for sample in (seen[0], seen[-1]):
        start = int(sample.completion_mask.argmax())
        prompt, completion = sample.input_ids[:start].tolist(), sample.input_ids[start:].tolist()
        assert sample.completion_mask[start:].all()
        learner = logprobs_of(models[sample.model_version], prompt, completion, TEMPERATURE)
        assert float((learner - torch.tensor(sample.old_log_probs[start:])).abs().max()) < 1e-4
    groups = {}
    for sample in seen[:8]:
        groups.setdefault(sample.group_id, []).append(sample.advantage)
    assert all(abs(sum(advantages)) < 1e-3 for advantages in groups.values() if len(advantages) == 4)


def test_a_worker_that_fails_says_so_to_the_trainer(policy, client):
    from caesura.integrations.trl_async import RolloutWorker

    def broken(**_):
        raise ValueError("no reward today")

    tokenizer = transformers.AutoTokenizer.from_pretrained(str(policy))
    config = SimpleNamespace(num_generations=2, **SAMPLER)
    worker = RolloutWorker(client.endpoint, PROMPTS, [broken], tokenizer, config)
    worker.start()
    worker._thread.join()
    with pytest.raises(RuntimeError, match="rollout worker has failed") as caught:
        worker.check_health(stale_after_s=60)
    assert "no reward today" in str(caught.value.__cause__)
    worker.stop()
