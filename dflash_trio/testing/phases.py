"""How clients are brought into a phase, and how it is known that they are in it.

On a foreign server that is known from the client's side only. Each phase says in words what it
relies on; a server with dflash's ``/status/json`` makes *queued*, *prefilling* and *non-streaming*
exact. What cannot be shown is not claimed: the phase raises NotReached.

Life of a phase: :meth:`Phase.enter` brings the clients there. Then, with no await in between,
:meth:`Phase.lost` is asked and the signal sent. :meth:`Phase.after_signal` plays the rest.
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Callable
from typing import Any, ClassVar

import trio

from .reference import Kind, generating_request
from .stage import QUICK, NotReached, Stage, over
from .witnesses import SLOW_PAUSE, Role, Witness, watch_refusal

QUIET = 1.0
"""Seconds without a byte moving after which an unread connection counts as blocked. They are
counted by looks at it: while this process stands still, the server may do so too."""
LOOK_SECONDS = 0.05
"""Between two looks at an unread connection."""
HOLD = 1.5
"""Seconds after the signal for which a zero-window client goes on reading nothing."""


class Phase(abc.ABC):
    """Brings clients somewhere. One object per scenario run."""

    name: ClassVar[str]
    kinds: ClassVar[tuple[Kind, ...]] = ()
    """The golden answers that it needs; without any it is the same on every API."""

    @abc.abstractmethod
    async def enter(self, stage: Stage) -> str:
        """Bring the clients there; how that is known. Raises NotReached."""

    def lost(self, stage: Stage) -> str | None:
        """Why the phase is over already; ``None`` if it is not. Does not await."""
        return next((why for w in stage.witnesses if (why := over(w))), None)

    async def after_signal(self, stage: Stage) -> None:
        """What clients do once the first signal has been sent. May raise NotReached."""
        return  # most do nothing


def model_phase(name: str) -> Callable[[dict[str, Any]], bool]:
    """Whether a status page shows exactly one reservation in a phase of its life."""
    return lambda status: status["models"][0]["in_flight"].get(name) == 1


class Idle(Phase):
    name = "idle"

    async def enter(self, stage: Stage) -> str:
        return "ready, and no client connected"


class IdleKeepAlive(Phase):
    name = "idle-keep-alive"

    async def enter(self, stage: Stage) -> str:
        for used in (True, False):
            witness = await stage.connection(Role.IDLE, used=used)
            witness.may_read.set()
            stage.nursery.start_soon(witness.read)
        return "one connection kept alive after an answer, one that never sent anything"


class HalfSent(Phase):
    name = "half-sent-body"
    kinds = (Kind.ANSWER,)

    async def enter(self, stage: Stage) -> str:
        path, body = generating_request(
            stage.options, stage.api, stage.reference.model, Kind.ANSWER, stream=True
        )
        exchange = await stage.server.address.connect()
        witness = Witness(Role.HALF_SENT, exchange, Kind.ANSWER, stream=True)
        stage.witnesses.append(witness)
        headers = dict(stage.options.headers)
        await exchange.send("POST", path, body, headers, sent_bytes=len(body) // 2)
        witness.may_read.set()
        stage.nursery.start_soon(witness.read)
        # A connection that came later has been served: so this one is known to the server.
        later = await stage.connection(Role.IDLE, used=True)
        stage.witnesses.remove(later)
        later.exchange.close()
        return "headers and half of the body sent; a later connection has been served"


class Streaming(Phase):
    name = "streaming"
    kinds = (Kind.ANSWER,)

    async def enter(self, stage: Stage) -> str:
        await stage.streaming()
        return "text of the streamed answer seen, its end not"

    async def after_signal(self, stage: Stage) -> None:
        address, patience = stage.server.address, stage.options.slack
        stage.accounts.append(await watch_refusal(address, patience))


class KeepAliveRequest(Phase):
    """While an answer is under way, another client asks on a connection that it kept open."""

    name = "keep-alive-request"
    kinds = (Kind.ANSWER,)

    async def enter(self, stage: Stage) -> str:
        await stage.streaming()
        self._kept = await stage.connection(Role.NEW_REQUEST, used=True)
        return "text of a streamed answer seen; another connection kept alive after an answer"

    async def after_signal(self, stage: Stage) -> None:
        await watch_refusal(stage.server.address, QUICK)
        kept = self._kept
        kept.began_at = trio.current_time()
        path, body = generating_request(
            stage.options, stage.api, stage.reference.model, Kind.ANSWER, stream=True
        )
        with contextlib.suppress(trio.ClosedResourceError, OSError):
            await kept.exchange.send("POST", path, body, dict(stage.options.headers))
        kept.may_read.set()
        stage.nursery.start_soon(kept.read)


class Queued(Phase):
    name = "queued"
    kinds = (Kind.ANSWER,)

    async def enter(self, stage: Stage) -> str:
        golden = stage.golden(Kind.ANSWER)
        for _ in range(stage.reference.slots):
            await stage.streaming()
        active = list(stage.witnesses)
        waiter = await stage.ask(Kind.ANSWER, Role.WAITER)
        if stage.reference.tells_status:
            if not await stage.until_status(lambda s: s["routing"]["waiting"] == 1, waiter):
                raise NotReached("the extra request was answered: it had not to wait")
            stage.check_unfinished(*active)
            return "all slots stream; /status/json shows one request waiting"
        patience = max(QUICK, 2 * golden.first_text)
        with trio.move_on_after(patience):
            await waiter.exchange.until(stage.has_text)
        if stage.has_text(waiter.exchange) or waiter.finished:
            raise NotReached("the extra request was answered: it had not to wait (see --slots)")
        stage.check_unfinished(*active)
        return (
            f"{len(active)} streams under way, one more request without text for "
            f"{patience:.1f} s, twice what a free slot takes"
        )

    def lost(self, stage: Stage) -> str | None:
        if stage.has_text(stage.witnesses[-1].exchange):
            return "the extra request was being answered"
        return super().lost(stage)


class Prefilling(Phase):
    name = "prefilling"
    kinds = (Kind.LONG_PROMPT,)

    async def enter(self, stage: Stage) -> str:
        golden = stage.golden(Kind.LONG_PROMPT)
        self._witness = await stage.ask(Kind.LONG_PROMPT, Role.PREFILL)
        if stage.reference.tells_status:
            if not await stage.until_status(model_phase("prefill"), self._witness):
                raise NotReached("the prefill was over before it could be seen (--prefill-tokens)")
            return "no byte yet, and /status/json shows the request in its prefill"
        if golden.first_text < QUICK:
            raise NotReached(
                f"a prefill takes only {golden.first_text:.2f} s, too little to meet it "
                "(--prefill-tokens)"
            )
        with trio.move_on_after(golden.first_text / 2):
            await self._witness.exchange.until(stage.has_text)
        return f"no text yet after {golden.first_text / 2:.1f} s, half of what the first takes"

    def lost(self, stage: Stage) -> str | None:
        if stage.has_text(self._witness.exchange):
            return "the answer had begun before the signal (--prefill-tokens)"
        return super().lost(stage)


class NonStreaming(Phase):
    name = "non-streaming"
    kinds = (Kind.ANSWER,)

    async def enter(self, stage: Stage) -> str:
        golden = stage.golden(Kind.ANSWER)
        if golden.making < QUICK:
            raise NotReached(f"an answer takes only {golden.seconds:.2f} s (--answer-tokens)")
        witness = await stage.ask(Kind.ANSWER, Role.ACTIVE, stream=False)
        half = golden.seconds - golden.making / 2
        known = f"unanswered after {half:.1f} s, when a stream would be half-way of its answer"
        if stage.reference.tells_status:
            if not await stage.until_status(model_phase("decode"), witness):
                raise NotReached("the answer was over before it could be seen (--answer-tokens)")
            known = "unanswered, and /status/json shows the request decoding"
        with trio.move_on_after(witness.began_at + half - trio.current_time()):
            await witness.exchange.until(lambda e: e.begun)
        return known


class SlowReader(Phase):
    name = "slow-reader"
    kinds = (Kind.ANSWER,)

    async def enter(self, stage: Stage) -> str:
        golden = stage.golden(Kind.ANSWER)
        making = golden.making
        if making < QUICK:
            raise NotReached(f"an answer takes only {golden.seconds:.2f} s (--answer-tokens)")
        # Half as fast as the answer is made.
        piece = max(64, math.ceil(golden.wire_bytes / making * SLOW_PAUSE / 2))
        witness = await stage.ask_slowly(Kind.ANSWER, Role.SLOW, piece)
        await stage.until(witness.exchange, lambda e: e.begun)
        await trio.sleep(making / 3)
        stage.check_unfinished(witness)
        unread = witness.exchange.unread_here()
        if not unread:
            raise NotReached("the reader kept up with the answer")
        return f"reads {piece / SLOW_PAUSE / 1000:.1f} kB/s, half as fast as the answer is made"


class ZeroWindow(Phase):
    name = "zero-window"
    kinds = (Kind.LONG_ANSWER,)

    async def enter(self, stage: Stage) -> str:
        golden = stage.golden(Kind.LONG_ANSWER)
        self._witness = await stage.ask_slowly(Kind.LONG_ANSWER, Role.UNREAD, None)
        exchange = self._witness.exchange
        enough = math.ceil(max(QUIET, golden.first_text) / LOOK_SECONDS)
        held, looks = 0, 0
        deadline = trio.current_time() + stage.options.timeout
        while trio.current_time() < deadline:
            there = exchange.unread_there()
            if there is None:
                raise NotReached("the server's send queue cannot be looked at on this system")
            now = there + exchange.unread_here()
            looks = looks + 1 if now == held else 0
            held = now
            if there and looks >= enough:
                break
            await trio.sleep(LOOK_SECONDS)
        # Answers differ by a few bytes (ids, times).
        if held > golden.wire_bytes - 1024:
            raise NotReached(
                f"the kernel took the whole answer of {golden.wire_bytes} bytes from the server "
                "(--long-answer-tokens)"
            )
        return f"nothing read; stuck after {held} bytes of an answer of {golden.wire_bytes}"

    async def after_signal(self, stage: Stage) -> None:
        await trio.sleep(HOLD)
        self._witness.may_read.set()


class DisconnectingWhileDraining(Phase):
    name = "disconnecting"
    kinds = (Kind.ANSWER,)

    async def enter(self, stage: Stage) -> str:
        self._witness = await stage.streaming(Kind.LONG_ANSWER)
        return "text of a long streamed answer seen; it leaves after the signal"

    async def after_signal(self, stage: Stage) -> None:
        witness = self._witness
        await watch_refusal(stage.server.address, QUICK)
        if witness.finished:
            raise NotReached("the answer was over before the client could leave")
        golden = stage.golden(Kind.ANSWER)
        making = golden.making / stage.options.answer_tokens
        rest = making * stage.options.long_answer_tokens - (trio.current_time() - witness.began_at)
        if rest < stage.options.slack + 1:
            raise NotReached(
                f"the rest of the answer would take only {rest:.1f} s (--long-answer-tokens)"
            )
        witness.role = Role.LEAVER
        witness.exchange.leave()


PHASES: dict[str, type[Phase]] = {
    phase.name: phase
    for phase in (
        Idle,
        IdleKeepAlive,
        HalfSent,
        Queued,
        Prefilling,
        Streaming,
        NonStreaming,
        SlowReader,
        ZeroWindow,
        KeepAliveRequest,
        DisconnectingWhileDraining,
    )
}
LOADING = "loading"
"""The phase before the server is ready; the scenario's runner brings it about itself."""
