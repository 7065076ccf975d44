"""Every seed and any bytes through each target: what was found stays found. ``run.py`` looks for more."""

import importlib
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.properties import examples

HERE = Path(__file__).parent
TARGETS = sorted(path.stem.removeprefix("fuzz_") for path in HERE.glob("fuzz_*.py"))
SEEDS = [(name, seed.name) for name in TARGETS for seed in sorted((HERE / "corpus" / name).iterdir())]


@pytest.fixture(scope="module", autouse=True)
def importable():
    sys.path.insert(0, str(HERE))
    yield
    sys.path.remove(str(HERE))


@pytest.mark.parametrize("name", TARGETS)
def test_the_target_has_seeds_and_takes_no_bytes_at_all(name):
    assert any(target == name for target, _ in SEEDS)
    importlib.import_module(f"fuzz_{name}").target(b"")


@pytest.mark.parametrize(("name", "seed"), SEEDS)
def test_the_seed_keeps_the_contract(name, seed):
    importlib.import_module(f"fuzz_{name}").target((HERE / "corpus" / name / seed).read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes_keep_the_contract(name):
    target = importlib.import_module(f"fuzz_{name}").target

    @settings(max_examples=examples(200))
    @given(st.binary(max_size=200))
    def keeps_the_contract(data):
        target(data)

    keeps_the_contract()


@settings(max_examples=examples(400))
@given(
    st.sampled_from([name for target, name in SEEDS if target == "codec"]), st.randoms(use_true_random=False)
)
def test_changed_frames_keep_the_contract(seed, rng):
    codec = importlib.import_module("fuzz_codec")
    codec.target(codec.changed((HERE / "corpus/codec" / seed).read_bytes(), rng))
