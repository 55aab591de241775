"""For any text whatever: no parser raises, none depends on how its text was cut, none is slow."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trio.text.tool_calls.formats import FORMATS
from dflash_trio.text.tool_calls.pieces import Piece, Text

from .reading import TOOLS, in_words, joined, read
from .test_parsers import ONE_CALL, OTHER_FORMS

_PARTS = sorted(
    {"\n", " ", "{", "}", "[", "]", "(", ")", '"', "'", "\\", "\\u12", ",", ":", ";", "=", "<", ">"}
    | {"```", "```json", "```tool_code", "weather", "clock", "x", "é", "\ud7ff", "1", "-", "True"}
    | {
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "</function>",
        "<parameter=city>",
        "<parameter=",
    }
    | {"</parameter>", "<|python_tag|>", "<|python_start|>", "<|python_end|>", "[TOOL_CALLS]"}
    | {"[ARGS]", "[CALL_ID]", '"name"', '"arguments"', '"parameters"', '"type"', "function"}
    | {"<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"}
    | {
        "<｜tool▁call▁end｜>",
        "<|channel|>",
        "<|message|>",
        "<|start|>",
        "<|constrain|>",
        "<|call|>",
    }
    | {"commentary to=functions.weather", "assistant", '"weather"', '{"name": "weather", '}
)


def _texts(form: str) -> st.SearchStrategy[str]:
    examples = [text for each, text in [*ONE_CALL.items(), *OTHER_FORMS] if each == form]
    pieces = st.sampled_from(examples).flatmap(
        lambda text: st.tuples(st.integers(0, len(text)), st.integers(0, len(text))).map(
            lambda ends: text[min(ends) : max(ends)]
        )
    )
    part = st.one_of(
        st.sampled_from(_PARTS), st.sampled_from(examples), pieces, st.text(max_size=5)
    )
    return st.lists(part, max_size=12).map("".join)


@pytest.mark.parametrize("form", sorted(FORMATS))
@given(data=st.data())
def test_how_a_text_is_cut_changes_nothing(form: str, data: st.DataObject) -> None:
    text = data.draw(_texts(form))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(form, text)
    in_words(whole)
    assert read(form, *parts) == whole
    assert read(form, *text) == whole


@pytest.mark.parametrize("form", sorted(FORMATS))
@given(text=st.text(alphabet=st.characters(exclude_characters="<[{`")))
def test_text_that_begins_no_marker_passes_unchanged(form: str, text: str) -> None:
    parser = FORMATS[form].new_parser(TOOLS)
    pieces: list[Piece] = [*parser.push(text), *parser.finish()]
    assert joined(pieces) == ([Text(text)] if text else [])


@pytest.mark.parametrize("form", sorted(FORMATS))
@pytest.mark.parametrize(
    "unit",
    [
        *("<", "{", "[", "`", " ", "\n", "<tool_call>", "<tool_call>{", '{"name": ', "[weather("),
        *('{"type": "', "<|channel|>", "[TOOL_CALLS]a", "<function=a", "<｜tool▁calls▁begin｜>\n"),
        *("```tool_code\n", "\n{", "\n[", '<tool_call>{"name": "f", "arguments": {"a": ['),
        *(
            "<function=weather><parameter=city>\n",
            "[weather(city=[",
            '<tool_call>{"a":',
            "<|start|>",
        ),
        *('<tool_call>{"name": "f", "arguments": {"a": [({', "```tool_code\nprint(", "print("),
        *('{"name": "weather", "parameters": [, ', "[TOOL_CALLS]f[ARGS]{'[TOOL_"),
        '<tool_call>{"name": "f", "arguments": ,</tool_cal',
    ],
)
def test_reading_takes_time_in_proportion_to_the_text(form: str, unit: str) -> None:
    def seconds(repeats: int) -> float:
        text = unit * (repeats // len(unit))
        best = 9.0
        for _ in range(2):
            begun = time.thread_time()
            read(form, *(text[at : at + 16] for at in range(0, len(text), 16)))
            best = min(best, time.thread_time() - begun)
        return best

    small, large = seconds(4_000), seconds(32_000)
    assert large < 0.05 + small * 8 * 4
