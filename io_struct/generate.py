"""Generation and scoring: the requests, the per-step stream message and the terminal results.

Token and logprob arrays cross the wire as little-endian bytes (int32, float32): one object per token would
cost more than everything else a step does (docs/explanation/performance.md).
"""

import math
import struct
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from .base import Identifier, Label, Message, Record, Reply, ReplyRecord, Request
from .field_errors import NamedFields

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
MAX_INT32 = 2**31 - 1
"""Largest token count or position in a request."""
MIN_REPETITION_PENALTY = 1e-6
"""Smallest ``repetition_penalty``: logits over it and the least temperature stay finite in float32."""
MAX_SAMPLES = 1024
"""Maximum of ``n``, the number of samples of one request."""
MAX_LOGIT_BIAS = 1024
"""Maximum number of tokens in ``logit_bias``."""
MAX_ALLOWED_TOKEN_IDS = 1024
"""Maximum number of ids in ``allowed_token_ids``."""
MAX_BAD_WORDS, MAX_BAD_WORD = 256, 64
"""Most words of ``bad_words_ids``, and most tokens of one."""
MAX_TOP_LOGPROBS = 128
"""Maximum of ``top_logprobs_num``."""
MAX_SAMPLING_MASK = 4096
"""Most tokens in the sampling mask of a position."""
MAX_TOKEN_IDS_LOGPROB = 1024
"""Maximum number of ids in ``token_ids_logprob``."""
MAX_HIDDEN_BYTES = 32 << 20
"""Most bytes of the hidden states of a sample."""
GREEDY_BELOW = 1e-6
"""Temperatures below this mean greedy decoding, as in SGLang."""
MAX_GRAMMAR = 512 << 10
"""Most characters of ``grammar``."""
MAX_SEQUENCES = 65536
"""Maximum number of sequences in one message."""


class SamplingParams(Record, kw_only=True, frozen=True, metaclass=NamedFields):
    """Sampling parameters. Names and defaults follow SGLang; :meth:`problems` checks the ranges."""

    max_new_tokens: int | None = 128
    """Maximum number of output tokens. None means up to the context length."""
    temperature: float = 1.0
    """Values below 1e-6 mean greedy decoding."""
    top_p: float = 1.0
    """In (0, 1]; 1 disables it."""
    top_k: int = -1
    """At least 1; -1 and 0 disable it, as SGLang and vLLM write it."""
    min_p: float = 0.0
    """In [0, 1]: tokens less likely than ``min_p`` times the most likely token are removed; 0 disables it."""
    frequency_penalty: float = 0.0
    """In [-2, 2]: subtracted from a token's logit once for each occurrence in the output."""
    presence_penalty: float = 0.0
    """In [-2, 2]: subtracted from the logit of each token that occurs in the output."""
    repetition_penalty: float = 1.0
    """In [1e-6, 2]: positive logits of tokens in prompt or output are divided by it, negative multiplied."""
    logit_bias: dict[TokenId, float] | None = None
    """Token id to a value in [-100, 100], or -inf, that is added to its logit. None means no bias."""
    allowed_token_ids: list[TokenId] | None = None
    """At most 1,024 ids: no other token is sampled. None means all."""
    bad_words_ids: list[list[TokenId]] | None = None
    """At most 256 words of 2 to 64 ids: a word's last token is not sampled where the output ends with the
    others. None means no word; a word of one token is a ``logit_bias`` of -inf."""
    min_new_tokens: int = 0
    """End-of-sequence ids and ``stop_token_ids`` are not sampled before this many output tokens."""
    stop_token_ids: list[TokenId] = []
    """Generation ends after any of these tokens; the token is kept in the output."""
    ignore_eos: bool = False
    """True: the model's end-of-sequence ids do not end the generation; ``stop_token_ids`` still do."""
    seed: Seed | None = None
    """Seed of the sampling noise. None means a random seed, which the result contains."""
    grammar: str | None = None
    """Grammar of the output, at most 524,288 characters of llguidance's JSON, Lark, or GBNF. What it does not
    allow is not sampled, and stop tokens only where it may end. None means any output."""
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)] = 1
    """Number of samples of this prompt. Sample ``i`` uses the noise stream ``(seed, i)``."""
    forced_output_ids: list[TokenId] | None = None
    """Output to replay: all else comes back as if it had been sampled. Needs ``n`` = 1; ``max_new_tokens``
    does not count, and stop tokens before the last end nothing. None means that the output is sampled."""

    @staticmethod
    def fields_beside() -> tuple[str, ...]:
        """Return what stands next to sampling parameters in a request (:class:`NamedFields`)."""
        return GenerateReqInput.__struct_fields__

    def problems(self) -> list[tuple[str, object, str]]:
        """Return ``(field, value, requirement)`` for each value out of range; NaN fails every comparison."""
        found: list[tuple[str, object, str]] = []
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            found.append(("max_new_tokens", self.max_new_tokens, "must be at least 1, or null"))
        if not 0.0 <= self.temperature <= 1e4:
            found.append(("temperature", self.temperature, "must be finite and in [0, 10000]"))
        if not 0.0 < self.top_p <= 1.0:
            found.append(("top_p", self.top_p, "must be in (0, 1]"))
        if not -1 <= self.top_k <= MAX_INT32:
            found.append(("top_k", self.top_k, "must be at least 1, or -1 or 0, which keep all"))
        if len(self.stop_token_ids) > 64:
            found.append(("stop_token_ids", len(self.stop_token_ids), "at most 64 ids"))
        if self.forced_output_ids is not None and not self.forced_output_ids:
            found.append(("forced_output_ids", [], "must have at least one id"))
        if self.forced_output_ids is not None and self.n > 1:
            found.append(("n", self.n, "must be 1 with forced_output_ids"))
        return found + self._edit_problems()

    def _edit_problems(self) -> list[tuple[str, object, str]]:
        found: list[tuple[str, object, str]] = []
        if not 0.0 <= self.min_p <= 1.0:
            found.append(("min_p", self.min_p, "must be in [0, 1]"))
        if not MIN_REPETITION_PENALTY <= self.repetition_penalty <= 2.0:
            requirement = f"must be in [{MIN_REPETITION_PENALTY:g}, 2]"
            found.append(("repetition_penalty", self.repetition_penalty, requirement))
        found += [
            (name, value, "must be in [-2, 2]")
            for name, value in (
                ("frequency_penalty", self.frequency_penalty),
                ("presence_penalty", self.presence_penalty),
            )
            if not -2.0 <= value <= 2.0
        ]
        most = MAX_INT32 if self.max_new_tokens is None else self.max_new_tokens
        if not 0 <= self.min_new_tokens <= most:
            requirement = f"must be in [0, {MAX_INT32 if self.max_new_tokens is None else 'max_new_tokens'}]"
            found.append(("min_new_tokens", self.min_new_tokens, requirement))
        bias = self.logit_bias or {}
        if len(bias) > MAX_LOGIT_BIAS:
            found.append(("logit_bias", len(bias), f"at most {MAX_LOGIT_BIAS} tokens"))
        found += [
            (f"logit_bias[{token}]", value, "must be in [-100, 100], or -inf")
            for token, value in bias.items()
            if not (-100.0 <= value <= 100.0 or value == -math.inf)
        ]
        allowed = self.allowed_token_ids
        if allowed is not None and not 1 <= len(allowed) <= MAX_ALLOWED_TOKEN_IDS:
            found.append(("allowed_token_ids", len(allowed), f"must have 1 to {MAX_ALLOWED_TOKEN_IDS} ids"))
        if self.grammar is not None and not 1 <= len(self.grammar) <= MAX_GRAMMAR:
            found.append(("grammar", len(self.grammar), f"must have 1 to {MAX_GRAMMAR} characters"))
        words = self.bad_words_ids or ()
        if len(words) > MAX_BAD_WORDS:
            found.append(("bad_words_ids", len(words), f"at most {MAX_BAD_WORDS} words"))
        found += [
            (f"bad_words_ids[{at}]", len(word), f"must have 2 to {MAX_BAD_WORD} ids")
            for at, word in enumerate(words)
            if not 2 <= len(word) <= MAX_BAD_WORD
        ]
        return found


def removes_tokens(params: SamplingParams) -> bool:
    """Return True if some tokens are never sampled because they are unlikely."""
    return params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0


class GenerateReqInput(Request, kw_only=True):
    """Generate ``sampling_params.n`` samples, each a :class:`GenerateReqOutput`, or all an ``ErrorReply``."""

    rid: Identifier | None = None
    """Request id, for abort and results. None means the message id."""
    input_ids: list[TokenId]
    """The prompt: ids below ``vocab_size``, at least one, with ``max_new_tokens`` at most ``context_len``."""
    sampling_params: SamplingParams = SamplingParams()
    return_logprob: bool = False
    """Return each output token's float32 log-softmax over the vocabulary, after temperature unless greedy."""
    return_raw_logprob: bool = False
    """Return the logprob of each output token under the unmodified logits (temperature 1)."""
    return_sampled_logprob: bool = False
    """Return logprobs under the sampling distribution: renormalised after grammar, top-k, top-p and min-p."""
    logprob_start_len: int = -1
    """With ``return_logprob``: also logprobs of prompt tokens from here on, without temperature and logit
    edits, once for equal prompts. -1, or at least the prompt's length: none."""
    top_logprobs_num: int = 0
    """With ``return_logprob``: at each of these positions, also this many most likely tokens; at most 128."""
    token_ids_logprob: list[TokenId] | None = None
    """With ``return_logprob``: at most 1,024 ids whose logprobs come at each position. None means none."""
    return_sampling_mask: bool = False
    """Return the tokens that grammar, top-k, top-p and min-p kept (:class:`SamplingMask`), for a trainer to
    renormalise. Samples from at most 4,096 tokens: a larger ``top_k``, or none, counts as 4,096."""
    return_routed_experts: bool = False
    """Return each position's experts, prompt included (:class:`RoutedExperts`), if the model has some."""
    routed_experts_start_len: Annotated[int, msgspec.Meta(ge=0)] = 0
    """First position whose experts are returned; at most the prompt's length."""
    return_hidden_states: bool = False
    """Return hidden states of the positions, prompt included (:class:`HiddenStates`); at most 32 MiB."""
    hidden_states_layers: list[int] | None = None
    """Layers whose hidden states are returned, as transformers numbers them: 0 is the embedding, ``i`` what
    layer ``i`` leaves, and the last, -1, follows the final norm. None means the last alone."""
    hidden_states_start_len: Annotated[int, msgspec.Meta(ge=0)] = 0
    """First position whose hidden states are returned; at most the prompt's length."""
    stream: bool = False
    """True: send the new tokens after each step. The terminal result always contains everything."""
    cache_salt: Label = ""
    """Requests share prefix cache entries only with requests of the same salt."""
    prefix_lease: Identifier | None = None
    """Name of a lease on the cached pages of prompt and output, which are evicted after all others, up to
    half of the cache. :class:`EndPrefixLeasesReqInput` ends it. None means no lease."""
    prefix_lease_s: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 300.0
    """Seconds until the lease ends by itself, counted from the end of the last generation that named it."""
    adapter: Identifier | None = None
    """Name of a loaded adapter (:class:`LoadAdapterReqInput`). None means the model itself."""
    min_weights_epoch: int | None = None
    """Refuse with ``epoch_behind`` if the engine's weights epoch is lower. None means no minimum."""
    first_sample: Annotated[int, msgspec.Meta(ge=0, le=MAX_INT32)] = 0
    """Index of the first of the ``n`` samples, in noise and results, to go on for another engine."""
    continued_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Number of last ``input_ids`` that are output of an earlier part of the sample, penalised as such."""
    stream_details: bool = False
    """With ``stream``: deltas have what a part of an output needs to be continued (:class:`DeltaDetails`)."""


FinishType = Literal["stop", "length", "abort", "error"]


class FinishReason(ReplyRecord, kw_only=True, frozen=True):
    """Why a generation ended."""

    type: FinishType
    """``stop``: a stop token was sampled. ``length``: a length limit was reached. ``abort``: aborted (also by
    a pause, an update, a shutdown), or the client left. ``error``: not computed, or the result not sent."""
    matched: int | None = None
    """``stop``: the token id that ended the generation."""
    length: int | None = None
    """``length``: the limit that was reached, in output tokens."""
    message: str | None = None
    """``abort`` and ``error``: what happened, as text."""
    code: str | None = None
    """``error``: an ``ErrorCode``. ``abort``: ``shutting_down`` if the shutdown ended it, else None."""


class WeightVersionSpan(ReplyRecord, kw_only=True, frozen=True):
    """Output tokens ``[start, end)`` were sampled with these weights."""

    version: str
    """Public version label of the weights."""
    epoch: int
    """Weights epoch: the engine's commit counter."""
    start: int
    """Index of the first output token of the span."""
    end: int
    """Index after the last output token of the span."""
    incarnation: str = ""
    """Start of the engine that sampled them (``HelloReqOutput.incarnation``)."""
    stale_kv: bool = False
    """True: some KV was computed with older weights (after an update during an ``in_place`` pause)."""
    adapter: str | None = None
    """Name of the adapter. None means the model itself."""
    adapter_epoch: int = 0
    """Version of the adapter; 0 without one."""
    digest: str = ""
    """Digest of the weights, in hex. Empty means that the engine keeps none (``weights_digest``)."""
    adapter_digest: str = ""
    """Digest of the adapter (:class:`AdapterStatus`); empty without one."""


class RoutedExperts(ReplyRecord, kw_only=True, frozen=True):
    """Experts of the positions ``[start, seqlen - 1)`` of one sample, none before its first token.

    ``seqlen`` counts prompt and output; the last token was never a model input. A row is recorded once, when
    its position is first computed, for this or a sample with the same cached prefix, whatever weights
    recompute it. ``numpy.asarray`` of this object is a read-only array over the same memory.
    """

    data: bytes
    """Expert ids, little-endian, in C order."""
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=3, max_length=3)]
    """[rows, layers of the model, experts per token]; rows of layers without experts are zeros."""
    dtype: Literal["U8", "U16"]
    """``U8`` for models with up to 256 experts."""
    start: int
    """Position of the first row: ``routed_experts_start_len``."""

    @property
    def itemsize(self) -> int:
        """Bytes per expert id."""
        return 1 if self.dtype == "U8" else 2

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Array interface: numpy's array interface, version 3: numpy itself is not needed to have one."""
        typestr = "|u1" if self.dtype == "U8" else "<u2"
        return {"version": 3, "shape": tuple(self.shape), "typestr": typestr, "data": self.data}


class HiddenStates(ReplyRecord, kw_only=True, frozen=True):
    """Hidden states of the positions ``[start, seqlen - 1)`` of one sample, as :class:`RoutedExperts` are.

    Each row is of the weights that first computed its position, but for those that an update during the
    prefill computes again.
    """

    data: bytes
    """Values of the model's dtype, little-endian, in C order."""
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=3, max_length=3)]
    """[rows, layers, hidden size]; layers as in ``hidden_states_layers``."""
    dtype: Literal["BF16", "F16", "F32"]
    """The model's dtype, as safetensors names it."""
    start: int
    """Position of the first row: ``hidden_states_start_len``."""


class SamplingMask(ReplyRecord, kw_only=True, frozen=True):
    """Tokens that top-k, top-p and min-p kept for each of ``len`` output tokens; greedy: only itself."""

    ids: bytes
    """int32: the token ids of all positions, one position after the other, ascending within each."""
    offsets: bytes
    """int32 [tokens + 1]: position ``i`` has the ids ``[offsets[i], offsets[i + 1])``; the first is 0."""

    def __len__(self) -> int:
        return len(self.offsets) // 4 - 1

    def at(self, position: int) -> list[int]:
        """Return the token ids of one position; ``IndexError`` behind the last."""
        start, end = struct.unpack_from("<2i", self.offsets, 4 * range(len(self))[position])
        return list(struct.unpack_from(f"<{end - start}i", self.ids, 4 * start))

    def cut(self, start: int, end: int | None = None) -> "SamplingMask":
        """Return the positions [start, end); None means to the last."""
        first, last, _ = slice(start, end).indices(len(self))
        offsets = struct.unpack_from(f"<{max(last - first, 0) + 1}i", self.offsets, 4 * first)
        begin = offsets[0]
        return SamplingMask(
            ids=self.ids[4 * begin : 4 * offsets[-1]],
            offsets=struct.pack(f"<{len(offsets)}i", *(offset - begin for offset in offsets)),
        )


class LogprobRows(ReplyRecord, kw_only=True, frozen=True):
    """Logprobs of ``k`` tokens at each of several positions (rows)."""

    k: Annotated[int, msgspec.Meta(ge=1)]
    """Tokens per row: ``top_logprobs_num``, or the length of ``token_ids_logprob``."""
    ids: bytes
    """int32 [rows, k]; or [k], if they are the same in every row."""
    logprobs: bytes
    """float32 [rows, k]; those of the most likely tokens in descending order."""


class GenerateReqOutput(ReplyRecord, kw_only=True, frozen=True):
    """The terminal result of one sample. Data about the output has an entry or row for each output id."""

    rid: str
    """The request id: ``rid`` of the request, else its message id."""
    index: int = 0
    """Index of the sample, below ``n``."""
    output_ids: bytes
    """int32, output tokens only, including the stop token that ended it."""
    output_logprobs: bytes | None = None
    """float32; None unless ``return_logprob``."""
    raw_logprobs: bytes | None = None
    """float32; None unless ``return_raw_logprob``."""
    sampled_logprobs: bytes | None = None
    """float32; None unless ``return_sampled_logprob``."""
    output_top_logprobs: LogprobRows | None = None
    """None unless ``top_logprobs_num``."""
    output_token_ids_logprobs: LogprobRows | None = None
    """None unless ``token_ids_logprob``."""
    input_logprobs: bytes | None = None
    """float32 [prompt_tokens - logprob_start_len], the first NaN. None unless asked for and prefilled."""
    input_top_logprobs: LogprobRows | None = None
    """A row for each of ``input_logprobs`` but the first. None without these or ``top_logprobs_num``."""
    input_token_ids_logprobs: LogprobRows | None = None
    """A row for each of ``input_logprobs`` but the first. None without these or ``token_ids_logprob``."""
    sampling_mask: SamplingMask | None = None
    """None unless ``return_sampling_mask``."""
    routed_experts: RoutedExperts | None = None
    """None unless ``return_routed_experts``, and if an error ended the sample."""
    hidden_states: HiddenStates | None = None
    """None unless ``return_hidden_states``, without an output, and if no position is wanted."""
    finish_reason: FinishReason
    weight_versions: list[WeightVersionSpan]
    """Contiguous spans that cover ``[0, len(output_ids))``."""
    prompt_tokens: int
    """Length of the prompt in tokens; 0 if this result replaces one that could not be sent."""
    cached_tokens: int
    """Prompt tokens found in the prefix cache when the request was first scheduled."""
    seed: int
    """The seed that was used; 0 if this result replaces one that could not be sent."""
    num_retractions: int = 0
    """Times that its KV cache was freed and recomputed: by a pause, or because the KV cache was full."""
    drafted_tokens: int = 0
    """Tokens that speculation drafted."""
    accepted_tokens: int = 0
    """Drafted tokens that were sampled and became output; it took as many steps less."""
    queue_time: float = 0.0
    """Seconds from arrival to the first scheduled step; to the end, if it was never scheduled."""
    e2e_latency: float = 0.0
    """Seconds from arrival to the end."""


class DeltaLogprobs(ReplyRecord, kw_only=True, frozen=True):
    """Logprobs of further tokens at a :class:`StreamDelta`'s positions: ``ks[i]`` per token of row ``i``."""

    ks: bytes
    """int32 [rows]; 0 where not requested."""
    ids: bytes
    """int32 [sum(counts * ks)]"""
    logprobs: bytes
    """float32 [sum(counts * ks)]"""


class DeltaWeights(ReplyRecord, kw_only=True, frozen=True):
    """Weights that sampled tokens of a :class:`StreamDelta`, as in :class:`WeightVersionSpan`."""

    version: str
    """Public version label of the weights."""
    epoch: int
    incarnation: str = ""
    """Start of the engine that sampled with them."""
    stale_kv: bool = False
    adapter: str | None = None
    """Name of the adapter. None means the model itself."""
    adapter_epoch: int = 0
    """Version of the adapter; 0 without one."""
    digest: str = ""
    """Digest of the weights, in hex. Empty means that the engine keeps none (``weights_digest``)."""
    adapter_digest: str = ""
    """Digest of the adapter (:class:`AdapterStatus`); empty without one."""


class DeltaDetails(ReplyRecord, kw_only=True, frozen=True):
    """Facts about a :class:`StreamDelta`'s tokens beyond ids and logprobs, with ``stream_details``."""

    weights: list[DeltaWeights]
    """All weights that sampled tokens of these rows."""
    sampled_by: bytes
    """int32 [sum(counts)]: index into ``weights``; -1 in rows without ``stream_details``."""
    raw_logprobs: bytes
    """float32 [sum(counts)]; NaN where not requested."""
    sampled_logprobs: bytes
    """float32 [sum(counts)]; NaN where not requested."""
    sampling_mask: SamplingMask | None = None
    """A mask of each token, without ids where not requested. None means that no row requested them."""


class StreamDelta(ReplyRecord, kw_only=True, frozen=True):
    """New tokens of one client's streams at one step; deltas dropped for a slow reader leave a gap.

    Row ``i``: ``counts[i]`` tokens from output token ``starts[i]`` on, of sample ``indices[i]`` of
    ``rids[i]``.
    """

    rids: list[str]
    """The ``rid`` of each row's generation."""
    indices: bytes
    """int32 [rows]"""
    starts: bytes
    """int32 [rows]"""
    counts: bytes
    """int32 [rows]"""
    tokens: bytes
    """int32 [sum(counts)]"""
    logprobs: bytes
    """float32 [sum(counts)]; NaN where not requested."""
    top: DeltaLogprobs | None = None
    """The most likely tokens. None means that no row requested them."""
    token_ids: DeltaLogprobs | None = None
    """The tokens of ``token_ids_logprob``. None means that no row requested them."""
    details: DeltaDetails | None = None
    """None means that no row requested them (``stream_details``)."""


class BatchTokenOutput(Message, kw_only=True, forbid_unknown_fields=False):
    """To one client, at most once per step: stream deltas and the results of finished samples."""

    step: int
    """Step that made the last of these tokens, from 1; without new tokens, the last step started."""
    delta: StreamDelta | None = None
    """None means nothing to stream in this step."""
    finished: list[GenerateReqOutput] = []
    """Results of finished samples, in the order in which they ended."""


class Keepalive(Message, kw_only=True, forbid_unknown_fields=False):
    """Sent every two seconds to clients that wait for a reply, to find disconnected ones; no answer."""

    step: int
    """Steps started since the engine's start."""


class AbortReq(Request, kw_only=True):
    """Abort generations in any state; each ends with its partial output. Unknown rids are not an error."""

    rid: str | list[str] | None = None
    """The request id, or several, matched exactly. None needs ``abort_all``."""
    index: int | None = None
    """Abort only this sample of the request. None means all its samples."""
    abort_all: bool = False
    """True: abort all generations of all clients, queued ones too; ``rid`` and ``index`` are ignored."""


class AbortReqOutput(Reply, kw_only=True):
    """The number of samples that were aborted."""

    aborted: int
    """Samples that this call aborted; 0 if there was no such live sample."""


class FetchResultReqInput(Request, kw_only=True):
    """Get the stored results of a generation whose client could not be reached at its end."""

    rid: Identifier
    """The request id: ``rid`` of the request, else its message id."""


class FetchResultReqOutput(Reply, kw_only=True):
    """The stored results. Fetching does not remove them; they expire after ``result_ttl_s``."""

    results: list[GenerateReqOutput]
    """In the order of the sample index; empty if nothing is stored for this rid."""
    live: int
    """Samples of this rid that have not finished."""


class EndPrefixLeasesReqInput(Request, kw_only=True):
    """End leases (``prefix_lease``): their pages, as far as only they have them, are evicted first."""

    names: Annotated[list[Identifier], msgspec.Meta(max_length=MAX_SEQUENCES)]
    """Names that requests gave; one without a lease is skipped."""


class EndPrefixLeasesReqOutput(Reply, kw_only=True):
    """The number of leases that were there."""

    OF_GROUP: ClassVar = {}
    ended: int
    """Number of leases that ended, over all engines."""


class AddCorpusReqInput(Request, kw_only=True):
    """Keep texts that speculation drafts from, for every prompt; ``unsupported`` by an engine without it."""

    name: Identifier
    """Name to remove it by. One that is there is refused."""
    token_ids: Annotated[list[list[TokenId]], msgspec.Meta(min_length=1, max_length=MAX_SEQUENCES)]
    """Texts. All corpora together have at most 4,194,304 tokens, of which each text counts as one more."""


class AddCorpusReqOutput(Reply, kw_only=True):
    """The corpus is drafted from."""

    OF_GROUP: ClassVar = {"num_tokens": "first"}
    num_tokens: int
    """Number of its tokens."""


class RemoveCorpusReqInput(Request, kw_only=True):
    """Forget a corpus (:class:`AddCorpusReqInput`)."""

    name: Identifier
    """Name that it was added by. An unknown one is refused."""


class RemoveCorpusReqOutput(Reply, kw_only=True):
    """The corpus is forgotten."""

    OF_GROUP: ClassVar = {"num_tokens": "first"}
    num_tokens: int
    """Number of tokens that it had."""


class ListCorporaReqInput(Request, kw_only=True):
    """Get the corpora (:class:`AddCorpusReqInput`)."""


class ListCorporaReqOutput(Reply, kw_only=True):
    """The corpora of an engine."""

    corpora: dict[str, int]
    """Numbers of tokens by name."""


class ScoreReqInput(Request, kw_only=True):
    """Compute logprobs under the reference model; ``unsupported`` by an engine without one."""

    input_ids: Annotated[list[list[TokenId]], msgspec.Meta(min_length=1, max_length=MAX_SEQUENCES)]
    """The sequences, each with prompt and output."""
    start: list[Annotated[int, msgspec.Meta(ge=1)]]
    """For each sequence: first token to score, usually the prompt's length. Position 0 has no logprob."""
    temperature: float = 1.0
    """Logits are divided by it; below 1e-6 they are used as they are, as in greedy decoding."""


class ScoreReqOutput(Reply, kw_only=True):
    """Logprobs of all sequences, in the order of the request."""

    logprobs: list[bytes]
    """Little-endian float32 per token from ``start`` on: log-softmax over the vocabulary at temperature."""
