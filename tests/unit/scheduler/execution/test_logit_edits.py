"""Penalties, biases, masks and further log-probabilities against their definition."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.edited_logits import bound, edited, log_softmax, logits_of
from support.properties import examples

from caesura.io_struct import GenerateReqInput, SamplingParams
from caesura.scheduler.execution.logit_edits import FETCHED_TOP, SpecialSampler, further_of
from caesura.scheduler.execution.sampler import Sampler, SamplerOutput
from caesura.scheduler.scheduling.outputs import top_tokens
from caesura.scheduler.scheduling.request import Request, make_requests
from caesura.scheduler.scheduling.sampling import sampling_batch

VOCAB, SLOTS = 23, 4
EOS = (2,)
HUNDREDTHS = st.integers(-200, 200).map(lambda n: n / 100)


@st.composite
def messages(draw, *, only_edits: bool = False) -> GenerateReqInput:
    """``only_edits``: no words, and nothing but the token is wanted."""
    tokens = st.integers(0, VOCAB - 1)
    bias = st.dictionaries(tokens, HUNDREDTHS | st.just(-math.inf), max_size=5)
    # Few tokens, so that samples meet words; fewer than biases and stops leave.
    word = st.lists(st.integers(0, 2), min_size=2, max_size=4)
    # More than biases and stops can forbid.
    allowed = st.lists(tokens, unique=True, min_size=10)
    more = st.just(0) if only_edits else st.integers(0, 1)
    return GenerateReqInput(
        input_ids=draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)),
        sampling_params=SamplingParams(
            max_new_tokens=40,
            temperature=draw(st.sampled_from([0.0, 0.6, 1.0, 1.7])),
            top_k=draw(st.sampled_from([0, 0, 7])),
            seed=draw(st.integers(0, 99)),
            repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.6, 2.0])),
            frequency_penalty=draw(st.just(0.0) | HUNDREDTHS),
            presence_penalty=draw(st.just(0.0) | HUNDREDTHS),
            logit_bias=draw(st.none() | bias),
            bad_words_ids=draw(more) * draw(st.lists(word, max_size=4)) or None,
            allowed_token_ids=draw(st.none() | st.none() | allowed),
            min_new_tokens=draw(st.sampled_from([0, 0, 2, 5])),
            stop_token_ids=draw(st.lists(st.integers(0, VOCAB - 1), max_size=3)),
        ),
        return_logprob=True,
        return_raw_logprob=draw(st.booleans()),
        return_sampling_mask=bool(draw(more)),
        top_logprobs_num=draw(more) * draw(st.sampled_from([1, 4])),
        token_ids_logprob=draw(more) * draw(st.lists(st.integers(0, VOCAB - 1), max_size=3)) or None,
    )


def assert_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> None:
    assert (one is None) == (other is None)
    assert one is None or torch.equal(one, other)


class World:
    """Requests in a real table, sampled by the real sampler one step ahead of what the table knows."""

    def __init__(self, sent: list[GenerateReqInput], dtype: torch.dtype) -> None:
        self.table, self.requests = bound(sent, VOCAB, EOS)
        self.dtype = dtype
        ordinary = Sampler(VOCAB, SLOTS, "cpu", dtype)
        self.sampler, self.ordinary = SpecialSampler(ordinary, VOCAB, torch.device("cpu")), ordinary
        self.in_torch = SpecialSampler(ordinary, VOCAB, torch.device("cpu"))
        self.in_torch.in_one_call = lambda batch: False
        # A chunk of two rows, so that a step needs several.
        self.sampler.chunk_rows = self.in_torch.chunk_rows = 2
        self.messages = sent
        self.outputs: list[list[int]] = [[] for _ in sent]
        self.pending: list[tuple[int, int]] = []
        """(request, token) of the step in flight."""

    def land(self) -> None:
        for number, token in self.pending:
            slot = self.requests[number].slot
            self.table.tokens[slot, self.table.length[slot]] = token
            self.table.length[slot] += 1
        self.pending = []

    def lose(self) -> None:
        for number, _ in self.pending:
            self.outputs[number].pop()
        self.pending = []

    def retract(self, number: int) -> None:
        self.land()
        request = self.requests[number]
        self.table.evict(request)
        self.table.bind(request, self.table.take_slot())

    def step(self, members: list[int]) -> None:
        slots = np.asarray([self.requests[number].slot for number in members])
        known = [len(self.messages[n].input_ids) + len(self.outputs[n]) for n in members]
        rows = [logits_of(n, at, vocab_size=VOCAB) for n, at in zip(members, known, strict=True)]
        logits = torch.tensor(np.stack(rows)).to(self.dtype)
        before = logits.clone()
        batch = sampling_batch(self.table, slots, np.asarray(known))
        if batch.special is None:
            out = self.ordinary.sample(logits, batch)
        else:
            last = [(self.messages[n].input_ids + self.outputs[n])[-1] for n in members]
            out, same = (
                sampler.sample(logits, batch, batch.special, torch.tensor(last))
                for sampler in (self.sampler, self.in_torch)
            )
            for name in ("token_ids", "logprobs", "raw_logprobs", "sampled_logprobs"):
                assert_equal(getattr(out, name), getattr(same, name))
            assert (out.further is None) == (same.further is None)
            if out.further is not None:
                for name in ("top_ids", "top", "token_ids_logprobs", "kept"):
                    assert_equal(getattr(out.further, name), getattr(same.further, name))
        assert torch.equal(logits, before), "the logits are others' business"
        self.table.sampling.counted[slots] = np.asarray(known) + 1
        self.land()
        self._check(members, before, out, batch)
        for row, number in enumerate(members):
            self.pending.append((number, int(out.token_ids[row])))
            self.outputs[number].append(int(out.token_ids[row]))

    def _check(self, members: list[int], logits: torch.Tensor, out: SamplerOutput, batch) -> None:
        plain = self.ordinary.sample(logits, batch)
        wanting = range(0 if out.further is None else len(out.further.top))
        order = [] if batch.special is None else batch.special.rows[batch.special.wants].tolist()
        at = dict(zip(order, wanting, strict=True))
        for row, number in enumerate(members):
            message, history = self.messages[number], self.outputs[number]
            params = message.sampling_params
            values = edited(logits[row].double().numpy(), params, message.input_ids, history, EOS)
            logprobs = log_softmax(values, params.temperature or 1.0)
            token = int(out.token_ids[row])
            assert logprobs[token] > -math.inf
            if params.temperature == 0.0:
                assert logprobs[token] == pytest.approx(max(logprobs), abs=1e-6)
            assert float(out.logprobs[row]) == pytest.approx(logprobs[token], abs=2e-5)
            if batch.want_raw:
                raw = log_softmax(logits[row].double().tolist())
                assert float(out.raw_logprobs[row]) == pytest.approx(raw[token], abs=2e-5)
            if batch.special is None or row not in batch.special.rows.tolist():
                assert token == plain.token_ids[row] and out.logprobs[row] == plain.logprobs[row]
            record = self.requests[number].record
            if record is not None and record.wants_outputs:
                self._check_further(out, at[row], logprobs, message)
            else:
                assert row not in at or message.return_sampling_mask

    def _check_further(
        self, out: SamplerOutput, place: int, logprobs: list[float], message: GenerateReqInput
    ) -> None:
        top = message.top_logprobs_num
        best = sorted(range(VOCAB), key=lambda token: -logprobs[token])[:top]
        assert [logprobs[t] for t in out.further.top_ids[place, :top].tolist()] == pytest.approx(
            [logprobs[t] for t in best], abs=1e-6
        )
        assert out.further.top[place, :top].tolist() == pytest.approx([logprobs[t] for t in best], abs=2e-5)
        ids = message.token_ids_logprob or []
        found = out.further.token_ids_logprobs[place, : len(ids)].tolist()
        assert found == pytest.approx([logprobs[token] for token in ids], abs=2e-5)


@settings(max_examples=examples(60))
@given(
    sent=st.booleans().flatmap(lambda only: st.lists(messages(only_edits=only), min_size=1, max_size=SLOTS)),
    events=st.lists(
        st.sampled_from(["step", "step", "step", "some", "lose", "retract"]), min_size=4, max_size=14
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_every_token_is_drawn_from_the_defined_logits(sent, events, dtype):
    world = World(sent, dtype)
    everybody = list(range(len(sent)))
    for number, event in enumerate(events):
        if event == "lose":
            world.lose()
        elif event == "retract":
            world.retract(number % len(sent))
        else:
            world.step(everybody if event == "step" else everybody[number % len(sent) :])


def test_a_slots_next_request_starts_with_fresh_counters():
    message = GenerateReqInput(
        input_ids=[5, 5, 6], sampling_params=SamplingParams(repetition_penalty=1.5, temperature=0.0, seed=0)
    )
    world = World([message] * 2, torch.float32)
    world.step([0, 1])
    world.land()
    tokens = [9, 4, 9, 1]  # as many as the slot's last owner knew
    leaving: Request = world.requests[0]
    world.table.release(leaving)
    (new,) = make_requests(
        GenerateReqInput(
            input_ids=tokens, sampling_params=SamplingParams(frequency_penalty=1.0, temperature=0.0)
        ),
        client=b"c", seed=0, limit=60, eos_token_ids=EOS, arrival=0.0,
    )  # fmt: skip
    world.requests[0], world.outputs[0] = new, []
    world.messages = [GenerateReqInput(input_ids=tokens, sampling_params=new.params), message]
    world.table.bind(new, world.table.take_slot())
    for _ in range(6):
        world.step([0, 1])
    assert world.table.sampling.num_counters == 2


def test_rows_without_extras_skip_the_special_sampler():
    plain = GenerateReqInput(input_ids=[3], sampling_params=SamplingParams(top_p=0.5, seed=1))
    greedy = GenerateReqInput(input_ids=[3], sampling_params=SamplingParams(temperature=0.0, seed=1))
    world = World([plain, greedy], torch.float32)
    slots = np.asarray([request.slot for request in world.requests])
    batch = sampling_batch(world.table, slots, np.asarray([1, 1]))
    assert batch.special is None
    assert batch.min_p is None


def test_a_row_depends_on_itself_alone():
    sent = [
        GenerateReqInput(
            input_ids=[n, 5, 5], return_logprob=True, return_raw_logprob=True, top_logprobs_num=n % 3,
            token_ids_logprob=[7],
            sampling_params=SamplingParams(
                seed=n, temperature=0.8, repetition_penalty=1.0 + 0.3 * (n % 2), logit_bias={3: 1.5}
            ),
        )
        for n in range(4)
    ]  # fmt: skip
    logits = torch.tensor(np.stack([logits_of(n, vocab_size=VOCAB) for n in range(4)]))

    def sample(members: list[int], chunk_rows: int) -> tuple[SamplerOutput, list[int]]:
        world = World([sent[n] for n in members], torch.float32)
        world.sampler.chunk_rows = chunk_rows
        slots = np.asarray([request.slot for request in world.requests])
        batch = sampling_batch(world.table, slots, np.full(len(members), 3))
        out = world.sampler.sample(logits[members], batch, batch.special)
        return out, batch.special.rows[batch.special.wants].tolist()

    whole, order = sample([0, 1, 2, 3], 8)
    for members, chunk_rows in ([[0], 1], [[1], 1], [[2, 3], 1], [[3, 1, 0], 2]):
        part, part_order = sample(members, chunk_rows)
        for row, number in enumerate(members):
            assert part.token_ids[row] == whole.token_ids[number]
            assert part.logprobs[row] == whole.logprobs[number]
            assert part.raw_logprobs[row] == whole.raw_logprobs[number]
            mine, theirs = part_order.index(row), order.index(number)
            k = sent[number].top_logprobs_num
            assert torch.equal(part.further.top[mine, :k], whole.further.top[theirs, :k])
            assert torch.equal(
                part.further.token_ids_logprobs[mine], whole.further.token_ids_logprobs[theirs]
            )


@pytest.mark.parametrize("top", [1, 5, 40, 97])
def test_equal_top_tokens_come_by_id_however_many(top: int) -> None:
    logprobs = torch.randint(-4, 0, (20, 97), generator=torch.Generator().manual_seed(0)).float()
    logprobs[:5, 3:] = -torch.inf
    ids, values = top_tokens(further_of(logprobs, top, torch.empty((20, 0), dtype=torch.int64)))
    expected = logprobs.sort(dim=1, descending=True, stable=True)
    np.testing.assert_array_equal(values[:, :top], expected.values[:, :top])
    np.testing.assert_array_equal(ids[:, :top], expected.indices[:, :top])


def test_more_equal_tokens_than_are_found_are_the_same():
    logprobs = torch.zeros((4, 3 * FETCHED_TOP))
    none = torch.empty((4, 0), dtype=torch.int64)
    few, many = (top_tokens(further_of(logprobs, top, none))[0] for top in (2, 100))
    np.testing.assert_array_equal(few[:, :2], many[:, :2])


def test_a_row_that_is_not_finite_disturbs_nobody():
    message = GenerateReqInput(
        input_ids=[1, 2], sampling_params=SamplingParams(repetition_penalty=1.5, seed=4), top_logprobs_num=2,
        return_logprob=True, return_raw_logprob=True,
    )  # fmt: skip
    world = World([message] * 3, torch.float32)
    slots = np.asarray([request.slot for request in world.requests])
    logits = torch.tensor(np.stack([logits_of(n, vocab_size=VOCAB) for n in range(3)]))
    batch = sampling_batch(world.table, slots, np.full(3, 2))
    whole = world.sampler.sample(logits, batch, batch.special)
    logits[1, 7] = torch.nan
    broken = world.sampler.sample(logits, batch, batch.special)
    assert broken.token_ids[1] == -1
    assert broken.logprobs[1].isnan() and broken.raw_logprobs[1].isnan()
    for row in (0, 2):
        # The counters have counted the first call's tokens: only what does not depend on them is compared.
        assert broken.token_ids[row] >= 0 and broken.logprobs[row].isfinite()
        assert torch.isfinite(broken.further.top[row]).all()
    assert whole.token_ids.min() >= 0


def test_words_begin_in_the_output_whatever_their_lengths():
    words = [[7, 1], [6, 7, 2], [7, 8, 3], [6, 7, 8, 4], [7, 8, 9, 5]]
    sent = [
        GenerateReqInput(
            input_ids=[5, 6], sampling_params=SamplingParams(bad_words_ids=given, min_new_tokens=9)
        )
        for given in (words, None)
    ]
    table, requests = bound(sent, VOCAB, EOS)
    slots = np.asarray([request.slot for request in requests])
    table.tokens[slots, 2:5] = 7, 8, 9

    def ends(position: int) -> list[list[int]]:
        found = sampling_batch(table, slots, np.full(2, position)).special.word_ends
        if found is None:
            return []
        assert (found[1] == -1).all()
        return found[0].tolist()

    assert [ends(position) for position in (2, 3, 4, 5)] == [[], [[7, 1]], [[7, 1], [8, 3]], [[7, 1], [9, 5]]]
