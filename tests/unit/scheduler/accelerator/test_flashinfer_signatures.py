"""FlashInfer has every function that the engine calls, and each accepts the engine's arguments."""

import inspect
import sys
import zipfile

import pytest
import torch
from support import fake_flashinfer, fake_fp8_libraries, record_flashinfer
from support.flashinfer_interface import Call, Interface, recorded
from support.forward_batches import Row, attention_shape, forward_batch

from caesura.scheduler.attention import flashinfer
from caesura.scheduler.attention.flashinfer import FlashInferBackend
from caesura.scheduler.attention.flashinfer_mla import FlashInferLatentBackend
from caesura.scheduler.cache.pool import MHAPool, MLAPool
from caesura.scheduler.execution.forward import StepLimits
from caesura.scheduler.kernels.attention_form import PLAIN, AttentionForm
from caesura.scheduler.layers import fp8_products
from caesura.scheduler.memory.workspace import Workspace

HEADS, KV_HEADS, SIZE, LATENT = 8, 2, 64, 128
SIGNATURES = recorded()


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    library = Interface()
    modules = library.modules()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashinfer, "INT_WORKSPACE_BYTES", 64)
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        pool = MHAPool(num_layers=1, num_pages=9, kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.bfloat16)
        forms = PLAIN, AttentionForm(window=9, softcap=3.0), AttentionForm(window=5, sinks=torch.zeros(HEADS))
        shape = attention_shape(pool, HEADS, kinds=[form.kind for form in forms])
        limits = StepLimits(rows=4, tokens=60, context_len=4 * 16)
        backend = FlashInferBackend(pool, shape, limits)
        decode, prompt = Row([0], 20, [1, 2]), Row([0] * 20, 0, [3, 4])
        for rows, over in (([decode, prompt], backend), ([decode], backend.for_decode(1))):
            batch = forward_batch(rows, 1)
            over.plan(batch)
            qkv = torch.zeros((len(batch.input_ids), HEADS + 2 * KV_HEADS, SIZE), dtype=torch.bfloat16)
            for form in forms:
                over.forward(qkv[:, :HEADS], qkv[:, HEADS:-KV_HEADS], qkv[:, -KV_HEADS:], 0, form)
        latents = MLAPool(num_layers=1, num_pages=9, width=LATENT + SIZE, dtype=torch.bfloat16)
        latent = FlashInferLatentBackend(
            latents, attention_shape(latents, HEADS, 0.1, latent=LATENT), limits, "fa2"
        )
        for rows, over in (([decode, prompt], latent), ([decode], latent.for_decode(1))):
            batch = forward_batch(rows, 1)
            over.plan(batch)
            keys = torch.zeros((len(batch.input_ids), 1, LATENT + SIZE), dtype=torch.bfloat16)
            over.forward(keys.expand(-1, HEADS, -1), keys, keys[..., :LATENT], 0)
        products()
    return library.calls


def products() -> None:
    x, ids = torch.zeros((3, 128), dtype=torch.bfloat16), torch.zeros((3, 2), dtype=torch.int64)
    weight, scales = torch.zeros((2, 256, 128), dtype=torch.float8_e4m3fn), torch.ones((2, 2, 1))
    for dense in (fp8_products.flashinfer_hopper, fp8_products.flashinfer_blackwell):
        assert dense(x, weight[0], scales[0]).shape == (3, 256)
    ends = torch.tensor([1, 3], dtype=torch.int32)
    assert fp8_products.flashinfer_grouped(x, ends, weight, scales).shape == (3, 256)
    down = weight[:, :128], scales[:, :1]
    experts = fp8_products.FlashInferExperts(Workspace())
    assert experts(x, ids, torch.ones((3, 2)), (weight, scales), down).shape == (3, 128)


def test_every_recorded_name_is_called(calls):
    assert {call.name for call in calls} == {name for names in SIGNATURES.values() for name in names}


def test_no_argument_goes_where_anything_does(calls):
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    for call in calls:
        parameters = signature(call.name).parameters
        found = [name for name in call.arguments if parameters[name].kind in kinds]
        if call.name == "BatchAttentionWithAttentionSinkWrapper.run":
            assert found == ["args"]
            (sinks,) = call.arguments["args"]
            assert (sinks.dtype, sinks.shape) == (torch.float32, (HEADS,))
        else:
            assert found == [], call.name


STAND_INS = {
    "flashinfer": fake_flashinfer,
    "flashinfer.mla": fake_flashinfer.mla,
    **{name: module for name, module in fake_fp8_libraries.MODULES.items() if name in SIGNATURES},
}


def test_every_module_has_a_stand_in_that_computes():
    assert set(STAND_INS) == set(SIGNATURES)


@pytest.mark.parametrize(
    "module,name", [(module, name) for module, names in SIGNATURES.items() for name in names]
)
def test_the_stand_in_that_computes_takes_no_more(module, name):
    theirs = signature(name).parameters
    places = [each for each in theirs if theirs[each].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    owner, _, method = name.rpartition(".")
    found = STAND_INS[module]
    if method == "workspace_size":
        return  # the engine asks for it only where it is
    function = getattr(getattr(found, owner) if owner else found, method)
    ours = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    assert {each.name for each in ours} <= set(theirs)
    given = [each.name for each in ours if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    placed = [each for each in given if each in places]
    assert placed == places[: len(placed)]


def signature(name: str) -> inspect.Signature:
    return next(names[name] for names in SIGNATURES.values() if name in names)


SOURCES = {
    "flashinfer/__init__.py": "from .decode import Wrapper as Wrapper\nfrom .page import *\n",
    "flashinfer/page.py": "@traced(x=1)\ndef append(k, v: int, *, layout: str = 'NHD') -> None: ...\n",
    "flashinfer/decode.py": """
def make():
    class Wrapper: ...
class Base:
    def reset(self, buffer, /, more=None): ...
class Wrapper(Base):
    @overload
    def run(self, q): ...
    def run(self, q, *args, out=None): ...
    def plan(self, a, *old, **options):
        return self._plan(a, **merged(options)) if old else self._plan(a, **options)
    def _plan(self, a, *, scale=None): ...
""",
}


@pytest.fixture
def sources(tmp_path):
    wheel = tmp_path / "flashinfer_python-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in SOURCES.items():
            archive.writestr(path, text)
    return record_flashinfer.Sources(str(wheel))


@pytest.mark.parametrize("name,parameters", [
    ("append", "k, v, *, layout=..."),
    ("Wrapper.run", "q, *args, out=..."),
    ("Wrapper.plan", "a, *, scale=..."),
    ("Wrapper.reset", "buffer, /, more=..."),
])  # fmt: skip
def test_signatures_are_read_from_a_wheel(sources, name, parameters):
    assert sources.version == "1.2.3"
    assert sources.signature("flashinfer", name) == parameters


def test_a_missing_name_is_reported(sources):
    with pytest.raises(LookupError, match="gone"):
        sources.signature("flashinfer", "Wrapper.gone")
