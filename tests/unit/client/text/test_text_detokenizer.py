"""Detokenizer: text in pieces is the text of the whole, and never half a character."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.tokenizers import LINES, make_byte_level, make_sentencepiece, pieces

from caesura.client.text import Detokenizer, TextTokenizer, output_text
from caesura.client.text.detokenizer import CONTEXT, WINDOW

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


def test_pieces_are_the_text_of_the_whole(tokenizer):
    @given(ids(tokenizer), ids(tokenizer), st.lists(st.integers(1, 40), max_size=60), st.booleans())
    @example([], list(range(tokenizer.size)) * 2, [1] * 2000, True)
    def check(prompt, output, sizes, skip):
        detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
        shown = "".join(detokenizer.feed(part) for part in pieces(output, sizes))
        assert shown + detokenizer.peek() == shown + detokenizer.flush()
        detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
        one_by_one = "".join(detokenizer.feed([token]) for token in output) + detokenizer.flush()
        whole = expected(tokenizer, prompt, output, skip)
        assert one_by_one == whole
        assert output_text(tokenizer, prompt, output, skip_special_tokens=skip) == whole
        detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
        assert (
            "".join(detokenizer.feed(part) for part in pieces(output, sizes)) + detokenizer.flush() == whole
        )

    check()


def test_no_piece_holds_half_a_character(tokenizer):
    text = "".join(LINES)
    detokenizer = Detokenizer(tokenizer, [])
    found = [detokenizer.feed([token]) for token in tokenizer.encode(text, add_special_tokens=False)]
    assert not any(HALF in piece for piece in found)
    assert "".join(found) + detokenizer.flush() == text
    assert sum(map(bool, found)) > len(text) / 8  # and they do come one by one


def test_a_real_replacement_character_is_text(tokenizer):
    detokenizer = Detokenizer(tokenizer, [])
    found = "".join(
        detokenizer.feed([token]) for token in tokenizer.encode(f"a{HALF}{HALF}b", add_special_tokens=False)
    )
    assert found + detokenizer.flush() == f"a{HALF}{HALF}b"


def test_the_prompt_decides_about_the_first_space(sentencepiece):
    word = sentencepiece.encode("pause", add_special_tokens=False)  # begins with ▁
    assert output_text(sentencepiece, [], word) == "pause"
    assert output_text(sentencepiece, word, word) == " pause"
    bos = sentencepiece.encode("")
    assert output_text(sentencepiece, bos, word) == "pause"
    assert output_text(sentencepiece, bos, word, skip_special_tokens=False) == " pause"


def test_a_character_that_the_prompt_began(byte_level):
    whole = byte_level.encode("🏽")
    assert len(whole) > 1
    for cut in range(1, len(whole)):
        detokenizer = Detokenizer(byte_level, whole[:cut])
        assert "".join(detokenizer.feed([token]) for token in whole[cut:]) == "🏽"


def test_special_tokens_are_shown_on_request(tokenizer):
    output = tokenizer.encode("a</s>b<think>c", add_special_tokens=False)
    shown = output_text(tokenizer, [], output, skip_special_tokens=False)
    hidden = output_text(tokenizer, [], output)
    assert "</s>" in shown
    assert "</s>" not in hidden
    assert "<think>" in hidden
    assert tokenizer.encode(shown, add_special_tokens=False)[0] == output[0]


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


@pytest.mark.parametrize("flood", FLOODS)
def test_work_per_token_is_bounded(tokenizer, flood, monkeypatch):
    decoded = []
    real = TextTokenizer.decode

    def counting(self, ids, **options):
        decoded.append(len(ids))
        return real(self, ids, **options)

    monkeypatch.setattr(TextTokenizer, "decode", counting)
    output = FLOODS[flood](tokenizer)
    detokenizer = Detokenizer(tokenizer, output)
    for token in output:
        detokenizer.feed([token])
    assert max(decoded) <= 2 * WINDOW
    assert sum(decoded) < 2 * WINDOW * len(output)


def test_the_window_may_be_cut_anywhere_in_a_character(byte_level):
    four = byte_level.encode("𐍈")
    assert len(four) == 4
    for before in range(2 * WINDOW):
        detokenizer = Detokenizer(byte_level, [])
        found = [detokenizer.feed([token]) for token in [*byte_level.encode("a") * before, *four, *four]]
        assert "".join(found) == "a" * before + "𐍈𐍈"


def test_half_characters_without_end_stay_cheap(byte_level):
    first = byte_level.encode("世")[0]
    detokenizer = Detokenizer(byte_level, [])
    found = "".join(detokenizer.feed([first]) for _ in range(300))
    assert found == HALF * 299
    assert detokenizer.flush() == HALF


def test_unknown_ids_are_left_out(tokenizer):
    detokenizer = Detokenizer(tokenizer, [tokenizer.size + 7])
    assert not any(detokenizer.feed([tokenizer.size + i]) for i in range(300))
