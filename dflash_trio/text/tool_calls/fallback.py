"""Tools for chat templates that know none: described, called and answered in plain text.

What the model is told, as part of the leading system turn (made if there is none)::

    You can call these functions:
    <tools>
    {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}
    </tools>
    To call one, answer with its name and arguments as JSON:
    <tool_call>
    {"name": "...", "arguments": {...}}
    </tool_call>

It calls them in the Hermes form, in which its earlier calls are shown to it as well. Results stand
in user turns, since such templates know no other turn that would do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ...generation.request import Tool
from ..messages import SYSTEM_JOIN
from .hermes import CLOSE, OPEN

_INTRODUCTION = """\
You can call these functions:
<tools>
{tools}
</tools>
To call one, answer with its name and arguments as JSON:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


def messages_with_tools(
    messages: Sequence[Mapping[str, object]], tools: Sequence[Tool]
) -> list[dict[str, object]]:
    """The same conversation in turns of system, user and assistant alone.

    ``messages``: as ``text.messages.normalise`` returns them. Turns that were rewritten are joined
    with a neighbour of the same role, so that user and assistant alternate where they did before.
    Without tools nothing is described, but calls and results are still shown.
    """
    turns: list[dict[str, object]] = []
    rewritten = False
    for message in messages:
        turn, changed = _as_text(message)
        last = turns[-1] if turns else None
        if last is not None and last["role"] == turn["role"] and (changed or rewritten):
            last["content"] = _joined(str(last["content"]), str(turn["content"]))
            rewritten = True
        else:
            turns.append(turn)
            rewritten = changed
    if tools:
        listed = "\n".join(_json(_described(tool)) for tool in tools)
        text = _INTRODUCTION.format(tools=listed)
        if turns and turns[0]["role"] == "system":
            head = str(turns[0]["content"])
            turns[0]["content"] = SYSTEM_JOIN.join(filter(None, (head, text)))
        else:
            turns.insert(0, {"role": "system", "content": text})
    return turns


def _as_text(message: Mapping[str, object]) -> tuple[dict[str, object], bool]:
    """A turn without calls, and whether it had to be rewritten."""
    content = str(message.get("content", ""))
    if message.get("role") == "tool":
        text = f"<tool_response>\n{content}\n</tool_response>"
        return {"role": "user", "content": text}, True
    turn = dict(message)
    turn["content"] = content
    calls = turn.pop("tool_calls", None)
    if not isinstance(calls, Sequence) or not calls:
        return turn, False
    turn["content"] = _joined(content, *(f"{OPEN}\n{_call(call)}\n{CLOSE}" for call in calls))
    return turn, True


def _call(call: object) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    if not isinstance(function, Mapping):
        function = {}
    return _json({"name": function.get("name"), "arguments": function.get("arguments", {})})


def _described(tool: Tool) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    return {"type": "function", "function": function}


def _joined(*texts: str) -> str:
    return "\n".join(filter(None, texts))


def _json(value: object) -> str:
    """Keeps characters and the order of keys. A schema may be any mapping."""
    return json.dumps(value, ensure_ascii=False, default=dict)
