"""A template from a stranger's file cannot run code, nor hold a thread or the memory."""

from __future__ import annotations

import time

import pytest

from dflash_trio.text.chat_template import ChatTemplate, TemplateError, TemplateRefused

USER = [{"role": "user", "content": "hello"}]


def render(source: str, *, seconds: float = 10.0, most_characters: int = 1_000_000) -> str:
    template = ChatTemplate(
        source,
        bos_token="<s>",
        eos_token="</s>",
        label="m",
        seconds=seconds,
        most_characters=most_characters,
    )
    return template.render(USER, add_generation_prompt=False).text


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'].__mro__ }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ strftime_now.__globals__['x'] }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages.clear() }}",
        "{% include 'x' %}",
        "{{ lipsum(5) }}",
    ],
)
def test_python_is_out_of_reach(source: str) -> None:
    with pytest.raises(TemplateRefused):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * 'x' }}",
        "{{ [1] * 10**9 }}",
        "{{ 9**(9**9) }}",
        "{% set ns = namespace(n=3) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}"
        "{% endfor %}",
        "{% set ns = namespace(s='xx') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}"
        "{% endfor %}",
        "{% set ns = namespace(s='xx') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}"
        "{% endfor %}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(99) %}{% set ns.l = [ns.l, ns.l] %}"
        "{% endfor %}{{ ns.l }}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(99) %}{% set ns.l = [ns.l, ns.l] %}"
        "{% endfor %}{{ ns.l|tojson }}",
        "{% set ns = namespace(l=[1], m=[1]) %}{% for i in range(99) %}"
        "{% set ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}{% endfor %}{{ ns.l == ns.m }}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(99) %}"
        "{% set ns.l = ([ns.l] * 2)|batch(2)|list %}{% endfor %}{{ ns.l ~ '' }}",
        "{% set ns = namespace(d={}) %}{% for i in range(99) %}"
        "{% set ns.d = dict(a=ns.d, b=ns.d) %}{% endfor %}{{ ns.d }}",
        "{{ 'x'.ljust(10**9) }}",
        "{{ 'x'|center(10**9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%999999999d'|format(1) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 999999999) }}",
        "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
        "{{ range(100000)|join('y' * 100000) }}",
        "{{ range(100000)|map('string')|join('y' * 100000) }}",
        "{{ ('y' * 100000).join(range(100000)|map('string')) }}",
        "{{ ('y' * 100000).join(['x'] * 100000) }}",
        "{{ ('x\n' * 100000)|indent(100000) }}",
        "{{ 1.5|round(10**9) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set x %}{% for i in range(99999) %}{% for j in range(99999) %}text{% endfor %}"
        "{% endfor %}{% endset %}",
    ],
)
def test_what_would_grow_without_bound_is_refused_at_once(source: str) -> None:
    began = time.process_time()
    with pytest.raises(TemplateRefused) as refused:
        render(source, seconds=100)
    assert "too long" not in str(refused.value)  # it was not the deadline
    assert time.process_time() - began < 20


NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% BODY %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        NESTED.replace("{% BODY %}", ""),
        NESTED.replace("{% BODY %}", "{% if loop.last %}{% continue %}{% endif %}"),
        NESTED.replace("range(99999) %}{% B", "range(99999) if b < 0 %}{% B").replace(
            "{% BODY %}", ""
        ),
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(99) }}",
        "{%- for x in [[[]]] recursive %}{% for i in range(99999) %}{% for j in range(99999) %}"
        "{% endfor %}{% endfor %}{{ loop(x) }}{% endfor %}",
    ],
)
def test_rendering_ends_at_its_deadline(source: str) -> None:
    began = time.process_time()
    with pytest.raises(TemplateRefused, match="too long"):
        render(source, seconds=0.1)
    assert time.process_time() - began < 20


def test_constants_are_not_computed_while_compiling() -> None:
    ChatTemplate("{{ 'x' * 10**12 }}{{ 9**(9**9) }}", bos_token="", eos_token="", label="m")


def test_the_output_is_bounded() -> None:
    source = "{% for i in range(1000) %}{{ 'x' * 1000 }}{% endfor %}"
    assert len(render(source)) == 1_000_000
    with pytest.raises(TemplateRefused, match="too much text"):
        render(source, most_characters=999_999)


def test_loops_keep_their_conveniences() -> None:
    source = (
        "{% for x in range(5) if x != 3 %}{% if x == 4 %}{% break %}{% endif %}"
        "{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{{ loop.nextitem }} "
        "{% else %}none{% endfor %}"
        "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}{{ v }}{{ loop.revindex }}{% endfor %}"
        "{% for x in [] %}{% else %}empty{% endfor %}{% for x in nothing %}{% endfor %}"
        "{{ messages|map(attribute='role')|list|join('-') }}"
        "{{ ['a', 'B']|map('upper')|join }}{{ 1719999999|string }}{{ none|default(10**12, true) }}"
    )
    assert render(source) == "1/4,1 2/4,2 3/4,4 a12b21emptyuserAB17199999991000000000000"


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ x",
        "{{ x|nosuchfilter }}",
        "{% nosuchtag %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% for i in x %}" * 30 + "{% endfor %}" * 30,
    ],
)
def test_a_bad_template_is_an_error_that_names_the_model(source: str) -> None:
    with pytest.raises(TemplateError, match=r"\Amy model: bad chat template: ") as info:
        ChatTemplate(source, bos_token="", eos_token="", label="my model")
    assert "\n" not in str(info.value)
    assert len(str(info.value)) < 400


@pytest.mark.parametrize("message", ["two\nlines", "\ud83d", "x" * 100_000, "<|im_end|>\x1b[31m"])
def test_refusals_are_one_encodable_line(message: str) -> None:
    template = ChatTemplate(
        "{{ raise_exception(messages[0].content) }}",
        bos_token="",
        eos_token="",
        label="m",
        control_literals=["<|im_end|>"],
    )
    with pytest.raises(TemplateRefused) as info:
        template.render([{"role": "user", "content": message}], add_generation_prompt=True)
    text = str(info.value)
    text.encode()
    assert text.isprintable()
    assert len(text) <= 300
    assert ("<|im_end|>" in text) == ("<|im_end|>" in message)
