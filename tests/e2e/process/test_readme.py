"""The Python examples of the README and of pages for users, as they stand there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long  # its engines take seconds to start

README = Path(__file__).parents[3] / "README.md"
FIRST_STEPS = README.parent / "docs" / "tutorial" / "first-steps.md"
SEVERAL_ENGINES = README.parent / "docs" / "howto" / "several-engines.md"
FLEET = README.parent / "docs" / "howto" / "fleet.md"
IMAGES = README.parent / "docs" / "tutorial" / "images.md"
ABOUT_IMAGES = README.parent / "docs" / "explanation" / "images.md"


PARTS = """
from transformers import AutoModelForCausalLM

from caesura.client import ControlClient, launch_scheduler
from caesura.client.trainer import checkpoint_tensors

policy = AutoModelForCausalLM.from_pretrained("/tmp/tiny-new")
with (
    launch_scheduler("/tmp/tiny", num_threads=1) as one,
    launch_scheduler("/tmp/tiny", num_threads=1) as two,
    launch_scheduler("/tmp/tiny", num_threads=1) as late,
):
    trainers = [ControlClient(engine.endpoint, owner="trainer") for engine in (one, two)]
    exec(ROADS)
    serving = trainers[0]
    exec(CLONE)
    print([engine.status().weight_version for engine in (one, two, late)])
    for trainer in trainers:
        trainer.close()
"""
"""Beginnings that the parts of docs/howto/several-engines.md say they go on from."""

TEXT = r"""('.*'|".*")"""
"""A text as ``repr`` writes it."""


def block_of(page: Path, number: int) -> str:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[number]


def example(page: Path, number: int, tmp_path: Path) -> str:
    output, said = run(block_of(page, number), tmp_path)
    assert " WARNING " not in said, "an example is no place for what the engine warns of"
    return output


def run(program: str, tmp_path: Path) -> tuple[str, str]:
    for name in ("tiny-image-new", "tiny-image", "tiny-new", "tiny"):
        program = program.replace(f'/tmp/{name}"', f'{tmp_path / name}"')
    assert "/tmp/tiny" not in program.replace(str(tmp_path), "")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def make_checkpoints(tmp_path: Path, page: Path = README) -> None:
    commands = re.findall(r"python (benchmarks/checkpoints\.py .*)", page.read_text(encoding="utf-8"))
    assert len(commands) == 2
    for command in commands:
        arguments = command.replace("/tmp/", f"{tmp_path}/").split()
        subprocess.run([sys.executable, *arguments], check=True, cwd=README.parent)


def test_the_first_example_shows_two_versions_of_weights(tmp_path):
    make_checkpoints(tmp_path)
    lines = example(README, 0, tmp_path).splitlines()
    spans = [line for line in lines if line.startswith("tokens ")]
    assert re.fullmatch(r"tokens 0 to \d+: weights 'default'", spans[0])
    assert re.fullmatch(r"tokens \d+ to 500: weights '1'", spans[1])
    assert len(spans) == 2
    assert any(line.startswith("freed ") for line in lines)


def test_the_example_of_a_trainer_runs(tmp_path):
    make_checkpoints(tmp_path)
    example(README, 2, tmp_path)


def test_the_examples_of_text_clients_show_text(tmp_path):
    make_checkpoints(tmp_path)
    assert re.fullmatch(TEXT + r" (None|\d+|'\\n') \d+\n", example(README, 1, tmp_path))
    whole, *pieces = example(FIRST_STEPS, 1, tmp_path).splitlines()
    assert re.fullmatch(TEXT + r" (None|\d+|'(\\n|\.)') (stop|length)", whole)
    assert pieces


def test_the_first_steps_show_samples_and_spans(tmp_path):
    make_checkpoints(tmp_path, FIRST_STEPS)
    samples = re.findall(r"^(\d) \[[\d, ]+\] length$", example(FIRST_STEPS, 0, tmp_path), re.MULTILINE)
    assert samples == ["0", "1", "2", "3"] * 2
    spans = [line for line in example(FIRST_STEPS, 2, tmp_path).splitlines() if line.startswith("tokens ")]
    assert re.fullmatch(r"tokens 0 to \d+: weights 'default', epoch 0", spans[0])
    assert re.fullmatch(r"tokens \d+ to 500: weights 'new', epoch 1", spans[1])


def test_several_engines_get_the_same_update(tmp_path):
    make_checkpoints(tmp_path)
    assert example(SEVERAL_ENGINES, 0, tmp_path).splitlines()[-6:] == ["['1', '1']"] * 6


def test_the_other_roads_and_a_clone_bring_the_same_weights(tmp_path):
    make_checkpoints(tmp_path)
    roads = block_of(SEVERAL_ENGINES, 1).replace('"10.0.0.1"', '"127.0.0.1"')
    parts = f"ROADS, CLONE = {roads!r}, {block_of(SEVERAL_ENGINES, 2)!r}\n{PARTS}"
    assert run(parts, tmp_path)[0].splitlines()[-1] == "['3', '3', '3']"


def test_a_fleet_is_updated_as_one(tmp_path):
    make_checkpoints(tmp_path)
    lines = example(FLEET, 0, tmp_path).splitlines()
    assert lines[-5:-1] == ["['default', 'default']"] * 4
    assert re.fullmatch(r"1 1 \['ipc://.*', 'ipc://.*'\] {}", lines[-1])


def test_the_tutorial_of_images_finds_log_probabilities(tmp_path):
    pytest.importorskip("diffusers")
    make_checkpoints(tmp_path, IMAGES)
    lines = example(IMAGES, 0, tmp_path).splitlines()
    assert [line[:3] for line in lines[:8]] == ["0 [", "1 [", "2 [", "3 ["] * 2
    assert lines[8:10] == ["image (32, 32, 3)", "latents (6, 4, 8, 8)"]
    assert re.fullmatch(r"[1-9]\d?%? of the values differ; weights 'new'", lines[10])
    gap, epoch = example(IMAGES, 1, tmp_path).splitlines()
    assert float(gap.rpartition(" ")[2]) < 1e-5
    assert epoch == "weights epoch 1"
    assert "(6, 4, 8, 8) (32, 32, 3)" in example(ABOUT_IMAGES, 0, tmp_path)
