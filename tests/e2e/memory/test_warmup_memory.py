"""The peak of a warm-up at 512 rows and a vocabulary of 152k: real models, in a process of their own."""

import pytest
from checkpoints import write_checkpoint
from harness.process_memory import MB
from support.warmup_peaks import HEAD_ROWS, ROWS, WIDE, measure_peaks

pytestmark = pytest.mark.slow  # its engines take seconds to start

LOGITS = ROWS * WIDE.vocab_size * 4
BOUNDED = HEAD_ROWS * WIDE.vocab_size * 4
SLACK = 24 * MB
"""Activations, and what the sampler's filter takes for one row."""
ROOM = 128 * MB


@pytest.mark.long
def test_a_warm_up_takes_no_memory_by_rows_times_vocabulary(tmp_path, capfd):
    model = write_checkpoint(tmp_path, WIDE, dtype="float32")
    runs = [("dummy", None), ("autotune", None), ("logits", None)]
    dummy, tuned, with_logits = measure_peaks(model, runs)
    assert dummy.fits
    assert with_logits.fits
    assert with_logits.peak > LOGITS > 290 * MB
    assert dummy.peak < SLACK
    assert with_logits.peak - dummy.peak > LOGITS - SLACK
    assert BOUNDED < tuned.peak < BOUNDED + SLACK, "head and sampler ran, at their own number of rows"

    # The same with little room: only the mode fits.
    limited = measure_peaks(model, [("logits", ROOM), ("dummy", ROOM), ("autotune", ROOM)])
    assert [run.fits for run in limited] == [False, True, True]
    assert "starts cold" not in capfd.readouterr().err
    (short,) = measure_peaks(model, [("autotune", BOUNDED // 2)])
    assert short.peak < BOUNDED
    assert "starts cold" in capfd.readouterr().err, "a warning, and the engine goes on"
