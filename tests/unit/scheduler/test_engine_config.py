"""An impossible configuration is refused by field name, before anything is allocated."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from caesura.io_struct import CaesuraError
from caesura.process import private_directory
from caesura.scheduler.memory.device_module import use_device
from caesura.scheduler.runtime.engine_config import EngineConfig, Sizes

IMPOSSIBLE = [
    ("max_running_requests", 0), ("kv_pool_tokens", -1), ("context_len", 0), ("kv_memory_fraction", 1.0),
    ("kv_memory_fraction", float("nan")), ("idle_empty_s", -1.0), ("idle_empty_s", float("nan")),
    ("result_ttl_s", float("nan")), ("result_bytes", -1), ("session_deadline_s", -0.5),
    ("session_orphan_s", float("nan")), ("group_interface", "no-such-interface"), ("drain_timeout_s", -1.0),
    ("watchdog_timeout_s", float("nan")), ("shutdown_mode", "sometime"), ("pipeline_depth", 2),
    ("dtype", "int8"), ("autotune_lm_head_rows", -1), ("prompt_cache_bytes", -1),
]  # fmt: skip


def test_an_impossible_value_is_refused_by_name():
    for field, value in IMPOSSIBLE:
        with pytest.raises(CaesuraError) as caught:
            EngineConfig(model_path="m", **{field: value})
        assert (caught.value.code, caught.value.detail["field"]) == ("invalid_request", field)


class SecondOfTwo:
    """Stand-in for ``torch.cuda`` with two devices, the second one current."""

    def current_device(self) -> int:
        return 1

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 1 << 30, 1 << 30


def test_mps_is_refused_by_name_and_never_chosen(monkeypatch):
    found = torch.device("mps")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    config = EngineConfig(model_path="m", endpoint="ipc:///tmp/x")
    assert config.resolve().device == "cpu"
    with pytest.raises(CaesuraError, match="device = 'mps' is not served") as refused:
        replace(config, device="mps").resolve()
    assert refused.value.detail["field"] == "device"


class Card:
    """Stand-in for ``torch.cuda`` on a card of some size."""

    def __init__(self, gigabytes: float) -> None:
        self._total = int(gigabytes * 1e9)

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        assert device.index is not None
        return self._total // 2, self._total


@pytest.fixture
def module_of(monkeypatch):
    """Modules of torch by kind of device, in place of torch's own."""
    modules = {"cpu": torch.cpu, "xpu": object()}
    monkeypatch.setattr(torch, "get_device_module", lambda of: modules[torch.device(of).type])
    return modules


def resolved(device: str, **options: object) -> EngineConfig:
    given = EngineConfig(model_path="m", device=device, endpoint="ipc:///tmp/x", num_threads=1, **options)
    found = given.resolve()
    assert found.sizes == given.sizes
    return found


def sizes_on(device: str, **options: object) -> Sizes:
    found = resolved(device, **options)
    return Sizes(found.max_running_requests, found.chunked_prefill_size, found.kv_memory_fraction)


@pytest.mark.parametrize(
    ("device", "one"), [("cuda", "cuda:1"), ("cuda:0", "cuda:0"), ("xpu", "xpu"), ("cpu", "cpu")]
)
def test_a_device_is_one_device(module_of, monkeypatch, device, one):
    chosen = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    module_of["cuda"] = SecondOfTwo()
    assert resolved(device).device == one
    use_device(one)
    assert chosen == ([torch.device(one).index] if device.startswith("cuda") else [])


@pytest.mark.parametrize(
    "gigabytes,expected",
    [
        (151, Sizes(1024, 8192, 0.85)),
        (85, Sizes(1024, 8192, 0.85)),
        (42.4, Sizes(512, 4096, 0.85)),
        (25.7, Sizes(256, 2048, 0.8)),
    ],
)
def test_a_larger_card_does_more_at_once(module_of, gigabytes, expected):
    module_of["cuda"] = Card(gigabytes)
    assert sizes_on("cuda:0") == expected
    asked = sizes_on("cuda:0", max_running_requests=7, kv_memory_fraction=0.3)
    assert asked == Sizes(7, expected.chunk_tokens, 0.3)
    assert sizes_on("cpu") == Sizes(256, 512, 0.5)
    assert sizes_on("xpu") == Sizes(256, 2048, 0.8), "it does not tell its memory"


def test_resolving_decides_everything_and_changes_nothing():
    config = EngineConfig(model_path="m", device="cpu")
    found = config.resolve()
    assert config.endpoint is None
    assert found.endpoint.startswith("ipc://")
    assert (found.pipeline_depth, found.device, found.num_threads >= 1) == (0, "cpu", True)
    assert found.resolve() == found
    private_directory.remove(Path(found.endpoint.removeprefix("ipc://")).parent)
