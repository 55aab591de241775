"""Answers that are kept or under way: read, carried on, cancelled, deleted, and whose they are."""

from __future__ import annotations

import functools
import threading
from typing import Any

import openai
import pytest
import trio

from tests.api.responses_checks import check_response, check_stream
from tests.api.responses_client import PATH, HoldsBack, ask, read_until, saying, with_sdk
from tests.support.http_client import PATIENCE, Answer, connect, request
from tests.support.running import running

# --------------------------------------------------------------------------- kept answers


async def test_an_answer_is_kept_read_and_deleted() -> None:
    def use(client: openai.OpenAI) -> None:
        made = client.responses.create(model="m", input="hi")
        assert client.responses.retrieve(made.id) == made
        (listed,) = client.responses.input_items.list(made.id)
        assert (listed.type, listed.id[:4]) == ("message", "msg_")
        client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.input_items.list(made.id)

    async with running(saying("hello")) as server:
        await with_sdk(server, use)


async def test_what_a_stream_ended_with_is_what_is_kept() -> None:
    async with running(saying("hello")) as server:
        events = check_stream((await ask(server, stream=True)).text)
        made = events[-1]["response"]
        kept = await request(server.port, "GET", f"{PATH}/{made['id']}")
        without_prefix = await request(server.port, "GET", f"/responses/{made['id']}")
    assert kept.json() == without_prefix.json() == made


async def test_an_answer_is_carried_on_as_if_all_of_it_had_been_sent() -> None:
    async with running(saying("hello")) as server:
        first = (await ask(server, "one", instructions="old")).json()
        second = await ask(server, "two", previous_response_id=first["id"], instructions="new")
        turns = [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": "two"},
        ]
        sent = (await ask(server, turns, instructions="new")).json()
        listed = await request(
            server.port, "GET", f"{PATH}/{second.json()['id']}/input_items?order=asc"
        )
    assert second.json()["usage"] == sent["usage"]
    assert second.json()["previous_response_id"] == first["id"]
    texts = [item["content"][0]["text"] for item in listed.json()["data"]]
    assert texts == ["one", "hello", "two"]


async def test_items_of_kept_answers_can_be_referred_to() -> None:
    async with running(saying("hello")) as server:
        first = (await ask(server, "one")).json()
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        said = {"role": "assistant", "content": "hello"}
        question = {"role": "user", "content": "one"}
        referred = await ask(server, [question, reference, question])
        sent = await ask(server, [question, said, question])
    assert referred.json()["usage"] == sent.json()["usage"]


async def test_what_is_not_to_be_stored_is_not() -> None:
    async with running(saying("hello")) as server:
        made = (await ask(server, store=False)).json()
        assert made["store"] is False
        for path in (made["id"], f"{made['id']}/input_items"):
            assert (await request(server.port, "GET", f"{PATH}/{path}")).status == 404
        refused = await ask(server, previous_response_id=made["id"])
    assert (refused.status, refused.error["param"]) == (400, "previous_response_id")


async def test_input_items_come_in_pages() -> None:
    turns = [{"role": "user", "content": str(n), "id": f"msg_{n}"} for n in range(5)]
    async with running(saying("hello")) as server:
        made = (await ask(server, turns)).json()
        get = functools.partial(request, server.port, "GET")
        items = f"{PATH}/{made['id']}/input_items"
        newest = (await get(f"{items}?limit=2")).json()
        older = (await get(f"{items}?limit=4&after={newest['last_id']}")).json()
        assert (await get(f"{items}?limit=0")).error["param"] == "limit"
        assert (await get(f"{items}?order=up")).error["param"] == "order"
        assert (await get(f"{items}?after=nobody")).error["param"] == "after"

        def use(client: openai.OpenAI) -> list[Any]:
            page = client.responses.input_items.list(made["id"], limit=2, order="asc")
            return [item.id for item in page]

        assert await with_sdk(server, use) == [f"msg_{n}" for n in range(5)]
    assert [item["id"] for item in newest["data"]] == ["msg_4", "msg_3"]
    assert (newest["first_id"], newest["last_id"], newest["has_more"]) == ("msg_4", "msg_3", True)
    assert [item["id"] for item in older["data"]] == ["msg_2", "msg_1", "msg_0"]
    assert older["has_more"] is False


async def test_what_one_key_made_is_not_there_for_another() -> None:
    keys = {"api_keys": (b"first", b"second")}
    async with running(saying("hello"), **keys) as server:

        async def get(path: str, **headers: str) -> Answer:
            return await request(server.port, "GET", f"{PATH}/{path}", **headers)

        mine, other = {"authorization": "Bearer first"}, {"x-api-key": "second"}
        body = {"input": "hi"}
        made = (await request(server.port, "POST", PATH, body, **mine)).json()
        assert (await get(made["id"], **mine)).status == 200
        assert (await get(made["id"], **{"x-api-key": "first"})).status == 200
        # A second credential that is none does not hide the one that is.
        assert (await get(made["id"], **mine, **{"x-api-key": "none"})).status == 200
        assert (await get(made["id"], **other)).status == 404
        assert (await get(made["id"])).status == 401
        carried = {"input": "hi", "previous_response_id": made["id"]}
        assert (await request(server.port, "POST", PATH, carried, **other)).status == 400
        for method, path in (("DELETE", made["id"]), ("POST", f"{made['id']}/cancel")):
            refused = await request(server.port, method, f"{PATH}/{path}", **other)
            assert refused.status == 404
        assert (await get(made["id"], **mine)).status == 200


async def test_a_kept_answer_is_not_streamed_again() -> None:
    async with running(saying("hello")) as server:
        made = (await ask(server)).json()
        again = await request(server.port, "GET", f"{PATH}/{made['id']}?stream=true")
    assert (again.status, again.error["param"]) == (400, "stream")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", PATH, "POST"),
        ("POST", f"{PATH}/resp_1", "DELETE"),
        ("GET", f"{PATH}/resp_1/cancel", "POST"),
    ],
)
async def test_other_methods_are_405_in_json(method: str, path: str, allow: str) -> None:
    async with running(saying("hello")) as server:
        refused = await request(server.port, method, path)
    assert (refused.status, refused.error["code"]) == (405, "method_not_allowed")
    assert allow in refused.headers["allow"]


# ----------------------------------------------------------------------- answers under way


def response_id(text: str) -> str:
    return "resp_" + text.partition('"id":"resp_')[2].partition('"')[0]


@pytest.mark.parametrize("store", [True, False])
async def test_an_answer_under_way_can_be_cancelled_and_its_stream_says_so(store: bool) -> None:
    hold = HoldsBack()
    body = f'{{"input": "hi", "stream": true, "store": {str(store).lower()}}}'.encode()
    async with running(saying("x" * 1000, before_decode=hold)) as server:
        async with connect(server.port) as exchange:
            await exchange.send("POST", PATH, body)
            await exchange.read_headers()
            text = await read_until(exchange, "output_text.delta")
            id_ = response_id(text)
            seen = await request(server.port, "GET", f"{PATH}/{id_}")
            assert seen.status == (200 if store else 404)
            if store:
                assert check_response(seen.json())["status"] == "in_progress"
            cancelled = await request(server.port, "POST", f"{PATH}/{id_}/cancel")
            assert check_response(cancelled.json())["status"] == "cancelled"
            hold.gate.open()
            text += (await exchange.read_rest()).text
        events = check_stream(text)
        await server.until_idle()
        kept = await request(server.port, "GET", f"{PATH}/{id_}")
        again = await request(server.port, "POST", f"{PATH}/{id_}/cancel")
    last = events[-1]["response"]
    assert (last["status"], last["incomplete_details"]) == ("cancelled", None)
    assert last["usage"]["output_tokens"] < 1000
    if store:
        assert kept.json() == again.json() == last
    else:
        assert kept.status == again.status == 404


async def test_an_answer_that_is_over_stays_as_it_ended_when_it_is_cancelled() -> None:
    def use(client: openai.OpenAI) -> None:
        made = client.responses.create(model="m", input="hi")
        assert client.responses.cancel(made.id) == made

    async with running(saying("hello")) as server:
        await with_sdk(server, use)


async def test_an_answer_deleted_under_way_is_told_to_its_end_and_not_kept() -> None:
    hold = HoldsBack()
    async with running(saying("x" * 50, before_decode=hold)) as server:
        async with connect(server.port) as exchange:
            await exchange.send("POST", PATH, b'{"input": "hi", "stream": true}')
            await exchange.read_headers()
            text = await read_until(exchange, "output_text.delta")
            id_ = response_id(text)
            carried = await ask(server, previous_response_id=id_)
            assert "still being answered" in carried.error["message"]
            deleted = await request(server.port, "DELETE", f"{PATH}/{id_}")
            assert deleted.json() == {"id": id_, "object": "response", "deleted": True}
            hold.gate.open()
            text += (await exchange.read_rest()).text
        assert check_stream(text)[-1]["type"] == "response.completed"
        assert (await request(server.port, "GET", f"{PATH}/{id_}")).status == 404


async def test_an_answer_whose_client_left_is_not_kept() -> None:
    hold = HoldsBack()
    async with running(saying("x" * 1000, before_decode=hold)) as server:
        async with connect(server.port) as exchange:
            await exchange.send("POST", PATH, b'{"input": "hi", "stream": true}')
            await exchange.read_headers()
            text = await read_until(exchange, "output_text.delta")
        path = f"{PATH}/{response_id(text)}"
        # The engine stands still, so that the answer cannot be over before it is known that
        # nobody is there for it.
        with trio.fail_after(PATIENCE):
            # Each look is a request of its own, so that this does not spin.
            while (await request(server.port, "GET", path)).status != 404:
                pass
        hold.gate.open()
        await server.until_idle()
        assert (await request(server.port, "GET", path)).status == 404
        assert (await ask(server, max_output_tokens=1)).status == 200


async def test_a_failing_engine_ends_a_stream_with_a_failed_response_and_it_is_kept() -> None:
    hold = HoldsBack()

    def fail(batch: Any) -> None:
        hold(batch)
        if failing.is_set():
            raise RuntimeError("gone")

    failing = threading.Event()
    async with running(saying("x" * 100, before_decode=fail)) as server:
        async with connect(server.port) as exchange:
            await exchange.send("POST", PATH, b'{"input": "hi", "stream": true}')
            await exchange.read_headers()
            text = await read_until(exchange, "output_text.delta")
            failing.set()
            hold.gate.open()
            text += (await exchange.read_rest()).text
        events = check_stream(text)
        last = events[-1]["response"]
        kept = await request(server.port, "GET", f"{PATH}/{last['id']}")
    assert events[-1]["type"] == "response.failed"
    assert (last["status"], last["error"]["code"]) == ("failed", "server_error")
    assert kept.json() == last
