"""What each family of models writes is read as the calls it means."""

from __future__ import annotations

import json

import pytest

from dflash_trio.generation.request import Tool
from dflash_trio.text.tool_calls.formats import FORMATS
from dflash_trio.text.tool_calls.pieces import CallArguments, CallBegun, CallEnded, Text

from .reading import TOOLS, in_words, read

PARIS = '{"city": "Paris"}'
DS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>")
DS_CALL, DS_END, DS_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"

ONE_CALL = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "qwen-xml": "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "</function>\n</tool_call>",
    "llama3-json": '{"name": "weather", "parameters": {"city": "Paris"}}',
    "llama-pythonic": '[weather(city="Paris")]',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}]',
    "deepseek": f"{DS[0]}{DS_CALL}function{DS_SEP}weather\n```json\n{PARIS}\n```{DS_END}{DS[1]}",
    "gemma": '```tool_code\nweather(city="Paris")\n```',
    "gpt-oss": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    f"{PARIS}<|call|>",
}
OTHER_FORMS = [
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{PARIS}"),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]abc123[ARGS]{PARIS}"),
    ("mistral", f"[TOOL_CALLS]weather{PARIS}"),
    ("mistral", '[TOOL_CALLS] [{"arguments": {"city": "Paris"}, "name": "weather", "id": "x"}]'),
    ("deepseek", f"{DS[0]}{DS_CALL}weather{DS_SEP}{PARIS}{DS_END}{DS[1]}"),
    (
        "llama3-json",
        f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {PARIS}}}',
    ),
    ("llama-pythonic", "<|python_start|>[weather(city='Paris')]<|python_end|>"),
    ("llama-pythonic", "[weather('Paris')]"),
    ("qwen-xml", "<function=weather><parameter=city>Paris</parameter></function>"),
    ("qwen-xml", f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'),
    ("hermes", f'<tool_call>{{"arguments": {PARIS}, "name": "weather"}}</tool_call>'),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
    ),
    ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}}}\n</tool_call>'),
    ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}\n</tool_call>'),
    (
        "gpt-oss",
        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>" + PARIS,
    ),
]


def test_every_format_has_an_example() -> None:
    assert set(ONE_CALL) == set(FORMATS)


@pytest.mark.parametrize(("form", "text"), [*ONE_CALL.items(), *OTHER_FORMS])
def test_a_call_is_read_whatever_form_the_family_writes(form: str, text: str) -> None:
    assert in_words(read(form, text)) == [("weather", PARIS)]
    assert in_words(read(form, *text)) == [("weather", PARIS)]


@pytest.mark.parametrize(("form", "text"), [*ONE_CALL.items(), *OTHER_FORMS])
def test_text_around_a_call_is_text_and_white_space_beside_it_is_dropped(
    form: str, text: str
) -> None:
    assert in_words(read(form, f"  Let me\n see.\n\n{text}\n\nDone. \n")) == [
        "  Let me\n see.",
        ("weather", PARIS),
        "Done. \n",
    ]


@pytest.mark.parametrize(("form", "text"), [*ONE_CALL.items(), *OTHER_FORMS])
def test_a_second_call_may_follow(form: str, text: str) -> None:
    assert in_words(read(form, f"{text}\n{text}\n")) == [("weather", PARIS)] * 2


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (
            "llama3-json",
            '{"name": "weather", "parameters": {}}; {"name": "clock", "parameters": {}}',
        ),
        ("llama-pythonic", "[weather(), clock()]"),
        ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {}}, {"name": "clock"}]'),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": null}\n{"name": "clock"}</tool_call>',
        ),
        ("gemma", "```tool_code\nweather()\nclock()\n```"),
        ("qwen-xml", "<function=weather>\n</function><function=clock></function>"),
        (
            "deepseek",
            f"{DS[0]}{DS_CALL}weather{DS_SEP}{{}}{DS_END}{DS_CALL}clock{DS_SEP}{{}}{DS_END}",
        ),
    ],
)
def test_several_calls_are_told_apart_and_have_objects_for_arguments(form: str, text: str) -> None:
    assert in_words(read(form, text)) == [("weather", "{}"), ("clock", "{}")]


@pytest.mark.parametrize("form", sorted(set(FORMATS) - {"llama3-json", "llama-pythonic"}))
def test_where_a_marker_tells_an_unknown_name_is_a_call_too(form: str) -> None:
    text = ONE_CALL[form].replace("weather", "nothing.known")
    assert in_words(read(form, text)) == [("nothing.known", PARIS)]


@pytest.mark.parametrize("form", ["llama3-json", "llama-pythonic"])
def test_where_no_marker_tells_an_unknown_name_is_text(form: str) -> None:
    text = ONE_CALL[form].replace("weather", "unknown")
    assert read(form, text) == [Text(text)]
    in_a_line = f"I say {ONE_CALL[form]}"
    assert read(form, in_a_line) == [Text(in_a_line)]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "a <tool_call> b <tool_cal"),
        ("hermes", '<tool_call>\n{"x": 1}\n</tool_call>'),
        ("hermes", "<<tool_call>{}"),
        ("qwen-xml", "<function= <function>"),
        ("llama3-json", '{"name": "Anna", "parameters": {}}'),
        ("llama3-json", '{"name": "weather", "age": 5}'),
        ("llama3-json", "<|python_tag|>print(1)"),
        ("llama-pythonic", "[weather](http://x) [1, 2]\n[ ]"),
        ("mistral", "[TOOL_CALLS] none [TOOL"),
        ("deepseek", "<｜tool▁calls▁begin｜>?"),
        ("gemma", "```python\nf(1)\n```"),
        ("gpt-oss", "<|channel|>final<|message|> says <|end|>"),
    ],
)
def test_what_only_begins_like_a_call_is_given_out_as_it_is(form: str, text: str) -> None:
    assert read(form, *text) == [Text(text)]


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_an_answer_without_calls_is_not_changed(form: str) -> None:
    text = "\n  <b>Hi</b> {x: [1]} `code`\n\n```python\nf()\n``` \n "
    assert read(form, *text) == [Text(text)]


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_call_that_breaks_off_has_the_arguments_that_came(form: str) -> None:
    text = ONE_CALL[form]
    cut = text[: text.index("Paris") + 3]
    assert in_words(read(form, *cut)) == [("weather", '{"city": "Par')]


@pytest.mark.parametrize("form", sorted(set(FORMATS) - {"llama3-json"}))
def test_name_and_arguments_come_as_soon_as_they_are_known(form: str) -> None:
    text = ONE_CALL[form]
    parser = FORMATS[form].new_parser(TOOLS)
    seen: dict[int, object] = {}
    for at, character in enumerate(text):
        for piece in parser.push(character):
            seen[at] = piece
    name_ends = text.index("weather") + len("weather")
    begun = next(at for at, piece in seen.items() if isinstance(piece, CallBegun))
    assert begun <= name_ends + len(" <|constrain|>json<|message|>")
    letters = range(text.index("Paris"), text.index("Paris") + 5)
    assert [seen[at] for at in letters] == [CallArguments(c) for c in "Paris"]
    assert CallEnded() in seen.values() or CallEnded() in parser.finish()


def test_a_string_of_qwens_xml_comes_letter_by_letter() -> None:
    parser = FORMATS["qwen-xml"].new_parser(TOOLS)
    parser.push("<function=weather><parameter=city>\n")
    assert parser.push("a") == [CallArguments("a")]
    assert parser.push('"') == [CallArguments('\\"')]
    assert parser.push("\n") == []
    assert parser.push("</par") == []
    assert parser.push("x") == [CallArguments("\\n</parx")]


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("city", "5", "5"),
        ("city", "\n two\nlines \n", "\n two\nlines \n"),
        ("city", "a </parameter <b>", "a </parameter <b>"),
        ("days", "5", 5),
        ("days", "many", "many"),
        ("hourly", "True", True),
        ("hourly", " false ", False),
        ("where", "[1, 2.5]", [1, 2.5]),
        ("where", "[1, ", "[1, "),
        ("unknown", "text", "text"),
        ("unknown", '{"a": null}', {"a": None}),
        ("unknown", "NaN", "NaN"),
    ],
)
def test_values_of_qwens_xml_mean_what_the_schema_says(key: str, value: str, meant: object) -> None:
    text = f"<function=weather><parameter={key}>\n{value}\n</parameter></function>"
    ((name, arguments),) = in_words(read("qwen-xml", *text))
    assert name == "weather"
    assert json.loads(arguments) == {key: meant}


@pytest.mark.parametrize(
    ("python", "meant"),
    [
        ("True", True),
        ("None", None),
        ("-1.5e3", -1500.0),
        ("1_000", 1000),
        (".5", 0.5),
        ("0x10", 16),
        ("'it\\'s \\x41\\u00e9\\n\\101'", "it's Aé\nA"),
        ("'\\ud83d\\ude00'", "😀"),
        ('"""a "b" c"""', 'a "b" c'),
        ("r'a\\b'", "a\\b"),
        ("''", ""),
        ("[1, 'a', (2,), [], {}]", [1, "a", [2], [], {}]),
        ("{'a': {'b': [None]}, 2: 3,}", {"a": {"b": [None]}, "2": 3}),
        ("word", "word"),
        ('"ü\n"', "ü\n"),
    ],
)
def test_python_literals_are_given_out_as_json(python: str, meant: object) -> None:
    text = f"[weather(days = {python} , city='x')]"
    ((_, arguments),) = in_words(read("llama-pythonic", *text))
    assert json.loads(arguments) == {"days": meant, "city": "x"}


@pytest.mark.parametrize("python", ["f(1)", "[1 2]", "{1}", "1 + 2", "[x for x in y]", "*a", "1)("])
def test_python_that_is_no_literal_is_never_run_and_ends_the_call(python: str) -> None:
    ((name, arguments), *_) = in_words(read("llama-pythonic", f"[weather(days={python})]"))
    assert name == "weather"
    assert arguments.startswith('{"days": ')


def test_line_breaks_in_a_json_string_are_escaped() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "a\nb"}}</tool_call>'
    assert in_words(read("hermes", text)) == [("weather", '{"city": "a\\nb"}')]


def test_a_call_ends_where_its_json_cannot_go_on() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"a": {"b": 1}\n</tool_call>Sorry.'
    assert in_words(read("hermes", text)) == [("weather", '{"a": {"b": 1}\n'), "Sorry."]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'),
        (
            "qwen-xml",
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            "deepseek",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
            '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ),
        ("gemma", "```tool_code\nf(a=1)\n```"),
    ],
)
def test_a_call_that_is_cut_anywhere_leaves_no_half_marker_as_text(name: str, call: str) -> None:
    for cut in range(1, len(call)):
        parser = FORMATS[name].new_parser((Tool("f"),))
        pieces = [*parser.push(call[:cut]), *parser.finish()]
        if any(isinstance(piece, CallBegun) for piece in pieces):
            assert not [piece for piece in pieces if isinstance(piece, Text)], call[:cut]
