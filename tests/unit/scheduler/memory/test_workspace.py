"""Scratch memory: the same for the same purpose, grown and never shrunk, aligned, and usable in every mode."""

import gc
import weakref

import pytest
import torch
from support.workspaces import memory_of

from caesura.scheduler.memory.workspace import ALIGNMENT, Workspace


def test_workspace_grows_and_never_shrinks():
    workspace, sizes = Workspace(), []
    for rows in (3, 7, 2, 7, 0):
        taken = workspace.take("x", (rows, 5), torch.float32)
        assert taken.shape == (rows, 5)
        assert taken.is_contiguous()
        sizes.append(memory_of(workspace, "x").numel())
    assert sizes == [15, 35, 35, 35, 35]


def test_a_purpose_is_one_memory_and_two_are_two():
    workspace = Workspace()
    workspace.take("x", (4,), torch.int64).fill_(7)
    workspace.take("y", (4,), torch.int64).fill_(8)
    assert workspace.take("x", (2, 2), torch.int64).tolist() == [[7, 7], [7, 7]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
def test_tail_begins_at_a_line(dtype: torch.dtype):
    workspace = Workspace()
    for count in (1, 63, 4097, 1 << 20):
        assert workspace.take("x", (count,), dtype).data_ptr() % ALIGNMENT == 0


def test_smaller_workspaces_go_before_larger_ones_come(monkeypatch: pytest.MonkeyPatch):
    workspace = Workspace()
    gone: list[bool] = []
    small = weakref.ref(workspace.take("x", (8,), torch.float32))
    empty = torch.empty

    def watched(*args: object, **options: object) -> torch.Tensor:
        gc.collect()
        gone.append(small() is None)
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", watched)
    workspace.take("x", (9,), torch.float32)
    assert gone == [True]


def test_update_may_write_buffers_that_a_step_has_taken():
    workspace = Workspace()
    with torch.inference_mode():
        workspace.take("x", (4,), torch.float32)
    workspace.take("x", (4,), torch.float32).fill_(1)
    workspace.take("x", (3,), torch.float32).fill_(2)
