"""Clients with a part to play: what each one is to the server, and what it came to see."""

from __future__ import annotations

import enum

import trio
from attrs import define, field, frozen

from .client import TINY_BUFFER, Address, End, Exchange, Seen
from .options import CheckOptions
from .reference import Kind, generating_request
from .server_under_test import ServerUnderTest

SLOW_PAUSE = 0.05
"""Seconds between a slow reader's pieces."""


class Role(enum.Enum):
    """What a client is to the server when the signal comes. Each has its own right ending."""

    ACTIVE = "active answer"
    SLOW = "slow reader's answer"
    UNREAD = "unread answer"
    PREFILL = "prefilling request"
    WAITER = "waiting request"
    IDLE = "idle connection"
    HALF_SENT = "half-sent request"
    NEW_REQUEST = "new request on an open connection"
    NEW_CONNECTION = "new connection"
    LEAVER = "client that left"


@frozen
class Account:
    """One client's part and what it saw: what verdicts are made of."""

    role: Role
    seen: Seen
    kind: Kind | None = None
    """Which golden answer it is compared with."""
    stream: bool = False
    began_at: float = 0.0
    """When the client came to this part, on trio's clock."""


@define(eq=False)
class Witness:
    """A client whose connection is open. A task of the stage's nursery reads for it."""

    role: Role
    exchange: Exchange
    kind: Kind | None = None
    stream: bool = False
    may_read: trio.Event = field(factory=trio.Event)
    """Set: it begins to read. Until then it takes not a single byte."""
    began_at: float = field(factory=trio.current_time)

    @property
    def finished(self) -> bool:
        return self.exchange.ended

    async def read(self, *, piece: int | None = None) -> None:
        """The reading task; ``piece``: bytes every ``SLOW_PAUSE``, ``None``: all there is."""
        await self.may_read.wait()
        if piece is None:
            self.exchange.widen()
            await self.exchange.read_all()
        else:
            await self.exchange.read_slowly(piece, SLOW_PAUSE)

    def account(self) -> Account:
        return Account(
            self.role, self.exchange.seen(), self.kind, self.stream, began_at=self.began_at
        )


async def ask(
    server: ServerUnderTest,
    options: CheckOptions,
    api: str,
    model: str,
    kind: Kind,
    role: Role,
    *,
    stream: bool = True,
    tiny: bool = False,
) -> Witness:
    """A witness whose generating request has been sent; nobody reads for it yet."""
    exchange = await server.address.connect(receive_buffer=TINY_BUFFER if tiny else None)
    path, body = generating_request(options, api, model, kind, stream=stream)
    await exchange.send("POST", path, body, dict(options.headers))
    return Witness(role, exchange, kind, stream)


async def watch_refusal(address: Address, patience: float) -> Account:
    """Try to connect until that is refused, for at most ``patience`` seconds."""
    begin = trio.current_time()
    while trio.current_time() - begin < patience:
        if not await address.accepts():
            seen = Seen(End.REFUSED, ended_at=trio.current_time())
            return Account(Role.NEW_CONNECTION, seen, began_at=begin)
        await trio.sleep(0.02)
    return Account(Role.NEW_CONNECTION, Seen(End.OPEN), began_at=begin)
