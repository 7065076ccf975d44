"""torchrl's service of an SGLang server and its sender of weights, against ``caesura serve``.

The sender broadcasts over NCCL from a CUDA device; here its group is gloo's, and all else is torchrl's.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from support.http_serve import ServedEngine, make_text_model, served
from support.plain_trainer import free_port

sglang = pytest.importorskip("torchrl.modules.llm.backends.sglang", reason="torchrl is not installed")
sync = pytest.importorskip("torchrl.weight_update.llm.sglang_nccl", reason="torchrl is not installed")
pytestmark = pytest.mark.filterwarnings("default")
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("torchrl")
    return [make_text_model(root / name, seed) for seed, name in enumerate("ab", 3)]


@pytest.fixture(scope="module")
def engine(models: list[Path]) -> Iterator[ServedEngine]:
    with served("--model", str(models[0])) as engine:
        yield engine


def tokens(engine: ServedEngine) -> list[int]:
    found: list[int] = engine.generate(PROMPT, sampling_params={"max_new_tokens": 6})["output_ids"]
    return found


def test_rollouts_and_an_update_over_a_process_group(engine, models, recorded, monkeypatch):
    url = recorded("torchrl", "torchrl", engine.url)
    service = sglang.AsyncSGLang.connect(url)
    sampling = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True, "return_logprob": True}
    before = service.generate(input_ids=PROMPT, sampling_params=dict(sampling))
    assert before["output_ids"] == tokens(engine)
    assert len(before["meta_info"]["output_token_logprobs"]) == 6
    make_group = sync._init_custom_process_group
    monkeypatch.setattr(
        sync, "_init_custom_process_group", lambda backend, **options: make_group(backend="gloo", **options)
    )
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    tensors = load_file(models[1] / "model.safetensors")
    weights = {
        name: SimpleNamespace(dtype=tensor.dtype, shape=tensor.shape, to=lambda _, tensor=tensor: tensor)
        for name, tensor in tensors.items()
    }
    sender = sync.SGLangCollectiveTransport(url, "127.0.0.1", free_port(), rank=0, world_size=2)
    try:
        sender.init_all_workers_group({name: (each.dtype, each.shape) for name, each in tensors.items()})
        sender.send_weights("policy", weights)
    finally:
        sender.shutdown()
    assert service.flush_cache()
    after = service.generate(input_ids=PROMPT, sampling_params=dict(sampling))
    engine.ok("/update_weights_from_disk", {"model_path": str(models[1])})
    assert after["output_ids"] == tokens(engine) != before["output_ids"]
