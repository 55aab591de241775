"""Many conversations at a time, each with its own everything: none hears of another.

Every conversation has its marker word, its system prompt, its way to sample and its form. What it
is told when it is alone, one request after the other on a fresh server, it must be told among all
the others too, to the letter. On the real model that holds in the configuration in which
neighbours change nothing, see docs/reproducibility.md.

``DFLASH_CROSS_TALK_ROUNDS`` is how often all of them are had at once on the real model, then in two
turns each. Without it they are had once, in one turn.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import field, frozen

from dflash_trio.testing.dialects import events
from tests.support.http_client import Answer, connect, request
from tests.support.running import Asking, running, server_process
from tests.support.scripted import scripted_config, scripted_load
from tests.support.speaking import ROUTES, Route

REAL_ROUNDS = int(os.environ.get("DFLASH_CROSS_TALK_ROUNDS", "0"))
CONVERSATIONS = 16
AT_A_TIME = 6
SLOTS = 3
TOKENS = 8
WORDS = ["zebra", "quartz", "lemon", "anvil", "violin", "harbor", "copper", "walrus"]


@frozen
class Conversation:
    """One client's, whose every choice is made from its number."""

    number: int
    route: Route = field()
    marker: str = field()

    @route.default
    def _route(self) -> Route:
        return ROUTES[self.number % len(ROUTES)]

    @marker.default
    def _marker(self) -> str:
        return f"{WORDS[self.number % len(WORDS)]}{self.number:02d}"

    @property
    def has_form(self) -> bool:
        return self.number // 4 % 2 == 1

    def fields(self, turn: int) -> dict[str, Any]:
        """How to sample, and in which form to answer."""
        fields: dict[str, Any] = {"temperature": 0, self.route.limit: TOKENS + self.number}
        if self.route.name != "messages":  # which has none of these
            fields["ignore_eos"] = not self.has_form
            fields["seed"] = 100 * self.number + turn
            fields["temperature"] = (0, 0.7, 1.1)[self.number // 4 % 3]
            fields["repeat_penalty"] = 1 + 0.05 * (self.number % 5)
            fields["frequency_penalty"] = 0.1 * (self.number % 3)
            fields["logit_bias"] = {str(32 + self.number): -100, str(97 + self.number): 2}
        if not self.has_form:
            name = "stop_sequences" if self.route.name == "messages" else "stop"
            fields[name] = [chr(ord("a") + self.number) * 2, f"{self.marker}!"]
            return fields
        fields[self.route.limit] = 40
        schema = {
            "type": "object",
            "properties": {"word": {"type": "string", "enum": [self.marker]}},
            "required": ["word"],
            "additionalProperties": False,
        }
        match self.route.name:
            case "chat":
                wanted = {"name": "w", "schema": schema}
                fields["response_format"] = {"type": "json_schema", "json_schema": wanted}
            case "messages":
                fields["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
            case "responses":
                fields["text"] = {"format": {"type": "json_schema", "name": "w", "schema": schema}}
            case "completions":
                fields["guided_json"] = schema
        return fields

    def body(self, said: list[str], previous: str | None) -> dict[str, Any]:
        """The next turn's, after the answers that were ``said`` before."""
        turn = len(said)
        system = f"You only ever speak of {self.marker}."
        asked = [f"Part {number}: what is {self.marker}?" for number in range(turn + 1)]
        fields = {**self.fields(turn), "stream": (self.number + turn) % 2 == 0}
        if self.route.name == "completions":
            told = "".join(f"{a}\n{b}\n" for a, b in zip(asked, [*said, ""], strict=True))
            return {"prompt": f"{system}\n{told}", **fields}
        if self.route.name == "responses":
            carried = {} if previous is None else {"previous_response_id": previous}
            return {"input": asked[-1], "instructions": system, **carried, **fields}
        messages = [{"role": "user", "content": asked[0]}]
        for answer, question in zip(said, asked[1:], strict=True):
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": question})
        if self.route.name == "messages":
            return {"system": system, "messages": messages, **fields}
        return {"messages": [{"role": "system", "content": system}, *messages], **fields}


ALL = [Conversation(number) for number in range(CONVERSATIONS)]


def check_no_foreign_marker(conversation: Conversation, answer: Answer) -> None:
    for other in ALL:
        if other is not conversation:
            assert other.marker not in answer.text, conversation


async def talk(server: Asking, conversation: Conversation, turns: int) -> list[str]:
    """A whole conversation; what was answered."""
    route, said, previous = conversation.route, [], None
    for _ in range(turns):
        body = conversation.body(said, previous)
        answer = await request(server.port, "POST", route.path, body)
        read = route.read(answer, stream=body["stream"])
        check_no_foreign_marker(conversation, answer)
        if conversation.has_form:
            assert json.loads(read.text) == {"word": conversation.marker}
        said.append(read.text)
        if route.name == "responses":
            *_, (_, last) = events(answer.body) if body["stream"] else [("", answer.text)]
            previous = (json.loads(last).get("response") or json.loads(last))["id"]
    return said


async def leave_somewhere(
    server: Asking, conversation: Conversation, chance: random.Random
) -> None:
    """Ask as this conversation does, and go: with its request sent, or in mid-stream."""
    body = {**conversation.body([], None), "stream": True}
    async with connect(server.port) as exchange:
        await exchange.send("POST", conversation.route.path, json.dumps(body).encode())
        if chance.random() < 0.7:
            await exchange.read_headers()
            for _ in range(chance.randrange(5)):
                await exchange.read_some()
        if chance.random() < 0.5:
            exchange.reset()


async def golden_texts(server: Asking, turns: int) -> list[list[str]]:
    return [await talk(server, conversation, turns) for conversation in ALL]


async def check_cross_talk(server: Asking, goldens: list[list[str]], rounds: int) -> None:
    """All conversations at once, again and again, while others leave in between."""
    limiter = trio.CapacityLimiter(AT_A_TIME)
    chance = random.Random(8)
    found: list[tuple[Conversation, list[str]]] = []

    async def one(conversation: Conversation) -> None:
        async with limiter:
            found.append((conversation, await talk(server, conversation, len(goldens[0]))))

    async def leaver(conversation: Conversation) -> None:
        async with limiter:
            await leave_somewhere(server, conversation, chance)

    for _ in range(rounds):
        async with trio.open_nursery() as nursery:
            for conversation in chance.sample(ALL, len(ALL)):
                nursery.start_soon(one, conversation)
                if chance.random() < 0.4:
                    nursery.start_soon(leaver, chance.choice(ALL))
    assert len(found) == rounds * len(ALL)
    for conversation, said in found:
        assert said == goldens[conversation.number], conversation
    await server.until_idle()


def check_goldens_differ(goldens: list[list[str]]) -> None:
    """Else a text that got to the wrong client would not be noticed."""
    assert len({tuple(said) for said in goldens}) == len(goldens)
    assert all(all(said) for said in goldens)


async def test_conversations_on_a_scripted_model_hear_nothing_of_each_other() -> None:
    def load() -> Any:
        return scripted_config("m"), scripted_load(slots=SLOTS, max_ctx=1024, chunk=32)

    async with running(load()) as server:
        goldens = await golden_texts(server, turns=3)
    check_goldens_differ(goldens)
    async with running(load(), routing_queue_limit=64) as server:
        await check_cross_talk(server, goldens, rounds=3)


@pytest.mark.real
async def test_conversations_on_a_real_model_hear_nothing_of_each_other(smollm2: Path) -> None:
    arguments = [
        str(smollm2),
        "--port=0",
        "--threads=1",
        "--max-ctx=512",
        "--prefix-cache-slots=0",
        f"--max-concurrency={SLOTS}",
        "--routing-queue-limit=64",
        "--chunk=64",
        *("--cache-type-k", "q8_0", "--cache-type-v", "q8_0", "--flash-attn", "on"),
    ]
    with server_process(arguments) as server:
        await server.until_ready()
        goldens = await golden_texts(server, turns=2 if REAL_ROUNDS else 1)
    check_goldens_differ(goldens)
    with server_process(arguments) as server:
        await server.until_ready()
        await check_cross_talk(server, goldens, REAL_ROUNDS or 1)
