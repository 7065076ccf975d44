"""Text of a sample in pieces: that of the whole, never half a character, cut where a stop string ends."""

import math
import time
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.fake_scheduler import finished, floats
from support.tokenizers import LINES, make_byte_level, make_sentencepiece, pieces

from caesura.client.connection.results import TokenLogprobs, decode_output
from caesura.client.exceptions import InvalidRequest
from caesura.client.text import Detokenizer, StopMatcher, StopStrings, TextTokenizer, output_text
from caesura.client.text.detokenizer import CONTEXT, WINDOW, detokenizer
from caesura.client.text.sample_text import SampleText, shortened
from caesura.io_struct import RoutedExperts, WeightVersionSpan

HALF = "\ufffd"


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return TextTokenizer.from_folder(make_byte_level(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    return TextTokenizer.from_folder(make_sentencepiece(tmp_path_factory.mktemp("sentencepiece")))


@pytest.fixture(params=["byte_level", "sentencepiece"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def expected(tokenizer, prompt, output, skip):
    shown = [
        token for token in prompt if token < tokenizer.size and not (skip and token in tokenizer.skipped)
    ]
    before = tokenizer.decode(shown[-CONTEXT:], skip_special_tokens=skip)
    text = tokenizer.decode(shown[-CONTEXT:] + output, skip_special_tokens=skip)
    same = [a == b for a, b in zip(before, text, strict=False)]
    return text[[*same, False].index(False) :]


def ids(tokenizer):
    """Any ids, many of them single bytes that make no character, and real text."""
    raw = [tokenizer.encode(character, add_special_tokens=False) for character in "世🦉é́🇩"]
    parts = st.one_of(
        st.integers(0, tokenizer.size + 2).map(lambda token: [token]),
        st.sampled_from([token for encoded in raw for token in encoded]).map(lambda token: [token]),
        st.sampled_from(sorted(tokenizer.byte_ids) or [260]).map(lambda token: [token]),
        st.sampled_from([*LINES, HALF, f"a{HALF}b", " ", "  "]).map(
            lambda text: tokenizer.encode(text, add_special_tokens=False)[:12]
        ),
    )
    return st.lists(parts, max_size=30).map(lambda found: [token for part in found for token in part])


@pytest.mark.parametrize("make", [Detokenizer, detokenizer])
def test_pieces_are_the_text_of_the_whole(tokenizer, make):
    @given(ids(tokenizer), ids(tokenizer), st.lists(st.integers(1, 40), max_size=60), st.booleans())
    @example([], list(range(tokenizer.size)) * 2, [1] * 2000, True)
    def check(prompt, output, sizes, skip):
        made = make(tokenizer, prompt, skip_special_tokens=skip)
        shown = "".join(made.feed(part) for part in pieces(output, sizes))
        rest = made.peek()
        assert rest == made.flush()
        made = make(tokenizer, prompt, skip_special_tokens=skip)
        one_by_one = "".join(made.feed([token]) for token in output) + made.flush()
        whole = expected(tokenizer, prompt, output, skip)
        assert shown + rest == one_by_one == whole
        assert output_text(tokenizer, prompt, output, skip_special_tokens=skip) == whole

    check()


@pytest.mark.parametrize("make", [Detokenizer, detokenizer])
def test_no_piece_holds_half_a_character(tokenizer, make):
    text = "".join(LINES)
    made = make(tokenizer, [])
    found = [made.feed([token]) for token in tokenizer.encode(text, add_special_tokens=False)]
    assert not any(HALF in piece for piece in found)
    assert "".join(found) + made.flush() == text
    assert sum(map(bool, found)) > len(text) / 8  # and they do come one by one


def test_the_prompt_decides_about_the_first_space(sentencepiece):
    word = sentencepiece.encode("pause", add_special_tokens=False)  # begins with ▁
    assert output_text(sentencepiece, [], word) == "pause"
    assert output_text(sentencepiece, word, word) == " pause"
    bos = sentencepiece.encode("")
    assert output_text(sentencepiece, bos, word) == "pause"
    assert output_text(sentencepiece, bos, word, skip_special_tokens=False) == " pause"


@pytest.mark.parametrize("make", [Detokenizer, detokenizer])
def test_a_character_that_the_prompt_began(byte_level, make):
    whole = byte_level.encode("🏽")
    assert len(whole) > 1
    for cut in range(1, len(whole)):
        made = make(byte_level, whole[:cut])
        assert "".join(made.feed([token]) for token in whole[cut:]) == "🏽"


@pytest.mark.parametrize("make", [Detokenizer, detokenizer])
@pytest.mark.parametrize("begun", [b"\xe4", b"\xe4\xb8", b"\xed\xa1", b"\xf0\x9f\x8f"])
def test_bytes_without_a_character_stay_the_prompts(byte_level, make, begun):
    token_of = {byte_level.token_bytes[token]: token for token in range(byte_level.size)}
    made = make(byte_level, [token_of[bytes([byte])] for byte in begun])
    assert made.peek() == ""
    assert made.feed([token_of[b"a"]]) == "a"


# Text between characters, since runs of byte tokens are decoded when they end; and bytes of no character.
FLOODS = {
    **{
        text: lambda tokenizer, text=text: tokenizer.encode(
            (text * 3 + "pause ") * 100, add_special_tokens=False
        )
        for text in ("verse ", "世", HALF)
    },
    "half": lambda tokenizer: [tokenizer.encode("世", add_special_tokens=False)[-2]] * 300,
    "unknown": lambda tokenizer: [tokenizer.size + number for number in range(300)],
}


class Counting:
    """A tokenizer that notes how many ids it is given at once."""

    def __init__(self, tokenizer):
        self.skipped, self.size, self.byte_ids = tokenizer.skipped, tokenizer.size, tokenizer.byte_ids
        self.real, self.decoded = tokenizer, []

    def decode(self, ids, **options):
        self.decoded.append(len(ids))
        return self.real.decode(ids, **options)


@pytest.mark.parametrize("flood", FLOODS)
def test_work_per_token_is_bounded(tokenizer, flood):
    output, counting = FLOODS[flood](tokenizer), Counting(tokenizer)
    made = Detokenizer(counting, output)
    for token in output:
        made.feed([token])
    assert max(counting.decoded) <= 2 * WINDOW
    assert sum(counting.decoded) < 2 * WINDOW * len(output)


def test_the_window_may_be_cut_anywhere_in_a_character(byte_level):
    four = byte_level.encode("𐍈")
    assert len(four) == 4
    for before in range(2 * WINDOW):
        made = Detokenizer(byte_level, [])
        found = [made.feed([token]) for token in [*byte_level.encode("a") * before, *four, *four]]
        assert "".join(found) == "a" * before + "𐍈𐍈"


few = st.text("ab🎉\ufffd", max_size=24)
stop_lists = st.lists(st.text("ab🎉\ufffd", min_size=1, max_size=5), min_size=1, max_size=4)


def first_complete(text, stops):
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[::-1] if found else None


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
        assert matcher.match is None
        assert shown + matcher.flush() == text
    else:
        start, end = expected
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


def run(tokenizer, ids, stops, sizes, min_new_tokens=0):
    sample = SampleText(tokenizer, [], StopStrings(stops), min_new_tokens=min_new_tokens)
    shown = ""
    for part in pieces(ids, sizes):
        shown += sample.feed(part)
        assert sample.settled <= len(ids)
    return shown + sample.finish(), sample


def test_tokens_are_cut_behind_the_match(tokenizer):
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


LOGPROBS = {"output_logprobs": -1.0, "raw_logprobs": -2.0, "sampled_logprobs": -3.0}


def output(count, *, prompt=3, start=1, dtype="U8", layers=2, top_k=2, spans=((0, 2), (2, 5))):
    rows = prompt + count - 1 - start
    nbytes = rows * layers * top_k * (1 if dtype == "U8" else 2)
    wire = finished(
        "r",
        list(range(10, 10 + count)),
        **{name: floats(scale * i for i in range(count)) for name, scale in LOGPROBS.items()},
        input_logprobs=floats([math.nan, -1.0]),
        routed_experts=RoutedExperts(
            data=bytes(i % 251 for i in range(nbytes)), shape=[rows, layers, top_k], dtype=dtype, start=start
        ),
        weight_versions=[WeightVersionSpan(version=f"v{a}", epoch=a, start=a, end=b) for a, b in spans],
    )
    further = TokenLogprobs(k=2, ids=list(range(2 * count)), logprobs=[-0.5 * i for i in range(2 * count)])
    return replace(decode_output(wire), output_top_logprobs=further, output_token_ids_logprobs=further)


@pytest.mark.parametrize("dtype", ["U8", "U16"])
@pytest.mark.parametrize("length", range(7))
def test_everything_that_counts_tokens_is_cut_equally(length, dtype):
    whole = output(5, dtype=dtype)
    part = shortened(whole, length)
    count = min(length, 5)
    assert part.output_ids == whole.output_ids[:count]
    for name in LOGPROBS:
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
