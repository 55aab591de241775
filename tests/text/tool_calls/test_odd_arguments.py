"""Arguments that are no JSON, or no object, reach the client as the model wrote them."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trio.generation.request import Tool
from dflash_trio.text.tool_calls.formats import FORMATS
from dflash_trio.text.tool_calls.pieces import CallArguments

from .reading import TOOLS, in_words, read

AROUND = {
    "hermes": ('<tool_call>\n{"name": "weather", "arguments": ', "}\n</tool_call>"),
    "qwen-xml": ('<tool_call>{"name": "weather", "arguments": ', "}</tool_call>"),
    "llama3-json": ('{"name": "weather", "parameters": ', "}"),
    "mistral": ('[TOOL_CALLS][{"name": "weather", "arguments": ', "}]"),
    "mistral [ARGS]": ("[TOOL_CALLS]weather[ARGS]", "[TOOL_CALLS]clock[ARGS]{}"),
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek 3.1": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "gpt-oss": ("<|channel|>commentary to=functions.weather<|message|>", "<|call|>"),
}
"""What stands before and behind the arguments."""


def calls_in(form: str, arguments: str, *cuts: int) -> list[str | tuple[str, str]]:
    before, behind = AROUND[form]
    text = before + arguments + behind
    at = [0, *sorted(cut % len(text) for cut in cuts), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(at)]
    return in_words(read(form.split()[0], *parts))


def called(form: str, arguments: str) -> list[str | tuple[str, str]]:
    second = [("clock", "{}")] if form == "mistral [ARGS]" else []
    return [("weather", arguments), *second]


@pytest.mark.parametrize("form", sorted(AROUND))
@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": True}',
        '{"a": [False, None, NaN, -Infinity, .5, 01, 0x1F]}',
        "{'a': 'x'}",
        "{'a}': '[{', 'b': 'it\\'s \"'}",
        "{a: it's, b: {c: <d>}}",
        '{"a": "x" "b": 1}',
        '{"a": "x",}',
        '{"a": 5" tall"}',
        '{"a": True, "b": "</tool_call>[TOOL_CALLS]<|call|>```"}',
        '{"a": (1, 2}',
        '{"a": [1}',
        '{"a": 1]}',
        '{"a": <tool_ca [TOOL_ ``}',
        "{}",
    ],
)
def test_an_object_is_given_as_it_was_written(form: str, arguments: str) -> None:
    whole = calls_in(form, arguments)
    assert whole == called(form, arguments)
    assert calls_in(form, arguments, *range(200)) == whole


@pytest.mark.parametrize("form", sorted(AROUND))
@pytest.mark.parametrize("arguments", ["[1,2]", '[{"city": "Paris"}, [True]]', "[]"])
def test_a_list_is_given_as_it_was_written(form: str, arguments: str) -> None:
    assert calls_in(form, arguments) == called(form, arguments)
    assert calls_in(form, arguments, *range(200)) == called(form, arguments)


@pytest.mark.parametrize("form", sorted(set(AROUND) - {"deepseek 3.1"}))
@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        *((same, same) for same in ("nonsense", "two words", "a, b", "5", "true", "nul", "nulls")),
        *((same, same) for same in ("'it}'", "f({a}, [1])", "(1, 2)", "Nothing")),
        ("null", "{}"),
        ("None", "{}"),
        ("", "{}"),
        ('""', "{}"),
    ],
)
def test_what_is_no_object_is_given_as_it_was_written_unless_it_is_nothing(
    form: str, arguments: str, given: str
) -> None:
    assert calls_in(form, arguments) == called(form, given)
    assert calls_in(form, arguments, *range(200)) == called(form, given)


@pytest.mark.parametrize("form", ["hermes", "qwen-xml", "llama3-json", "mistral"])
def test_keys_behind_odd_arguments_are_still_the_calls(form: str) -> None:
    for odd in ("nonsense", "[1]", "{'a': True}", "null"):
        before, behind = AROUND[form]
        text = f'{before}{odd} , "id": None{behind}\nDone.'
        given = "{}" if odd == "null" else odd
        assert in_words(read(form, *text)) == [("weather", given), "Done."]


@pytest.mark.parametrize("form", ["hermes", "llama3-json", "mistral"])
def test_odd_arguments_may_stand_before_the_name(form: str) -> None:
    key = "parameters" if form == "llama3-json" else "arguments"
    call = f'{{"{key}": {{\'a\': True}}, "name": "weather"}}'
    before = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]"}.get(form, "")
    behind = "</tool_call>" if form == "hermes" else ""
    assert in_words(read(form, *before, *call, *behind)) == [("weather", "{'a': True}")]
    # Of an unknown name, or of none, it is no call here, and nothing of the text is missing.
    for text in (call.replace("weather", "x"), call[:-20], call[:8] + "'<|python_tag|>"):
        if form == "llama3-json":
            assert in_words(read(form, *text)) == [text]


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"a": \'x}</tool_call>Sorry.',
            [("weather", '{"a": \'x}'), "Sorry."],
        ),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"a": 5"}}</tool_call>Sorry.',
            [("weather", '{"a": 5"}}'), "Sorry."],
        ),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"a": [\n<tool_call>{"name": "clock"}',
            [("weather", '{"a": [\n'), ("clock", "{}")],
        ),
        (
            "mistral",
            '[TOOL_CALLS]weather[ARGS]{"a": [1[TOOL_CALLS]clock[ARGS]{}',
            [("weather", '{"a": [1'), ("clock", "{}")],
        ),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": [1, 2}</tool_call>',
            [("weather", "[1, 2")],
        ),
        (
            "qwen-xml",
            '<tool_call>{"name": "weather", "arguments": [1, 2}</tool_call>',
            [("weather", "[1, 2")],
        ),
    ],
)
def test_what_never_balances_ends_at_the_next_marker(
    form: str, text: str, expected: list[object]
) -> None:
    assert in_words(read(form, text)) == expected
    assert in_words(read(form, *text)) == expected


@pytest.mark.parametrize("form", sorted(AROUND))
def test_odd_arguments_come_as_they_are_written(form: str) -> None:
    before, _ = AROUND[form]
    parser = FORMATS[form.split()[0]].new_parser(TOOLS)
    parser.push(before)
    came = ""
    written = "{'a': True, b: [NaN, 'c'"
    for at, character in enumerate(written):
        for piece in parser.push(character):
            came += piece.text if isinstance(piece, CallArguments) else ""
        # Only what may begin a marker waits for the character behind it.
        waits = character == "[" and form.startswith("mistral")
        assert came == written[: at + 1 - waits]


_ODD = st.recursive(
    st.sampled_from(
        [
            *(
                "True",
                "NaN",
                "None",
                "nonsense",
                "-",
                "1",
                '"a"',
                '"}]\\""',
                '"</tool_call>"',
                "<b>",
            ),
            *("'c'", "'}])'", "'it\\'s'", "'\"'", "x'y", "é", '""', "''", "[TOOL_", "`", "<|"),
        ]
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda each: f"[{', '.join(each)}]"),
        st.lists(inner, max_size=3).map(lambda each: f"({','.join(each)})"),
        st.lists(inner, max_size=3).map(
            lambda each: "{" + ", ".join(f"'k{n}': {one}" for n, one in enumerate(each)) + "}"
        ),
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("form", sorted(AROUND))
@given(odd=_ODD, cuts=st.lists(st.integers(0, 400), max_size=8))
def test_whatever_balances_is_given_as_it_was_written(form: str, odd: str, cuts: list[int]) -> None:
    # In doubtful quotes a marker counts, so the one string with a marker goes where none is.
    arguments = '{"k": ' + (odd if "'" not in odd else odd.replace("</tool_call>", "")) + "}"
    assert calls_in(form, arguments, *cuts) == called(form, arguments)


@given(
    junk=st.text(st.sampled_from("{[()]'\"\\:, abTrue1<`\n"), max_size=30),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_nothing_of_what_never_balances_is_lost_or_doubled(junk: str, cuts: list[int]) -> None:
    text = f'<tool_call>{{"name": "weather", "arguments": {{{junk}</tool_call>'
    at = [0, *sorted(cut % len(text) for cut in cuts), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(at)]
    (call,) = in_words(read("hermes", *parts))
    assert call[0] == "weather"
    # A marker in a string that was never closed is the string's, and line breaks there are escaped.
    written = call[1].removesuffix("</tool_call>").replace("\\n", "\n")
    assert written == "{" + junk.replace("\\n", "\n")


def test_closing_what_was_left_open_takes_time_in_proportion_to_the_text() -> None:
    def seconds(repeats: int) -> float:
        best = 9.0
        for odd in ("[" * repeats + "}" * repeats, "(" * repeats + "]" * repeats, "({" * repeats):
            text = f'<tool_call>{{"name": "f", "arguments": {odd}</tool_call>'
            begun = time.thread_time()
            read("hermes", *(text[at : at + 16] for at in range(0, len(text), 16)))
            best = min(best, time.thread_time() - begun)
        return best

    small, large = seconds(2_000), seconds(16_000)
    assert large < 0.05 + small * 8 * 4


@pytest.mark.parametrize(
    ("form", "code", "expected"),
    [
        ("gemma", 'print(weather(city="Paris"))', [("weather", '{"city": "Paris"}')]),
        (
            "gemma",
            "print( clock( ) )\nprint(weather(1))",
            [("clock", "{}"), ("weather", '{"city": 1}')],
        ),
        ("gemma", "print(unknown(a=1))", [("unknown", '{"a": 1}')]),
        ("gemma", "print(str(weather('x')))", [("weather", '{"city": "x"}')]),
        ("gemma", "print(weather('x'), clock())", [("weather", '{"city": "x"}'), ("clock", "{}")]),
        ("gemma", "unknown(a=1, b=c)", [("unknown", '{"a": 1, "b": "c"}')]),
        ("gemma", "unknown()", [("unknown", "{}")]),
        (
            "pythonic",
            "print(weather('x')), clock()",
            [("weather", '{"city": "x"}'), ("clock", "{}")],
        ),
    ],
)
def test_what_is_wrapped_around_a_call_in_python_is_no_call(
    form: str, code: str, expected: list[object]
) -> None:
    text = f"```tool_code\n{code}\n```"
    if form != "gemma":
        form, text = "llama-pythonic", f"<|python_start|>[{code}]<|python_end|>"
    assert in_words(read(form, text)) == expected
    assert in_words(read(form, *text)) == expected


@pytest.mark.parametrize("code", ['print("hi")', "print(x)", 'print(f"{weather(1)}")', "print()"])
def test_printing_something_else_is_text(code: str) -> None:
    text = f"```tool_code\n{code}\n```"
    assert in_words(read("gemma", *text)) == [text]
    assert in_words(read("gemma", f"```tool_code\nclock()\n{code}\n```")) == [
        ("clock", "{}"),
        f"{code}\n```",
    ]


def test_a_tool_may_be_called_print() -> None:
    text = "```tool_code\nprint(weather('x'))\n```"
    tools = (Tool("print", parameters={"properties": {"what": {}}}), *TOOLS)
    assert in_words(read("gemma", text, tools=tools))[0] == ("print", '{"what": "weather"')


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ("", "{}"),
        ("\n", "{}"),
        ("\n<parameter=city>\nParis\n</parameter>\n", '{"city": "Paris"}'),
        ("\n</function>\n", "{}"),
    ],
)
def test_in_qwens_xml_the_end_of_the_call_ends_its_function(inside: str, arguments: str) -> None:
    text = f"<tool_call>\n<function=weather>{inside}</tool_call>\nDone."
    assert in_words(read("qwen-xml", text)) == [("weather", arguments), "Done."]
    assert in_words(read("qwen-xml", *text)) == [("weather", arguments), "Done."]
    twice = text.removesuffix("Done.") * 2
    assert in_words(read("qwen-xml", *twice)) == [("weather", arguments)] * 2
