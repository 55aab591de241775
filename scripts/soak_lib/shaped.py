"""Clients that want something of their answer: calls, a form, log probabilities, several at once.

And those that count tokens, and those that come back to a response that was kept.
"""

from __future__ import annotations

import json
from typing import Any

from .asking import begin_stream, check_asked, served_by, stream_body
from .judge import Question, Violation, check_answer, check_json, check_refusal
from .streams import ResponsesStream, check_whole, ended_by, response_text
from .town import APIS, GREETINGS, Client
from .wire import Answer, Wire, connect

WITH_TEMPLATES = ("chat", "messages", "responses")
CITIES = ("Oslo", "Rome")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(CITIES)}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
ROOM_FOR_SHAPE = 80
"""Tokens that a call or an object of the schema takes at the most: bytes, on a scripted model."""


def _is_of_the_schema(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"city", "warm"}
        and value["city"] in CITIES
        and isinstance(value["warm"], bool)
    )


async def _whole(client: Client, question: Question, **fields: Any) -> Answer:
    async with connect(client.port) as wire:
        return await (await wire.request("POST", question.path, question.body(**fields))).rest()


async def _whole_or_refused(
    client: Client, question: Question, **fields: Any
) -> tuple[dict[str, Any], dict[str, str]] | str:
    """A good answer's body and headers, or how it was refused."""
    answer = await _whole(client, question, **fields)
    check_answer(answer, {200, 503}, api=question.api)
    if answer.status == 503:
        return check_refusal(answer, question.api)
    return check_json(answer), answer.headers


# -------------------------------------------------------------------------- what changes nothing


async def fields_without_effect(client: Client) -> str:
    """Fields that clients send and that must not change the text: it is compared as any other."""
    question = client.question()
    fields: dict[str, Any] = {"user": "u", "metadata": {"a": "b"}}
    if question.api == "messages":
        fields = {"metadata": {"user_id": "u"}, "thinking": {"type": "adaptive"}}
        fields |= {"output_config": {"effort": "high"}, "context_management": {"edits": []}}
    elif question.api == "responses":
        fields |= {"store": False, "reasoning": {"effort": "low", "summary": "auto"}}
        fields |= {"include": ["reasoning.encrypted_content"], "tools": [{"type": "web_search"}]}
    elif question.api == "chat":
        fields |= {"reasoning_effort": "high", "thinking_budget_tokens": 9, "store": True}
    answer = await _whole(client, question, **fields)
    return check_asked(client, answer, question, None)


# -------------------------------------------------------------------------------- several answers


async def several_answers(client: Client) -> str:
    """Two answers to one prompt: on a greedy model both are the one that is known."""
    api = client.chance.choice(("chat", "completions"))
    question = Question(client.chance.choice(GREETINGS), 6, ignore_eos=True, api=api)
    found = await _whole_or_refused(client, question, n=2)
    if isinstance(found, str):
        return found
    body, headers = found
    usage = body["usage"]
    if [choice["index"] for choice in body["choices"]] != [0, 1]:
        raise Violation(f"not two answers: {body['choices']}")
    if ended_by(usage) is None and usage["completion_tokens"] != 2 * question.max_tokens:
        raise Violation(f"{usage} for two answers of {question.max_tokens} tokens")
    for choice in body["choices"]:
        text = choice["text"] if api == "completions" else choice["message"]["content"]
        client.town.goldens.check(body["model"], question.golden, text, ended_by(usage))
    return served_by(client, body["model"], headers)


# ------------------------------------------------------------------------------ calls and forms


async def forced_call(client: Client) -> str:
    """A tool that has to be called: its arguments satisfy the schema, whatever the model likes."""
    question = Question(
        "What is warm?", ROOM_FOR_SHAPE, False, client.chance.choice(WITH_TEMPLATES)
    )
    tool: dict[str, Any] = {"name": "look", "parameters": SCHEMA}
    choice: Any = "required"
    match question.api:
        case "chat":
            tool = {"type": "function", "function": tool}
        case "responses":
            tool = {"type": "function", **tool}
        case "messages":
            tool, choice = {"name": "look", "input_schema": SCHEMA}, {"type": "any"}
    several = {} if question.api == "messages" else {"parallel_tool_calls": False}
    if question.api == "messages":
        choice["disable_parallel_tool_use"] = True
    found = await _whole_or_refused(client, question, tools=[tool], tool_choice=choice, **several)
    if isinstance(found, str):
        return found
    body, headers = found
    why = ended_by(body["usage"])
    if why is not None:
        return f"ended by {why}"
    match question.api:
        case "chat":
            (call,) = body["choices"][0]["message"]["tool_calls"]
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        case "messages":
            (call,) = body["content"]
            name, arguments = call["name"], call["input"]
        case _:
            (call,) = body["output"]
            name, arguments = call["name"], json.loads(call["arguments"])
    if name != "look" or not _is_of_the_schema(arguments):
        raise Violation(f"a call that was not asked for: {call}")
    key = ("a forced call", question.api)
    client.town.goldens.check(body["model"], key, json.dumps(arguments), None)
    return served_by(client, body["model"], headers)


async def forced_form(client: Client) -> str:
    """An answer that has to be an object of a schema."""
    api = client.chance.choice(APIS)
    question = Question("Say it as JSON.", ROOM_FOR_SHAPE, False, api)
    form: dict[str, Any] = {"type": "json_schema", "name": "place", "schema": SCHEMA}
    fields: dict[str, Any] = {
        "chat": {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "place", "schema": SCHEMA},
            }
        },
        "messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "responses": {"text": {"format": form}},
        "completions": {"guided_json": SCHEMA},
    }[api]
    async with connect(client.port) as wire:
        body = stream_body(question, True, **fields)
        response = await wire.request("POST", question.path, body)
        if await response.head() != 200:
            return check_refusal(await response.rest(), api)
        stream = begin_stream(response, question, with_usage=True)
        while data := await response.part():
            stream.feed(data)
    shaped = Question(f"as JSON, {api}", ROOM_FOR_SHAPE, False, api)
    stream.question = shaped  # compared with answers of this form alone
    model = stream.end(complete=response.ended, goldens=client.town.goldens)
    assert stream.usage is not None
    if ended_by(stream.usage) is None and not _is_of_the_schema(json.loads(stream.text)):
        raise Violation(f"not of the schema: {stream.text!r}")
    return served_by(client, model, response.headers)


async def log_probabilities(client: Client) -> str:
    """The tokens that they are of make up the text, and none of them is certain beyond 1."""
    api = client.chance.choice(("chat", "responses", "completions"))
    question = Question(client.chance.choice(GREETINGS), 6, ignore_eos=True, api=api)
    fields: dict[str, Any] = {"top_logprobs": 2}
    if api == "chat":
        fields["logprobs"] = True
    elif api == "completions":
        fields = {"logprobs": 2}
    answer = await _whole(client, question, **fields)
    how = check_asked(client, answer, question, None)  # the text is that without them
    if answer.status != 200:
        return how
    body = answer.json()
    if api == "completions":
        given = body["choices"][0]["logprobs"]
        if len({len(given[key]) for key in given}) != 1:
            raise Violation(f"lists of different lengths: {given}")
        pieces, values = [token.encode() for token in given["tokens"]], given["token_logprobs"]
        text = body["choices"][0]["text"]
    else:
        if api == "chat":
            entries = body["choices"][0]["logprobs"]["content"]
            text = body["choices"][0]["message"]["content"]
        else:
            entries = body["output"][0]["content"][0]["logprobs"]
            text = response_text(body)
        pieces, values = [bytes(entry["bytes"]) for entry in entries], []
        for entry in entries:
            values += [entry["logprob"], *(other["logprob"] for other in entry["top_logprobs"])]
    # A character that was cut into pieces, or at the limit, shows as U+FFFD on one side or both.
    joined = b"".join(pieces).decode("utf-8", "replace")
    if "\ufffd" not in joined + text and joined != text:
        raise Violation(f"log probabilities of {joined!r}, beside {text!r}")
    if any(value > 0 for value in values) or len(values) < 1:
        raise Violation(f"no log probabilities: {values}")
    return how


# --------------------------------------------------------------------------------------- counting


async def counting(client: Client) -> str:
    """Tokens of a body, on the route that says so: always the same number, whoever is busy."""
    model = client.chance.choice(client.setup.models)
    content = client.chance.choice(GREETINGS)
    path, body, key = client.chance.choice(
        (
            (
                "/v1/messages/count_tokens",
                {"messages": [{"role": "user", "content": content}]},
                "input_tokens",
            ),
            ("/v1/responses/input_tokens", {"input": content}, "input_tokens"),
            ("/tokenize", {"content": content}, "tokens"),
        )
    )
    named = client.chance.random() < 0.8
    raw = json.dumps({**body, "model": model.name if named else "nobody"}).encode()
    async with connect(client.port) as wire:
        answer = await (await wire.request("POST", path, raw)).rest()
    api = "messages" if "messages" in path else "chat"
    label = check_answer(answer, {200 if named else 404}, api=api)
    if not named:
        return label
    count = check_json(answer)[key]
    number = len(count) if isinstance(count, list) else int(count)
    if number < 1:
        raise Violation(f"{number} tokens for {content!r}")
    client.town.goldens.check(model.name, ("tokens", path, content), str(number), None)
    return label


# --------------------------------------------------------------------------------- kept responses


async def kept_response(client: Client) -> str:
    """Make one, read it, go on from it, look at what it was asked, forget it."""
    question = Question(client.chance.choice(GREETINGS), 6, ignore_eos=True, api="responses")
    async with connect(client.port) as wire:
        answer = await (await wire.request("POST", question.path, question.body(store=True))).rest()
        check_answer(answer, {200, 503})
        if answer.status == 503:
            return check_refusal(answer)
        model = check_whole(answer, question, client.town.goldens)
        response = answer.json()
        path = f"{question.path}/{response['id']}"
        if await _json(wire, "GET", path) != response:
            raise Violation(f"kept is something else than was answered: {response}")
        follow_up = {"previous_response_id": response["id"], "input": "Go on."}
        body = json.dumps({**question.fields(), **follow_up}).encode()
        answer = await (await wire.request("POST", question.path, body)).rest()
        check_answer(answer, {200, 503})
        how = f"carried on by {model[:1]}"
        if answer.status == 503:
            how = check_refusal(answer)
        else:
            _check_follow_up(client, answer, response)
        items = await _json(wire, "GET", f"{path}/input_items")
        if [item["type"] for item in items["data"]] != ["message"]:
            raise Violation(f"its input was one message: {items}")
        ended = await _json(wire, "POST", f"{path}/cancel")
        if ended != response:
            raise Violation(f"changed by being cancelled after its end: {ended}")
        deleted = await _json(wire, "DELETE", path)
        if not deleted["deleted"]:
            raise Violation(f"not deleted: {deleted}")
        method = client.chance.choice(("GET", "DELETE"))
        check_answer(await (await wire.request(method, path)).rest(), {404})
    return how


def _check_follow_up(client: Client, answer: Answer, first: dict[str, Any]) -> None:
    body = check_json(answer)
    if body["previous_response_id"] != first["id"]:
        raise Violation(f"carried on from another response: {body['previous_response_id']}")
    grown = body["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    if body["model"] == first["model"] and not grown:
        raise Violation(f"a conversation that did not grow: {body['usage']}, {first['usage']}")
    # The first answer is a part of what is asked, and may have been another model's.
    key = ("carried on", first["model"], first["usage"]["input_tokens"], response_text(first))
    client.town.goldens.check(body["model"], key, response_text(body), ended_by(body["usage"]))


async def _json(wire: Wire, method: str, path: str) -> Any:
    answer = await (await wire.request(method, path)).rest()
    check_answer(answer, {200}, method=method)
    return check_json(answer)


async def cancelled_response(client: Client) -> str:
    """A stream that somebody else ends by the response's id; it is told so, and says so."""
    question = Question(client.chance.choice(GREETINGS), 100, ignore_eos=True, api="responses")
    keep = client.chance.random() < 0.5
    after = client.chance.choice((0, 1, 5))
    async with connect(client.port) as wire:
        body = stream_body(question, store=keep)
        response = await wire.request("POST", question.path, body)
        if await response.head() != 200:
            return check_refusal(await response.rest())
        stream = begin_stream(response, question, with_usage=False)
        assert isinstance(stream, ResponsesStream)
        while (stream.id is None or stream.deltas < after) and (data := await response.part()):
            stream.feed(data)
        path = f"{question.path}/{stream.id}"
        async with connect(client.port) as other:
            answer = await (await other.request("POST", f"{path}/cancel")).rest()
            check_answer(answer, {200} if keep else {200, 404})
        while data := await response.part():
            stream.feed(data)
        stream.end(complete=response.ended, goldens=client.town.goldens)
        if answer.status == 200 and answer.json()["status"] not in (stream.status, "in_progress"):
            raise Violation(f"{answer.json()['status']} for one that ended as {stream.status}")
        if keep:
            async with connect(client.port) as other:
                kept = await _json(other, "DELETE", path)
                if not kept["deleted"]:
                    raise Violation(f"not deleted: {kept}")
    return str(stream.status)
