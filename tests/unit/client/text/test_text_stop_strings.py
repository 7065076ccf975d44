"""Stop strings: found as ``str.find`` finds them in the whole text, and where they cut the tokens."""

import time
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizers import LINES, make_byte_level, make_sentencepiece, pieces

from caesura.client import GenerateOutput
from caesura.client.connection.results import TokenLogprobs
from caesura.client.exceptions import InvalidRequest
from caesura.client.text import StopMatcher, StopStrings, TextTokenizer, output_text
from caesura.client.text.sample_text import SampleText, shortened
from caesura.io_struct import FinishReason, RoutedExperts, WeightVersionSpan

few = st.text("ab🎉\ufffd", max_size=24)
stop_lists = st.lists(st.text("ab🎉\ufffd", min_size=1, max_size=5), min_size=1, max_size=4)


def first_complete(text, stops):
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    if not found:
        return None
    end, start = min(found)
    return start, end


@given(few, stop_lists, st.lists(st.integers(0, 7), max_size=12))
def test_matches_are_those_of_find_however_the_text_comes(text, stops, sizes):
    matcher = StopMatcher(StopStrings(stops))
    shown = ""
    for position, part in enumerate(map("".join, pieces(text, sizes))):
        shown += matcher.feed(part)
        so_far = text[: sum(sizes[: position + 1])] if position < len(sizes) else text
        rest = so_far[len(shown) :]
        if matcher.match is None:  # all is shown but what begins a stop string
            assert not rest or any(stop.startswith(rest) for stop in stops)
            assert not any(
                rest != stop and stop.startswith(so_far[at:]) for at in range(len(shown)) for stop in stops
            )
    expected = first_complete(text, stops)
    if expected is None:
        assert shown + matcher.flush() == text
        assert matcher.match is None
    else:
        start, end = expected
        assert matcher.match is not None
        assert (shown, matcher.match.stop, matcher.match.end) == (text[:start], text[start:end], end)
        assert matcher.feed("more") == matcher.flush() == ""


def test_looking_is_linear():
    def seconds(length):
        matcher = StopMatcher(StopStrings(["a" * 3000 + "b", "ab" * 1000]))
        begin = time.process_time()
        for _ in range(length):
            matcher.feed("aaaa")
        return time.process_time() - begin

    seconds(100)
    # Looking again at all that is held back, 3,000 characters a time, would take seconds.
    assert seconds(20_000) < 1.0


@pytest.mark.parametrize("stops", ["abc", [""], ["a", ""], [7]])
def test_invalid_stop_strings(stops):
    with pytest.raises(InvalidRequest) as caught:
        StopStrings(stops)
    assert caught.value.detail["field"] == "stop"


@pytest.fixture(scope="module", params=[make_byte_level, make_sentencepiece])
def tokenizer(request, tmp_path_factory):
    return TextTokenizer.from_folder(request.param(tmp_path_factory.mktemp("tokenizer")))


def run(tokenizer, ids, stops, sizes, min_new_tokens=0):
    sample = SampleText(tokenizer, [], StopStrings(stops), min_new_tokens=min_new_tokens)
    shown = ""
    for part in pieces(ids, sizes):
        shown += sample.feed(part)
        assert sample.settled <= len(ids)
    return shown + sample.finish(), sample


def test_tokens_are_cut_behind_the_one_that_completes_the_match(tokenizer):
    """Random cuts of the ids into messages, stop strings anywhere, several tokens and several bytes long."""
    source = "🦉🦉世".join(LINES)

    @given(
        st.lists(st.sampled_from([*LINES, "🦉", "🦉🦉", "世", "\ufffd"]), max_size=4).map("".join),
        st.lists(st.integers(0, len(source) - 9).flatmap(
            lambda at: st.integers(1, 8).map(lambda size: source[at : at + size])
        ), min_size=1, max_size=3),
        st.lists(st.integers(1, 12), max_size=80),
    )  # fmt: skip
    def check(text, stops, sizes):
        ids = tokenizer.encode(text, add_special_tokens=False)
        whole = output_text(tokenizer, [], ids)
        shown, sample = run(tokenizer, ids, stops, sizes)
        expected = first_complete(whole, stops)
        if expected is None:
            assert (shown, sample.stop, sample.length) == (whole, None, None)
            return
        start, end = expected
        assert (shown, sample.stop) == (whole[:start], whole[start:end])
        texts = (output_text(tokenizer, [], ids[:count]) for count in range(len(ids) + 1))
        assert sample.length == next(n for n, found in enumerate(texts) if found.startswith(whole[:end]))

    check()


def test_nothing_is_looked_for_before_min_new_tokens(tokenizer):
    ids = tokenizer.encode("Stop! Stop! Stop!", add_special_tokens=False)
    whole = output_text(tokenizer, [], ids)
    for allowed in range(len(ids) + 1):
        early = output_text(tokenizer, [], ids[:allowed])
        for sizes in ([1] * len(ids), [len(ids)]):
            shown, sample = run(tokenizer, ids, ["Stop"], sizes, allowed)
            at = whole.find("Stop", len(early))
            assert shown == (whole if at < 0 else whole[:at])
            assert (sample.stop is None) == (at < 0)


def test_a_stop_token_is_shown_without_being_searched(tokenizer):
    ids = tokenizer.encode("The pause", add_special_tokens=False)
    sample = SampleText(tokenizer, [], StopStrings(["pause!"]))
    last = tokenizer.encode("!", add_special_tokens=False)
    assert sample.feed(ids) + sample.finish(last) == output_text(tokenizer, [], ids + last)
    assert sample.stop is None


def test_a_match_in_what_is_held_back_at_the_end(tokenizer):
    ids = tokenizer.encode("a🦉", add_special_tokens=False)
    shown, sample = run(tokenizer, [*ids, 0], ["🦉"], [1] * len(ids))
    assert (shown, sample.stop, sample.length) == (output_text(tokenizer, [], ids)[:-1], "🦉", len(ids))


def output(count, *, prompt=3, start=1, dtype="U8", layers=2, top_k=2, spans=((0, 2), (2, 5))):
    itemsize = 1 if dtype == "U8" else 2
    rows = prompt + count - 1 - start
    further = TokenLogprobs(k=2, ids=list(range(2 * count)), logprobs=[-0.5 * i for i in range(2 * count)])
    return GenerateOutput(
        rid="r",
        index=0,
        output_ids=list(range(10, 10 + count)),
        output_logprobs=[-1.0 * i for i in range(count)],
        raw_logprobs=[-2.0 * i for i in range(count)],
        sampled_logprobs=[-3.0 * i for i in range(count)],
        output_top_logprobs=further,
        output_token_ids_logprobs=further,
        input_logprobs=[None, -1.0],
        routed_experts=RoutedExperts(
            data=bytes(i % 251 for i in range(rows * layers * top_k * itemsize)),
            shape=[rows, layers, top_k],
            dtype=dtype,
            start=start,
        ),
        finish_reason=FinishReason(type="length", length=count),
        weight_versions=[WeightVersionSpan(version=f"v{a}", epoch=a, start=a, end=b) for a, b in spans],
        prompt_tokens=prompt,
        cached_tokens=0,
        seed=1,
        num_retractions=0,
        queue_time=0.0,
        e2e_latency=1.0,
    )


@pytest.mark.parametrize("dtype", ["U8", "U16"])
@pytest.mark.parametrize("length", range(7))
def test_everything_that_counts_tokens_is_cut_equally(length, dtype):
    whole = output(5, dtype=dtype)
    part = shortened(whole, length)
    count = min(length, 5)
    assert part.output_ids == whole.output_ids[:count]
    for name in ("output_logprobs", "raw_logprobs", "sampled_logprobs"):
        assert getattr(part, name) == getattr(whole, name)[:count]
    for further in (part.output_top_logprobs, part.output_token_ids_logprobs):
        assert further is not None
        assert [further.at(i) for i in range(len(further))] == [
            whole.output_top_logprobs.at(i) for i in range(count)
        ]
    assert part.input_logprobs == whole.input_logprobs
    lengths = [span.end - span.start for span in part.weight_versions]
    assert lengths == [min(2, count), max(0, count - 2)][: len(lengths)]
    assert sum(lengths) == count
    assert list(accumulate(lengths, initial=0))[:-1] == [span.start for span in part.weight_versions]
    routed = part.routed_experts
    rows = 3 + count - 1 - 1 if count else 0
    assert routed.shape == [rows, 2, 2]
    assert routed.data == whole.routed_experts.data[: rows * 4 * routed.itemsize]


def test_the_prompts_rows_may_begin_behind_the_cut():
    assert shortened(output(5, start=3), 1).routed_experts.shape == [0, 2, 2]
    assert shortened(output(5), 5) == output(5)
