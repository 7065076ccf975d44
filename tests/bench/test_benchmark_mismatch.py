"""The mismatch of log-probabilities over a short training run."""

import json
import subprocess
import sys

import mismatch


def test_each_precision_has_its_gap(tmp_path):
    path = tmp_path / "mismatch.json"
    arguments = ["--updates", "2", "--every", "1", "--json", str(path)]
    subprocess.run([sys.executable, mismatch.__file__, *arguments], check=True)
    results = json.loads(path.read_text())["results"]
    exact = {row["engine"]: row["mean"] for row in results if row["reference"] == "float32"}
    assert exact["float32"] < 1e-5 < exact["float16"] < exact["bfloat16"] < exact["FP8 weights"] < 0.1
    assert exact["int8 weights"] < exact["FP8 weights"]
    assert exact["bfloat16"] < 2 * exact["transformers, bfloat16"]
