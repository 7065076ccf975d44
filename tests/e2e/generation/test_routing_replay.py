"""The experts that an engine returns, replayed in transformers, give the engine's own numbers.

A forward pass whose routers are replaced by the returned rows has the logprobs that came with them, wherever
the rows came from: a prompt in chunks, a prefix hit, a decoding step, before a retraction or an abort.
"""

import numpy as np
import pytest
import torch
from demo.learner import effective_sample_share
from support.checkpoints import make_checkpoint
from support.replay import chosen_experts, output_logprobs
from support.scripted import EngineDriver

from caesura.client import SamplingParams, launch_scheduler
from caesura.client.connection.results import GenerateOutput, decode_output
from caesura.io_struct import GenerateReqInput

LAYERS, EXPERTS, TOP_K = 3, 7, 2
DENSE_LAYER = 1
TOLERANCE = 1e-4
SHAPE = {
    "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "mlp_only_layers": [DENSE_LAYER],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    paths = [tmp_path_factory.mktemp("moe") / name for name in ("one", "two")]
    return [
        (str(path), make_checkpoint(path, "qwen3-moe", seed=seed, **SHAPE)) for seed, path in enumerate(paths)
    ]


@pytest.fixture(scope="module", params=[0, 1], ids=["depth0", "depth1"])
def engine(models, request):
    path = models[0][0]
    with EngineDriver(path, scripted=False, pipeline_depth=request.param, chunked_prefill_size=24) as driver:
        yield driver


@pytest.fixture
def driver(engine, models):
    engine.update(models[0][0])
    engine.flush(torch_empty_cache=False)
    return engine


def text(length: int, number: int) -> list[int]:
    return np.random.default_rng(number).integers(3, 97, length).tolist()


def ask(driver: EngineDriver, prompt: list[int], new_tokens: int, **fields: object) -> str:
    params = SamplingParams(max_new_tokens=new_tokens, temperature=1.0, seed=len(prompt), ignore_eos=True)
    message = GenerateReqInput(
        input_ids=prompt, sampling_params=params, return_logprob=True, return_routed_experts=True, **fields
    )
    return driver.submit(message)


def rows_of(output: GenerateOutput) -> torch.Tensor:
    return torch.from_numpy(np.asarray(output.routed_experts).astype(np.int64))


def check_replay(model, prompt: list[int], output: GenerateOutput, until: int | None = None) -> None:
    """Check that replayed rows give the first ``until`` logprobs (None: all), and other experts do not."""
    tokens = output.output_ids[:until]
    rows = rows_of(output)[: len(prompt) + len(tokens) - 1]
    assert len(tokens) > 0
    assert not rows[:, DENSE_LAYER].any()
    with torch.inference_mode():
        found = output_logprobs(model, prompt, tokens, rows)
        wrong = output_logprobs(model, prompt, tokens, (rows + 1) % EXPERTS)
    engine = torch.tensor(output.output_logprobs[:until])
    torch.testing.assert_close(found, engine, rtol=0, atol=TOLERANCE)
    assert (wrong - engine).abs().max() > 100 * TOLERANCE
    natural = chosen_experts(model, [*prompt, *tokens][:-1])
    assert torch.equal(rows.sort(dim=-1).values, natural)


def finished(driver: EngineDriver, rid: str) -> GenerateOutput:
    return decode_output(driver.result(rid))


def test_chunks_prefix_hits_and_mixed_batches(driver, models):
    model = models[0][1]
    prompts = [text(70, 1), text(5, 2), text(50, 3)]
    rids = []
    for prompt in prompts:
        rids.append(ask(driver, prompt, 12))
        driver.tick(2)
    driver.run_until_idle()
    for rid, prompt in zip(rids, prompts, strict=True):
        check_replay(model, prompt, finished(driver, rid))
    first = finished(driver, rids[0])
    longer = prompts[0] + first.output_ids + text(30, 4)
    again = ask(driver, longer, 12)
    driver.run_until_idle()
    output = finished(driver, again)
    assert output.cached_tokens == 80, "the prompt and what was generated from it"
    check_replay(model, longer, output)


def test_retracted_in_the_middle(driver, models):
    prompts = [text(40, 5), text(33, 6)]
    rids = [ask(driver, prompt, 20) for prompt in prompts]
    for ticks in (4, 3, 5):
        driver.tick(ticks)
        driver.pause("retract")
        driver.go_on(torch_empty_cache=False)
    driver.run_until_idle()
    for rid, prompt in zip(rids, prompts, strict=True):
        output = finished(driver, rid)
        assert output.num_retractions > 1
        check_replay(models[0][1], prompt, output)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_tokens_before_an_update_keep_their_experts(driver, models, mode):
    prompt = text(40, 7)
    rid = ask(driver, prompt, 30)
    driver.tick(8)
    driver.pause(mode)
    driver.update(models[1][0], flush_cache=False)
    driver.go_on(torch_empty_cache=False)
    driver.run_until_idle()
    output = finished(driver, rid)
    old, new = output.weight_versions
    assert new.end - new.start > 5
    assert old.end > 2
    check_replay(models[0][1], prompt, output, until=old.end)
    under_new = chosen_experts(models[1][1], [*prompt, *output.output_ids[: old.end - 1]])
    kept = rows_of(output)[: len(under_new)].sort(dim=-1).values
    assert (kept != under_new).any(dim=(1, 2)).float().mean() > 0.5, "the two weights choose alike: no test"


# -- all of it at once ---------------------------------------------------------------------------------------

REQUESTS, NEW_TOKENS, PROMPT = 48, 40, 24
WARM_UP = 12
FIRST_BATCH = 128
"""Requests at once before anything is measured: workspaces follow the largest batch."""
MAX_GROWTH = 1 << 20
"""Bytes, as in test_memory_flat.py."""


def job(number: int) -> tuple[list[int], dict[str, object]]:
    params = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=1.0, seed=number, ignore_eos=True)
    options = {"return_logprob": True, "return_routed_experts": True, "cache_salt": f"job {number}"}
    return text(PROMPT, 1000 + number), {"sampling_params": params, **options}


def policy_gradient(model, outputs: dict[int, GenerateOutput], shift: int = 0) -> tuple[float, float]:
    """Return (effective sample size as a share, loss) of what a trainer computes on ``outputs``."""
    ratios, terms = [], []
    rewards = {
        number: sum(t % 2 == 0 for t in output.output_ids) / NEW_TOKENS for number, output in outputs.items()
    }
    baseline = sum(rewards.values()) / len(rewards)
    for number, output in outputs.items():
        rows = (rows_of(output) + shift) % EXPERTS
        logprobs = output_logprobs(model, job(number)[0], output.output_ids, rows)
        ratio = torch.exp(logprobs - torch.tensor(output.output_logprobs))
        ratios.append(ratio)
        terms.append(ratio.clamp(max=2.0) * (rewards[number] - baseline) * logprobs)
    return effective_sample_share(torch.cat(ratios)), -torch.cat(terms).mean().item()


@pytest.mark.slow
def test_pauses_and_updates_under_load_change_no_statistic(models):
    path, model = models[0]
    engine = launch_scheduler(
        path,
        dtype="float32",
        device="cpu",
        num_threads=1,
        kv_pool_tokens=8192,
        chunked_prefill_size=64,
        load_bucket_bytes=1 << 18,
        check_ledger=True,
        log_level="WARNING",
    )
    with engine as client:
        fill = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
        prompts = [[3 + i % 90] * PROMPT for i in range(FIRST_BATCH)]
        client.generate(prompts, fill, return_logprob=True, return_routed_experts=True)
        handles = [client.submit(prompt, **options) for prompt, options in map(job, range(REQUESTS))]
        undisturbed = {number: handle.result() for number, handle in enumerate(handles)}
        client.flush_cache()

        handles, reserved, held = [], [], 0
        for number in range(REQUESTS):
            prompt, options = job(number)
            handles.append(client.submit(prompt, **options))
            next(client.submit(prompt[:4], fill, stream=True).deltas())  # steps have run since the last pause
            held += client.pause("in_place").held_requests
            update = client.update_weights_from_disk(path, weight_version=str(number), flush_cache=False)
            assert update.committed
            client.continue_generation()
            reserved.append(client.status().device_memory.reserved)
        paused = {number: handle.result() for number, handle in enumerate(handles)}
        assert client.status().weights_epoch == REQUESTS
    assert engine.returncode == 0

    assert held > REQUESTS, "the pauses were meant to find requests at work"
    crossed = [output for output in paused.values() if any(span.stale_kv for span in output.weight_versions)]
    assert len(crossed) > REQUESTS // 2, "the updates were meant to happen in the middle of requests"
    # Batches differ between the runs, and with them last bits: a token in a hundred thousand may fall on the
    # other side.
    same = [number for number in paused if paused[number].output_ids == undisturbed[number].output_ids]
    assert len(same) >= REQUESTS - 2
    alike = [torch.equal(rows_of(paused[number]), rows_of(undisturbed[number])) for number in same]
    assert sum(alike) >= len(same) - 2
    with torch.inference_mode():
        share, loss = policy_gradient(model, {number: undisturbed[number] for number in same})
        paused_share, paused_loss = policy_gradient(model, {number: paused[number] for number in same})
        wrong_share, wrong_loss = policy_gradient(model, {number: paused[number] for number in same}, shift=1)
    assert share > 1 - 1e-6
    assert abs(paused_share - share) < 1e-6
    assert abs(paused_loss - loss) < 1e-5
    assert wrong_share < 0.9, "routing must matter for the statistics that agree"
    assert abs(wrong_loss - loss) > 5e-4

    growth = max(reserved[WARM_UP:]) - max(reserved[:WARM_UP])
    assert growth <= MAX_GROWTH, f"reserved grew by {growth} bytes: {reserved[::8]}"
