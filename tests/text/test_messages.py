"""Every shape a client may write a conversation in reaches templates in one shape."""

from __future__ import annotations

import pytest

from dflash_trio.text.messages import UNREADABLE_ARGUMENTS, content_text, normalise


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


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("", {}),
        (" \n", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        *((text, {UNREADABLE_ARGUMENTS: text}) for text in ("{", "[1]", '{"a": NaN}', "[" * 5000)),
        ("1" * 5000, {UNREADABLE_ARGUMENTS: "1" * 5000}),
        ("null", {UNREADABLE_ARGUMENTS: "null"}),
        ([1], {UNREADABLE_ARGUMENTS: [1]}),
    ],
)
def test_the_arguments_of_a_call_are_an_object_whatever_a_client_replays(
    arguments: object, meant: object
) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    (turn,) = normalise([{"role": "assistant", "tool_calls": [call]}])
    assert turn["tool_calls"] == [{"function": {"name": "f", "arguments": meant}}]
    (flat,) = normalise([{"role": "assistant", "tool_calls": [call["function"]]}])
    assert flat["tool_calls"] == [{"name": "f", "arguments": meant}]


def test_a_call_that_has_no_arguments_has_an_empty_object() -> None:
    (turn,) = normalise([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}])
    assert turn["tool_calls"] == [{"function": {"name": "f", "arguments": {}}}]


def test_a_tool_turn_has_the_name_of_the_tool_that_was_called() -> None:
    def called(name: str) -> dict[str, object]:
        return {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": name}}]}

    turns = normalise(
        [
            called("f"),
            {"role": "tool", "tool_call_id": "c", "content": "1"},
            called("g"),
            {"role": "tool", "tool_call_id": "c", "content": "2", "name": None},
            {"role": "tool", "tool_call_id": "c", "content": "3", "name": "own"},
            {"role": "tool", "tool_call_id": "unknown", "content": "4"},
            {"role": "tool", "content": "5"},
        ]
    )
    names = [turn.get("name") for turn in turns if turn["role"] == "tool"]
    assert names == ["f", "g", "own", None, None]


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
