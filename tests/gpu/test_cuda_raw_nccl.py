"""NCCL's communicator as vLLM's trainers make it: its functions as they are declared, on one device."""

import ctypes
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from caesura.transfer.raw_nccl import ID_BYTES, RawNccl

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def nccl():
    made = (ctypes.c_byte * ID_BYTES)()
    assert ctypes.CDLL("libnccl.so.2").ncclGetUniqueId(made) == 0
    nccl = RawNccl(bytes(made), 0, 1, DEVICE)
    yield nccl
    nccl.abort()


def test_a_broadcast_to_itself_keeps_the_bytes(nccl):
    sent = torch.arange(100, dtype=torch.uint8, device=DEVICE)
    work = nccl.broadcast([sent], SimpleNamespace(timeout=timedelta(seconds=10)))
    work.wait()
    assert work.is_completed()
    assert sent.tolist() == list(range(100))


def test_an_aborted_communicator_raises(nccl):
    nccl.abort()
    nccl.abort()
    with pytest.raises(RuntimeError):
        nccl.broadcast([torch.zeros(1, dtype=torch.uint8, device=DEVICE)], SimpleNamespace(timeout=None))
