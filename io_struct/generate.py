"""Generation: the request, the per-step stream message and the terminal result.

Token and logprob arrays cross the wire as little-endian bytes (int32, float32): building one object per token costs
more than everything else a step does (docs/performance.md).
"""

from typing import Annotated, Any, Literal

import msgspec

from .base import Identifier, Label, Message, Record, Reply, ReplyRecord, Request

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

MAX_INT32 = 2**31 - 1
"""Largest count of tokens, and largest position, that a request may name."""

MIN_REPETITION_PENALTY = 1e-6
"""Smallest ``repetition_penalty``: logits divided by it, and then by the smallest temperature, are float32 numbers still."""

MAX_SAMPLES = 1024
"""Largest ``n``: samples of one prompt in one request."""

MAX_LOGIT_BIAS = 1024
"""Most tokens in one ``logit_bias``."""

MAX_TOP_LOGPROBS = 128
"""Largest ``top_logprobs_num``."""

MAX_TOKEN_IDS_LOGPROB = 1024
"""Most ids in one ``token_ids_logprob``."""

GREEDY_BELOW = 1e-6
"""Temperatures below this mean greedy decoding, as in SGLang."""


class SamplingParams(Record, kw_only=True, frozen=True):
    """How to sample. Names and defaults follow SGLang; ranges are checked by :meth:`problems`."""

    max_new_tokens: int | None = 128
    """None: up to the context length."""
    temperature: float = 1.0
    """Below 1e-6: greedy."""
    top_p: float = 1.0
    """In (0, 1]; 1 keeps all."""
    top_k: int = -1
    """-1 keeps all; otherwise at least 1."""
    min_p: float = 0.0
    """In [0, 1]: tokens less likely than ``min_p`` times the likeliest are dropped; 0 keeps all."""
    frequency_penalty: float = 0.0
    """In [-2, 2]: taken off a token's logit for each time it stands in the output."""
    presence_penalty: float = 0.0
    """In [-2, 2]: taken off the logit of each token that stands in the output."""
    repetition_penalty: float = 1.0
    """In [1e-6, 2]: positive logits of tokens in prompt or output are divided by it, negative ones multiplied."""
    logit_bias: dict[TokenId, float] | None = None
    """Added to these tokens' logits; values in [-100, 100]. None: nothing."""
    min_new_tokens: int = 0
    """Before so many tokens neither the model's end-of-sequence ids nor ``stop_token_ids`` are sampled."""
    stop_token_ids: list[TokenId] = []
    """Generation ends after any of these; the token is kept in the output."""
    ignore_eos: bool = False
    """True: the model's own end-of-sequence ids do not end the generation; ``stop_token_ids`` still do."""
    seed: Seed | None = None
    """None: drawn at admission and returned in the result."""
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)] = 1
    """Samples of this prompt. Sample ``i`` uses the noise stream ``(seed, i)``."""

    def problems(self) -> list[tuple[str, object, str]]:
        """Every value out of range as ``(field, value, requirement)``; comparisons are false for NaN, so NaN fails."""
        found: list[tuple[str, object, str]] = []
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            found.append(("max_new_tokens", self.max_new_tokens, "must be at least 1, or null"))
        if not 0.0 <= self.temperature <= 1e4:
            found.append(("temperature", self.temperature, "must be finite and in [0, 10000]"))
        if not 0.0 < self.top_p <= 1.0:
            found.append(("top_p", self.top_p, "must be in (0, 1]"))
        if not (self.top_k == -1 or 1 <= self.top_k <= MAX_INT32):
            found.append(("top_k", self.top_k, "must be -1 (all) or at least 1"))
        if len(self.stop_token_ids) > 64:
            found.append(("stop_token_ids", len(self.stop_token_ids), "at most 64 ids"))
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
            (f"logit_bias[{token}]", value, "must be in [-100, 100]")
            for token, value in bias.items()
            if not -100.0 <= value <= 100.0
        ]
        return found


class GenerateReqInput(Request, kw_only=True):
    """Generate ``sampling_params.n`` continuations of one prompt.

    Each sample is answered by exactly one :class:`GenerateReqOutput`, or the whole request by one ``ErrorReply``.
    """

    rid: Identifier | None = None
    """Names the generation, for abort and results. None: the message id."""
    input_ids: list[TokenId]
    """The prompt: at least one token id, each below the model's ``vocab_size``; with ``max_new_tokens`` at most
    ``context_len``."""
    sampling_params: SamplingParams = SamplingParams()
    """How to sample, and how many samples."""
    return_logprob: bool = False
    """Per token: log-softmax over the full vocabulary after temperature (greedy: unscaled), in fp32."""
    return_raw_logprob: bool = False
    """Per token: log-softmax of the unedited logits (temperature 1)."""
    return_sampled_logprob: bool = False
    """Per token: log-probability under the distribution really sampled (renormalised after top-k and top-p)."""
    logprob_start_len: int = -1
    """With ``return_logprob``: also those of the prompt's tokens from this position on, without temperature or edits. They are
    recomputed where the prefix cache has them. -1, or the prompt's length and more: none."""
    top_logprobs_num: int = 0
    """With ``return_logprob``: at each position that has a logprob, also the so many likeliest tokens; at most 128."""
    token_ids_logprob: list[TokenId] | None = None
    """With ``return_logprob``: at each of these positions, also these tokens' logprobs; at most 1,024. None, or empty: no others."""
    return_routed_experts: bool = False
    """The experts that computed each position, prompt included (:class:`RoutedExperts`). ``unsupported`` where the model has none."""
    routed_experts_start_len: Annotated[int, msgspec.Meta(ge=0)] = 0
    """First position whose experts are returned; at most the prompt's length."""
    stream: bool = False
    """True: deltas each step. The terminal result carries everything in both cases."""
    cache_salt: Label = ""
    """Requests share prefix-cache entries only within one salt."""
    min_weights_epoch: int | None = None
    """Refuse with ``epoch_behind`` on an engine whose weights epoch is lower. None: any."""


FinishType = Literal["stop", "length", "abort", "error"]


class FinishReason(ReplyRecord, kw_only=True, frozen=True):
    """Why a generation ended."""

    type: FinishType
    """``stop``: a stop token was sampled. ``length``: a limit was reached. ``abort``: somebody ended it (an abort, a pause,
    an update, a shutdown), or its client is gone. ``error``: it could not be computed or sent."""
    matched: int | None = None
    """``stop``: the token id that ended it."""
    length: int | None = None
    """``length``: the limit that was reached, in new tokens."""
    message: str | None = None
    """``abort`` and ``error``: what happened, for a person."""
    code: str | None = None
    """``error``: an :class:`~caesura.io_struct.errors.ErrorCode`."""


class WeightVersionSpan(ReplyRecord, kw_only=True, frozen=True):
    """Output tokens ``[start, end)`` were sampled under these weights."""

    version: str
    """The public label at sampling time."""
    epoch: int
    """The engine's commit counter at sampling time."""
    start: int
    """Index of the first output token of the span, counted from 0."""
    end: int
    """Index one past the last output token of the span."""
    incarnation: str = ""
    """Which start of the engine sampled them (``HelloReqOutput.incarnation``)."""
    stale_kv: bool = False
    """True: sampled on a KV cache that holds entries of an older epoch (an ``in_place`` pause with an update)."""


class RoutedExperts(ReplyRecord, kw_only=True, frozen=True):
    """Which experts computed the positions ``[start, seqlen - 1)`` of one sample; ``seqlen`` is prompt plus output.

    The last token has no row: nothing was computed from it. A sample that ended before its first token has no rows at all.
    A row is of the forward that first computed its position for this sample, or for the one whose cached prefix it shares,
    and stays so when the position is computed again after a retraction, under newer weights perhaps.

    ``numpy.asarray`` of this object is a read-only array of its shape over the same memory.
    """

    data: bytes
    """Expert ids, little-endian, in C order."""
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=3, max_length=3)]
    """[rows, layers of the model, experts per token]; layers without experts are zeros."""
    dtype: Literal["U8", "U16"]
    """``U8`` for models of up to 256 experts."""
    start: int
    """The position of the first row: ``routed_experts_start_len``."""

    @property
    def itemsize(self) -> int:
        """Bytes per expert id."""
        return 1 if self.dtype == "U8" else 2

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """numpy's array interface, version 3: numpy itself is not needed to have one."""
        typestr = "|u1" if self.dtype == "U8" else "<u2"
        return {"version": 3, "shape": tuple(self.shape), "typestr": typestr, "data": self.data}


class LogprobRows(ReplyRecord, kw_only=True, frozen=True):
    """Log-probabilities of ``k`` tokens at each of some positions ("rows")."""

    k: Annotated[int, msgspec.Meta(ge=1)]
    """Tokens per row: ``top_logprobs_num``, or the length of ``token_ids_logprob``."""
    ids: bytes
    """int32 [rows, k]; [k] where they are the same in every row."""
    logprobs: bytes
    """float32 [rows, k]; of the likeliest tokens in descending order."""


class GenerateReqOutput(ReplyRecord, kw_only=True, frozen=True):
    """The terminal result of one sample. Everything about the output has as many entries or rows as ``output_ids``."""

    rid: str
    """The ``rid`` of the request; its message id where it had none."""
    index: int = 0
    """Which of the ``n`` samples."""
    output_ids: bytes
    """int32, new tokens only, including the stop token that ended it."""
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
    """float32 [prompt_tokens - logprob_start_len], the first NaN; None unless ``logprob_start_len``, and where the sample ended
    before its prompt was computed."""
    input_top_logprobs: LogprobRows | None = None
    """A row for each of ``input_logprobs`` but the first; None without these, and unless ``top_logprobs_num``."""
    input_token_ids_logprobs: LogprobRows | None = None
    """A row for each of ``input_logprobs`` but the first; None without these, and unless ``token_ids_logprob``."""
    routed_experts: RoutedExperts | None = None
    """None unless ``return_routed_experts``, and where an error ended the sample."""
    finish_reason: FinishReason
    """Why the sample ended."""
    weight_versions: list[WeightVersionSpan]
    """Contiguous, covering ``[0, len(output_ids))``."""
    prompt_tokens: int
    """Length of the prompt, in tokens; 0 in what replaces a result that could not be sent."""
    cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache when the request first ran."""
    seed: int
    """The seed of the request, or the one that was drawn for it; 0 in what replaces a result that could not be sent."""
    num_retractions: int = 0
    """How often its KV was given back (by a pause or for want of memory) and recomputed."""
    queue_s: float = 0.0
    """Seconds from arrival to the first scheduled step; all of its life if it never ran."""
    e2e_latency: float = 0.0
    """Seconds from arrival to the end."""


class DeltaLogprobs(ReplyRecord, kw_only=True, frozen=True):
    """Log-probabilities of further tokens at the positions of a :class:`StreamDelta`: ``ks[i]`` at each token of its row ``i``."""

    ks: bytes
    """int32 [rows]; 0 where not requested."""
    ids: bytes
    """int32 [sum(counts * ks)]"""
    logprobs: bytes
    """float32 [sum(counts * ks)]"""


class StreamDelta(ReplyRecord, kw_only=True, frozen=True):
    """New tokens of all streaming requests of one client at one step, as a struct of arrays.

    Row ``i`` belongs to sample ``indices[i]`` of ``rids[i]`` and holds ``counts[i]`` tokens, the first of which is
    output token number ``starts[i]``. A gap between deltas means some were dropped for a slow reader; the terminal
    result is complete either way.
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
    """The likeliest tokens. None: no row asked."""
    given: DeltaLogprobs | None = None
    """Those of ``token_ids_logprob``. None: no row asked."""


class BatchTokenOutput(Message, kw_only=True, forbid_unknown_fields=False):
    """Scheduler to one client, at most one per step: stream deltas and the results of samples that ended."""

    step: int
    """Number of the step that made the last of these tokens, counted from 1 since the engine's start; where none did (an
    abort, a retry), of the last one launched."""
    delta: StreamDelta | None = None
    """None: nothing to stream this step."""
    finished: list[GenerateReqOutput] = []
    """Results of the samples that have ended, in that order. Empty: none has ended."""


class Keepalive(Message, kw_only=True, forbid_unknown_fields=False):
    """Scheduler to clients with live requests, every two seconds; finds out who is gone. Carries nothing to answer."""

    step: int
    """Steps launched since the engine's start."""


class AbortReq(Request, kw_only=True):
    """End generations now, wherever they are; each answers with its partial output. Unknown rids are no error."""

    rid: str | None = None
    """Exact match. None needs ``abort_all``."""
    index: int | None = None
    """Only this one of its samples. None: all of them."""
    abort_all: bool = False
    """True: every live generation of every client, queued ones too; ``rid`` and ``index`` are not looked at."""


class AbortReqOutput(Message, kw_only=True, forbid_unknown_fields=False):
    """``aborted``: how many samples this call ended."""

    id: str
    """The ``id`` of the request that this answers."""
    aborted: int
    """Samples that this call ended; 0 where none of them was live."""


class FetchResultReqInput(Request, kw_only=True):
    """The kept results of a generation whose client could not be reached when it ended."""

    rid: Identifier
    """The ``rid`` of the generation; its message id where it had none."""


class FetchResultReqOutput(Reply, kw_only=True):
    """What was kept; taking it does not remove it, its time to live does."""

    results: list[GenerateReqOutput]
    """By index of the sample; empty where nothing is kept under this rid."""
    live: int
    """Samples of this rid that have not ended yet."""
