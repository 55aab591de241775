"""A right body for each POST route, each time another one: what mutations start from."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from .hostile import GRAMMARS, NUMBERS, REGEXES, SCHEMAS, any_text, any_value

Body = dict[str, Any]

MODEL = "fuzzed"
"""The name of the model under test; also of routes that tell models apart."""

WORDS = ("hi", "what is new?", "é", "", "a\nb", "<|im_end|>", "one two three", "😀 歪")


def _few_tokens(chance: random.Random) -> int:
    """Most answers are short: it is the way in that is fuzzed."""
    return chance.choice((1, 1, 2, 3, 8, 8, 40))


def _some(chance: random.Random, likely: float, **fields: Callable[[], Any]) -> Body:
    """Each of some fields with the chance ``likely``."""
    return {name: make() for name, make in fields.items() if chance.random() < likely}


def schema(chance: random.Random) -> Any:
    return chance.choice(SCHEMAS)


def _sampling(chance: random.Random) -> Body:
    return _some(
        chance,
        0.12,
        temperature=lambda: chance.choice((0, 0.5, 1, 2)),
        top_p=lambda: chance.random(),
        top_k=lambda: chance.choice((0, 1, 40)),
        min_p=lambda: chance.random(),
        repeat_penalty=lambda: 1.1,
        presence_penalty=lambda: chance.uniform(-2, 2),
        frequency_penalty=lambda: chance.uniform(-2, 2),
        repeat_last_n=lambda: chance.choice((-1, 0, 64)),
        seed=lambda: chance.choice((-1, 0, 7, 2**32 - 1, 2**63)),
        logit_bias=lambda: {str(chance.randrange(300)): chance.choice((-100, 0, 100))},
        stop=lambda: chance.choice(("x", ["a", "b"], [], None)),
        ignore_eos=lambda: chance.random() < 0.5,
        cache_prompt=lambda: chance.random() < 0.5,
    )


def _forms(chance: random.Random) -> Body:
    """At most one of the fields that give an answer its form."""
    kind = chance.choice(("none",) * 6 + ("format", "object", "guided", "vllm", "grammar", "regex"))
    match kind:
        case "format":
            named = {"name": "n", "schema": schema(chance), "strict": chance.random() < 0.5}
            return {"response_format": {"type": "json_schema", "json_schema": named}}
        case "object":
            return {"response_format": {"type": "json_object"}}
        case "guided":
            return {chance.choice(("guided_json", "json_schema")): schema(chance)}
        case "vllm":
            what: Body = {"json": schema(chance)}
            if chance.random() < 0.5:
                what = {"choice": [any_text(chance), "b"]}
            return {"structured_outputs": what}
        case "grammar":
            return {chance.choice(("grammar", "guided_grammar")): chance.choice(GRAMMARS)}
        case "regex":
            return {"guided_regex": chance.choice(REGEXES)}
    return {}


def _call(chance: random.Random, number: int) -> Body:
    arguments = chance.choice(("{}", '{"a": 1}', "", "{", "[]", "null", '"x"', "<|im_end|>"))
    return {
        "id": f"c{number}",
        "type": "function",
        "function": {"name": chance.choice(("f", "g")), "arguments": arguments},
    }


def _chat_turns(chance: random.Random) -> list[Any]:
    turns: list[Any] = []
    if chance.random() < 0.4:
        turns.append({"role": chance.choice(("system", "developer")), "content": "be brief"})
    for number in range(chance.randint(1, 3)):
        text = chance.choice(WORDS) or "x"
        content: Any = text
        if chance.random() < 0.3:
            content = [{"type": chance.choice(("text", "input_text")), "text": text}]
        turns.append({"role": "user", "content": content})
        if chance.random() < 0.3:
            calls = [_call(chance, number)]
            turns.append({"role": "assistant", "content": None, "tool_calls": calls})
            turns.append({"role": "tool", "tool_call_id": f"c{number}", "content": "42"})
        elif chance.random() < 0.4:
            turns.append({"role": "assistant", "content": "yes"})
    return turns


def _chat_tool(chance: random.Random) -> Body:
    function: Body = {"name": chance.choice(("f", "g", "get_weather")), "description": "d <b>&'"}
    if chance.random() < 0.8:
        function["parameters"] = schema(chance)
    return {"type": "function", "function": function}


def chat(chance: random.Random) -> Body:
    body: Body = {"messages": _chat_turns(chance), "max_tokens": _few_tokens(chance)}
    body |= _some(
        chance,
        0.15,
        model=lambda: chance.choice((MODEL, "auto", "")),
        stream=lambda: chance.random() < 0.7,
        stream_options=lambda: {"include_usage": chance.random() < 0.5},
        max_completion_tokens=lambda: _few_tokens(chance),
        n=lambda: chance.choice((1, 2)),
        chat_template_kwargs=lambda: {"enable_thinking": chance.random() < 0.5, "x": 1},
        reasoning_effort=lambda: chance.choice(("low", "none", "max", "x-high")),
        reasoning=lambda: {"effort": "low", "max_tokens": 5, "enabled": True},
        thinking=lambda: {"type": "enabled", "budget_tokens": 5},
        thinking_budget_tokens=lambda: chance.choice((-1, 0, 5)),
        parallel_tool_calls=lambda: chance.random() < 0.5,
        functions=list,
        modalities=lambda: ["text"],
        metadata=lambda: {"a": "b"},
    )
    if chance.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": chance.choice((0, 2, 20))}
    if chance.random() < 0.25:
        body["tools"] = [_chat_tool(chance) for _ in range(chance.randint(0, 3))]
        named = {"type": "function", "function": {"name": "f"}}
        body["tool_choice"] = chance.choice(("auto", "none", "required", named))
    return body | _sampling(chance) | _forms(chance)


def completion(chance: random.Random) -> Body:
    prompt = chance.choice(("hi", "a b", [65, 66], ["x"], [[65]], "<|im_end|>", "é"))
    body: Body = {"prompt": prompt, "max_tokens": _few_tokens(chance)}
    body |= _some(
        chance,
        0.15,
        model=lambda: MODEL,
        stream=lambda: chance.random() < 0.7,
        stream_options=lambda: {"include_usage": True},
        n=lambda: chance.choice((1, 2)),
        best_of=lambda: 1,
        echo=lambda: chance.random() < 0.5,
        suffix=lambda: "",
        logprobs=lambda: chance.randint(0, 5),
    )
    return body | _sampling(chance) | _forms(chance)


def _block_turns(chance: random.Random) -> list[Any]:
    turns: list[Any] = []
    for number in range(chance.randint(1, 3)):
        text = chance.choice(WORDS)
        block: Body = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
        turns.append({"role": "user", "content": chance.choice((text, [block]))})
        if chance.random() < 0.3:
            use = {"type": "tool_use", "id": f"t{number}", "name": "f", "input": {"a": 1}}
            thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
            hidden = {"type": "redacted_thinking", "data": "x"}
            turns.append({"role": "assistant", "content": [chance.choice((thought, hidden)), use]})
            result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": "42"}
            turns.append({"role": "user", "content": [result]})
        elif chance.random() < 0.4:
            turns.append({"role": "assistant", "content": "{"})
    return turns


def _blocks_tool(chance: random.Random) -> Body:
    if chance.random() < 0.2:
        return {"type": "bash_20250124", "name": "bash"}
    return {"name": chance.choice(("f", "g")), "description": "d", "input_schema": schema(chance)}


def count_messages(chance: random.Random) -> Body:
    body: Body = {"messages": _block_turns(chance)}
    body |= _some(
        chance,
        0.2,
        model=lambda: MODEL,
        system=lambda: chance.choice(("s", [{"type": "text", "text": "s"}], [])),
        thinking=lambda: {"type": chance.choice(("adaptive", "disabled"))},
        context_management=dict,
        metadata=lambda: {"user_id": "u"},
    )
    if chance.random() < 0.3:
        body["tools"] = [_blocks_tool(chance) for _ in range(chance.randint(0, 3))]
        kinds = ("auto", "any", "none", "tool")
        body["tool_choice"] = {"type": chance.choice(kinds), "name": "f"}
    return body


def messages(chance: random.Random) -> Body:
    body = count_messages(chance) | {"max_tokens": _few_tokens(chance)}
    body |= _some(
        chance,
        0.15,
        stream=lambda: chance.random() < 0.7,
        stop_sequences=lambda: chance.choice((["x"], [], ["a", "b"])),
        temperature=lambda: chance.choice((0, 1)),
        top_p=lambda: chance.random(),
        top_k=lambda: 5,
        output_config=lambda: {
            "effort": "low",
            "format": {"type": "json_schema", "schema": schema(chance)},
        },
        output_format=lambda: {"type": "json_schema", "schema": schema(chance)},
    )
    if chance.random() < 0.1:
        body |= {"max_tokens": 1100, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    return body


def _items(chance: random.Random) -> list[Any]:
    items: list[Any] = []
    for number in range(chance.randint(1, 3)):
        text = chance.choice(WORDS)
        parts = [{"type": "input_text", "text": text}]
        items.append({"role": "user", "content": chance.choice((text, parts))})
        if chance.random() < 0.3:
            thought = {"type": "reasoning", "id": f"rs_{number}", "summary": []}
            call = {"type": "function_call", "call_id": f"k{number}", "name": "f"}
            items += [thought, call | {"arguments": "{}"}]
            output = {"type": "function_call_output", "call_id": f"k{number}"}
            items.append(output | {"output": chance.choice(("42", parts))})
        elif chance.random() < 0.3:
            said = [{"type": "output_text", "text": "yes"}]
            items.append({"type": "message", "role": "assistant", "content": said})
        elif chance.random() < 0.1:
            items.append({"type": "item_reference", "id": chance.choice(("msg_x", "", "a\r\nb"))})
    return items


def count_responses(chance: random.Random) -> Body:
    body: Body = {"input": "hi" if chance.random() < 0.3 else _items(chance)}
    body |= _some(
        chance,
        0.15,
        model=lambda: MODEL,
        instructions=lambda: "be brief",
        reasoning=lambda: {"effort": "low", "summary": "auto"},
        parallel_tool_calls=lambda: True,
        previous_response_id=lambda: chance.choice(("resp_x", "", "a\r\nb", "é" * 100)),
    )
    if chance.random() < 0.25:
        tool = {"type": "function", "name": "f", "parameters": schema(chance)}
        body["tools"] = [tool, {"type": "web_search"}][: chance.randint(0, 2)]
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [tool]}
        named = {"type": "function", "name": "f"}
        body["tool_choice"] = chance.choice(("auto", "none", "required", named, allowed))
    return body


def responses(chance: random.Random) -> Body:
    body = count_responses(chance) | {"max_output_tokens": _few_tokens(chance)}
    form = {"type": "json_schema", "name": "n", "schema": schema(chance)}
    body |= _some(
        chance,
        0.12,
        stream=lambda: chance.random() < 0.7,
        store=lambda: chance.random() < 0.5,
        text=lambda: {"format": form, "verbosity": "low"},
        include=lambda: ["message.output_text.logprobs"],
        top_logprobs=lambda: chance.randint(0, 20),
        metadata=lambda: {"a": "b"},
        truncation=lambda: "auto",
        background=lambda: False,
        prompt_cache_key=lambda: "k",
        max_tool_calls=lambda: 3,
    )
    return body | _sampling(chance)


def tokenize(chance: random.Random) -> Body:
    body: Body = {"content": any_text(chance) if chance.random() < 0.7 else any_value(chance)}
    return body | _some(
        chance,
        0.4,
        model=lambda: MODEL,
        parse_special=lambda: chance.random() < 0.5,
        add_special=lambda: chance.random() < 0.5,
        with_pieces=lambda: chance.random() < 0.5,
    )


def detokenize(chance: random.Random) -> Body:
    some = [chance.randrange(256) for _ in range(chance.choice((0, 1, 5, 2000)))]
    odd = [*some, chance.choice(NUMBERS)]
    return {"tokens": odd if chance.random() < 0.3 else some}


def nothing(_: random.Random) -> Body:
    return {}


SHAPES: dict[str, Callable[[random.Random], Body]] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completion,
    "/v1/messages": messages,
    "/v1/responses": responses,
    "/v1/messages/count_tokens": count_messages,
    "/v1/responses/input_tokens": count_responses,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/apply-template": chat,
    "/v1/responses/{response_id}/cancel": nothing,
}
"""Each POST route, as the server's own description calls it, with what it takes."""

WHOLE_ANSWERS: dict[str, set[str]] = {
    "/v1/chat/completions": {"id", "object", "created", "model", "choices", "usage"},
    "/v1/completions": {"id", "object", "created", "model", "choices", "usage"},
    "/v1/messages": {"id", "type", "role", "model", "content", "stop_reason", "usage"},
    "/v1/responses": {"id", "object", "created_at", "model", "status", "output", "usage"},
    "/v1/messages/count_tokens": {"input_tokens"},
    "/v1/responses/input_tokens": {"object", "input_tokens"},
    "/tokenize": {"tokens"},
    "/detokenize": {"content"},
    "/apply-template": {"prompt"},
    "/v1/responses/{response_id}/cancel": {"id", "status"},
}
"""The fields that an answer of each route has at least."""

STREAM_ENDS: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("[DONE]",),
    "/v1/completions": ("[DONE]",),
    "/v1/messages": ("message_stop",),
    "/v1/responses": ("response.completed", "response.incomplete"),
}
"""What the last event of a stream is: its data, or the type in it."""
