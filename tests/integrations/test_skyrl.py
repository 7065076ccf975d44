"""SkyRL's client of remote inference servers (skyrl 0.3.0), unmodified, against ``caesura serve``."""

import asyncio
import threading
import typing
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import typing_extensions
from safetensors.torch import load_file
from support.checkpoints import make_checkpoint
from support.http_serve import ServedEngine, served
from support.tokenizers import make_byte_level

from caesura.client.trainer.update_group import WeightUpdateGroup
from caesura.io_struct.weights import DEFAULT_GROUP_NAME
from caesura.transfer.process_group import Membership, keys_of, make_backend, serve_store

TYPED_DICT = typing.TypedDict
typing.TypedDict = typing_extensions.TypedDict  # as pydantic needs it below Python 3.12
try:
    remote = pytest.importorskip(
        "skyrl.backends.skyrl_train.inference_servers.remote_inference_client",
        reason="skyrl and aiohttp are not installed",
    )
finally:
    typing.TypedDict = TYPED_DICT
pytestmark = pytest.mark.filterwarnings("default")  # aiohttp warns of what SkyRL calls


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("skyrl")
    paths = [root / "one", root / "two"]
    for seed, path in enumerate(paths):
        make_checkpoint(path, "qwen3", tied=True, seed=seed, vocab_size=400, max_position_embeddings=512)
        make_byte_level(path, vocab_size=400)
    return paths


@pytest.fixture(scope="module")
def engine(models: list[Path]) -> Iterator[ServedEngine]:
    options = ("--weight-transfer-backend", "gloo", "--enable-memory-saver", "--served-model-name", "policy")
    with served("--model", str(models[0]), *options) as engine:
        yield engine


class InitInfo:
    """The payload of SkyRL's ``BroadcastInitInfo``, whose module needs its trainer's packages."""

    def __init__(self, port: int, rank_offset: int = 1) -> None:
        self.port, self.rank_offset = port, rank_offset

    def for_servers(self, per_server: int, servers: int, dp_size: int = 1) -> list["InitInfo"]:
        return [InitInfo(self.port, self.rank_offset + i * per_server) for i in range(servers)]

    def to_api_payload(self) -> dict[str, Any]:
        return {
            "master_address": "127.0.0.1",
            "master_port": self.port,
            "rank_offset": self.rank_offset,
            "world_size": 2,
        }


def test_rollouts_pauses_and_chunked_updates(engine, models, recorded):
    url = recorded("SkyRL", "skyrl", engine.url)
    tensors = list(load_file(models[1] / "model.safetensors").items())
    update_info = {
        "names": [name for name, _ in tensors],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
        "shapes": [list(tensor.shape) for _, tensor in tensors],
        "packed": True,
    }
    limit = timedelta(seconds=60)
    store, _ = serve_store("127.0.0.1", 0, 2, limit)
    member = Membership(DEFAULT_GROUP_NAME, f"127.0.0.1:{store.port}", 2, 0, "gloo")
    joined: list[Any] = []
    joining = threading.Thread(
        target=lambda: joined.append(
            make_backend(member, keys_of(member, store)[1], limit, hostname="127.0.0.1")
        )
    )
    joining.start()
    asked = {
        "prompt_token_ids": [[5, 6, 7], [8, 9]],
        "sampling_params": {"max_tokens": 6, "temperature": 0.0, "logprobs": 1, "ignore_eos": True},
    }

    async def rollouts() -> list[Any]:
        client = remote.RemoteInferenceClient(url, [url], 1, model_name="policy")
        async with client:
            found = [await client.generate(asked)]
            await client.init_weight_update_communicator(InitInfo(store.port))
            await asyncio.to_thread(joining.join)
            group = WeightUpdateGroup(joined[0])
            for _ in range(2):
                await client.pause()
                await client.start_weight_update()
                call = asyncio.create_task(client.update_weights_nccl(update_info))
                await asyncio.to_thread(group.send, tensors, "flattened_bucket", call.done)
                await call
                await client.finish_weight_update()
                await client.reset_prefix_cache()
                await client.resume()
            found.append(await client.generate(asked))
            await client.sleep(level=2, tags=["kv_cache"])
            await client.wake_up(tags=["kv_cache"])
            found.append(await client.generate(asked))
            group.close()
        return found

    before, after, again = asyncio.run(rollouts())
    assert before["response_ids"] != after["response_ids"] == again["response_ids"]
    assert [len(each) for each in after["response_logprobs"]] == [6, 6]
    assert all(after["responses"])
    engine.ok("/update_weights_from_disk", {"model_path": str(models[1])})
    expected = [engine.generate(ids, sampling_params={"max_new_tokens": 6}) for ids in ([5, 6, 7], [8, 9])]
    assert [each["output_ids"] for each in expected] == after["response_ids"]
