"""docs/reference/wire.md says what the structs say, and its client in plain msgpack works."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from generate_wire import PARTS
from generated_parts import generate

from caesura.client import SamplingParams, launch_scheduler

DOCS = Path(__file__).parents[3] / "docs" / "reference"


@pytest.fixture(scope="module")
def document() -> str:
    return (DOCS / "wire.md").read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_structs(document):
    assert generate(document, PARTS) == document, "run: python docs/generate_wire.py"


def test_every_row_of_the_generated_tables_says_something(document):
    generated = [
        document.partition(f"<!-- generated: {name} -->")[2].partition(f"<!-- end of {name} -->")[0]
        for name in PARTS
    ]
    # The first row of a table names its columns, of which the overview of the requests has one without a
    # name.
    rows = re.findall(r"(?<=\|\n)\| .*\|$", "\n".join(generated), re.MULTILINE)
    assert len(rows) > 300
    assert [row for row in rows if any(not cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1])] == []


def test_a_changed_table_is_noticed_and_restored(document):
    changed = document.replace("| `input_ids` | array of int", "| `input_ids` | array of str")
    assert changed != document
    assert generate(changed, PARTS) == document


def test_a_document_without_marks_is_refused(document):
    with pytest.raises(ValueError, match="'limits'"):
        generate(document.replace("<!-- end of limits -->", ""), PARTS)


def test_the_client_in_plain_msgpack_gets_what_ours_gets(document, tiny_model, tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    assert "caesura" not in example
    script = tmp_path / "client.py"
    script.write_text(example)
    with launch_scheduler(tiny_model, num_threads=1, kv_pool_tokens=1024) as client:
        expected = client.generate(
            input_ids=[1, 2, 3], sampling_params=SamplingParams(max_new_tokens=8, temperature=0.0)
        )
        endpoint = client.endpoint
        done = subprocess.run([sys.executable, script, endpoint], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == f"{expected.output_ids} {expected.finish_reason.type}\nrunning\n"
