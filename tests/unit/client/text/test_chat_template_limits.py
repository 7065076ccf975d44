"""Templates that do not end, or make much of little."""

import gc
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from support.tokenizers import make_byte_level
from support.waiting import eventually

from caesura.client.exceptions import CheckpointError, InvalidRequest
from caesura.client.text import chat_template
from caesura.client.text.chat_template import ChatTemplate
from caesura.client.text.tokenizer import MAX_TEMPLATE_CHARACTERS, TextTokenizer

ASK = [{"role": "user", "content": "hello"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
SLOW = "{% for a in range(99999) %}{% set x = range(99999)|sum %}{% endfor %}"


@pytest.fixture
def started() -> Callable[[], psutil.Process | None]:
    before = psutil.Process().children()
    return lambda: next((each for each in psutil.Process().children() if each not in before), None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        ENDLESS,
        SLOW,
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for a in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
        "{{ lipsum(n=10**9) }}",
        (
            "{% set big = ('a' * 10**7) %}{% for a in range(99999) %}{{ big.translate({97: 98})|length }}{% "
            "endfor %}"
        ),
        "{{ (10 ** (10 ** 9 + messages|length))|string|length }}",
        "{% for a in range(99999) %}{{ ('x' * (10**7 + a))|replace('x', 'y')|length }}{% endfor %}",
    ],
)
def test_endless_processes_are_ended(source, monkeypatch):
    monkeypatch.setattr(chat_template, "CPU_S", 1)
    template = ChatTemplate(
        {"default": "{% if messages[0].harm %}" + source + "{% else %}fine{% endif %}"}, {}
    )
    with pytest.raises(InvalidRequest, match=r"more than 1 s of CPU time|too much memory|recursion"):
        template.render([{"role": "user", "harm": True}])
    assert template.render(ASK) == "fine"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**9 }}",
        "{{ ['x'] * 10**9 }}",
        "{{ ('x' * 10**6) * 10**6 }}",
        (
            "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% "
            "endfor %}"
        ),
        (
            "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% "
            "endfor %}"
        ),
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ 'x'|center(1000000000) }}",
        "{{ 'x'|indent(1000000000, true) }}",
        "{{ ('x' * 1000000).replace('x', 'y' * 1000000) }}",
        "{{ 'aaaaaaaaaa'.translate({97: 'x' * 10**8}) }}",
        "{{ {'a': 1}|tojson(indent=1000000000) }}",
        "{{ 'x' * 17 * 2**20 }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_much_of_little_is_refused(source):
    template = ChatTemplate(
        {"default": "{% if messages[0].harm %}" + source + "{% else %}fine{% endif %}"}, {}
    )
    with pytest.raises(InvalidRequest, match=r"limit|too much memory|unsafe|refuses"):
        template.render([{"role": "user", "harm": True}])
    assert template.render(ASK) == "fine"


def test_a_rendering_that_goes_on_holds_nobody_up(monkeypatch, started):
    monkeypatch.setattr(chat_template, "CPU_S", 3600)
    template = ChatTemplate({"default": "{% if messages[0].harm %}" + SLOW + "{% endif %}fine"}, {})
    with ThreadPoolExecutor(1) as thread:
        harmful = thread.submit(template.render, [{"role": "user", "harm": True}])
        busy = eventually(started)
        eventually(lambda: busy.cpu_times().user > 0.5)
        assert [template.render(ASK) for _ in range(3)] == ["fine"] * 3
        assert not harmful.done()
        busy.send_signal(signal.SIGXCPU)  # as the kernel does when the time is over
        with pytest.raises(InvalidRequest, match="CPU time"):
            harmful.result()


def test_a_process_that_was_ended_is_replaced(started):
    template = ChatTemplate({"default": "fine"}, {})
    assert template.render(ASK) == "fine"
    child = started()
    child.kill()
    eventually(lambda: child.status() == psutil.STATUS_ZOMBIE)
    assert template.render(ASK) == "fine"


def test_processes_end_with_the_template(started):
    template = ChatTemplate({"default": "fine"}, {})
    template.render(ASK)
    child = started()
    del template
    gc.collect()
    assert not child.is_running()


def test_a_fork_has_a_process_of_its_own():
    template = ChatTemplate({"default": "fine"}, {})
    template.render(ASK)
    if (child := os.fork()) == 0:
        os._exit(0 if template.render(ASK) == "fine" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert template.render(ASK) == "fine"


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
def test_surrogates_of_a_template_are_refused_in_words_that_can_be_encoded(source):
    with pytest.raises((InvalidRequest, CheckpointError)) as refused:
        ChatTemplate({"default": source}, {}).render(ASK)
    assert refused.value.message.encode()


def test_a_long_error_of_a_template_is_cut():
    with pytest.raises(InvalidRequest) as refused:
        ChatTemplate({"default": "{{ raise_exception('x' * 10**7) }}"}, {}).render(ASK)
    assert len(refused.value.message) < 2000
