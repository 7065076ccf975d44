"""TextTokenizer and ChatTemplate: what transformers gives for the same folder; templates without end."""

import gc
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from support.lanes import every, quick
from support.signals import blocked
from support.tokenizers import CHAT_TEMPLATE, LINES, SPECIALS, make_byte_level, make_sentencepiece
from support.waiting import eventually

from caesura.client.exceptions import CheckpointError, InvalidRequest
from caesura.client.text import TextTokenizer, TokenizerMissing
from caesura.client.text.chat_template import ChatTemplate
from caesura.client.text.tokenizer import MAX_TEMPLATE_CHARACTERS

MAKERS = {"byte_level": make_byte_level, "sentencepiece": make_sentencepiece}
MESSAGES = [
    {"role": "system", "content": "Be <brief>. 世界"},
    {"role": "user", "content": "Stop? 🎉 <|im_end|>", "name": None},
    {"role": "assistant", "content": "  yes "},
]
TOOLS = [{"type": "function", "function": {"name": "añadir", "parameters": {"x": {"type": "number"}}}}]

texts = st.lists(
    st.one_of(st.sampled_from([*LINES, *SPECIALS, "<think>", " ", "\n", "▁"]), st.text(max_size=8)),
    max_size=5,
).map("".join)


@pytest.fixture(scope="module", params=MAKERS)
def folder(request, tmp_path_factory):
    return MAKERS[request.param](tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def ours(folder):
    return TextTokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def theirs(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_ids_and_text_are_those_of_transformers(ours, theirs):
    @given(texts, st.booleans())
    def compare(text, special):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == theirs.encode(text, add_special_tokens=special)
        assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(
            ids, skip_special_tokens=special
        )

    compare()


def test_any_ids_decode_as_with_transformers(ours, theirs):
    @given(st.lists(st.integers(0, ours.size + 5)), st.booleans(), st.booleans())
    def compare(ids, skip, spaces):
        found = theirs.decode(ids, skip_special_tokens=skip, spaces_between_special_tokens=spaces)
        assert ours.decode(ids, skip_special_tokens=skip) == found

    compare()


@pytest.mark.parametrize("variables", [{}, {"thinking": True}, {"tools": TOOLS}])
@pytest.mark.parametrize("prompt", [True, False])
def test_conversations_are_rendered_as_by_transformers(ours, theirs, prompt, variables):
    found = ours.render_chat(MESSAGES, add_generation_prompt=prompt, **variables)
    assert found == theirs.apply_chat_template(
        MESSAGES, add_generation_prompt=prompt, tokenize=False, **variables
    )


def test_templates_in_files_of_their_own(ours, tmp_path):
    folder = make_byte_level(tmp_path, chat_template="in the config")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "in JSON"}))
    assert TextTokenizer.from_folder(folder).render_chat(MESSAGES) == "in JSON"
    (folder / "chat_template.jinja").write_text("{{ messages | length }} {{ strftime_now('%Y') }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | length }} tools")
    both = TextTokenizer.from_folder(folder)
    assert both.render_chat(MESSAGES).startswith("3 20")
    assert both.render_chat(MESSAGES, tools=TOOLS) == "1 tools"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    listed = TextTokenizer.from_folder(make_byte_level(tmp_path / "listed", chat_template=named))
    assert listed.render_chat(MESSAGES) == "plain"
    assert listed.render_chat(MESSAGES, tools=TOOLS) == "with tools"


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        (CHAT_TEMPLATE, [{"role": "robot", "content": "x"}], "unknown role robot"),
        (CHAT_TEMPLATE, [], "must not be empty"),
        ("{{ messages[0].content + 1 }}", MESSAGES, "refuses the messages"),
        ("{{ messages[7].content.text }}", MESSAGES, "refuses the messages"),
        ("{{ ''.__class__.__mro__ }}", MESSAGES, "unsafe"),
        ("{{ messages.append(1) }}", MESSAGES, "unsafe"),
        (None, MESSAGES, "no chat template"),
        ([{"name": "rag", "template": "x"}], MESSAGES, "no default"),
    ],
)
def test_template_refusals_are_client_errors(tmp_path, template, messages, says):
    tokenizer = TextTokenizer.from_folder(make_byte_level(tmp_path, chat_template=template))
    with pytest.raises(InvalidRequest, match=says) as caught:
        tokenizer.render_chat(messages)
    assert caught.value.detail["field"] == "messages"


@pytest.mark.parametrize("config", [{"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("make", MAKERS.values())
def test_the_config_does_not_decide_on_bos_and_eos(make, tmp_path, config):
    folder = make(tmp_path, **config)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert TextTokenizer.from_folder(folder).encode("Stop!") == theirs.encode("Stop!")


def test_special_tokens_that_only_the_config_has(tmp_path):
    folder = make_byte_level(tmp_path, pad_token="<pad>")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = TextTokenizer.from_folder(folder)
    assert ours.encode("a<pad>b") == theirs.encode("a<pad>b")
    assert ours.decode(ours.encode("a<pad>b")) == "ab"


def test_a_folder_without_tokenizer_names_the_file(tmp_path):
    with pytest.raises(TokenizerMissing, match=r"tokenizer\.json") as caught:
        TextTokenizer.from_folder(tmp_path)
    assert caught.value.detail["path"] == str(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_broken_files_are_named(tmp_path, file):
    folder = make_byte_level(tmp_path)
    (folder / file).write_text("{")
    with pytest.raises(CheckpointError, match=file.replace(".", r"\.")):
        TextTokenizer.from_folder(folder)


def test_a_template_that_is_not_jinja(tmp_path):
    tokenizer = TextTokenizer.from_folder(make_byte_level(tmp_path, chat_template="{% if %}"))
    with pytest.raises(CheckpointError, match="cannot be compiled"):
        tokenizer.render_chat(MESSAGES)


def test_prompts_that_are_neither_text_nor_ids(ours):
    with pytest.raises(InvalidRequest, match="Unicode"):
        ours.encode("\ud800")
    for ids in ([-1], ["a"]):
        with pytest.raises(InvalidRequest, match="not token ids"):
            ours.decode(ids)


def test_padding_and_truncation_of_the_file_are_ignored(tmp_path: Path):
    folder = make_byte_level(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"max_length": 3, "strategy": "LongestFirst", "direction": "Right", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = TextTokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.encode(LINES[0])) == LINES[0]


ASKED = [{"role": "user", "content": "hello"}]


@pytest.fixture
def started() -> Callable[[], psutil.Process | None]:
    before = psutil.Process().children()
    return lambda: next((each for each in psutil.Process().children() if each not in before), None)


def growing(operator):
    steps = "{% for i in range(40) %}{% set ns.s = ns.s OP ns.s %}{% endfor %}".replace("OP", operator)
    return "{% set ns = namespace(s='xxxxxxxx') %}" + steps


BIG = (
    "{% set big = ('a' * 10**7) %}{% for a in range(99999) %}{{ big.translate({97: 98})|length }}{% endfor %}"
)
ENDLESS = [
    "{% for a in range(99999) %}{% set x = range(99999)|sum %}{% endfor %}",
    "{{ (10 ** (10 ** 9 + messages|length))|string|length }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for a in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "{{ lipsum(n=10**9) }}",
    BIG,
]
"""Templates that run into the limit of CPU time, two seconds."""
GROWING = [
    "{{ 'x' * 10**9 }}",
    "{{ ['x'] * 10**9 }}",
    "{{ ('x' * 10**6) * 10**6 }}",
    growing("+"),
    growing("~"),
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ 'x'|center(1000000000) }}",
    "{{ 'x'|indent(1000000000, true) }}",
    "{{ ('x' * 1000000).replace('x', 'y' * 1000000) }}",
    "{{ 'aaaaaaaaaa'.translate({97: 'x' * 10**8}) }}",
    "{{ {'a': 1}|tojson(indent=1000000000) }}",
    "{{ 'x' * 17 * 2**20 }}",
]


@pytest.mark.parametrize("source", quick(ENDLESS, 1) + every(GROWING, 3))
def test_endless_and_growing_templates_are_refused(source):
    template = ChatTemplate(
        {"default": "{% if messages[0].harm %}" + source + "{% else %}fine{% endif %}"}, {}
    )
    with pytest.raises(InvalidRequest, match=r"of CPU time|limit|too much memory|unsafe|refuses|recursion"):
        template.render([{"role": "user", "harm": True}])
    assert template.render(ASKED) == "fine"


def test_a_template_ends_though_its_parent_blocks_the_signal():
    template = ChatTemplate({"default": ENDLESS[0]}, {})
    with blocked(signal.SIGXCPU), pytest.raises(InvalidRequest, match="of CPU time"):
        template.render(ASKED)


def test_a_process_that_was_ended_is_replaced(started):
    template = ChatTemplate({"default": "fine"}, {})
    assert template.render(ASKED) == "fine"
    child = started()
    child.kill()
    eventually(lambda: child.status() == psutil.STATUS_ZOMBIE)
    assert template.render(ASKED) == "fine"


def test_processes_end_with_the_template(started):
    template = ChatTemplate({"default": "fine"}, {})
    template.render(ASKED)
    child = started()
    del template
    gc.collect()
    assert not child.is_running()


def test_a_fork_has_a_process_of_its_own():
    template = ChatTemplate({"default": "fine"}, {})
    template.render(ASKED)
    if (child := os.fork()) == 0:
        os._exit(0 if template.render(ASKED) == "fine" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert template.render(ASKED) == "fine"


def test_threads_get_their_own_texts():
    template = ChatTemplate({"default": "{{ messages[0].content * 1000 }}"}, {})
    found: dict[str, str] = {}

    def render(text: str) -> None:
        for _ in range(20):
            found[text] = template.render([{"role": "user", "content": text}])

    threads = [threading.Thread(target=render, args=(text,)) for text in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {text: text * 1000 for text in "abcd"}


def test_messages_must_be_json():
    with pytest.raises(InvalidRequest, match="not JSON"):
        ChatTemplate({"default": "fine"}, {}).render([{"role": "user", "content": object()}])


def test_a_template_has_a_size(tmp_path):
    make_byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("x" * (MAX_TEMPLATE_CHARACTERS + 1))
    with pytest.raises(CheckpointError, match="limit"):
        TextTokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('\\ud800') }}", "{{ '\\ud800' }}", "{{ '\\ud800' | nothing }}"]
)
def test_surrogates_of_a_template_are_refused(source):
    with pytest.raises((InvalidRequest, CheckpointError)) as refused:
        ChatTemplate({"default": source}, {}).render(ASKED)
    assert refused.value.message.encode()


def test_a_long_error_of_a_template_is_cut():
    with pytest.raises(InvalidRequest) as refused:
        ChatTemplate({"default": "{{ raise_exception('x' * 10**7) }}"}, {}).render(ASKED)
    assert len(refused.value.message) < 2000
