"""A step's inputs on their way to the device and its results on their way back, through pinned host memory.

Invariants:
- All inputs of a step lie in one block and travel in one copy. Both blocks are allocated once, at the size of
  the largest step, and never move.
- The host writes its block only after the copy of the step before has left it, which an event tells.
- The device block is written on the forward stream, hence after every reader of the step before.
- Arrays by token, row and sampled token come first, so that captured graphs find them at equal addresses.
- Page tables come last, that of layers with a window behind, and stay on the host if no device code reads
  them.
- A block of results belongs to one step until they have been fetched.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..memory.device_module import StreamModule
from .forward import (
    NO_ADAPTER,
    Column,
    ForwardBatch,
    FurtherLogprobs,
    HostOutput,
    SamplingBatch,
    StepLimits,
    columns_of,
    moved,
)
from .sampler import SamplerOutput

_ALIGNMENT = 64


_STEP, _SAMPLING = columns_of(ForwardBatch), columns_of(SamplingBatch)
_COLUMNS = {**_STEP, **_SAMPLING}
_NUMPY = {each.dtype: np.dtype(str(each.dtype).removeprefix("torch.")) for each in _COLUMNS.values()}
_OPTIONS = [each.name for each in fields(SamplingBatch) if each.name not in (*_SAMPLING, "special")]


class InputStaging:
    def __init__(self, limits: StepLimits, *, device: torch.device, device_module: StreamModule) -> None:
        counts = {"token": limits.tokens, "row": limits.rows, "sample": limits.rows}
        self._tables = 1 + limits.windows
        capacity = self._starts(counts)[-1] + self._tables * limits.rows * limits.pages * 4
        self._spare_slot = limits.spare_slot
        pinned = device.type != "cpu"
        self.host_block = torch.empty(capacity, dtype=torch.uint8, pin_memory=pinned)
        self._bytes: np.ndarray = self.host_block.numpy()
        self.device_block = torch.zeros(capacity, dtype=torch.uint8, device=device)
        self._taken = device_module.Event()

    @contextmanager
    def staged(
        self, batch: ForwardBatch, rows: int | None = None, *, table: bool = True
    ) -> Iterator[ForwardBatch]:
        """Yield ``batch``, which is on the host, on the device; the forward stream is the current one.

        Plan within the ``with`` block: what a plan copies from the host has been read when the next begins.
        Decode rows up to ``rows`` are added, of one token at position 0 on the scratch page, for slot 0;
        their greedy sampling inputs, for a slot without a request, are behind those of the batch that is
        yielded. Without ``table`` what is yielded has no page table on the device.
        """
        self._taken.synchronize()
        added = 0 if rows is None else rows - batch.num_rows
        counts = {
            "token": batch.input_ids.shape[0] + added,
            "row": batch.num_rows + added,
            "sample": batch.sample_tokens.shape[0] + added,
        }
        starts = self._starts(counts)
        width = batch.page_table.shape[1]
        end = starts[-1] + self._tables * counts["row"] * width * 4
        assert end <= len(self._bytes), f"{counts} and {width} pages a row are more than was announced"
        columns: dict[str, Any] = {}
        for (name, column), start in zip(_COLUMNS.items(), starts[:-1], strict=True):
            owner = batch if name in _STEP else batch.sampling
            columns[name] = self._write(name, column, getattr(owner, name), start, counts[column.per])
        pages = self._bytes[starts[-1] : end].view(np.int32).reshape(self._tables, -1, width)
        for number, given in enumerate((batch.page_table, batch.window_table)[: self._tables]):
            pages[number, : batch.num_rows] = 0 if given is None else given.numpy()
        pages[:, batch.num_rows :] = 0
        copied = end if table else starts[-1]
        shape = self._tables, counts["row"], width if table else 0
        tables = self.device_block[starts[-1] : copied].view(torch.int32).view(shape)
        if self._tables == 1:
            columns["window_slots"] = None
        if batch.adapters is None and rows is None:
            columns["adapters"] = None
        try:
            self.device_block[:copied].copy_(self.host_block[:copied], non_blocking=True)
            yield ForwardBatch(
                num_decode=batch.num_decode + added,
                page_table=tables[0],
                page_table_host=pages[0],
                window_table=None if self._tables == 1 else tables[1],
                window_table_host=None if self._tables == 1 else pages[1],
                q_lens_host=[*batch.q_lens_host, *[1] * added],
                kv_lens_host=[*batch.kv_lens_host, *[1] * added],
                sampling=self._sampling(batch.sampling, columns),
                inputs=None if batch.inputs is None else moved(batch.inputs, self._to_device),
                hidden=None if batch.hidden is None else moved(batch.hidden, self._to_device),
                states=None if batch.states is None else batch.states.to(self.device_block.device),
                **{name: columns[name] for name in _STEP},
            )
        finally:
            self._taken.record()

    def _sampling(self, given: SamplingBatch, columns: dict[str, Tensor]) -> SamplingBatch:
        # Special rows are rare, and of any size: they travel on their own.
        special = None if given.special is None else moved(given.special, self._to_device)
        found: dict[str, Any] = {name: getattr(given, name) for name in _OPTIONS}
        for name in _SAMPLING:
            found[name] = None if getattr(given, name) is None else columns[name]
        return SamplingBatch(**found, special=special)

    def _to_device(self, values: Tensor) -> Tensor:
        return values.to(self.device_block.device, non_blocking=True)

    def _starts(self, counts: dict[str, int]) -> list[int]:
        """Return the offset of each field in bytes, then that of the page table."""
        starts = [0]
        for column in _COLUMNS.values():
            nbytes = counts[column.per] * column.dtype.itemsize
            starts.append(starts[-1] + -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        return starts

    def _write(self, name: str, column: Column, values: Tensor | None, start: int, count: int) -> Tensor:
        """Write to the host's block, padded to ``count``; return the device's view, samples unpadded."""
        stop = start + count * column.dtype.itemsize
        block = self._bytes[start:stop].view(_NUMPY[column.dtype])
        found = self.device_block[start:stop].view(column.dtype)
        if values is None:
            block[:] = NO_ADAPTER if name == "adapters" else 0
            return found
        assert values.dtype == column.dtype, f"{name} is {values.dtype}, not {column.dtype}"
        array = values.numpy()
        padding = self._spare_slot if name == "sample_slots" else column.padding
        block[: len(array)], block[len(array) :] = array, padding
        return found[: len(array)] if column.per == "sample" else found


class _OutputBlock:
    def __init__(self, rows: int, pinned: bool, device_module: StreamModule) -> None:
        self.token_ids = torch.empty(rows, dtype=torch.int64, pin_memory=pinned)
        self.logprobs, self.raw_logprobs, self.sampled_logprobs = (
            torch.empty(rows, pin_memory=pinned) for _ in range(3)
        )
        self.arrived = device_module.Event()


class OutputStaging:
    def __init__(self, limits: StepLimits, *, device: torch.device, device_module: StreamModule) -> None:
        self._rows = limits.rows
        self._pinned = device.type != "cpu"
        self._module = device_module
        self._free: list[_OutputBlock] = []

    def send(self, sampled: SamplerOutput) -> "PendingOutput":
        block = self._free.pop() if self._free else _OutputBlock(self._rows, self._pinned, self._module)
        rows = sampled.token_ids.shape[0]
        for name in ("token_ids", "logprobs", "raw_logprobs", "sampled_logprobs"):
            values = getattr(sampled, name)
            if values is not None:
                getattr(block, name)[:rows].copy_(values, non_blocking=True)
        further, inputs = (
            None if each is None else moved(each, self._to_host) for each in (sampled.further, sampled.inputs)
        )
        hidden = None if sampled.hidden is None else self._to_host(sampled.hidden)
        block.arrived.record()
        return PendingOutput(block, sampled, self._free, further, inputs, hidden)

    def _to_host(self, values: Tensor) -> Tensor:
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=self._pinned)
        return host.copy_(values, non_blocking=True)


class PendingOutput:
    """Results on their way; one that is never fetched keeps its block from everybody else."""

    def __init__(
        self,
        block: _OutputBlock,
        sampled: SamplerOutput,
        free: list[_OutputBlock],
        further: FurtherLogprobs | None,
        inputs: FurtherLogprobs | None,
        hidden: Tensor | None,
    ) -> None:
        self._block = block
        self._further, self._inputs, self._hidden = further, inputs, hidden
        self._rows = sampled.token_ids.shape[0]
        self._raw = sampled.raw_logprobs is not None
        self._sampled = sampled.sampled_logprobs is not None
        self._free: list[_OutputBlock] | None = free

    def fetch(self) -> HostOutput:
        """Wait for this step, copy its results out of the block and give the block back; once."""
        assert self._free is not None, "fetched already"
        block, rows = self._block, self._rows
        block.arrived.synchronize()
        output = HostOutput(
            token_ids=block.token_ids[:rows].numpy().astype(np.int32),
            logprobs=block.logprobs[:rows].numpy().copy(),
            raw_logprobs=block.raw_logprobs[:rows].numpy().copy() if self._raw else None,
            sampled_logprobs=block.sampled_logprobs[:rows].numpy().copy() if self._sampled else None,
            further=self._further,
            inputs=self._inputs,
            hidden=self._hidden,
        )
        self._free.append(block)
        self._free = None
        return output
