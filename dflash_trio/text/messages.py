"""Brings the messages of a request into the shape that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

SYSTEM_JOIN = "\n\n"
"""Between system texts that become one turn."""
PART_JOIN = "\n"
"""Between the text parts of one content."""
UNREADABLE_ARGUMENTS = "unreadable_arguments"
"""The only key of a call's arguments that were given as something else than an object."""


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
    * The arguments of a tool call are an object: templates go through its items, or write it with
      ``tojson``, which would quote a string twice. JSON text of an object becomes that object, and
      empty text an empty one. Anything else, such as JSON that a model broke off and a client sends
      back with each later request, becomes an object with the one key ``unreadable_arguments``,
      which holds what was given: the model sees what it wrote, and the conversation goes on.
    * A ``tool`` turn has the ``name`` of its tool, where it is not given and a call of the
      conversation has the turn's ``tool_call_id``. Of two calls with one id, the last before it
      counts.

    The given messages are not changed.

    Raises:
        TypeError: a content is none (see ``content_text``).
    """
    system: list[str] | None = None
    turns: list[dict[str, object]] = []
    names: dict[str, str] = {}
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
            names.update(_call_names(calls))
        call_id = turn.get("tool_call_id")
        if turn.get("role") == "tool" and isinstance(call_id, str) and call_id in names:
            turn.setdefault("name", names[call_id])
        turns.append(turn)
    if system is not None:
        turns.insert(0, {"role": "system", "content": SYSTEM_JOIN.join(system)})
    return turns


def _with_arguments(call: object) -> object:
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": {**function, "arguments": _object(function.get("arguments"))}}
    if "arguments" in call:
        return {**call, "arguments": _object(call["arguments"])}
    return dict(call)


def _object(arguments: object) -> Mapping[str, object]:
    """Arguments as templates can take them, whatever a client replays."""
    if isinstance(arguments, Mapping):
        return arguments
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return {UNREADABLE_ARGUMENTS: arguments}
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments, parse_constant=_refuse)
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {UNREADABLE_ARGUMENTS: arguments}


def _call_names(calls: Sequence[object]) -> dict[str, str]:
    """The tool of each call that has an id and a name, by its id."""
    names: dict[str, str] = {}
    for call in calls:
        if isinstance(call, Mapping):
            function = call.get("function", call)
            name = function.get("name") if isinstance(function, Mapping) else None
            if isinstance(call.get("id"), str) and isinstance(name, str):
                names[call["id"]] = name
    return names


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")
