"""Coverage-guided fuzzing of one target, with atheris (``pip install "caesura[fuzz]"``).

    python tests/fuzz/run.py codec -max_total_time=300

Options after the target's name are libFuzzer's. What is found new lies in a temporary folder that is named at
the start; an input that breaks the contract is written beside it as ``crash-…`` and belongs, small, into
``tests/fuzz/corpus/``.
"""

import importlib
import sys
import tempfile
from pathlib import Path

import atheris

HERE = Path(__file__).parent


def main() -> None:
    name = sys.argv[1]
    with atheris.instrument_imports(include=["caesura"], enable_loader_override=False):
        module = importlib.import_module(f"fuzz_{name}")
    found = Path(tempfile.mkdtemp(prefix=f"caesura-fuzz-{name}-"))
    words = found.parent / f"{found.name}.dict"
    escaped = ("".join(f"\\x{byte:02x}" for byte in word.encode("latin-1")) for word in module.WORDS)
    words.write_text("".join(f'"{word}"\n' for word in escaped), encoding="ascii")
    print(f"new inputs: {found}", file=sys.stderr)
    seeds = HERE / "corpus" / name
    options = [f"-dict={words}", f"-artifact_prefix={found.parent}/{found.name}-", *sys.argv[2:]]
    mutator = {"custom_mutator": module.mutate} if hasattr(module, "mutate") else {}
    atheris.Setup([sys.argv[0], str(found), str(seeds), *options], module.target, **mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
