"""Ranks that compute attention for requests of their own: the same results and ledgers as of one rank."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import make_checkpoint
from support.faults import Fault
from support.lanes import quick
from support.rank_updates import UPDATES, checksums
from support.scripted import EngineDriver, assert_error, tokens_of

from caesura.io_struct import CaesuraError, GenerateReqInput, GenerateReqOutput, SamplingParams
from caesura.scheduler.models.config import load_model_config
from caesura.scheduler.models.registry import require_ranks
from caesura.scheduler.runtime.engine_config import EngineConfig

pytestmark = pytest.mark.slow  # workers take seconds to start

POOL = 320
"""Tokens of KV of each rank."""
OPTIONS = {"scripted": False, "kv_pool_tokens": POOL, "chunked_prefill_size": 48}
LENGTHS = (100, 30, 200, 5, 64, 33, 77, 1)
KINDS = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "seed": 4, "top_k": 7, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "frequency_penalty": 0.7, "repetition_penalty": 1.2, "logit_bias": {11: 3.0}},
)


def prompt(number: int) -> list[int]:
    return [3 + (7 * token + number) % 90 for token in range(LENGTHS[number % len(LENGTHS)])]


def params(number: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=20, ignore_eos=True, **KINDS[number % len(KINDS)])


def outputs(driver: EngineDriver, **fields) -> list[GenerateReqOutput]:
    rids = [
        driver.generate(prompt(number), sampling_params=params(number), return_logprob=True, **fields)
        for number in range(len(LENGTHS))
    ]
    driver.run_until_idle()
    return [driver.result(rid) for rid in rids]


def assert_same(found: list[GenerateReqOutput], expected: list[GenerateReqOutput]) -> None:
    assert [tokens_of(each) for each in found] == [tokens_of(each) for each in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.routed_experts == theirs.routed_experts
        for name in ("output_logprobs", "input_logprobs"):
            pair = [np.frombuffer(getattr(each, name) or b"", np.float32) for each in (ours, theirs)]
            np.testing.assert_allclose(*pair, atol=1e-4)
        if theirs.hidden_states is not None:
            torch.testing.assert_close(states_of(ours), states_of(theirs), atol=1e-4, rtol=1e-4)


def states_of(result: GenerateReqOutput) -> torch.Tensor:
    found = result.hidden_states
    assert found is not None
    return torch.frombuffer(bytearray(found.data), dtype=torch.float32).view(found.shape)


@dataclass
class Pair:
    """An engine with data-parallel attention, and one of one rank, of the same checkpoint."""

    path: Path
    other_path: Path
    ranks: EngineDriver
    alone: EngineDriver
    has_experts: bool


DIVISIONS = {
    "deepseek-v3 2 1": {},
    "deepseek-v3 3 3": {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1},
    "qwen3-moe 3 1": {},
    "qwen3 4 1": {},
    "llama 2 1": {},
    "deepseek-v2 3 3": {},
    "qwen3-moe 4 4": {"num_experts_per_tok": 2, "num_experts": 8},
    "qwen2-moe 4 2": {"num_experts_per_tok": 1, "num_experts": 6},
}
"""Family, ranks and groups of whole experts, to sizes; with few of many experts, rows go to these alone."""


@pytest.fixture(scope="module", params=quick(DIVISIONS, 2))
def shared(request, tmp_path_factory) -> Iterator[Pair]:
    family, size, ep = request.param.split()
    path, other = (tmp_path_factory.mktemp(f"model-{seed}") for seed in (0, 1))
    for seed, folder in enumerate((path, other)):
        sizes = DIVISIONS[request.param]
        make_checkpoint(folder, family, seed=seed, max_position_embeddings=512, **sizes)
    with (
        EngineDriver(str(path), tp=int(size), dp_attention=int(size), ep=int(ep), **OPTIONS) as ranks,
        EngineDriver(str(path), **OPTIONS) as alone,
    ):
        yield Pair(path, other, ranks, alone, "moe" in family or "deepseek" in family)


@pytest.fixture
def pair(shared) -> Iterator[Pair]:
    yield shared
    for driver in (shared.ranks, shared.alone):
        driver.abort(abort_all=True)
        driver.pause("abort")
        driver.update(shared.path)
        driver.go_on(force=True)


def test_results_are_those_of_one_rank(pair):
    fields = {"return_routed_experts": pair.has_experts, "logprob_start_len": 0}
    pair.ranks.flush()
    assert_same(outputs(pair.ranks, **fields), outputs(pair.alone, **fields))
    later = {"return_routed_experts": pair.has_experts}
    cached = outputs(pair.ranks, **later)
    assert sum(each.cached_tokens for each in cached) > 200
    assert_same(cached, outputs(pair.alone, **later))


@pytest.mark.parametrize("layers", [[-1], [0, 1, -1]])
def test_hidden_states_and_forced_tokens_are_those_of_one_rank(pair, layers):
    found = []
    for driver in (pair.ranks, pair.alone):
        driver.flush()
        rids = [
            driver.generate(
                prompt(number),
                sampling_params=SamplingParams(
                    max_new_tokens=9,
                    ignore_eos=True,
                    temperature=1.0,
                    seed=number,
                    forced_output_ids=[9 + number, 17, 5] if number % 2 else None,
                ),
                return_logprob=True,
                return_hidden_states=True,
                hidden_states_layers=layers,
            )
            for number in range(len(LENGTHS))
        ]
        driver.run_until_idle()
        found.append([driver.result(rid) for rid in rids])
    assert_same(*found)


def test_ranks_hold_tokens_of_their_own(pair):
    ranks, alone = pair.ranks, pair.alone
    size = ranks.config.tp
    found, single = ranks.status().kv, alone.status().kv
    assert found.bytes_per_token == single.bytes_per_token
    assert found.total == size * single.total == size * POOL
    before = ranks.engine.batcher.num_retractions
    messages = [([7 + number] * 235, 80) for number in range(size)]  # a rank has room for one of them
    rids = [ranks.generate(*message) for message in messages]
    most = 0
    ranks.tick()
    while ranks.engine.live:
        ranks.tick()
        most = max(most, ranks.engine.cache.usage().held)
    assert most >= size * 16, "all hold theirs at the same time"
    assert ranks.engine.batcher.num_retractions == before
    expected = [alone.generate(*message) for message in messages]
    alone.run_until_idle()
    for ours, theirs in zip(rids, expected, strict=True):
        assert tokens_of(ranks.result(ours)) == tokens_of(alone.result(theirs))
    reply = ranks.call(
        GenerateReqInput(input_ids=[7] * POOL, sampling_params=SamplingParams(max_new_tokens=2))
    )
    assert assert_error(reply, "exceeds_kv_pool").detail == {"needed_tokens": POOL + 1, "total_tokens": POOL}


def test_samples_of_a_prompt_are_divided_equally(pair):
    driver, size = pair.ranks, pair.ranks.config.tp
    driver.flush()
    rid = driver.generate([9] * 50, 60, n=4 * size, seed=1)
    homes = driver.engine.cache.ranks
    driver.tick()
    while driver.engine.waiting:
        driver.tick()
    assert [home.num_open for home in homes] == [4] * size
    driver.tick()
    shared = [home.tree.num_locked_pages for home in homes]
    assert shared == [3] * size, "each rank has the prompt's full pages once"
    driver.run_until_idle()
    again = pair.alone.generate([9] * 50, 60, n=4 * size, seed=1)
    pair.alone.run_until_idle()
    for index in range(4 * size):
        assert tokens_of(driver.result(rid, index)) == tokens_of(pair.alone.result(again, index))


@pytest.mark.parametrize("send", quick(UPDATES))
def test_an_update_reaches_whole_attention_on_every_rank(pair, send):
    ranks, alone = pair.ranks, pair.alone
    reply = send(ranks, pair.other_path)
    assert reply.committed, reply
    alone.update(pair.other_path)
    found, expected = checksums(ranks), checksums(alone)
    whole = [name for name in expected if "attention" in name]
    assert whole
    for name in whole:
        assert {found[name], *(found[f"{name} of rank {rank}"] for rank in range(1, ranks.config.tp))} == {
            expected[name]
        }
    ranks.go_on(force=True)
    assert_same(outputs(ranks), outputs(alone))


@pytest.mark.long
def test_released_memory_comes_back_on_every_rank(pair):
    pair.ranks.pause("abort")
    pair.ranks.release()
    pair.ranks.resume()
    assert pair.ranks.update(pair.path).committed
    pair.ranks.go_on()
    assert_same(outputs(pair.ranks), outputs(pair.alone))


@dataclass
class Story:
    """Events of an engine whose ranks have little room, drawn from a seed."""

    pair: Pair
    chance: random.Random

    def __post_init__(self) -> None:
        self.driver = self.pair.ranks
        self.sent: dict[str, dict] = {}

    def submit(self) -> None:
        length = self.chance.choice([1, 15, 17, 40, 100, 150, 190])
        fields = {
            "prompt": [3 + (5 * token + length) % 90 for token in range(length)],
            "sampling_params": SamplingParams(
                max_new_tokens=self.chance.choice([1, 10, 30, 60]),
                ignore_eos=True,
                temperature=self.chance.choice([0.0, 1.0]),
                seed=self.chance.randrange(100),
                n=self.chance.choice([1, 1, 4]),
            ),
            "return_logprob": True,
            "logprob_start_len": self.chance.choice([-1, 0]),
        }
        self.sent[self.driver.generate(**fields)] = fields

    def tick(self) -> None:
        self.driver.tick(self.chance.randint(1, 9))

    def abort(self) -> None:
        if self.sent:
            self.driver.abort(self.chance.choice(list(self.sent)))

    def pause(self) -> None:
        mode = self.chance.choice(["in_place", "retract", "retract", "abort"])
        self.driver.pause(mode)
        if mode != "in_place" and self.chance.random() < 0.3:
            self.driver.release("kv_cache")
            self.driver.resume("kv_cache")
        elif self.chance.random() < 0.5:
            self.driver.update(self.pair.path, flush_cache=mode != "in_place")
        self.driver.go_on()

    def update(self) -> None:
        self.driver.update(self.pair.path, flush_cache=self.chance.random() < 0.5)

    def fail(self) -> None:
        with Fault(self.driver.engine.runner.own.model, "forward", MemoryError("no room for one more")):
            self.driver.tick()


@pytest.mark.parametrize("seed", quick(range(4)))
def test_results_outlive_whatever_happens(pair, seed):
    """Weights are replaced by equal ones, so that tokens stay those of an engine of one rank."""
    story = Story(pair, random.Random(seed))
    before = story.driver.engine.batcher.num_retractions
    events = [story.submit] * 5 + [story.tick] * 6 + [story.abort, story.pause, story.update, story.fail]
    for _ in range(50):
        story.chance.choice(events)()
        story.driver.engine.cache.check()
    story.driver.run_until_idle()
    assert story.driver.engine.batcher.num_retractions > before
    ended = set()
    whole = {rid: pair.alone.generate(**fields) for rid, fields in story.sent.items()}
    pair.alone.run_until_idle()
    for rid, fields in story.sent.items():
        for index in range(fields["sampling_params"].n):
            found, expected = story.driver.result(rid, index), pair.alone.result(whole[rid], index)
            tokens = tokens_of(found)
            assert tokens == tokens_of(expected)[: len(tokens)]
            logprobs = [
                np.frombuffer(each.output_logprobs, np.float32)[: len(tokens)] for each in (found, expected)
            ]
            np.testing.assert_allclose(*logprobs, atol=1e-4)
            ended.add(found.finish_reason.type)
            if found.finish_reason.type == "length":
                assert len(tokens) == fields["sampling_params"].max_new_tokens
    assert ended == {"length", "abort"}
    usage = story.driver.engine.cache.usage()
    assert (usage.held, usage.total) == (0, pair.ranks.config.tp * POOL // 16)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("dp_attention", {"tp": 4, "dp_attention": 2}),
        ("dp_attention", {"tp": 1, "dp_attention": 2}),
        ("kv_tier_bytes", {"tp": 2, "dp_attention": 2, "kv_tier_bytes": 1 << 20}),
        ("enable_lora", {"tp": 2, "dp_attention": 2, "enable_lora": True}),
    ],
)
def test_options_that_do_not_go_together_are_refused(tiny_model, field, options):
    with pytest.raises(CaesuraError) as caught:
        EngineConfig(model_path=str(tiny_model), **options)
    assert (caught.value.code, caught.value.detail["field"]) == ("invalid_request", field)


@pytest.mark.parametrize(
    ("family", "kept"), [("gemma3", "a sliding window"), ("qwen3-next", "a state per sequence")]
)
def test_layers_that_keep_more_than_pages_are_refused(tmp_path, family, kept):
    make_checkpoint(tmp_path, family)
    with pytest.raises(CaesuraError, match=kept) as caught:
        require_ranks(load_model_config(str(tmp_path), "auto"), 2, dp_attention=2)
    assert caught.value.detail["field"] == "dp_attention"


@pytest.mark.long
def test_speculation_drafts_rows_of_the_own_requests(tmp_path):
    make_checkpoint(tmp_path, "qwen3")
    found = []
    for size in (1, 2):
        options = {"tp": size, "dp_attention": size, "speculation": "suffix", **OPTIONS}
        with EngineDriver(str(tmp_path), **options) as driver:
            rids = [driver.generate([5, 6, 7] * number, 60) for number in range(1, 5)]
            driver.run_until_idle()
            found.append([tokens_of(driver.result(rid)) for rid in rids])
            drafted = driver.engine.batcher.drafted_tokens
    assert found[0] == found[1]
    assert drafted > 0
