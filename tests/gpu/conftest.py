"""Fixtures for every test on a device."""

import inspect

import pytest
import torch


@pytest.fixture(autouse=True)
def graphs_check_that_their_inputs_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch (from 2.13 on) refuses to replay a graph whose inputs somebody has given up."""
    begin = torch.cuda.CUDAGraph.capture_begin
    if not torch.cuda.is_available() or "check_input_liveness" not in inspect.signature(begin).parameters:
        return

    def checked(self: torch.cuda.CUDAGraph, **options: object) -> None:
        begin(self, **options, check_input_liveness=True)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", checked)
