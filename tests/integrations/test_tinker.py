"""Tinker's SDK (tinker 0.38.0), unmodified, against ``caesura serve``."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.http_serve import ServedEngine, make_text_model, served
from support.lora import ALL_LINEAR, logprobs_by_peft, make_adapter
from support.tinker_trainer import TinkerTrainer, training
from support.waiting import eventually
from transformers import AutoModelForCausalLM

tinker = pytest.importorskip("tinker", reason="tinker is not installed")
types = pytest.importorskip("tinker.types")
pytestmark = pytest.mark.filterwarnings("default")  # the SDK's own

PROMPT = [5, 6, 7, 8, 9]
INPUT = types.ModelInput.from_ints(PROMPT)
GREEDY = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[])
KEY = "tml-key"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("tinker") / "base")


@pytest.fixture(scope="module")
def adapters(model: Path) -> list[Path]:
    return [make_adapter(model, model.parent / f"a{i}", ALL_LINEAR, seed=i) for i in range(3)]


@pytest.fixture(scope="module")
def trainer() -> TinkerTrainer:
    return TinkerTrainer([])


@pytest.fixture(scope="module")
def engine(model: Path, trainer: TinkerTrainer) -> Iterator[ServedEngine]:
    arguments = ["--model", str(model), "--dtype", "float32", "--max-waiting-requests", "3"]
    arguments += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"]
    with training(trainer) as url:
        env = {"CAESURA_API_KEY": KEY}
        with served(*arguments, "--tinker-trainer", url, env=env) as engine:
            engine.http.headers["authorization"] = f"Bearer {KEY}"
            yield engine


@pytest.fixture
def service(engine: ServedEngine) -> Iterator[Any]:
    with service_of(engine.url) as service:
        yield service


def service_of(url: str) -> Any:
    return tinker.ServiceClient(base_url=url, api_key=KEY)


def test_samples_and_logprobs_are_those_of_transformers(engine, model, recorded):
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with service_of(recorded("Tinker's SDK", "tinker", engine.url)) as service:
        sampler = service.create_sampling_client(base_model=str(model)).result()
        answer = sampler.sample(
            INPUT, 2, GREEDY, include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2
        ).result()
        alone = sampler.compute_logprobs(INPUT).result()
        last = sampler.compute_logprobs(INPUT, prompt_logprobs_last_n=2).result()
        ids = torch.full((4, 2), -1)
        ids[1, 0], ids[3, 1] = 11, 12
        target = types.TensorData.from_torch(ids)
        dense = sampler.sample(INPUT, 1, GREEDY, target_prompt_logprobs=target).result()
        target = types.TensorData.from_torch_sparse(ids, pad_value=-1)
        sparse = sampler.sample(INPUT, 1, GREEDY, target_prompt_logprobs=target).result()
        clone = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key=KEY)
        cloned = clone.sample(INPUT, 1, GREEDY).result()
        tokenizer = sampler.get_tokenizer()
        assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    first, second = answer.sequences
    with torch.no_grad():
        values = reference(torch.tensor([[*PROMPT, *first.tokens]])).logits[0].log_softmax(-1)
    assert first.tokens == second.tokens == cloned.sequences[0].tokens == values[4:-1].argmax(-1).tolist()
    assert first.stop_reason == "length"
    assert first.sequence_id != second.sequence_id
    assert first.logprobs == pytest.approx(values[4:-1].amax(-1).tolist(), abs=1e-4)
    prompt = [float(values[at - 1, PROMPT[at]]) for at in range(1, 5)]
    assert alone == answer.prompt_logprobs == [None, *map(pytest.approx, alone[1:])]
    assert alone[1:] == pytest.approx(prompt, abs=1e-4)
    assert last == [None, None, None, *map(pytest.approx, alone[3:])]
    for row, expected in zip(
        answer.topk_prompt_logprobs[1:], values[:4].topk(3).indices.tolist(), strict=True
    ):
        assert [token for token, _ in row] == expected
    assert answer.topk_prompt_logprobs[0] is None
    assert [len(row) for row in first.topk_logprobs] == [2] * 6
    expected = torch.zeros(4, 2)
    expected[1, 0], expected[3, 1] = values[1, 11], values[3, 12]
    assert torch.allclose(dense.target_prompt_logprobs.to_torch(), expected, atol=1e-4)
    assert torch.allclose(sparse.target_prompt_logprobs.to_torch().to_dense(), expected, atol=1e-4)


def test_stops_seeds_and_refusals(service, engine, model):
    sampler = service.create_sampling_client(base_model=str(model)).result()
    tokens = sampler.sample(INPUT, 1, GREEDY).result().sequences[0].tokens
    params = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[tokens[0]])
    stopped = sampler.sample(INPUT, 1, params).result().sequences[0]
    assert (stopped.stop_reason, stopped.tokens) == ("stop", tokens[:1])
    params = types.SamplingParams(
        max_tokens=6, temperature=0.0, stop=sampler.get_tokenizer().decode(tokens[:2])
    )
    stopped = sampler.sample(INPUT, 1, params).result().sequences[0]
    assert (stopped.stop_reason, stopped.tokens) == ("stop", tokens[: len(stopped.tokens)])
    params = types.SamplingParams(max_tokens=8, temperature=3.0, seed=5)
    runs = [sampler.sample(INPUT, 2, params).result().sequences for _ in range(2)]
    assert [each.tokens for each in runs[0]] == [each.tokens for each in runs[1]]
    with pytest.raises(tinker.BadRequestError, match="prompt_alt_tokens_k is not supported"):
        sampler.sample(INPUT, 1, GREEDY, prompt_alt_tokens_k=2).result()
    with pytest.raises(tinker.BadRequestError, match="512"):
        sampler.compute_logprobs(types.ModelInput.from_ints([5] * 600)).result()
    with pytest.raises(tinker.NotFoundError, match="'other' does not exist"):
        service.create_sampling_client(base_model="other").result()
    with pytest.raises(tinker.NotFoundError, match="no adapter 'none' is loaded"):
        service.create_sampling_client(model_path="tinker://none").result()
    with pytest.raises(tinker.AuthenticationError):
        tinker.ServiceClient(base_url=engine.url, api_key="tml-other").create_sampling_client(base_model="x")


def test_the_sdk_waits_where_the_queue_is_full(service, engine, model):
    sampler = service.create_sampling_client(base_model=str(model)).result()
    expected = sampler.sample(INPUT, 1, GREEDY).result().sequences[0].tokens
    refusals = 'caesura:errors_total{code="queue_full"'
    engine.ok("/pause_generation", {"mode": "in_place"})
    asked = [sampler.sample(INPUT, 1, GREEDY) for _ in range(8)]
    eventually(lambda: refusals in engine.get("/metrics").text)
    engine.ok("/continue_generation", {})
    assert [each.result().sequences[0].tokens for each in asked] == [expected] * 8


def test_the_sdk_asks_anew_for_what_was_aborted(service, engine, model):
    sampler = service.create_sampling_client(base_model=str(model)).result()
    engine.ok("/pause_generation", {"mode": "in_place"})
    asked = sampler.sample(INPUT, 1, GREEDY)
    eventually(lambda: engine.get("/v1/loads").json()["loads"][0]["num_waiting_reqs"] == 1)
    engine.ok("/pause_generation", {"mode": "abort"})
    engine.ok("/continue_generation", {})
    assert len(asked.result().sequences[0].tokens) == 6


def test_snapshots_and_weights_in_flight_of_a_trainer(engine, model, adapters, trainer, recorded):
    trainer.folders = [str(each) for each in adapters]

    def check(sampler: Any, adapter: Path) -> None:
        (found,) = sampler.sample(INPUT, 1, GREEDY).result().sequences
        expected = logprobs_by_peft(model, adapter, [*PROMPT, *found.tokens], len(PROMPT))
        assert found.logprobs == pytest.approx(expected, abs=1e-4)

    with service_of(recorded("Tinker's SDK", "tinker", engine.url)) as service:
        learner = service.create_lora_training_client(base_model=str(model), rank=4).result()
        path = learner.save_weights_for_sampler("step-1").result().path
        info = service.create_rest_client().get_weights_info_by_tinker_path(path).result()
        assert (info.base_model, info.is_lora, info.lora_rank) == (str(model), True, 4)
        named = learner.create_sampling_client(path).result()
        check(named, adapters[0])
        check(learner.save_weights_and_get_sampling_client().result(), adapters[1])
        flying = learner.save_weights_and_get_sampling_client(kind="inflight").result()
        check(flying, adapters[2])
        with pytest.raises(tinker.NotFoundError, match="step-1"):  # unloaded to make room
            named.sample(INPUT, 1, GREEDY).result()
        trainer.folders = [str(adapters[0])]
        learner.save_weights_and_get_sampling_client(kind="inflight").result()
        check(flying, adapters[0])
        datum = types.Datum(model_input=INPUT, loss_fn_inputs={})
        with pytest.raises(tinker.NotFoundError, match="no such route"):  # the trainer's own answer
            learner.forward_backward([datum], "cross_entropy").result()
    assert any(path == "/api/v1/forward_backward" for path, _ in trainer.asked)


def test_the_cookbooks_completers_and_teacher(service, model):
    completers = pytest.importorskip("tinker_cookbook.completers", reason="tinker-cookbook is not installed")
    renderers = pytest.importorskip("tinker_cookbook.renderers")
    sdft = pytest.importorskip("tinker_cookbook.distillation.sdft")
    sampler = service.create_sampling_client(base_model=str(model)).result()
    renderer = renderers.get_renderer("role_colon", sampler.get_tokenizer())
    completion = [3, 4, 5, 6, 7, 8]
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([*PROMPT, *completion[:-1]]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch(torch.tensor([*PROMPT[1:], *completion])),
            "mask": types.TensorData.from_torch(torch.tensor([0.0] * 4 + [1.0] * 6)),
        },
    )

    async def work() -> tuple[Any, Any, Any]:
        complete = completers.TinkerTokenCompleter(sampler, max_tokens=6, temperature=0.0)
        tokens = await complete(INPUT, stop=[PROMPT[0]])
        chat = completers.TinkerMessageCompleter(sampler, renderer, max_tokens=4)
        message = await chat([{"role": "user", "content": "hello"}])
        (soft,), _ = await sdft.build_topk_distillation_datums(
            [datum], [{"group_idx": 0}], sampler, [INPUT], topk=4, skip_first_n_tokens=0
        )
        return tokens, message, soft

    tokens, message, soft = asyncio.run(work())
    expected = logprobs_by_peft(model, None, [*PROMPT, *tokens.tokens], len(PROMPT))
    assert tokens.logprobs == pytest.approx(expected, abs=1e-4)
    assert message["role"] == "assistant"
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        values = reference(torch.tensor([[*PROMPT, *completion]])).logits[0, 4:-1]
    targets = soft.loss_fn_inputs["target_tokens"].to_torch()[4:]
    weights = soft.loss_fn_inputs["weights"].to_torch()[4:]
    assert torch.equal(targets, values.topk(4).indices)
    assert torch.allclose(weights / weights.sum(1, keepdim=True), values.topk(4).values.softmax(1), atol=1e-4)
