"""Cancels an operation at each of its schedule points in turn, and says where these were.

An operation is run again and again on a mock clock, each time cancelled one schedule point later,
until it ends without having been cancelled. Two kinds of moment matter at each point: while
the task is blocked there (the await raises Cancelled), and when it has been woken but has not run
yet (the await succeeds, and the next one raises).
"""

from __future__ import annotations

import ast
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import trio
from trio.testing import MockClock

import dflash_trio.routing

ROUTING = Path(dflash_trio.routing.__file__).parent

Place = tuple[str, int]
"""File name in the routing package, line."""
Moment = Literal["blocked", "woken"]


class CancelAt(trio.abc.Instrument):
    """Cancels ``scope`` at the k-th schedule point of the task that watches, or of its children."""

    def __init__(self, k: int, moment: Moment) -> None:
        self.scope = trio.CancelScope()
        self.fired = False
        self.places: set[Place] = set()
        """Every await of the routing package that the cancelled task was in."""
        self._left = k
        self._moment = moment
        self._root: trio.lowlevel.Task | None = None

    async def __call__(self, operation: Callable[[], Awaitable[None]]) -> None:
        """Run the operation in the scope that will be cancelled."""
        self._root = trio.lowlevel.current_task()
        with self.scope:
            await operation()
        self._root = None

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._moment == "blocked":
            self._count(task)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._moment == "woken":
            self._count(task)

    def _count(self, task: trio.lowlevel.Task) -> None:
        if self.fired or not self._watched(task):
            return
        self._left -= 1
        if self._left == 0:
            self.fired = True
            self.places = set(_places(task.coro))
            self.scope.cancel()

    def _watched(self, task: trio.lowlevel.Task) -> bool:
        while self._root is not None:
            if task is self._root:
                return True
            if task.parent_nursery is None:
                return False
            task = task.parent_nursery.parent_task
        return False


def _places(coroutine: Any) -> Iterator[Place]:
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)
        if frame is not None and Path(frame.f_code.co_filename).parent == ROUTING:
            yield (Path(frame.f_code.co_filename).name, frame.f_lineno)
        coroutine = getattr(coroutine, "cr_await", None)


def cancel_everywhere(scenario: Callable[[CancelAt], Awaitable[None]]) -> set[Place]:
    """Run ``scenario`` with a cancellation at every point of what it runs under its argument.

    The scenario itself asserts what must hold afterwards. Returns all awaits that were hit.
    """
    places: set[Place] = set()
    for moment in ("blocked", "woken"):
        k, fired = 0, True
        while fired:
            k += 1
            assert k < 500, "the operation never ends"
            instrument = CancelAt(k, moment)
            trio.run(
                _bounded,
                scenario,
                instrument,
                clock=MockClock(autojump_threshold=0),
                instruments=[instrument],
            )
            fired = instrument.fired
            places |= instrument.places
    return places


async def _bounded(scenario: Callable[[CancelAt], Awaitable[None]], instrument: CancelAt) -> None:
    with trio.fail_after(100):
        await scenario(instrument)


def awaits_of(file: str) -> dict[int, range]:
    """Every await, ``async with`` and ``async for`` of a routing file: first line to lines."""
    found: dict[int, range] = {}
    for node in ast.walk(ast.parse((ROUTING / file).read_text())):
        match node:
            case ast.Await():
                found[node.lineno] = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            case ast.AsyncWith() | ast.AsyncFor():
                found[node.lineno] = range(node.lineno, node.body[0].lineno)
    return found
