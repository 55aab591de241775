"""What clients share, what one client is, and what a kind of client is.

Everything a client decides comes from its own random numbers, made from the run's seed and the
client's number. Every client is bounded by its town's patience.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Awaitable, Callable, Sequence

import trio
from attrs import define, field, frozen

from .judge import PATHS, QUEUE_FULL, Goldens, Question, Violation
from .report import Report
from .setup import Setup
from .wire import Leaving, Malformed

CHAT = PATHS["chat"]
APIS = ("chat", "chat", "messages", "responses", "completions")
TINY_WINDOW = 2048
"""Bytes; the kernel makes it its smallest."""
BACK_OFF = 0.5
"""Seconds after a 503. Without it a slow model would mostly be seen refusing."""
GREETINGS = (
    "Name three rivers.",
    "The sky is",
    "Count from one to ten.",
    "Erzähle mir etwas über Äpfel, 雨 und 🌊.",
)


@define(eq=False)
class Town:
    """What all clients share."""

    port: int
    setup: Setup
    report: Report
    seed: int
    patience: float
    """Seconds within which every client must have come to its end."""
    kinds: Sequence[Kind]
    """What clients there are."""
    goldens: Goldens = field(factory=Goldens)
    numbers: itertools.count[int] = field(factory=itertools.count)
    fat_streams: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(1))
    """Streams that nobody reads hold a slot until the stall guard cuts them: one at a time."""

    async def send_client(self) -> str:
        """One more client, from its choice of a kind to its end; how it ended."""
        number = next(self.numbers)
        chance = random.Random(f"{self.seed}:{number}")
        (kind,) = chance.choices(self.kinds, [kind.weight for kind in self.kinds])
        where = f"client {number} ({kind.name})"
        how = "violation"
        with trio.move_on_after(self.patience) as scope:
            try:
                how = await kind.run(Client(self, number, chance))
            except (Violation, Malformed) as error:
                self.report.violation(where, str(error))
            except OSError as error:
                self.report.violation(where, f"could not connect: {error!r}")
        if scope.cancelled_caught:
            self.report.violation(where, f"has come to no end within {self.patience:g} s")
        self.report.outcome(kind.name, how)
        return how

    async def keep_sending(self, go_on: Callable[[], bool]) -> None:
        """One client after the other. Who is refused comes back a little later, as clients do."""
        while go_on():
            if await self.send_client() == QUEUE_FULL:
                await trio.sleep(BACK_OFF)


@frozen(eq=False)
class Client:
    """One client: its town, its number and its chance."""

    town: Town
    number: int
    chance: random.Random

    @property
    def port(self) -> int:
        return self.town.port

    @property
    def setup(self) -> Setup:
        return self.town.setup

    def leaving(self) -> Leaving:
        return self.chance.choice(("FIN", "RST"))

    def question(self) -> Question:
        """A short one, of a few kinds: the answers are compared with each other."""
        greeting, limit = self.chance.choice(GREETINGS), self.chance.choice((1, 6, 24))
        return self.asking(greeting, limit, ignore_eos=self.chance.random() < 0.7)

    def asking(self, content: str, max_tokens: int, *, ignore_eos: bool = True) -> Question:
        """A question to any of the routes."""
        return Question(content, max_tokens, ignore_eos, self.chance.choice(APIS))

    def long_question(self, max_tokens: int = 8) -> Question:
        """One whose prefill takes several steps, and which both models fit."""
        return self.asking(self.words(self.setup.long_prompt_tokens), max_tokens)

    def words(self, tokens: int) -> str:
        return "word " * (tokens // self.setup.tokens_per_word)


@frozen
class Kind:
    """A kind of client. ``weight``: how often it comes, compared with the others."""

    run: Callable[[Client], Awaitable[str]]
    weight: float

    @property
    def name(self) -> str:
        return self.run.__name__.replace("_", " ")
