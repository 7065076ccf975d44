"""The README's Python examples, as they stand there, but for where the checkpoints lie."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[3] / "README.md"


def example(number: int, tmp_path: Path) -> str:
    """The output of the README's Python block of this number."""
    text = README.read_text(encoding="utf-8")
    block = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[number]
    for name in ("tiny-new", "tiny"):
        block = block.replace(f'/tmp/{name}"', f'{tmp_path / name}"')
    assert "/tmp/tiny" not in block.replace(str(tmp_path), "")
    done = subprocess.run(
        [sys.executable, "-c", block], capture_output=True, text=True, timeout=170, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def make_checkpoints(tmp_path: Path) -> None:
    """By the README's own commands."""
    maker = README.parent / "benchmarks" / "checkpoints.py"
    for name, *seed in (("tiny",), ("tiny-new", "--seed", "1")):
        subprocess.run([sys.executable, str(maker), "tiny", str(tmp_path / name), *seed], check=True)


def test_the_first_example_shows_a_request_under_two_versions_of_the_weights(tmp_path):
    make_checkpoints(tmp_path)
    lines = example(0, tmp_path).splitlines()
    spans = [line for line in lines if line.startswith("tokens ")]
    assert re.fullmatch(r"tokens 0 to \d+: weights 'default'", spans[0])
    assert re.fullmatch(r"tokens \d+ to 500: weights '1'", spans[1])
    assert len(spans) == 2
    assert any(line.startswith("freed ") for line in lines)


def test_the_example_of_a_trainer_runs(tmp_path):
    make_checkpoints(tmp_path)
    example(1, tmp_path)
