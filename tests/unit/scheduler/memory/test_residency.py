"""Components that give their memory back and take it again, on every backend that a CPU can stand in for."""

import gc
import sys
from math import prod
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.moving_components import CPU, MIB, exhaust
from support.properties import examples

from caesura.io_struct import CaesuraError
from caesura.scheduler.cache.pool import MHAPool
from caesura.scheduler.layers.parameters import Parameter
from caesura.scheduler.memory.device_memory import empty_device_cache
from caesura.scheduler.memory.host import HOST
from caesura.scheduler.memory.residency import (
    MEMORY_TAGS,
    ComponentResidencyManager,
    MappedComponent,
    SavedComponent,
    StorageComponent,
    allocate,
)

BACKENDS = [
    pytest.param(
        MappedComponent,
        marks=pytest.mark.skipif(sys.platform != "linux", reason="madvise as Linux has it"),
    ),
    StorageComponent,
]


def resident() -> int:
    gc.collect()
    empty_device_cache(HOST)
    return HOST.memory_reserved()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_system_really_gets_the_memory(backend):
    manager = ComponentResidencyManager(CPU, make_component=backend)
    nothing = resident()
    with manager.component("weights"):
        weights = [allocate((4 * MIB,), torch.float32, CPU) for _ in range(4)]
    with manager.component("kv_cache"):
        cache = allocate((4 * MIB,), torch.float32, CPU)
    assert (manager.nbytes("weights"), manager.nbytes("kv_cache")) == (64 * MIB, 16 * MIB)
    if backend is MappedComponent:
        assert HOST.memory_reserved() - nothing < 4 * MIB, "what nobody wrote costs nothing"
    for tensor in (*weights, cache):
        tensor.fill_(1.0)
    addresses = [tensor.data_ptr() for tensor in weights]
    before = resident()
    assert exhaust(manager.release(["weights"])) >= 4, "it yields between allocations"
    assert before - resident() > 60 * MIB
    assert bool((cache == 1).all())
    exhaust(manager.resume(["weights"]))
    if backend is MappedComponent:
        assert before - resident() > 60 * MIB
    for tensor in weights:
        assert not tensor.any()
        tensor.fill_(2.0)
    # Less by what threads of earlier tests give back meanwhile, but not by the component.
    assert -16 * MIB < resident() - before < 4 * MIB
    if backend is MappedComponent:
        assert [tensor.data_ptr() for tensor in weights] == addresses


@pytest.mark.parametrize("backend", BACKENDS)
def test_allocations_of_others_stay(backend):
    manager = ComponentResidencyManager(CPU, make_component=backend)
    with manager.component("weights"):
        buffer = torch.full((1000,), 3.0)
        parameter = Parameter("p", (10, 10), torch.float32, CPU)
    with pytest.raises(ZeroDivisionError), manager.component("kv_cache"):
        raise ZeroDivisionError
    outside = Parameter("q", (10, 10), torch.float32, CPU)
    pool = MHAPool(num_layers=1, num_pages=2, kv_heads=1, head_size=4, dtype=torch.float32)
    outside.data.fill_(5.0)
    pool.layer(0)[0].fill_(6.0)
    assert manager.nbytes("weights") == parameter.data.nbytes
    assert manager.nbytes("kv_cache") == 0
    exhaust(manager.release(MEMORY_TAGS))
    assert bool((buffer == 3).all())
    assert bool((outside.data == 5).all())
    assert bool((pool.layer(0)[0] == 6).all())


@settings(max_examples=examples(60))
@given(
    shape=st.lists(st.integers(0, 40), max_size=3).map(tuple),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.float8_e4m3fn]),
    backend=st.sampled_from(
        [MappedComponent, StorageComponent] if sys.platform == "linux" else [StorageComponent]
    ),
)
def test_any_tensor(shape, dtype, backend):
    component = backend("weights")
    tensors = [component.allocate(shape, dtype, CPU) for _ in range(2)]
    view = tensors[0].view(torch.uint8) if tensors[0].dim() else tensors[0]
    assert component.nbytes == 2 * prod(shape) * dtype.itemsize
    for _ in range(2):
        for tensor in tensors:
            assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
            assert tensor.data_ptr() % 64 == 0
            assert not tensor.to(torch.float64).any()
        tensors[0].fill_(1)
        assert not tensors[1].to(torch.float64).any(), "tensors share no byte"
        assert view.numel() == 0 or bool(view.to(torch.float64).any())
        exhaust(component.release())
        exhaust(component.resume())


def test_unused_blocks_of_the_allocator_count_as_room():
    free = [0]
    module = SimpleNamespace(
        memory_reserved=lambda: 0,
        empty_cache=lambda: free.append(4000),
        mem_get_info=lambda: (free[-1], 1 << 30),
    )
    manager = ComponentResidencyManager(CPU, device_module=module)
    with manager.component("weights"):
        allocate((1000,), torch.float32, CPU)
    exhaust(manager.release(["weights"]))
    exhaust(manager.resume(["weights"]))


def test_an_allocator_that_refuses_half_way_takes_nothing():
    class Refusing(StorageComponent):
        def resume(self):
            for number, step in enumerate(super().resume()):
                if number == 1 and self is refusing:
                    raise RuntimeError("out of memory")
                yield step

    manager = ComponentResidencyManager(CPU, make_component=Refusing)
    tensors = []
    for tag in ("weights", "kv_cache"):
        with manager.component(tag):
            tensors += [allocate((1000,), torch.float32, CPU) for _ in range(3)]
    refusing = manager.components["kv_cache"]
    exhaust(manager.release(MEMORY_TAGS))
    with pytest.raises(CaesuraError) as caught:
        exhaust(manager.resume(MEMORY_TAGS))
    assert caught.value.code == "out_of_memory"
    assert caught.value.detail["needed_bytes"] == 24_000
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0] * 6
    refusing = None
    exhaust(manager.resume(MEMORY_TAGS))
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [4000] * 6


@pytest.fixture
def saver(tmp_path, monkeypatch):
    (tmp_path / "torch_memory_saver.py").write_text(
        "from contextlib import contextmanager\n"
        "calls = []\n"
        "class Saver:\n"
        "    @contextmanager\n"
        "    def region(self, tag, enable_cpu_backup):\n"
        "        calls.append(('enter', tag, enable_cpu_backup))\n"
        "        yield\n"
        "        calls.append(('leave', tag))\n"
        "    def pause(self, tag):\n"
        "        calls.append(('pause', tag))\n"
        "    def resume(self, tag):\n"
        "        calls.append(('resume', tag))\n"
        "torch_memory_saver = Saver()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_memory_saver", raising=False)
    import torch_memory_saver

    yield torch_memory_saver
    sys.modules.pop("torch_memory_saver", None)


PRELOADED = {"LD_PRELOAD": "/lib/torch_memory_saver_hook_mode_preload.abi3.so"}


def test_the_saver_is_used_where_it_is_active(saver):
    def component(device: str, environ: dict[str, str]) -> object:
        manager = ComponentResidencyManager(device, device_module=HOST, environ=environ)
        return manager.components["weights"]

    assert isinstance(component("cuda", PRELOADED), SavedComponent)
    for device, environ in (("cuda", {}), ("cpu", PRELOADED), ("xpu", PRELOADED)):
        assert not isinstance(component(device, environ), SavedComponent)
    with pytest.raises(CaesuraError, match="PYTORCH_CUDA_ALLOC_CONF sets expandable_segments"):
        component("cuda", PRELOADED | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})


def test_the_saver_is_asked_once_per_component(saver):
    manager = ComponentResidencyManager(CPU, make_component=SavedComponent)
    with manager.component("weights"):
        tensors = [allocate((8,), torch.float32, CPU) for _ in range(2)]
    assert saver.calls == [("enter", "caesura-weights", False), ("leave", "caesura-weights")] * 2
    saver.calls.clear()
    tensors[0].fill_(7.0)
    exhaust(manager.release(MEMORY_TAGS))
    exhaust(manager.resume(MEMORY_TAGS))
    assert saver.calls == [("pause", "caesura-weights"), ("resume", "caesura-weights")]
    assert not tensors[0].any(), "what is mapped is undefined until it is zeroed"
