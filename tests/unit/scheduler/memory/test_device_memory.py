"""Emptying and reading device allocators."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from caesura.io_struct import CaesuraError
from caesura.scheduler.memory import device_memory
from caesura.scheduler.memory.device_memory import (
    DeviceCache,
    DeviceMemoryReading,
    EmptyCacheReport,
    empty_device_cache,
    get_available_memory,
    refuse_defeating_settings,
)
from caesura.scheduler.memory.device_module import (
    device_module_for,
    free_and_total,
    graphs_of,
    streams_of,
)
from caesura.scheduler.memory.host import HOST, GlibcHostDevice, HostDevice

MIB = 1 << 20
needs_glibc = pytest.mark.skipif(
    not isinstance(HOST, GlibcHostDevice), reason="glibc's malloc is not in charge"
)


class CachingDevice:
    """``torch.accelerator`` on a device of some kind, over a real ledger."""

    def __init__(self, kind: str, *, allocated: int, cached: int, total: int) -> None:
        self.kind, self.allocated, self.cached, self.total = kind, allocated, cached, total
        self.calls: list[str] = []
        self.streams = ["default"]

    def current_accelerator(self) -> torch.device:
        return torch.device(self.kind)

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")
        self.cached = 0

    def memory_reserved(self, device: torch.device) -> int:
        self.calls.append(f"memory_reserved {device}")
        return self.allocated + self.cached

    def memory_allocated(self, device: torch.device) -> int:
        self.calls.append(f"memory_allocated {device}")
        return self.allocated

    def get_memory_info(self, device: torch.device) -> tuple[int, int]:
        self.calls.append(f"get_memory_info {device}")
        return self.total - self.allocated - self.cached, self.total

    def synchronize(self, device: torch.device) -> None:
        self.calls.append(f"synchronize {device}")

    def current_stream(self, device: torch.device) -> str:
        return self.streams[-1]

    def set_stream(self, stream: str) -> None:
        self.streams.append(stream)


class SilentDevice(CachingDevice):
    """One whose allocator does not tell what the system has."""

    def get_memory_info(self, device: torch.device) -> tuple[int, int]:
        raise NotImplementedError("getMemoryInfo is not implemented for this allocator yet.")


class ScriptedGroup:
    def __init__(self, *others: int) -> None:
        self.others = others

    def all_reduce_min(self, value: int) -> int:
        return min(value, *self.others)


@pytest.fixture
def accelerator(monkeypatch):
    def use(kind: str, made: type[CachingDevice] = CachingDevice) -> CachingDevice:
        device = made(kind, allocated=100, cached=40, total=1000)
        monkeypatch.setattr(torch, "accelerator", device)
        return device

    return use


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mtia", "privateuseone"])
def test_caching_devices_are_emptied_alike(accelerator, kind):
    accelerator(kind)
    module = device_module_for(f"{kind}:0")
    assert DeviceMemoryReading.of(module) == DeviceMemoryReading(reserved=140, allocated=100)
    assert empty_device_cache(module) is True
    assert DeviceMemoryReading.of(module) == DeviceMemoryReading(reserved=100, allocated=100)


def test_free_memory_that_is_not_told_is_unknown(accelerator):
    accelerator("xpu", SilentDevice)
    silent = device_module_for("xpu")
    assert DeviceCache(silent).empty("idle") == EmptyCacheReport(140, 100)
    assert get_available_memory("xpu") is free_and_total(silent) is None


def test_devices_of_another_kind_are_refused_by_name(accelerator):
    with pytest.raises(CaesuraError, match="device cuda:1 is not served: this torch serves no accelerator"):
        device_module_for("cuda:1")
    accelerator("xpu")
    with pytest.raises(CaesuraError, match="device cuda is not served: this torch serves xpu") as refused:
        device_module_for("cuda")
    assert (refused.value.code, refused.value.detail["field"]) == ("unsupported", "device")


def test_streams_nest_also_within_themselves(accelerator):
    device = accelerator("cuda")
    bound = device_module_for("cuda:0")
    with bound.stream("forward"), bound.stream("forward"):
        assert bound.current_stream() == "forward"
    assert device.streams == ["default", "forward", "forward", "forward", "default"]


def test_graphs_are_those_of_the_kind(accelerator, monkeypatch):
    accelerator("cuda")
    monkeypatch.setattr(torch, "get_device_module", lambda device: {"cuda:1": torch.cuda}[str(device)])
    bound = device_module_for("cuda:1")
    assert graphs_of(bound) is streams_of(bound) is bound
    assert bound.CUDAGraph is torch.cuda.CUDAGraph
    monkeypatch.setattr(torch, "get_device_module", lambda device: torch.mtia)
    assert graphs_of(bound) is None


def test_cpu_is_the_host_and_not_torch_cpu():
    assert device_module_for("cpu") is HOST
    assert device_module_for(torch.device("cpu", 0)) is HOST


def test_figures_are_of_the_bound_device(accelerator):
    device = accelerator("cuda")
    bound = device_module_for("cuda:1")
    assert DeviceMemoryReading.of(bound) == DeviceMemoryReading(reserved=140, allocated=100)
    assert get_available_memory("cuda:1") == 860
    bound.synchronize()
    assert device.calls == [
        "memory_reserved cuda:1", "memory_allocated cuda:1", "get_memory_info cuda:1", "synchronize cuda:1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        (812 * MIB, 640 * MIB, "continue_generation: reserved 812.0 MB -> 640.0 MB (freed 172.0 MB)"),
        (640 * MIB, 812 * MIB, "continue_generation: reserved 640.0 MB -> 812.0 MB (freed 0.0 MB)"),
        (10 * MIB, 10 * MIB + 100, "continue_generation: reserved 10.0 MB -> 10.0 MB (freed 0.0 MB)"),
        (int(1.55 * MIB), 0, "continue_generation: reserved 1.5 MB -> 0.0 MB (freed 1.5 MB)"),
    ],
)
def test_report_line(before, after, line):
    report = EmptyCacheReport(before, after)
    assert report.describe("continue_generation") == line
    assert report.freed == max(0, before - after)


def test_available_memory_empties_the_cache_only_on_request(accelerator):
    device = accelerator("cuda")
    assert get_available_memory("cuda") == 860
    assert get_available_memory("cuda", group=ScriptedGroup(2000, 500)) == 500
    assert get_available_memory("cuda", group=ScriptedGroup(2000)) == 860
    assert "empty_cache" not in device.calls
    assert get_available_memory("cuda", empty_cache=True) == 900


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:True"),
        ("PYTORCH_HIP_ALLOC_CONF", "expandable_segments:True"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:1"),
        ("PYTORCH_CUDA_ALLOC_CONF", " expandable_segments : TRUE ,max_split_size_mb:64"),
    ],
)
def test_expandable_segments_with_a_saver_are_refused(name, value):
    with pytest.raises(CaesuraError, match=name) as caught:
        refuse_defeating_settings({name: value})
    assert caught.value.detail == {"field": name, "value": value}
    segments = ("expandable_segments", "expandable_segments:False", "expandable_segments:0")
    for other in ("", "max_split_size_mb:1", "backend:true", *segments):
        refuse_defeating_settings({name: other})


def make_host(tmp_path: Path, files: dict[str, str]) -> HostDevice:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return HostDevice(proc=tmp_path / "proc", cgroup=tmp_path / "cgroup")


MEMINFO = (
    "MemTotal:       1000 kB\nMemFree:          10 kB\nMemAvailable:    600 kB\nHugePages_Total:       0\n"
)
KB = 1024


def limits(folder: str, most: int, used: int) -> dict[str, str]:
    return {f"{folder}/memory.max": f"{most * KB}\n", f"{folder}/memory.current": f"{used * KB}\n"}


@pytest.mark.parametrize(
    ("cgroup", "files", "free", "total"),
    [
        pytest.param("0::/a\n", {"cgroup/a/memory.max": "max\n"}, 600, 1000, id="no limit"),
        pytest.param("0::/pod/box\n", limits("cgroup/pod/box", 500, 300), 200, 500, id="v2"),
        pytest.param(
            "0::/pod/box\n",
            limits("cgroup/pod/box", 500, 300)
            | {"cgroup/pod/box/memory.stat": f"anon 5\ninactive_file {100 * KB}\nactive_file {50 * KB}\n"},
            300,
            500,
            id="v2, inactive page cache is free",
        ),
        pytest.param(
            "0::/pod/box\n",
            limits("cgroup/pod/box", 900, 100) | limits("cgroup/pod", 400, 390),
            10,
            400,
            id="v2, the tightest ancestor wins",
        ),
        pytest.param(
            "0::/kubepods/pod1/box\n", limits("cgroup", 500, 700), 0, 500, id="at the root of a container"
        ),
        pytest.param(
            "5:cpu,cpuacct:/x\n4:memory:/box\n0::/unified\n",
            {
                "cgroup/memory/box/memory.limit_in_bytes": f"{500 * KB}\n",
                "cgroup/memory/box/memory.usage_in_bytes": f"{300 * KB}\n",
                "cgroup/memory/box/memory.stat": f"inactive_file 7\ntotal_inactive_file {20 * KB}\n",
                "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "cgroup/memory/memory.usage_in_bytes": f"{800 * KB}\n",
            },
            220,
            500,
            id="v1",
        ),
    ],
)
def test_free_memory_is_that_of_the_tightest_cgroup(tmp_path, cgroup, files, free, total):
    host = make_host(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, **files})
    assert host.mem_get_info() == (free * KB, total * KB)


def test_only_anonymous_memory_is_reserved(tmp_path):
    silent = make_host(tmp_path, {})
    assert DeviceMemoryReading.of(silent) == DeviceMemoryReading(0, 0)
    assert silent.mem_get_info()[0] == 0
    assert empty_device_cache(silent) is False
    status = "Name:\tx\nVmRSS:\t 90 kB\nRssAnon:\t 50 kB\nRssFile:\t 30 kB\nRssShmem:\t 10 kB\n"
    assert make_host(tmp_path, {"proc/self/status": status}).memory_reserved() == 50 * KB


INTERLEAVED = """
import torch
from caesura.scheduler.memory.device_memory import DeviceCache
from caesura.scheduler.memory.host import HOST
from caesura.scheduler.memory.device_memory import DeviceMemoryReading

generator = torch.Generator().manual_seed(0)
sizes = torch.randint(25_000, 50_000, (4000,), generator=generator).tolist()
tensors = [torch.ones(size) for size in sizes]          # 100 to 200 KB each, about 600 MB
full = DeviceMemoryReading.of(HOST)
tensors = tensors[::2]
freed = DeviceMemoryReading.of(HOST)
report = DeviceCache(HOST).empty("idle")
after = DeviceMemoryReading.of(HOST)
intact = all(bool((tensor == 1).all()) for tensor in tensors)
print(full.allocated, freed.allocated, after.allocated, report.reserved_before, report.reserved_after, intact)
"""


ARENAS = """
import ctypes, threading
from caesura.scheduler{} import __main__

held = threading.Barrier(5)
for _ in range(4):
    threading.Thread(target=lambda: (bytearray(4096), held.wait())).start()
held.wait()
ctypes.CDLL(None).malloc_stats()
"""


@needs_glibc
@pytest.mark.parametrize("package", ["", ".executor"])
@pytest.mark.parametrize("setting", [None, "3"])
def test_threads_of_an_engine_share_one_arena(monkeypatch, package, setting):
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    if setting is not None:
        monkeypatch.setenv("MALLOC_ARENA_MAX", setting)
    code = ARENAS.format(package)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr.count("Arena ") == int(setting or 1)


@needs_glibc
def test_emptying_returns_the_holes_between_live_tensors():
    result = subprocess.run([sys.executable, "-c", INTERLEAVED], capture_output=True, text=True, check=True)
    *numbers, intact = result.stdout.split()
    full, freed, after, reserved_before, reserved_after = map(int, numbers)
    assert intact == "True"
    assert full - freed > 200 * MIB
    assert abs(after - freed) < MIB
    # Blocks that malloc mapped one by one are gone when freed; the rest stays until the trim. How many are
    # which depends on glibc's sliding threshold, so the bound is loose.
    assert reserved_before - reserved_after > 50 * MIB
    assert reserved_after < 1.5 * after


@needs_glibc
def test_allocated_follows_tensors_and_reserved_covers_them():
    HOST.empty_cache()  # or the tensor may take what earlier tests have left in the heap
    before = DeviceMemoryReading.of(HOST)
    tensor = torch.ones(16 * MIB)
    during = DeviceMemoryReading.of(HOST)
    assert during.allocated - before.allocated == pytest.approx(64 * MIB, rel=0.05)
    assert during.reserved - before.reserved == pytest.approx(64 * MIB, rel=0.2)
    del tensor
    assert DeviceMemoryReading.of(HOST).allocated - before.allocated < MIB


SHORTAGES = [
    MemoryError(), torch.OutOfMemoryError("x"), OSError(12, "Cannot allocate memory"),
    RuntimeError("CUDA error: CUDA_ERROR_OUT_OF_MEMORY"), RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    RuntimeError("HIP error: hipErrorOutOfMemory"),
    RuntimeError("cudaErrorMemoryAllocation"), RuntimeError("std::bad_alloc"),
    RuntimeError("UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"), RuntimeError("ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY"),
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"),
    RuntimeError("unable to mmap 9 bytes: Cannot allocate memory (12)"),
]  # fmt: skip
OTHERS = [
    ValueError("out of memory"), OSError(28, "No space left on device"), OSError(13, "out of memory"),
    RuntimeError("shape mismatch"), RuntimeError("CUDA error: an illegal memory access was encountered"),
]  # fmt: skip


@pytest.mark.parametrize("error", [*SHORTAGES, *OTHERS], ids=repr)
def test_shortages_of_memory_are_told_from_other_errors(error):
    assert device_memory.is_out_of_memory(error) is (error in SHORTAGES)


class Device:
    """Reserved memory goes through ``readings``, then stays at the last one."""

    def __init__(self, *readings: int) -> None:
        self.readings = [reading * MIB for reading in readings]
        self.emptied = 0

    def memory_reserved(self) -> int:
        return self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]

    def empty_cache(self) -> None:
        self.emptied += 1


@pytest.mark.parametrize(("broken", "freed"), [("synchronize", 0), ("empty_cache", 0), (None, 4 * MIB)])
def test_a_failure_is_noted_with_the_freed_bytes(caplog, broken, freed):
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    device, noted = Device(10, 6), []
    if broken == "empty_cache":
        device.empty_cache = fail
    cache = DeviceCache(
        device,
        synchronize=fail if broken == "synchronize" else lambda: None,
        note_failure=lambda what, freed: noted.append((what, freed)),
    )
    cache.after_failure("step 3")
    assert noted == [("step 3", freed)]
    assert ("could not be emptied" in caplog.text) == (freed == 0)


def test_bytes_freed_since_a_reading_count_for_its_place():
    cache = DeviceCache(Device(8, 6))
    assert cache.empty("release", reserved_before=100 * MIB).freed == 92 * MIB
    assert [(each.place, each.freed_bytes) for each in cache.totals()] == [("release", 92 * MIB)]
