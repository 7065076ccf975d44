"""An impossible configuration is refused by field name, before anything is allocated."""

from dataclasses import replace

import pytest
import torch

from caesura.io_struct import CaesuraError
from caesura.scheduler.memory.device_module import use_device
from caesura.scheduler.runtime.config import EngineConfig, Sizes


@pytest.mark.parametrize(
    "field,value",
    [
        ("max_running_requests", 0),
        ("kv_pool_tokens", -1),
        ("context_len", 0),
        ("kv_memory_fraction", 1.0),
        ("kv_memory_fraction", float("nan")),
        ("idle_empty_s", -1.0),
        ("idle_empty_s", float("nan")),
        ("result_ttl_s", float("nan")),
        ("result_bytes", -1),
        ("session_deadline_s", -0.5),
        ("session_orphan_s", float("nan")),
        ("group_interface", "no-such-interface"),
        ("drain_timeout_s", -1.0),
        ("watchdog_timeout_s", float("nan")),
        ("shutdown_mode", "sometime"),
        ("pipeline_depth", 2),
        ("dtype", "int8"),
    ],
)
def test_an_impossible_value_is_refused_by_name(field, value):
    with pytest.raises(CaesuraError) as caught:
        EngineConfig(model_path="m", **{field: value})
    assert caught.value.code == "invalid_request"
    assert caught.value.detail["field"] == field


class SecondOfTwo:
    """Stand-in for ``torch.cuda`` with two devices, the second one current."""

    def __init__(self) -> None:
        self.chosen: list[torch.device] = []

    def current_device(self) -> int:
        return 1

    def set_device(self, device: torch.device) -> None:
        self.chosen.append(device)


@pytest.mark.parametrize(
    ("device", "resolved"), [("cuda", "cuda:1"), ("cuda:0", "cuda:0"), ("xpu", "xpu"), ("cpu", "cpu")]
)
def test_a_device_is_one_device(tmp_path, monkeypatch, device, resolved):
    modules = {"cuda": SecondOfTwo(), "xpu": object(), "cpu": torch.cpu}
    monkeypatch.setattr(torch, "get_device_module", lambda of: modules[torch.device(of).type])
    found = EngineConfig(model_path="m", device=device, endpoint="ipc:///tmp/x", num_threads=1).resolve()
    assert found.device == resolved
    use_device(found.device)
    assert modules["cuda"].chosen == ([torch.device(resolved)] if device.startswith("cuda") else [])


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


def sizes_on(monkeypatch: pytest.MonkeyPatch, module: object, device: str, **options: object) -> Sizes:
    monkeypatch.setattr(torch, "get_device_module", lambda of: module)
    given = EngineConfig(model_path="m", device=device, endpoint="ipc:///tmp/x", num_threads=1, **options)
    resolved = given.resolve()
    assert resolved.sizes == given.sizes
    return Sizes(resolved.max_running_requests, resolved.chunked_prefill_size, resolved.kv_memory_fraction)


@pytest.mark.parametrize(
    "gigabytes,expected",
    [
        (151, Sizes(1024, 8192, 0.85)),
        (85, Sizes(1024, 8192, 0.85)),
        (42.4, Sizes(512, 4096, 0.85)),
        (25.7, Sizes(256, 2048, 0.8)),
    ],
)
def test_a_larger_card_does_more_at_once(monkeypatch, gigabytes, expected):
    assert sizes_on(monkeypatch, Card(gigabytes), "cuda:0") == expected
    assert sizes_on(
        monkeypatch, Card(gigabytes), "cuda:0", max_running_requests=7, kv_memory_fraction=0.3
    ) == (Sizes(7, expected.chunk_tokens, 0.3))


def test_sizes_of_the_cpu_and_of_devices_without_memory_figures(monkeypatch):
    assert sizes_on(monkeypatch, torch.cpu, "cpu") == Sizes(256, 512, 0.5)
    assert sizes_on(monkeypatch, object(), "xpu") == Sizes(256, 2048, 0.8)


def test_resolving_decides_everything_and_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    config = EngineConfig(model_path="m", device="cpu")
    resolved = config.resolve()
    assert config.endpoint is None
    assert resolved.endpoint is not None
    assert resolved.endpoint.startswith("ipc://")
    assert (resolved.pipeline_depth, resolved.device) == (0, "cpu")
    assert resolved.num_threads is not None
    assert resolved.num_threads >= 1
    assert resolved.resolve() == resolved
