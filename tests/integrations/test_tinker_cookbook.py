"""Cookbook of Tinker (0.5.8), unmodified: a completer, and a benchmark as an evaluator of a served engine."""

import asyncio

import pytest
from support.http_serve import make_text_model, served

tinker = pytest.importorskip("tinker", reason="tinker is not installed")
evaluators = pytest.importorskip(
    "tinker_cookbook.eval.benchmark_evaluator", reason="tinker-cookbook is not installed"
)
renderers = pytest.importorskip("tinker_cookbook.renderers")
completers = pytest.importorskip("tinker_cookbook.completers")
tokenizers = pytest.importorskip("tinker_cookbook.tokenizer_utils")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # the cookbook's own

QUESTIONS = [{"question": f"{i} + {i}?", "answer": f"{i} and {i}\n#### {2 * i}"} for i in range(6)]
README = """---
configs:
- config_name: main
  data_files: [{split: train, path: train.parquet}, {split: test, path: test.parquet}]
---
"""


def test_a_benchmark_evaluates_a_sampler(tmp_path, monkeypatch):
    model = make_text_model(tmp_path / "model")
    folder = tmp_path / "openai" / "gsm8k"  # read in place of the hub's dataset of that name
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        datasets.Dataset.from_list(QUESTIONS).to_parquet(folder / f"{split}.parquet")
    (folder / "README.md").write_text(README, encoding="utf-8")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    async def evaluated(sampler, renderer):
        complete = completers.TinkerMessageCompleter(sampler, renderer, max_tokens=8)
        said = await complete([{"role": "user", "content": "a"}])
        assert said["role"] == "assistant"
        return await evaluators.BenchmarkEvaluator("gsm8k", renderer, max_examples=4, max_tokens=16)(sampler)

    with served("--model", str(model), "--context-len", "512") as engine:
        client = tinker.ServiceClient(base_url=engine.url, api_key="tml-x")
        sampler = client.create_sampling_client(base_model=str(model)).result()
        renderer = renderers.get_renderer("role_colon", tokenizers.get_tokenizer(str(model)))
        found = asyncio.run(evaluated(sampler, renderer))
    assert found["eval/gsm8k/num_examples"] == 4
    assert found["eval/gsm8k/num_errors"] == 0
    assert 4 <= found["eval/gsm8k/total_ac_tokens"] <= 64
