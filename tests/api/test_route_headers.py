"""An answer says how its model came to be the one that answers."""

from __future__ import annotations

import trio

from tests.support.http_client import Answer, request
from tests.support.running import CHAT, chat_body, running
from tests.support.scripted import Gate, answer, scripted_config, scripted_load


async def test_an_answer_says_whether_it_came_by_the_primary_a_fallback_or_a_wait() -> None:
    gate = Gate(open=False)
    first = (scripted_config("first"), scripted_load(max_ctx=64, before_decode=gate))
    second = (scripted_config("second"), scripted_load(script=answer("2"), before_decode=gate))
    answers: dict[str, Answer] = {}
    async with running(first, second) as server:

        async def ask(name: str, text: str = "x") -> None:
            body = chat_body(text, stream=name == "busy", max_tokens=3)
            answers[name] = await request(server.port, "POST", CHAT, body)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "primary")
            await server.until(lambda s: s["models"][0]["slots"]["reserved"] == 1)
            nursery.start_soon(ask, "busy")
            await server.until(lambda s: s["models"][1]["slots"]["reserved"] == 1)
            nursery.start_soon(ask, "waited")
            await server.until(lambda s: s["routing"]["waiting"] == 1)
            gate.open()
        await ask("room", "x" * 100)
    told = {
        name: {key: answers[name].headers.get(f"x-dflash-{key}") for key in ("route", "fallback")}
        for name in answers
    }
    assert told["primary"] == {"route": "primary", "fallback": None}
    assert told["busy"] == {"route": "fallback", "fallback": "busy"}
    assert told["room"] == {"route": "fallback", "fallback": "room"}
    assert told["waited"]["route"] == "waited"
    assert float(answers["waited"].headers["x-dflash-waited"]) > 0
    assert not any("x-dflash-waited" in answers[name].headers for name in told.keys() - {"waited"})
