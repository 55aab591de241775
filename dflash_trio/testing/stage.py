"""One server with the clients that play on it, and the steps that phases are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio
from attrs import define, field

from .client import Exchange
from .dialects import DIALECTS
from .options import CheckOptions
from .reference import Golden, Kind, Reference, status_of
from .server_under_test import ServerUnderTest
from .witnesses import Account, Role, Witness, ask

QUICK = 0.3
"""Seconds: a phase that lasts no longer than this cannot be met with certainty."""


class NotReached(Exception):
    """The phase was not there when the signal was sent, or nobody could tell. Says why."""


@define(eq=False)
class Stage:
    """One server with the clients that play on it. The nursery is the scenario's."""

    server: ServerUnderTest
    options: CheckOptions
    reference: Reference
    api: str
    nursery: trio.Nursery
    witnesses: list[Witness] = field(factory=list)
    accounts: list[Account] = field(factory=list)
    """Of clients without a connection that lasts."""

    def golden(self, kind: Kind) -> Golden:
        golden = self.reference.goldens.get((self.api, kind))
        if golden is None:
            raise NotReached(self.reference.missing.get((self.api, kind), "no reference run"))
        return golden

    async def ask(self, kind: Kind, role: Role, *, stream: bool = True) -> Witness:
        """A client that has sent its request and reads as fast as it can."""
        witness = await self._witness(kind, role, stream=stream)
        witness.may_read.set()
        self.nursery.start_soon(witness.read)
        return witness

    async def ask_slowly(self, kind: Kind, role: Role, piece: int | None) -> Witness:
        """A client with a tiny buffer, which reads ``piece`` bytes at a time; ``None``: nothing
        before its ``may_read`` is set."""
        witness = await self._witness(kind, role, tiny=True)
        if piece is not None:
            witness.may_read.set()
        self.nursery.start_soon(lambda: witness.read(piece=piece))
        return witness

    async def _witness(
        self, kind: Kind, role: Role, *, stream: bool = True, tiny: bool = False
    ) -> Witness:
        witness = await ask(
            self.server,
            self.options,
            self.api,
            self.reference.model,
            kind,
            role,
            stream=stream,
            tiny=tiny,
        )
        self.witnesses.append(witness)
        return witness

    async def connection(self, role: Role, *, used: bool) -> Witness:
        """An open connection without a request; ``used``: after one that was answered."""
        exchange = await self.server.address.connect()
        witness = Witness(role, exchange)
        self.witnesses.append(witness)
        if used:
            with trio.move_on_after(self.options.timeout):
                await exchange.send("GET", self.options.ready, headers=dict(self.options.headers))
                await exchange.read_all()
            if not exchange.reusable:
                raise NotReached("the server does not keep connections alive")
            exchange.expect_close()
        return witness

    async def streaming(self, kind: Kind = Kind.ANSWER) -> Witness:
        """A client that has seen text of its streamed answer, whose rest takes a while."""
        golden = self.golden(Kind.ANSWER)
        if golden.making < QUICK:
            raise NotReached(f"an answer takes only {golden.seconds:.2f} s (--answer-tokens)")
        witness = await self.ask(kind, Role.ACTIVE)
        await self.until(witness.exchange, self.has_text)
        self.check_unfinished(witness)
        return witness

    def has_text(self, exchange: Exchange) -> bool:
        """Whether a stream has brought text, and not only headers or opening events."""
        return bool(DIALECTS[self.api].read(exchange.body, stream=True).text)

    async def until(self, exchange: Exchange, what: Callable[[Exchange], bool]) -> None:
        with trio.move_on_after(self.options.timeout):
            await exchange.until(what)
            return
        raise NotReached(f"nothing came for {self.options.timeout:g} s")

    async def until_status(self, what: Callable[[dict[str, Any]], bool], witness: Witness) -> bool:
        """Wait for a status page for which ``what`` holds; False when the answer came first."""
        with trio.move_on_after(self.options.timeout):
            while not witness.exchange.begun:
                status = await status_of(self.server, self.options)
                if status is not None and what(status):
                    return not witness.exchange.begun
                await trio.sleep(0.005)
        return False

    @staticmethod
    def check_unfinished(*witnesses: Witness) -> None:
        for witness in witnesses:
            if why := over(witness):
                raise NotReached(why)


def over(witness: Witness) -> str | None:
    """Why a client's exchange is no longer under way; ``None`` while it is."""
    seen = witness.exchange.seen()
    if not witness.finished:
        return None
    status = f" with HTTP {seen.status}" if seen.status else ""
    return f"the {witness.role.value} was over ({seen.end.value}{status}) before the signal"
