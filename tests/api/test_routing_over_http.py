"""Two models of different context and template behind one address: who answers, who waits, who not.

The promises of the router, seen from outside on every route that generates: real sockets, engines
held at gates.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs
import pytest
import trio

from tests.support.http_client import PATIENCE, Answer, request
from tests.support.running import RunningServer, running
from tests.support.scripted import (
    PLAIN_TEMPLATE,
    Gate,
    answer,
    scripted_config,
    scripted_load,
)
from tests.support.speaking import ROUTES, Route

# The second model's template costs more, so that prompt tokens tell who counted them.
PREAMBLE = "[This is a conversation.]\n"
WORDY_TEMPLATE = PREAMBLE + PLAIN_TEMPLATE
REFUSES_BANG = (
    "{% if '!' in messages[0].content %}{{ raise_exception('no shouting') }}{% endif %}"
    + PLAIN_TEMPLATE
)
EVERY_ROUTE = pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
WITH_TEMPLATES = pytest.mark.parametrize(
    "route", [route for route in ROUTES if route.has_template], ids=lambda route: route.name
)
STREAM_OR_NOT = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
SEVERAL = pytest.mark.parametrize(
    "route",
    [route for route in ROUTES if route.name in ("chat", "completions")],
    ids=lambda route: route.name,
)


@attrs.define
class TwoModels:
    server: RunningServer
    gates: tuple[Gate, Gate]

    def open(self) -> None:
        for gate in self.gates:
            gate.open()

    async def ask(self, route: Route, content: str = "hello", **fields: Any) -> Answer:
        body = route.body(content, **fields)
        return await request(self.server.port, "POST", route.path, body)


@contextlib.asynccontextmanager
async def two_models(
    *,
    contexts: tuple[int, int] = (200, 400),
    slots: tuple[int, int] = (1, 1),
    templates: tuple[str, str] = (PLAIN_TEMPLATE, WORDY_TEMPLATE),
    queue_limit: int = 8,
    steps: Callable[[Any], None] | None = None,
) -> AsyncIterator[TwoModels]:
    gates = (Gate(), Gate())
    loads = [
        (
            scripted_config(name),
            scripted_load(
                max_ctx=context,
                slots=count,
                template=template,
                script=answer("said"),
                before_decode=steps if steps is not None and name == "first" else gate,
            ),
        )
        for name, context, count, template, gate in zip(
            ("first", "second"), contexts, slots, templates, gates, strict=True
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


@EVERY_ROUTE
@STREAM_OR_NOT
async def test_the_models_field_never_selects_and_the_answer_names_who_answered(
    route: Route, stream: bool
) -> None:
    async with two_models() as two:
        for fields in ({}, *({"model": name} for name in ("second", "auto", "", "ünknown", None))):
            response = await two.ask(route, stream=stream, **fields)
            assert route.read(response, stream=stream).text == "said"
            assert route.model(response, stream=stream) == "first"
        refused = await two.ask(route, stream=stream, model=5)
        assert refused.status == 400
        assert "model" in route.message(refused)


@EVERY_ROUTE
@STREAM_OR_NOT
async def test_busy_primary_and_it_fits_the_second_goes_to_the_second(
    route: Route, stream: bool
) -> None:
    async with two_models() as two, busy(two, 0):
        response = await two.ask(route, stream=stream)
        assert route.read(response, stream=stream).text == "said"
        assert route.model(response, stream=stream) == "second"
        if not stream:
            # Rendered and counted by the model that answered.
            expected = 1 + len(PREAMBLE * route.has_template + "hello\n>")
            usage = route.usage(response)
            assert usage["prompt_tokens"] == expected


@EVERY_ROUTE
@STREAM_OR_NOT
async def test_busy_primary_and_it_fits_only_the_primary_waits(route: Route, stream: bool) -> None:
    async with two_models(contexts=(400, 100)) as two:
        answers: list[Answer] = []

        async def ask() -> None:
            answers.append(await two.ask(route, "x" * 200, stream=stream))

        async with trio.open_nursery() as nursery, busy(two, 0):
            nursery.start_soon(ask)
            await two.server.until(lambda s: s["routing"]["waiting"] == 1)
            assert not answers
        assert route.model(answers[0], stream=stream) == "first"
        assert route.read(answers[0], stream=stream).text == "said"


@EVERY_ROUTE
async def test_it_fits_only_the_second_and_goes_there_at_once(route: Route) -> None:
    async with two_models() as two:
        assert route.model(await two.ask(route, "x" * 300)) == "second"


@EVERY_ROUTE
@STREAM_OR_NOT
async def test_it_fits_none_is_a_400_with_both_rooms_even_when_all_are_busy_and_none_may_wait(
    route: Route, stream: bool
) -> None:
    async with two_models(queue_limit=0) as two, busy(two, 0, 1):
        full = await two.ask(route, stream=stream)
        assert (full.status, route.error(full)) == (503, route.word("queue_full"))
        assert full.headers["retry-after"].isdigit()
        response = await two.ask(route, "x" * 500, stream=stream)
        assert (response.status, route.error(response)) == (
            400,
            route.word("context_length_exceeded"),
        )
        if route.name != "messages":
            fields = {"chat": "messages", "responses": "input", "completions": "prompt"}
            assert response.error["param"] == fields[route.name]
        second = 503 + len(PREAMBLE) * route.has_template
        for words in ("first: 503 prompt tokens, room 200", f"second: {second}", "room 400"):
            assert words in route.message(response)


@WITH_TEMPLATES
@STREAM_OR_NOT
async def test_a_template_refusal_with_the_second_idle_is_a_400_and_no_second_try(
    route: Route, stream: bool
) -> None:
    async with two_models(templates=(REFUSES_BANG, PLAIN_TEMPLATE)) as two:
        response = await two.ask(route, "hey!", stream=stream)
        assert (response.status, route.error(response)) == (400, route.word("None"))
        assert "no shouting" in route.message(response)
        status = await two.server.status()
        assert status["models"][1]["engine"]["prompt_tokens"] == 0


@WITH_TEMPLATES
async def test_a_later_models_refusal_only_takes_that_model_out(
    route: Route, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "dflash_trio.routing")
    async with two_models(templates=(PLAIN_TEMPLATE, REFUSES_BANG)) as two:
        answers: list[Answer] = []

        async def ask() -> None:
            answers.append(await two.ask(route, "hey!"))

        async with trio.open_nursery() as nursery, busy(two, 0):
            nursery.start_soon(ask)
            await two.server.until(lambda s: s["routing"]["waiting"] == 1)
        assert route.model(answers[0]) == "first"
    assert sum("no shouting" in record.message for record in caplog.records) == 1


@EVERY_ROUTE
@STREAM_OR_NOT
async def test_an_engine_failure_after_admission_is_an_error_and_no_second_try(
    route: Route, stream: bool
) -> None:
    def fail(batch: Any) -> None:
        raise RuntimeError("the device fell off")

    async with two_models(steps=fail) as two:
        response = await two.ask(route, stream=stream)
        assert (response.status, route.error(response)) == (500, route.word("engine_failed"))
        status = await two.server.status()
        assert status["models"][1]["engine"]["prompt_tokens"] == 0


@EVERY_ROUTE
@pytest.mark.parametrize("limit", [0, 1, 2, 8])
async def test_in_one_burst_exactly_the_limit_waits_and_the_others_get_503_at_once(
    route: Route, limit: int
) -> None:
    async with two_models(queue_limit=limit) as two:
        answers: list[Answer] = []

        async def ask(stream: bool) -> None:
            answers.append(await two.ask(route, stream=stream))

        async with trio.open_nursery() as nursery, busy(two, 0, 1):
            for number in range(limit + 5):
                nursery.start_soon(ask, number % 2 == 1)
            await two.server.until(lambda s: s["routing"]["waiting"] == limit)
            with trio.fail_after(PATIENCE):
                while len(answers) < 5:  # noqa: ASYNC110
                    await trio.sleep(0.01)
            for refused in answers:
                assert refused.status == 503
                assert route.error(refused) == route.word("queue_full")
                assert refused.headers["retry-after"].isdigit()
            assert len(answers) == 5
        statuses = [response.status for response in answers]
        assert sorted(statuses) == [200] * limit + [503] * 5


@SEVERAL
@STREAM_OR_NOT
async def test_several_answers_take_as_many_slots_of_one_model_and_give_all_of_them_back(
    route: Route, stream: bool
) -> None:
    async with two_models(slots=(2, 3)) as two:
        answers: list[Answer] = []

        async def ask() -> None:
            answers.append(await two.ask(route, stream=stream, n=3))

        for gate in two.gates:
            gate.close()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            # The primary has too few, however idle it is.
            status = await two.server.until(lambda s: s["models"][1]["slots"]["reserved"] == 3)
            assert status["models"][0]["slots"]["reserved"] == 0
            two.open()
        await two.server.until_idle()
        assert route.model(answers[0], stream=stream) == "second"
        if stream:
            # Each answer's text in turn: read together, they are three times the same.
            assert sorted(route.read(answers[0], stream=True).text) == sorted("said" * 3)
        else:
            assert [choice["index"] for choice in answers[0].json()["choices"]] == [0, 1, 2]
            assert route.read(answers[0]).text == "said"
        refused = await two.ask(route, stream=stream, n=4)
        assert (refused.status, route.error(refused)) == (400, route.word("None"))


@SEVERAL
async def test_several_answers_wait_until_all_their_slots_are_free(route: Route) -> None:
    async with two_models(slots=(2, 1)) as two:
        answers: list[Answer] = []

        async def ask() -> None:
            answers.append(await two.ask(route, n=2))

        async with trio.open_nursery() as nursery, busy(two, 0):
            nursery.start_soon(ask)
            status = await two.server.until(lambda s: s["routing"]["waiting"] == 1)
            # One slot is free, and one is not enough.
            assert status["models"][0]["slots"]["reserved"] == 1
        assert len(answers[0].json()["choices"]) == 2
        assert route.model(answers[0]) == "first"
