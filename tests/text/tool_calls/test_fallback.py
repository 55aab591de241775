"""Templates that know no tools are given them as text, in turns that they know."""

from __future__ import annotations

from dflash_trio.generation.request import Tool
from dflash_trio.text.messages import normalise
from dflash_trio.text.tool_calls.fallback import messages_with_tools

from .reading import in_words, read

TOOLS = [Tool(name="weather", description="查询 <b>&'", parameters={"type": "object"})]


def call(name: str, arguments: str, id: str = "c") -> dict[str, object]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_tools_are_described_in_the_leading_system_turn() -> None:
    with_system = messages_with_tools(
        normalise([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]),
        TOOLS,
    )
    assert [turn["role"] for turn in with_system] == ["system", "user"]
    head = str(with_system[0]["content"])
    assert head.startswith("Be kind.\n\nYou can call")
    assert (
        '{"type": "function", "function": {"name": "weather", "description": "查询 <b>&\'", '
        '"parameters": {"type": "object"}}}' in head
    )
    without = messages_with_tools(normalise([{"role": "user", "content": "Hi"}]), TOOLS)
    assert [turn["role"] for turn in without] == ["system", "user"]
    assert str(without[0]["content"]).startswith("You can call")


def test_calls_and_results_are_shown_and_turns_alternate() -> None:
    conversation = normalise(
        [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": [call("weather", '{"a": "é"}')]},
            {"role": "tool", "tool_call_id": "c", "content": "42"},
            {"role": "tool", "tool_call_id": "d", "content": [{"type": "text", "text": "43"}]},
            {"role": "user", "content": "And?"},
            {"role": "assistant", "content": "Let me see.", "tool_calls": [call("weather", "")]},
            {"role": "assistant", "tool_calls": [call("clock", "{")]},
        ]
    )
    turns = messages_with_tools(conversation, [])
    assert turns == [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": '<tool_call>\n{"name": "weather", "arguments": {"a": "é"}}\n</tool_call>',
        },
        {
            "role": "user",
            "content": "<tool_response>\n42\n</tool_response>\n"
            "<tool_response>\n43\n</tool_response>\nAnd?",
        },
        {
            "role": "assistant",
            "content": "Let me see.\n"
            '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>\n'
            '<tool_call>\n{"name": "clock", "arguments": {"unreadable_arguments": "{"}}\n'
            "</tool_call>",
        },
    ]
    assert "tool_calls" in conversation[1]  # not changed


def test_a_shown_call_is_in_the_form_that_is_read() -> None:
    (turn,) = messages_with_tools(
        normalise([{"role": "assistant", "tool_calls": [call("weather", '{"a": 1}')]}]), []
    )
    assert in_words(read("hermes", str(turn["content"]))) == [("weather", '{"a": 1}')]


def test_a_conversation_without_tools_is_left_alone() -> None:
    conversation = normalise(
        [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "name": "Ann"}]
    )
    assert messages_with_tools(conversation, []) == conversation
