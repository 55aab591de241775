"""Brings the messages of a request into the shape that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

SYSTEM_JOIN = "\n\n"
"""Between system texts that become one turn."""
PART_JOIN = "\n"
"""Between the text parts of one content."""


def content_text(content: object) -> str:
    """The text of a message's content.

    None is no text. The parts of a list are joined by a line break, so that two documents given as
    two parts do not run into each other; parts without text count for nothing.

    Raises:
        TypeError: the content is neither None, a string nor a list of parts with texts.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise TypeError("content must be a string, null or a list of parts")
    texts = []
    for part in content:
        text = part
        if isinstance(part, Mapping):
            text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise TypeError("every part of a content must be text")
        if text:
            texts.append(text)
    return PART_JOIN.join(texts)


def normalise(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The same conversation in the plainest form that says the same.

    * ``developer`` turns are system turns. All system turns, wherever they stand, become one
      leading turn, in their order, joined by a blank line, empty ones left out: templates know one
      system turn, at the start. Text given as ``developer`` thus costs what it costs as ``system``.
    * Every content is a string; a missing one is empty.
    * Fields that are null, and empty ``tool_calls``, are left out: templates ask whether a field
      is there.
    * The arguments of a tool call are an object where they hold the JSON text of one, as templates
      write them with ``tojson`` and a string would be quoted twice.

    The given messages are not changed.

    Raises:
        TypeError: a content is none (see ``content_text``).
    """
    system: list[str] | None = None
    turns: list[dict[str, object]] = []
    for message in messages:
        text = content_text(message.get("content"))
        if message.get("role") in ("system", "developer"):
            system = system or []
            if text:
                system.append(text)
            continue
        turn = {key: value for key, value in message.items() if value is not None}
        turn["content"] = text
        calls = turn.pop("tool_calls", None)
        if isinstance(calls, Sequence) and calls:
            turn["tool_calls"] = [_with_arguments(call) for call in calls]
        turns.append(turn)
    if system is not None:
        turns.insert(0, {"role": "system", "content": SYSTEM_JOIN.join(system)})
    return turns


def _with_arguments(call: object) -> object:
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments, parse_constant=_refuse)
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, dict):
            arguments = parsed
    return {**call, "function": {**function, "arguments": arguments}}


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")
