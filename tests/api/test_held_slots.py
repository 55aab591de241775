"""What other tests hold on to is held: ``held_slot`` keeps a slot, or says that it did not."""

from __future__ import annotations

import pytest

from tests.support.running import TOO_SHORT, running
from tests.support.scripted import answer, scripted_config, scripted_load


async def test_a_slot_is_held_although_its_answer_has_long_been_made() -> None:
    load = scripted_load(script=answer("at once"))
    async with running((scripted_config("m"), load), routing_queue_limit=0) as server:
        async with server.held_slot():
            await server.until(lambda s: s["models"][0]["in_flight"]["draining"] == 1)
            assert (await server.chat("x")).status == 503
        await server.until_idle()
        assert (await server.chat("x")).status == 200


async def test_an_answer_too_short_to_hold_anything_fails_the_test_that_trusts_it() -> None:
    async with running((scripted_config("m"), scripted_load())) as server:
        with pytest.raises(AssertionError, match=TOO_SHORT):
            async with server.held_slot(max_tokens=1):
                await server.until_idle()
