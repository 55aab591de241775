"""Every shape a client may write a conversation in reaches templates in one shape."""

from __future__ import annotations

import pytest

from dflash_trio.text.messages import content_text, normalise


def test_developer_is_system() -> None:
    as_developer = normalise(
        [{"role": "developer", "content": "s"}, {"role": "user", "content": "u"}]
    )
    as_system = normalise([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
    assert as_developer == as_system


def test_all_system_turns_become_one_at_the_start() -> None:
    assert normalise(
        [
            {"role": "system", "content": "a"},
            {"role": "user", "content": "u"},
            {"role": "developer", "content": [{"type": "text", "text": "b"}]},
            {"role": "system", "content": ""},
        ]
    ) == [{"role": "system", "content": "a\n\nb"}, {"role": "user", "content": "u"}]


@pytest.mark.parametrize("extra", [{"content": None}, {}, {"content": ""}, {"content": []}])
def test_a_call_without_content_has_empty_content(extra: dict[str, object]) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    given = {"role": "assistant", "tool_calls": [call], "name": None, **extra}
    (turn,) = normalise([given])
    assert turn == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
        ],
    }
    assert call["function"] == {"name": "f", "arguments": '{"a": "é"}'}  # not changed


@pytest.mark.parametrize("arguments", ["", "{", "[1]", '{"a": NaN}', "[" * 5000, "1" * 5000])
def test_arguments_that_are_no_object_stay_as_they_are(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    (turn,) = normalise([{"role": "assistant", "tool_calls": [call]}])
    assert turn["tool_calls"] == [call]


def test_empty_tool_calls_are_left_out() -> None:
    assert normalise([{"role": "assistant", "content": "x", "tool_calls": []}]) == [
        {"role": "assistant", "content": "x"}
    ]


def test_text_parts_are_joined_by_a_line_break() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, {"text": ""}]
    assert content_text(parts) == "a\nb"


@pytest.mark.parametrize("content", [1, {"text": "x"}, [{"type": "image_url"}], [1], b"x"])
def test_what_is_no_text_is_refused(content: object) -> None:
    with pytest.raises(TypeError):
        content_text(content)
