"""AReaL's own client of an inference server, unmodified, against ``caesura serve``.

Runs where the package ``areal`` is installed, with what its client imports; the trainer itself needs GPUs.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.checkpoints import make_checkpoint
from support.http_serve import ServedEngine, make_text_model, served
from support.plain_trainer import PlainTrainer, weights_of
from support.waiting import eventually

remote = pytest.importorskip(
    "areal.engine.sglang_remote",
    reason="areal is not installed with what its client imports",
    exc_type=ImportError,
)
api, cli_args = import_module("areal.api"), import_module("areal.api.cli_args")
workflow_context = import_module("areal.infra").workflow_context
name_resolve, names = import_module("areal.utils.name_resolve"), import_module("areal.utils.names")

pytestmark = pytest.mark.filterwarnings("default")
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    return [
        make_text_model(tmp_path_factory.mktemp("areal") / name, seed) for seed, name in enumerate("ab", 3)
    ]


@pytest.fixture(scope="module")
def server(models):
    root = models[1].parents[1]
    options = ("--weights-root", str(root), "--enable-memory-saver", "--enable-weights-cpu-backup")
    with served("--model", str(models[0]), *options) as engine:
        yield engine


def engine_of(url: str, root: Path, **options: object):
    config = cli_args.InferenceEngineConfig(
        backend="sglang:d1", experiment_name=f"caesura-{root.name}", trial_name="test", fileroot=str(root),
        max_concurrent_rollouts=4, consumer_batch_size=1, setup_timeout=30.0, request_timeout=60.0,
        request_retries=1, **options,
    )  # fmt: skip
    engine = remote.RemoteSGLangEngine(config)
    engine.initialize(addr=url.removeprefix("http://"), train_data_parallel_size=1)
    return engine


@pytest.fixture
def engine(server, recorded, tmp_path):
    engine = engine_of(recorded("AReaL", "areal", server.url), tmp_path)
    yield engine
    engine.destroy()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(1) as pool:
        yield pool


def generate(engine, count: int = 8, prompt: list[int] = PROMPT, **parameters: object):
    given = {"greedy": True, "ignore_eos": True, "max_tokens": 512, **parameters}
    request = api.ModelRequest(
        input_ids=list(prompt), gconfig=cli_args.GenerationHyperparameters(max_new_tokens=count, **given)
    )

    async def run():
        try:
            return await engine.agenerate(request)
        finally:
            await (await workflow_context.get_aiohttp_session()).close()

    return asyncio.run(run())


def load(server: ServedEngine) -> dict[str, int]:
    return server.get("/v1/loads").json()["loads"][0]


def test_a_rollout(server, engine):
    answer = generate(engine)
    expected = server.generate(PROMPT, return_logprob=True)
    assert answer.output_tokens == expected["output_ids"]
    logprobs = [row[0] for row in expected["meta_info"]["output_token_logprobs"]]
    assert answer.output_logprobs == pytest.approx(logprobs, abs=1e-5)
    assert answer.stop_reason == "length"
    sampled = generate(engine, greedy=False, temperature=1.0, top_p=0.9, top_k=20, frequency_penalty=0.1)
    assert len(sampled.output_tokens) == 8


def test_a_rollout_that_is_interrupted_by_an_update_goes_on(server, engine, models, pool, tmp_path):
    name_resolve.reconfigure(cli_args.NameResolveConfig(type="nfs", nfs_record_root=str(tmp_path)))
    waiting = pool.submit(generate, engine, 400)
    eventually(lambda: load(server)["num_running_reqs"] == 1)
    engine.pause()  # its own workflows, as the trainer does first
    engine.pause_generation()
    key = names.update_weights_from_disk(engine.config.experiment_name, "test", engine.get_version())
    name_resolve.add(key, str(time.time()), replace=True)
    meta = api.WeightUpdateMeta(type="disk", path=str(models[1]), clear_checkpoint_after_load=False)
    engine.update_weights_from_disk(meta).result()
    engine.set_version(1)
    engine.continue_generation()
    engine.resume()
    answer = waiting.result()
    assert len(answer.output_tokens) == 400
    assert set(answer.output_versions) == {0, 1}
    assert server.get("/model_info").json()["model_path"] == str(models[1])


def test_weights_over_a_process_group(server, engine, models):
    weights, trainer = weights_of(models[0]), PlainTrainer("update_weight_group")
    parallel = SimpleNamespace(tp_size=1, pp_size=1, world_size=1)
    meta = api.WeightUpdateMeta(
        type="xccl", nccl_master_address="127.0.0.1", nccl_master_port=trainer.port,
        nccl_group_name=trainer.name, gen_allocation=SimpleNamespace(parallel=parallel),
    )  # fmt: skip
    trainer.beside(trainer.join)
    joined = engine.init_weights_update_group(meta)
    trainer.finish()
    joined.result()
    try:
        engine.pause_generation()
        trainer.beside(lambda: trainer.broadcast_each(weights))
        specs = [
            api.ParamSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).split("torch.")[1])
            for name, tensor in weights.items()
        ]
        engine.update_weights_from_distributed(meta, specs).result()
        trainer.finish()
        engine.continue_generation()
        assert generate(engine).output_tokens == server.generate(PROMPT)["output_ids"]
    finally:
        server.post("/destroy_weights_update_group", {"group_name": trainer.name})
        trainer.close()


def test_offload_and_onload(server, engine):
    before = generate(engine).output_tokens
    engine.pause_generation()
    engine.offload()
    assert server.get("/ready").status_code == 503
    engine.onload()
    engine.continue_generation()
    assert generate(engine).output_tokens == before


def test_routing_of_a_model_with_experts(pool, recorded, tmp_path):
    """Also where an abort came before the first token: no rows, which the client must be able to read."""
    make_checkpoint(tmp_path / "experts", "qwen3-moe", seed=2)
    with served("--model", str(tmp_path / "experts")) as server:
        url = recorded("AReaL", "areal", server.url)
        engine = engine_of(url, tmp_path, return_routed_experts=True)
        server.ok("/pause_generation", {"mode": "in_place"})
        waiting = pool.submit(generate, engine, 5)
        eventually(lambda: load(server)["num_waiting_reqs"] == 1)
        server.post("/abort_request", {"abort_all": True})
        totals = lambda: server.get("/server_info").json()["internal_states"][0]["totals"]  # noqa: E731
        eventually(lambda: totals()["finished_requests"].get("abort"))
        eventually(lambda: load(server)["num_waiting_reqs"] == 1)  # it has come back
        server.ok("/continue_generation", {})
        answer = waiting.result()
        engine.destroy()
    assert len(answer.output_tokens) == 5
    assert answer.routed_experts.shape == (len(PROMPT) + 5 - 1, 2 * 3)
