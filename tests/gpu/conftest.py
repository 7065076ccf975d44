"""Marks and fixtures of every test on a device."""

import inspect
from pathlib import Path

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def graphs_check_that_their_inputs_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch (from 2.13 on) refuses to replay a graph whose inputs somebody has given up."""
    begin = torch.cuda.CUDAGraph.capture_begin
    if not torch.cuda.is_available() or "check_input_liveness" not in inspect.signature(begin).parameters:
        return

    def checked(self: torch.cuda.CUDAGraph, **options: object) -> None:
        begin(self, **options, check_input_liveness=True)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", checked)
