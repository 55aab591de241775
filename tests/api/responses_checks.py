"""What every stream of the Responses API has to keep to, whatever is in it."""

from __future__ import annotations

import json
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
FINAL = ("response.completed", "response.incomplete", "response.failed")
DELTAS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


def stream_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream; fails unless each is its name's line and one line of data."""
    events = []
    blocks = text.split("\n\n")
    assert blocks.pop() == "", "the stream ends with a whole event"
    for block in blocks:
        name, data = block.splitlines()
        assert name.startswith("event: ")
        assert data.startswith("data: ")
        event = json.loads(data.removeprefix("data: "))
        assert event["type"] == name.removeprefix("event: ")
        events.append(event)
    return events


def check_stream(text: str) -> list[dict[str, Any]]:
    """The events of a whole stream, checked against the SDK's models and for their order."""
    events = stream_events(text)
    for event in events:
        _EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event["type"] for event in events if event["type"] in FINAL] == [events[-1]["type"]]
    assert {event["response"]["id"] for event in events if "response" in event} == {
        events[0]["response"]["id"]
    }
    inner = [event for event in events[2:-1] if event["type"] != "response.in_progress"]
    done: list[dict[str, Any]] = []
    while inner:
        item = _check_item(inner, len(done), whole=events[-1]["type"] != "response.failed")
        done.append(item)
    assert events[-1]["response"]["output"] == done
    assert len({item["id"] for item in done}) == len(done)
    return events


def _check_item(events: list[dict[str, Any]], place: int, *, whole: bool) -> dict[str, Any]:
    """Take the events of one item off the front, and give the item as it ended."""
    added = events.pop(0)
    assert added["type"] == "response.output_item.added"
    assert added["output_index"] == place
    item = added["item"]
    kind, id_ = item["type"], item["id"]
    assert item["status"] == "in_progress"
    assert id_.startswith({"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}[kind])

    def take(type_: str) -> dict[str, Any]:
        event = events.pop(0)
        assert event["type"] == type_
        assert (event["item_id"], event["output_index"]) == (id_, place)
        if kind != "function_call":
            assert event["content_index"] == 0
        return event

    if kind != "function_call":
        assert item["content"] == []
        assert take("response.content_part.added")["part"]["text"] == ""
    text, logprobs = "", []
    while events and events[0]["type"] == f"{DELTAS[kind]}.delta":
        delta = take(f"{DELTAS[kind]}.delta")
        text += delta["delta"]
        logprobs += delta.get("logprobs", [])
    if not events and not whole:
        return _as_it_stands(item, text, logprobs)
    end = take(f"{DELTAS[kind]}.done")
    if kind == "function_call":
        assert (end["arguments"], end["name"]) == (text, item["name"])
    else:
        part = take("response.content_part.done")["part"]
        assert end["text"] == part["text"] == text
        assert end.get("logprobs", []) == part.get("logprobs", []) == logprobs
    finished = events.pop(0)
    assert finished["type"] == "response.output_item.done"
    assert (finished["output_index"], finished["item"]["id"]) == (place, id_)
    result = finished["item"]
    assert result == {**_as_it_stands(item, text, logprobs), "status": result["status"]}
    return dict(result)


def _as_it_stands(item: dict[str, Any], text: str, logprobs: list[Any]) -> dict[str, Any]:
    if item["type"] == "function_call":
        return {**item, "arguments": text, "status": "incomplete"}
    part: dict[str, Any] = {"type": "reasoning_text", "text": text}
    if item["type"] == "message":
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {**item, "content": [part], "status": "incomplete"}


def check_response(body: Any) -> dict[str, Any]:
    """A whole response object: every field that OpenAI's type knows, or a reason why not."""
    parsed = Response.model_validate(body)
    # Of features that this server does not have.
    absent = {
        "access_programs",
        "conversation",
        "image",
        "input_transformations",
        "moderation",
        "prompt",
        "prompt_cache_diagnostics",
        "prompt_cache_options",
        "prompt_cache_retention",
        "tool_usage",
    }
    assert Response.model_fields.keys() - body.keys() == absent
    assert parsed.object == "response"
    return dict(body)
