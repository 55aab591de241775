"""Two models of different context and template behind one address: who answers, who waits, who not.

The promises of the router, seen from outside: real sockets, engines held at gates.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import attrs
import pytest
import trio

from tests.support.http_client import Answer
from tests.support.running import RunningServer, running
from tests.support.scripted import (
    PLAIN_TEMPLATE,
    Gate,
    answer,
    scripted_config,
    scripted_load,
)

# The second model's template costs more, so that prompt tokens tell who counted them.
WORDY_TEMPLATE = "[This is a conversation.]\n" + PLAIN_TEMPLATE
REFUSES_BANG = (
    "{% if '!' in messages[0].content %}{{ raise_exception('no shouting') }}{% endif %}"
    + PLAIN_TEMPLATE
)


@attrs.define
class TwoModels:
    server: RunningServer
    gates: tuple[Gate, Gate]

    def open(self) -> None:
        for gate in self.gates:
            gate.open()


@contextlib.asynccontextmanager
async def two_models(
    *,
    contexts: tuple[int, int] = (200, 400),
    templates: tuple[str, str] = (PLAIN_TEMPLATE, WORDY_TEMPLATE),
    queue_limit: int = 8,
    steps: Any = None,
) -> AsyncIterator[TwoModels]:
    gates = (Gate(), Gate())
    loads = [
        (
            scripted_config(name),
            scripted_load(
                max_ctx=context,
                template=template,
                script=answer("said"),
                before_decode=steps if steps is not None and name == "first" else gate,
            ),
        )
        for name, context, template, gate in zip(
            ("first", "second"), contexts, templates, gates, strict=True
        )
    ]
    async with running(*loads, routing_queue_limit=queue_limit) as server:
        two = TwoModels(server, gates)
        yield two
        two.open()
        await server.until_idle()


@contextlib.asynccontextmanager
async def busy(two: TwoModels, *which: int) -> AsyncIterator[None]:
    """The given models' only slots are taken until the end of the block, by requests in prefill."""
    for index in which:
        two.gates[index].close()
    async with contextlib.AsyncExitStack() as stack:
        for index in which:
            # Fits both; lands on the first that is free, in order.
            await stack.enter_async_context(two.server.chatting("busy"))
            await two.server.until(
                lambda s, index=index: s["models"][index]["slots"]["reserved"] == 1
            )
        yield
        for index in which:
            two.gates[index].open()


async def test_busy_primary_and_it_fits_the_second_goes_to_the_second() -> None:
    async with two_models() as two, busy(two, 0):
        response = await two.server.chat("hello")
        assert response.json()["model"] == "second"
        # Rendered and counted by the model that answered.
        expected = 1 + len("[This is a conversation.]\nhello\n>")
        assert response.json()["usage"]["prompt_tokens"] == expected


async def test_busy_primary_and_it_fits_only_the_primary_waits() -> None:
    async with two_models(contexts=(400, 100)) as two:
        answers: list[Answer] = []

        async def ask() -> None:
            answers.append(await two.server.chat("x" * 200))

        async with trio.open_nursery() as nursery, busy(two, 0):
            nursery.start_soon(ask)
            await two.server.until(lambda s: s["routing"]["waiting"] == 1)
            assert not answers
        assert answers[0].json()["model"] == "first"


async def test_it_fits_only_the_second_and_goes_there_at_once() -> None:
    async with two_models() as two:
        response = await two.server.chat("x" * 300)
        assert response.json()["model"] == "second"


async def test_it_fits_none_is_a_400_with_both_rooms_even_when_all_are_busy_and_none_may_wait() -> (
    None
):
    async with two_models(queue_limit=0) as two, busy(two, 0, 1):
        assert (await two.server.chat("hello")).status == 503
        response = await two.server.chat("x" * 500)
        assert response.status == 400
        assert response.error["code"] == "context_length_exceeded"
        for words in ("first: 503 prompt tokens, room 200", "second: 529", "room 400"):
            assert words in response.error["message"]


async def test_a_template_refusal_with_the_second_idle_is_a_400_and_no_second_try() -> None:
    async with two_models(templates=(REFUSES_BANG, PLAIN_TEMPLATE)) as two:
        response = await two.server.chat("hey!")
        assert response.status == 400
        assert "no shouting" in response.error["message"]
        status = await two.server.status()
        assert status["models"][1]["engine"]["prompt_tokens"] == 0


async def test_a_later_models_refusal_only_takes_that_model_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "dflash_trio.routing")
    async with two_models(templates=(PLAIN_TEMPLATE, REFUSES_BANG)) as two:
        answers: list[Answer] = []

        async def ask() -> None:
            answers.append(await two.server.chat("hey!"))

        async with trio.open_nursery() as nursery, busy(two, 0):
            nursery.start_soon(ask)
            await two.server.until(lambda s: s["routing"]["waiting"] == 1)
        assert answers[0].json()["model"] == "first"
    assert sum("no shouting" in record.message for record in caplog.records) == 1


async def test_an_engine_failure_after_admission_is_an_error_and_no_second_try() -> None:
    def fail(batch: Any) -> None:
        raise RuntimeError("the device fell off")

    async with two_models(steps=fail) as two:
        response = await two.server.chat("hello")
        assert (response.status, response.error["code"]) == (500, "engine_failed")
        status = await two.server.status()
        assert status["models"][1]["engine"]["prompt_tokens"] == 0


@pytest.mark.parametrize("limit", [0, 1, 2, 8])
async def test_in_one_burst_exactly_the_limit_waits_and_the_others_get_503_at_once(
    limit: int,
) -> None:
    async with two_models(queue_limit=limit) as two:
        statuses: list[int] = []

        async def ask() -> None:
            statuses.append((await two.server.chat("hello")).status)

        async with trio.open_nursery() as nursery, busy(two, 0, 1):
            for _ in range(limit + 5):
                nursery.start_soon(ask)
            await two.server.until(lambda s: s["routing"]["waiting"] == limit)
            with trio.fail_after(20):
                while len(statuses) < 5:  # noqa: ASYNC110
                    await trio.sleep(0.01)
            assert statuses == [503] * 5
        assert sorted(statuses) == [200] * limit + [503] * 5
