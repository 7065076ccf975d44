"""One step: the batch that goes to the device, what comes back, and the interfaces of what computes it.

Invariants:
- Rows are requests, and a drafted token of one is a decode row of its own; decode rows (one query token each)
  come first, so ``[0, num_decode)`` of every per-row array and of every per-token array belong to them.
- Page 0 of the KV pool is scratch: page tables are padded with it, it is never allocated.
- A masked KV position never contributes to an output, whatever it holds (stale KV may be NaN).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..kernels.attention_form import PLAIN, AttentionForm, HeadNorms
from ..runtime.engine_config import PAGE_SIZE

if TYPE_CHECKING:
    from ..cache.pool import MLAPool
    from ..kernels.attention import PagedStep


class Column(NamedTuple):
    """An array of a step that travels to the device with it."""

    per: Literal["token", "row", "sample"]
    dtype: torch.dtype
    padding: int
    """Value in added rows."""


def column(per: Literal["token", "row", "sample"], dtype: torch.dtype, padding: int = 0) -> dict[str, Column]:
    return {"column": Column(per, dtype, padding)}


def columns_of(kind: type[Any]) -> dict[str, Column]:
    return {each.name: each.metadata["column"] for each in fields(kind) if each.metadata}


@dataclass(slots=True, kw_only=True)
class SpecialRows:
    """The E of a step's S rows whose logits are edited, or that want further log-probabilities.

    The first P have penalties, and a counter each of how often a token stands in the sample: a row of the
    runner's table. The runner counts what it samples; an outdated counter starts anew.
    """

    rows: Tensor
    """int64 [E]: indices into the S rows; each once."""
    repetition: Tensor
    """float32 [P]; 1 where unused."""
    frequency: Tensor
    """float32 [P]"""
    presence: Tensor
    """float32 [P]"""
    counters: Tensor
    """int64 [P]"""
    restarted: Tensor
    """int64: counters that begin from zero, with the next two."""
    prompt_at: Tensor
    """int64: ``counter * vocabulary + token`` of every token of their prompts."""
    output_at: Tensor
    """int64: the same of every token of their outputs."""
    bias_ids: Tensor
    """int64 [E, B], padded with token 0."""
    bias: Tensor
    """float32 [E, B]: added to these tokens' logits; 0 where padded, -inf where forbidden."""
    allowed_ids: Tensor | None = None
    """int64 [E, A], padded with the row's first: `restricted` rows have no other tokens. None: no row."""
    restricted: Tensor | None = None
    """bool [E]; None as `allowed_ids`."""
    word_ends: Tensor | None = None
    """int64 [E, W, 2], padded with -1: after the first token the second is not sampled. None: no row."""
    grammar: Tensor | None = None
    """int32 [E, vocabulary / 32]: a bit for each token that may be sampled. None: no row has a grammar."""
    constrained: Tensor | None = None
    """bool [E]: rows with a grammar; None as `grammar`."""
    wants: Tensor
    """int64 [N], ascending: those of the E rows that want :class:`FurtherLogprobs`."""
    wants_host: np.ndarray
    """int64 [N]"""
    top: int
    """K: number of likeliest tokens wanted."""
    masked: Tensor
    """bool [N]: rows that want to know what the filters kept."""
    num_masked: int
    token_ids: Tensor
    """int64 [N, M]: `token_ids_logprob`, padded with token 0."""
    num_counters: int
    """Number of counters that the table must have."""
    edited: np.ndarray
    """bool [E], on the host: rows with penalties, biases or allowed tokens."""
    in_one_call: bool
    """True if rows have no other edits, and no edited row wants :class:`FurtherLogprobs`."""
    repeats: bool
    """True if the next step of the same rows has exactly these edits."""


@dataclass(slots=True, kw_only=True)
class InputTokens:
    """The I of a step's T query tokens whose successors in the prompt are to be scored."""

    tokens: Tensor
    """int64 [I]: indices of the query tokens."""
    targets: Tensor
    """int64 [I]: the prompt's next tokens."""
    top: int
    """K: number of likeliest tokens wanted."""
    token_ids: Tensor
    """int64 [I, M]: `token_ids_logprob`, padded with token 0."""


@dataclass(slots=True, kw_only=True)
class FurtherLogprobs:
    """Log-probabilities of N positions beyond those of the sampled tokens; float32, and int32 for ids."""

    logprobs: Tensor
    """[N]: those of the prompt's tokens; [0] for sampled positions."""
    top_ids: Tensor
    """[N, F]; by torch those of equal log-probabilities in any order, compiled by id."""
    top: Tensor
    """[N, F], descending; F >= K, or the whole vocabulary. The first K do not depend on F."""
    token_ids_logprobs: Tensor
    """[N, M]"""
    kept: Tensor | None = None
    """bool [N, V]: the tokens that the filters kept, or None if nobody asked."""


@dataclass(slots=True, kw_only=True)
class HiddenTokens:
    """The H of a step's T query tokens whose hidden states are wanted, always those after the final norm."""

    tokens: Tensor
    """int64 [H]: indices of the query tokens."""
    inner: list[int]
    """Layers, ascending, whose inputs are wanted, too; the model then runs layer by layer."""
    taken: dict[int, Tensor] = field(default_factory=dict)
    """[H, hidden] by layer."""


_Fields = TypeVar("_Fields", SpecialRows, InputTokens, HiddenTokens, FurtherLogprobs, "SamplingBatch")


def moved(owner: _Fields, move: Callable[[Tensor], Tensor]) -> _Fields:
    """Return a copy of ``owner`` with each of its own tensors passed through ``move``."""
    found: dict[str, Any] = {field.name: getattr(owner, field.name) for field in fields(owner)}
    tensors = {name: move(value) for name, value in found.items() if isinstance(value, Tensor)}
    return replace(owner, **{**found, **tensors})


@dataclass(slots=True, kw_only=True)
class SamplingBatch:
    """Sampling inputs of a step's S sampled tokens, on its device; the booleans are known on the host."""

    temperature: Tensor = field(metadata=column("sample", torch.float32, 1))
    """float32 [S]; 1.0 for greedy rows."""
    greedy: Tensor = field(metadata=column("sample", torch.bool, 1))
    """bool [S]"""
    top_k: Tensor = field(metadata=column("sample", torch.int64, 1))
    """int64 [S]; vocabulary size where unused."""
    top_p: Tensor = field(metadata=column("sample", torch.float32, 1))
    """float32 [S]; 1.0 where unused."""
    uniforms: Tensor = field(metadata=column("sample", torch.float64))
    """float64 [S] in [0, 1): the noise, a pure function of (seed, sample index, absolute position)."""
    any_sampled: bool
    any_filtered: bool
    """True if some sampled row uses top-k, top-p or min-p."""
    want_raw: bool
    want_sampled: bool
    min_p: Tensor | None = field(default=None, metadata=column("sample", torch.float32))
    """float32 [S], or None if 0 for all."""
    given: Tensor | None = field(default=None, metadata=column("sample", torch.int64, -1))
    """int64 [S]: the token of a replayed row, which is not drawn; -1 for the others. None: all are drawn."""
    largest_top_k: int | None = None
    """Largest top-k of the filtered rows, or None if it may be the whole vocabulary."""
    special: SpecialRows | None = None
    want_last_kept: bool = False

    @classmethod
    def of_none(cls, device: torch.device | str = "cpu") -> "SamplingBatch":
        """Return the inputs of a step that samples nothing."""
        none: dict[str, Any] = {
            name: torch.empty(0, dtype=each.dtype, device=device) for name, each in columns_of(cls).items()
        }
        return cls(**none, any_sampled=False, any_filtered=False, want_raw=False, want_sampled=False)

    def select(self, index: Tensor) -> "SamplingBatch":
        """Return the rows ``index`` (int64), none of them special any more."""
        return replace(moved(self, lambda column: column[index]), special=None, want_last_kept=False)


class StateSegment(NamedTuple):
    """Tokens [start, end) of the step's T: of one prefilling row, between two of its states; on the host."""

    start: int
    end: int
    source: int | None
    """Row of states that they begin from, or None if nothing comes before."""
    target: int
    """Row of states that they end in."""
    kept: int | None
    """Another row that is to have the state after them, if any."""


@dataclass(slots=True, kw_only=True)
class StateStep:
    """The rows of states of a step, in layers that keep one per sequence (``cache/layer_ledgers.py``)."""

    rows: Tensor
    """int64 [R]: row of states that each of the step's rows ends in."""
    sources: Tensor | None
    """int64 [decode rows]: rows that these begin from; None if those that they end in."""
    segments: Sequence[StateSegment]
    """Segments of the prefilling rows, in an order in which one may follow from another."""
    kept: tuple[Tensor, Tensor] | None
    """int64 [K] each: decode rows whose next states are kept, and rows of states that get them; or None."""

    @property
    def in_place(self) -> bool:
        """True if all rows decode, and each does nothing but overwrite its state."""
        return self.sources is None and self.kept is None and not self.segments

    def to(self, device: torch.device) -> "StateStep":
        kept = self.kept
        if kept is not None:
            kept = kept[0].to(device, non_blocking=True), kept[1].to(device, non_blocking=True)
        sources = None if self.sources is None else self.sources.to(device, non_blocking=True)
        rows = self.rows.to(device, non_blocking=True)
        return StateStep(rows=rows, sources=sources, segments=self.segments, kept=kept)


NO_ADAPTER = -1


@dataclass(slots=True, kw_only=True)
class ForwardBatch:
    """One step's input: R rows, T query tokens, S sampled tokens. ``*_host`` copies spare backends a sync.

    The same object again is the next step of the same decoding rows: its tensors have other contents.
    """

    num_decode: int
    """Rows [0, num_decode) decode; the rest prefill."""
    input_ids: Tensor = field(metadata=column("token", torch.int64))
    """int64 [T]. The runner fills in decode rows, from the token that the row's slot sampled last."""
    positions: Tensor = field(metadata=column("token", torch.int64))
    """int64 [T]: absolute position of each query token."""
    kv_slots: Tensor = field(metadata=column("token", torch.int64))
    """int64 [T]: ``page * page_size + offset`` where the token's K and V are stored."""
    page_table: Tensor
    """int32 [R, P], padded with page 0; P covers the longest row of this batch."""
    kv_lens: Tensor = field(metadata=column("row", torch.int32, 1))
    """int32 [R]: KV length of each row after this step."""
    q_lens_host: Sequence[int]
    """[R]: query tokens per row (1 for decode rows)."""
    kv_lens_host: Sequence[int]
    """[R]"""
    page_table_host: np.ndarray | None = None
    """``page_table`` on the host, valid while the step is planned."""
    slots: Tensor = field(metadata=column("row", torch.int64))
    """int64 [R]: request slot of each row."""
    known: Tensor | None = None
    """int64 [num_decode], on the host: inputs of decode rows, in the memory of ``input_ids``.

    None: they are the slots' last tokens.
    """
    sample_tokens: Tensor = field(metadata=column("sample", torch.int64))
    """int64 [S]: index into [0, T) of each token whose successor is sampled; decode rows first."""
    sample_slots: Tensor = field(metadata=column("sample", torch.int64))
    """int64 [S]: request slot that receives each sampled token."""
    sampling: SamplingBatch
    inputs: InputTokens | None = None
    hidden: HiddenTokens | None = None
    window_slots: Tensor | None = field(default=None, metadata=column("token", torch.int64))
    """``kv_slots`` in layers with a window that give pages back; None if all layers are alike."""
    window_table: Tensor | None = None
    """``page_table`` in the same layers; page 0 where the window has moved on."""
    window_table_host: np.ndarray | None = None
    states: StateStep | None = None
    """None if no layer keeps a state, or the step is nobody's."""
    adapters: Tensor | None = field(default=None, metadata=column("token", torch.int64, NO_ADAPTER))
    """int64 [T]: adapter slot of each query token, or NO_ADAPTER; None if no row has an adapter."""

    @classmethod
    def of_rows(
        cls,
        ids: Sequence[np.ndarray],
        begins: Sequence[int],
        pages: Sequence[np.ndarray],
        sampled: np.ndarray,
        device: torch.device,
        *,
        num_decode: int = 0,
    ) -> "ForwardBatch":
        """Return a step of rows that no request has.

        ``ids``: tokens of each row; ``begins``: the first one's position; ``pages``: at least those of the
        row; ``sampled``: indices of the tokens whose results are taken.
        """
        lengths = [len(row) for row in ids]
        ends = [begin + length for begin, length in zip(begins, lengths, strict=True)]
        positions = [np.arange(*span) for span in zip(begins, ends, strict=True)]
        slots = [
            held[at // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + at % PAGE_SIZE
            for held, at in zip(pages, positions, strict=True)
        ]
        table = np.zeros((len(ids), -(-max(ends) // PAGE_SIZE)), np.int32)
        for row, held, end in zip(table, pages, ends, strict=True):
            used = held[: -(-end // PAGE_SIZE)]
            row[: len(used)] = used

        def to_device(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        return cls(
            num_decode=num_decode,
            input_ids=to_device(np.concatenate(ids).astype(np.int64)),
            positions=to_device(np.concatenate(positions)),
            kv_slots=to_device(np.concatenate(slots)),
            page_table=to_device(table),
            kv_lens=to_device(np.asarray(ends, np.int32)),
            q_lens_host=lengths,
            kv_lens_host=ends,
            page_table_host=table,
            slots=to_device(np.arange(len(ids))),
            sample_tokens=to_device(sampled),
            sample_slots=to_device(sampled),
            sampling=SamplingBatch.of_none(device),
        )

    def slots_in(self, form: AttentionForm) -> Tensor:
        return self.kv_slots if form.window is None or self.window_slots is None else self.window_slots

    @property
    def num_rows(self) -> int:
        return len(self.q_lens_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The largest step that a scheduler asks for."""

    tokens: int
    """T"""
    rows: int
    """R, and S"""
    context_len: int
    """KV length of a row."""
    windows: bool = False
    """True if layers with a window have slots and a page table of their own."""

    @classmethod
    def of(cls, *, max_rows: int, chunk_tokens: int, context_len: int, windows: bool = False) -> "StepLimits":
        """Return limits of ``chunk_tokens`` prompt tokens beside a token of each other row."""
        tokens = min(max_rows + chunk_tokens, max_rows * context_len)
        return cls(tokens=tokens, rows=max_rows, context_len=context_len, windows=windows)

    @property
    def spare_slot(self) -> int:
        return self.rows

    @property
    def pages(self) -> int:
        return -(-self.context_len // PAGE_SIZE)


@dataclass(slots=True, kw_only=True)
class HostOutput:
    """A step's results on the host, [S] each; token -1 marks a row whose logits were not finite."""

    token_ids: np.ndarray
    """int32"""
    logprobs: np.ndarray
    """float32: log-softmax after temperature over the full vocabulary; greedy rows unscaled."""
    raw_logprobs: np.ndarray | None
    """float32: log-softmax of the unedited logits; None when no row asked."""
    sampled_logprobs: np.ndarray | None
    """float32: under the filtered, renormalised distribution; None when no row asked."""
    further: FurtherLogprobs | None = None
    """Results of the special rows that want them."""
    inputs: FurtherLogprobs | None = None
    """Results of ``ForwardBatch.inputs``."""
    hidden: Tensor | None = None
    """[H, layers, hidden] of ``ForwardBatch.hidden``: its inner layers, and the last."""


class ForwardOutput(Protocol):
    """A launched step. On accelerators it is still running until :meth:`fetch` returns."""

    def fetch(self) -> HostOutput:
        """Wait for this step (and no later one) and copy its results to the host."""
        ...


class Runner(Protocol):
    def execute(self, batch: ForwardBatch) -> ForwardOutput: ...

    def set_last_tokens(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Set the tokens [n] that ``slots`` [n] sampled last, after a step whose results are lost."""
        ...

    def synchronize(self) -> None:
        """Return when the forward stream is idle."""
        ...

    def on_stream(self) -> AbstractContextManager[Any]:
        """Order device work inside with the steps: after those launched, before those to come."""
        ...


FusedAttention = Callable[[Tensor, Tensor, Tensor, int, HeadNorms | None, AttentionForm], Tensor]
"""Head norms, rotation, store and attention in one call, of these arguments:

[T, query heads + 2 kv heads, head size], queries, keys and values, of which queries may be overwritten;
cosines and sines [T, 1, rotated size / 2], the rest of a head being not rotated; the layer; norms of queries
and keys, if any; the layer's form. Returns [T, query heads * head size].
"""


class AttentionBackend(ABC):
    """Paged causal attention with grouped query heads."""

    fused: FusedAttention | None = None
    """If None, the caller normalises and rotates, and calls :meth:`forward`."""
    paged: "PagedStep | None" = None
    """The planned step for a kernel that computes whole layers, or None where layers go part by part."""
    reads_page_table = True
    """True if it reads ``ForwardBatch.page_table`` on the device; else the host's copy is enough."""

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> None:
        """Prepare what all layers of this step share (masks, gather indices)."""

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, form: AttentionForm = PLAIN) -> Tensor:
        """Store this step's K and V, then attend over what the layer's form lets each row see.

        q, k, v: [T, heads, head size]; v's size may differ. With latent attention one kv head, whose v is a
        view of the front of k. Return [T, query heads * v's head size].
        """


class LatentAttentionBackend(AttentionBackend):
    """Attention over latents, which a kernel may store by itself before :meth:`attend_latents`."""

    pool: "MLAPool"
    _kv_slots: Tensor

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, form: AttentionForm = PLAIN) -> Tensor:
        """Store this step's latents ``k`` [T, 1, width], then attend with absorbed and rotated ``q``.

        Return [T, heads * value size]: to be projected from latents to values, head by head.
        """
        assert form.kind == PLAIN.kind, "chosen for plain forms only"
        self.pool.store(layer, k.squeeze(1), self._kv_slots)
        return self.attend_latents(q, layer)

    def latent_cells(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's pool of latents [.., latent + rope], and this step's cells in it, int64 [T]."""
        return self.pool.layer(layer), self._kv_slots

    @abstractmethod
    def attend_latents(self, q: Tensor, layer: int) -> Tensor:
        """Attend as :meth:`forward` does, over latents that are in their cells."""


class CapturableBackend(AttentionBackend):
    """Attention whose decode steps a graph can hold."""

    @abstractmethod
    def for_decode(self, rows: int) -> AttentionBackend:
        """Return attention for steps of exactly ``rows`` decode rows, to be captured.

        ``plan`` runs outside of the graph, into fixed buffers; ``forward`` reads nothing else, and never
        waits.
        """
