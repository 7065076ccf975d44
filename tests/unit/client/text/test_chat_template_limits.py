"""Templates that do not end, or make much of little: each is refused as the conversation's fault, soon and in little memory."""

import threading

import pytest

from caesura.client.exceptions import CheckpointError, InvalidRequest
from caesura.client.text import template_limits
from caesura.client.text.chat_template import ChatTemplate
from caesura.client.text.tokenizer import MAX_TEMPLATE_CHARACTERS, TextTokenizer

ASK = [{"role": "user", "content": "hello"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def render(source: str, **variables) -> str:
    return ChatTemplate({"default": source}, {}).render(ASK, **variables)


@pytest.mark.parametrize(
    "source",
    [
        ENDLESS,
        ENDLESS.replace("{% endfor %}", "x{% endfor %}", 1),
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for a in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
        ENDLESS.replace("{% endfor %}", "{% set c = a + b %}{% endfor %}", 1),
    ],
)
def test_what_does_not_end_is_ended(source, monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.3)
    with pytest.raises(InvalidRequest, match=r"takes longer|makes more|recursion"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * 'x' }}",
        "{{ ['x'] * 10**9 }}",
        "{{ 10 ** 100000 }}",
        "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=1000000000) }}",
        "{{ '{:{w}}'.format(1, w='1000000000') }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ 'x'|center(1000000000) }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ 'x'|indent(1000000000, true) }}",
        "{{ ('x' * 1000000)|replace('x', 'y' * 1000000) }}",
        "{{ ('x' * 1000000).replace('x', 'y' * 1000000) }}",
        "{{ ('x' * 1000000).join(range(100000)|list) }}",
        "{{ [1]|batch(1000000000, 2)|list }}",
        "{{ {'a': 1}|tojson(indent=1000000000) }}",
        "{% for i in range(100000) %}{{ messages[0].content * 1000 }}{% endfor %}",
        "{% for i in range(100) %}{{ wide }}{% endfor %}",
    ],
)
def test_much_of_little_is_refused(source):
    with pytest.raises(InvalidRequest, match=r"limit|large|makes more|refuses"):
        render(source, wide="x" * 1_000_000)


def test_nothing_is_counted_from_one_rendering_to_the_next():
    template = ChatTemplate({"default": "{% for i in range(100) %}{{ ('ab' * 1000) ~ i }}{% endfor %}"}, {})
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(template.render(ASK))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found += [template.render(ASK) for _ in range(400)]
    assert set(found) == {"".join("ab" * 1000 + str(i) for i in range(100))}


def test_what_is_put_into_a_template_cannot_be_seen():
    source = (
        "{%- macro shown(m) -%}<{{ m.role ~ '|' ~ loop_index }}>{{ m.content }}{%- endmacro -%}"
        "{%- for m in messages -%}{%- set loop_index = loop.index -%}{{ shown(m) }}{% if loop.last %}!{% endif %}"
        "{%- else -%}none{%- endfor -%}{{ 2 ** 10 }}{{ 'a' + 'b' }}{{ '%03d' % 7 }}{{ [1] + [2] }}{{ 3 * 'x' }}"
    )
    assert render(source) == "<user|>hello!1024ab007[1, 2]xxx"


def test_a_template_has_a_size(tmp_path):
    from support.tokenizers import make_byte_level

    make_byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("x" * (MAX_TEMPLATE_CHARACTERS + 1))
    with pytest.raises(CheckpointError, match="limit"):
        TextTokenizer.from_folder(tmp_path)
