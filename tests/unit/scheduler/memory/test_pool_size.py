"""The KV pool on an accelerator leaves what a step takes; on the CPU it does not ask."""

import dataclasses
import gc
import weakref

import pytest
import torch
from support.checkpoints import make_checkpoint
from support.recorded_graphs import RecordingDevice
from support.workspaces import memory_of
from torch.overrides import TorchFunctionMode

from caesura.io_struct import CaesuraError
from caesura.scheduler.cache.layer_ledgers import storage_pages
from caesura.scheduler.execution import build
from caesura.scheduler.execution.build import build_pool, kv_bytes_per_token, load_model, step_bytes
from caesura.scheduler.memory.host import HOST
from caesura.scheduler.memory.workspace import ALIGNMENT, Workspace
from caesura.scheduler.runtime.engine_config import PAGE_SIZE, EngineConfig


@pytest.fixture
def memory_has(monkeypatch):
    """Return a function that sets the bytes which are free, whichever device is asked for them."""
    free: list[int] = []
    monkeypatch.setattr(build, "get_available_memory", lambda *of, **options: free[-1])
    return free.append


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "deepseek-v3"])
def test_a_step_has_room_beside_the_pool(tmp_path, monkeypatch, memory_has, family):
    make_checkpoint(tmp_path, family)
    config = EngineConfig(
        model_path=str(tmp_path),
        device="cpu",
        max_running_requests=5000,
        chunked_prefill_size=8192,
        kv_memory_fraction=0.85,
    )
    loaded = load_model(config)
    there = dataclasses.replace(loaded, device=torch.device("meta"))
    modules = {"cpu": HOST, "meta": RecordingDevice()}
    monkeypatch.setattr(build, "device_module_for", lambda device: modules[device.type])
    assert step_bytes(config, loaded) == 0
    needed = step_bytes(config, there)
    logits = 5000 * loaded.config.vocab_size * 4
    assert needed > logits + 13192 * loaded.config.hidden_size * loaded.dtype.itemsize
    graphs = build.graph_bytes(config, there)
    assert graphs > logits + 5000 * loaded.config.hidden_size * loaded.dtype.itemsize
    few = dataclasses.replace(config, cuda_graph_max_bs=64)
    assert 0 < build.graph_bytes(few, there) < graphs / 10
    none = dataclasses.replace(config, cuda_graphs=False)
    assert build.graph_bytes(none, there) == build.graph_bytes(config, loaded) == 0
    needed += graphs
    made = []
    monkeypatch.setattr(build, "make_pool", lambda loaded, num_pages, windows: made.append(num_pages - 1))
    memory_has(needed + (64 << 20))
    page = (kv_bytes_per_token(loaded) + build.routing_bytes_per_token(loaded)) * PAGE_SIZE
    for model, share in ((there, 64 << 20), (loaded, needed + (64 << 20))):
        build_pool(config, model, 1 << 14)
        assert made.pop() == min(int(share * 0.85) // page, 5000 * 1024)


def windowed(tmp_path, **options):
    make_checkpoint(tmp_path, "gemma3")
    sizes = {"max_running_requests": 4, "chunked_prefill_size": 32, **options}
    config = EngineConfig(model_path=str(tmp_path), device="cpu", **sizes)
    return config, load_model(config)


def pages_of(pool):
    return [len(pool.layer(layer)[0]) - 1 for layer in range(pool.num_layers)]


def test_layers_with_a_window_have_room_for_all_windows(tmp_path):
    config, loaded = windowed(tmp_path, kv_pool_tokens=4096)
    pool = build_pool(config, loaded, 256)
    most = storage_pages(20, PAGE_SIZE, rows=4, step_tokens=32)
    assert pages_of(pool) == [most, 256, most]
    assert most < 64
    windows = build.build_windows(config, loaded, pool)
    assert (windows.window, len(windows.behind)) == (20, 257)
    small = dataclasses.replace(config, kv_pool_tokens=160)
    assert pages_of(build_pool(small, loaded, 256)) == [10, 10, 10]


@pytest.mark.parametrize("share", [1 << 16, 1 << 17, 150_000])
def test_a_share_of_memory_is_used_up_by_both(tmp_path, memory_has, share):
    config, loaded = windowed(tmp_path, kv_memory_fraction=0.5)
    memory_has(2 * share)
    pool = build_pool(config, loaded, 1 << 14)
    page = kv_bytes_per_token(loaded) * PAGE_SIZE
    used = sum(pages_of(pool)) * page
    assert share - (3 if pages_of(pool)[0] == pages_of(pool)[1] else 1) * page < used <= share


def hybrid(tmp_path, **options):
    make_checkpoint(tmp_path, "qwen3.5")
    config = EngineConfig(model_path=str(tmp_path), device="cpu", max_running_requests=6, **options)
    return config, load_model(config)


def test_states_have_rows_for_requests_and_a_prefix(tmp_path):
    config, loaded = hybrid(tmp_path, kv_pool_tokens=160)
    pool = build_pool(config, loaded, 256)
    row = build.state_row_bytes(loaded)
    assert row == 3 * (4 * 12 * 10 * 4 + 3 * (2 * 2 * 12 + 4 * 10) * 4)
    assert (pool.states.num_rows, pool.states.nbytes) == (13, 13 * row)
    assert pages_of(pool) == [10]
    assert kv_bytes_per_token(loaded) * PAGE_SIZE * 11 == pool.nbytes


@pytest.mark.parametrize(("share", "rows"), [(1 << 18, 12), (1 << 17, 7), (30_000, 1)])
def test_states_and_pages_share_what_there_is(tmp_path, memory_has, share, rows):
    config, loaded = hybrid(tmp_path, kv_memory_fraction=0.5)
    memory_has(2 * share)
    pool = build_pool(config, loaded, 1 << 14)
    page = kv_bytes_per_token(loaded) * PAGE_SIZE
    assert pool.states.num_rows == 1 + rows
    used = pool.states.nbytes + pages_of(pool)[0] * page
    assert share - page < used <= share


def test_memory_that_holds_no_state_is_refused(tmp_path, memory_has):
    config, loaded = hybrid(tmp_path, kv_pool_tokens=16)
    memory_has(15_000)
    with pytest.raises(CaesuraError, match="1 pages and 1 rows of states needs") as refused:
        build_pool(config, loaded, 256)
    assert refused.value.detail["needed_bytes"] > 15_000


def test_workspace_grows_and_never_shrinks():
    workspace, sizes = Workspace(), []
    for rows in (3, 7, 2, 7, 0):
        taken = workspace.take("x", (rows, 5), torch.float32)
        assert taken.shape == (rows, 5)
        assert taken.is_contiguous()
        sizes.append(memory_of(workspace, "x").numel())
    assert sizes == [15, 35, 35, 35, 35]


def test_a_purpose_is_one_memory_and_two_are_two():
    workspace = Workspace()
    for purpose in (7, 8):
        workspace.take(str(purpose), (4,), torch.int64).fill_(purpose)
    assert workspace.take("7", (2, 2), torch.int64).tolist() == [[7, 7], [7, 7]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
def test_tail_begins_at_a_line(dtype: torch.dtype):
    workspace = Workspace()
    for count in (1, 63, 4097, 1 << 20):
        assert workspace.take("x", (count,), dtype).data_ptr() % ALIGNMENT == 0


def test_smaller_workspaces_go_before_larger_ones_come():
    workspace, gone = Workspace(), []
    small = weakref.ref(workspace.take("x", (8,), torch.float32))

    class Watched(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.empty:
                gc.collect()
                gone.append(small() is None)
            return function(*args, **(kwargs or {}))

    with Watched():
        workspace.take("x", (9,), torch.float32)
    assert gone == [True]


def test_update_may_write_buffers_that_a_step_has_taken():
    workspace = Workspace()
    with torch.inference_mode():
        workspace.take("x", (4,), torch.float32)
    workspace.take("x", (4,), torch.float32).fill_(1)
    workspace.take("x", (3,), torch.float32).fill_(2)
