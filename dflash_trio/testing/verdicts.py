"""What is right: one rule for each part a client may play, and some for the process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from attrs import frozen

from .client import End
from .dialects import DIALECTS, Answer, Dialect
from .options import PREFIX_CHARACTERS, CheckOptions
from .reference import Golden, Reference
from .witnesses import Account, Role

if TYPE_CHECKING:
    from .runner import Observation

SECOND_SIGNAL_SECONDS = 2.0
"""What a second signal leaves for writing what can still be written."""

VerdictKind = Literal["right", "wrong", "not reached", "not served"]


@frozen
class Verdict:
    """What is to be thought of a scenario, with all reasons."""

    kind: VerdictKind
    reasons: tuple[str, ...] = ()


class Undecided(Exception):
    """What was seen fits a right server and a wrong one: the phase was missed. Says why."""


def judge(observation: Observation, options: CheckOptions, reference: Reference) -> Verdict:
    """The verdict on one scenario. Pure."""
    if observation.not_reached is not None:
        return Verdict("not reached", (observation.not_reached,))
    judgement = _Judgement(observation, options, reference)
    try:
        faults = tuple(dict.fromkeys(judgement.faults()))
    except Undecided as undecided:
        return Verdict("not reached", (str(undecided),))
    return Verdict("wrong", faults) if faults else Verdict("right")


class _Judgement:
    """One scenario's rules. ``faults`` yields a line for everything that is wrong."""

    def __init__(
        self, observation: Observation, options: CheckOptions, reference: Reference
    ) -> None:
        self._observation = observation
        self._options = options
        self._reference = reference
        self._signals = len(observation.signals_at)
        self._first = observation.signals_at[0]
        self._last = observation.signals_at[-1]

    def faults(self) -> Iterator[str]:
        undecided: Undecided | None = None
        for client in self._observation.clients:
            try:
                yield from (f"{client.role.value}: {fault}" for fault in self._client(client))
            except Undecided as why:
                undecided = why
        yield from self._process()
        if undecided is not None:
            raise undecided

    # ------------------------------------------------------------------ the process

    def _process(self) -> Iterator[str]:
        observation = self._observation
        if observation.exited_at is None:
            yield f"the server did not end within {self._options.timeout:g} s"
            return
        code = observation.exit_code
        expected = self._options.third_exit if self._signals == 3 else 0
        if code != expected:
            yield f"{exit_words(code)} instead of {exit_words(expected)}"
        late = observation.exited_at - self._end_bound()
        if late > 0:
            since = observation.exited_at - self._end_bound(slack=0.0)
            yield f"the server ended {since:.1f} s after it should have"
        yield from (f"left over: {thing}" for thing in observation.leftovers)

    def _end_bound(self, slack: float | None = None) -> float:
        """When the process has to have ended, on trio's clock."""
        slack = self._options.slack if slack is None else slack
        if self._signals == 3:
            return self._last + slack
        if self._signals == 2:
            return self._last + SECOND_SIGNAL_SECONDS + slack
        ends = [
            client.seen.ended_at
            for client in self._observation.clients
            if client.seen.ended_at is not None
            and client.role in (Role.ACTIVE, Role.SLOW, Role.UNREAD, Role.PREFILL, Role.LEAVER)
        ]
        return max([self._first, *ends]) + slack

    # ------------------------------------------------------------------ clients

    def _client(self, client: Account) -> Iterator[str]:
        if self._signals == 3:
            return
        match client.role:
            case Role.LEAVER:
                if client.seen.end is not End.LEFT:
                    raise Undecided("the answer was over before the client could leave")
            case Role.NEW_CONNECTION:
                if client.seen.end is not End.REFUSED:
                    yield f"still accepted {self._options.slack:g} s after the signal"
            case Role.WAITER:
                yield from self._turned_away(client, or_closed=False)
            case Role.IDLE:
                yield from self._closed(client)
            case Role.HALF_SENT | Role.NEW_REQUEST:
                yield from self._turned_away(client, or_closed=True)
            case Role.PREFILL if self._options.policy == "finalize" and self._signals == 1:
                yield from self._prefill_finalized(client)
            case _:
                yield from self._answer(client)

    def _closed(self, client: Account) -> Iterator[str]:
        if client.seen.end is End.CLOSED:
            yield from self._prompt(client)
        elif client.seen.end is End.OPEN:
            yield "was not closed"
        else:
            yield f"got {seen_words(client, None)}"

    def _turned_away(self, client: Account, *, or_closed: bool) -> Iterator[str]:
        seen = client.seen
        refusals = (503, 408) if client.role is Role.HALF_SENT else (503,)
        if seen.end is End.OPEN:
            yield "was never answered"
        elif (seen.end is End.CLOSED and (or_closed or self._signals > 1)) or (
            seen.end is End.COMPLETE and seen.status in refusals
        ):
            yield from self._prompt(client)
        elif seen.end is End.CLOSED:
            yield "was closed without an answer instead of a 503"
        else:
            yield f"got {seen_words(client, None)} instead of a 503"

    def _prompt(self, client: Account) -> Iterator[str]:
        """Its end has to have come soon after the signal, or after it began to ask."""
        ended = client.seen.ended_at
        since = max(self._first, client.began_at)
        if ended is not None and ended - since > self._options.slack:
            yield f"was kept waiting for {ended - since:.1f} s"

    def _prefill_finalized(self, client: Account) -> Iterator[str]:
        seen = client.seen
        if seen.status == 503 and seen.end is End.COMPLETE:
            yield from self._prompt(client)
            return
        answer = self._read(client)
        if seen.first_byte_at is not None and seen.first_byte_at < self._first:
            # Its headers were out: a proper ending is all that is left, with or without text.
            yield from self._answer(client)
            return
        if seen.status == 200 and seen.end is End.COMPLETE and answer.terminal and answer.text:
            golden = self._golden(client)
            if len(answer.text) < len(golden.answer.text):
                raise Undecided("the prefill was over when the server took note of the signal")
        yield f"got {seen_words(client, answer)} instead of a 503"

    def _answer(self, client: Account) -> Iterator[str]:
        """An answer that was under way."""
        seen = client.seen
        dialect, golden, answer = self._dialect(), self._golden(client), self._read(client)
        cut_allowed = self._signals > 1
        if cut_allowed and seen.end in (End.CUT, End.CLOSED):
            yield from self._beginning(answer, golden)
            return
        if seen.end is not End.COMPLETE:
            total = len(golden.answer.text)
            yield f"{seen.end.value} after {len(answer.text)} of {total} characters"
            return
        if seen.status != 200:
            yield f"got HTTP {seen.status}"
            return
        if answer.problem is not None:
            yield answer.problem
        if not answer.terminal:
            yield f"ended without its terminal event after {len(answer.text)} characters"
            return
        whole = self._is_whole(answer, golden)
        if self._options.policy == "drain" and not cut_allowed:
            yield from self._whole(answer, golden)
        elif whole and client.role is not Role.UNREAD and not cut_allowed:
            self._check_not_raced(client)
            yield "went on to its end instead of being finalized"
        elif not whole or answer.finish == dialect.finalized:
            if answer.finish != dialect.finalized and not cut_allowed:
                yield f"ended with {answer.finish} instead of {dialect.finalized}"
            yield from self._beginning(answer, golden)
            if client.role in (Role.ACTIVE, Role.PREFILL) and not cut_allowed:
                yield from self._prompt(client)

    def _check_not_raced(self, client: Account) -> None:
        ended = client.seen.ended_at
        if ended is not None and ended - self._first < 1.0:
            raise Undecided("the answer was complete before the server could have ended it")

    # ------------------------------------------------------------------ comparing

    def _whole(self, answer: Answer, golden: Golden) -> Iterator[str]:
        if answer.finish != golden.answer.finish:
            yield f"ended with {answer.finish} instead of {golden.answer.finish}"
        if self._options.equal != "length":
            yield from self._beginning(answer, golden)
        if not self._is_whole(answer, golden):
            yield f"{_length(answer)} instead of {_length(golden.answer)}"

    def _is_whole(self, answer: Answer, golden: Golden) -> bool:
        """Whether it is as long as the golden answer; where tokens are not told and texts may
        differ, within a quarter."""
        if answer.tokens is not None and golden.answer.tokens is not None:
            return answer.tokens == golden.answer.tokens
        mine, right = len(answer.text), len(golden.answer.text)
        return mine == right if self._options.equal == "exact" else abs(mine - right) <= right / 4

    def _beginning(self, answer: Answer, golden: Golden) -> Iterator[str]:
        """The text, as far as it goes, has to be the golden one's."""
        mine, right = answer.text, golden.answer.text
        if self._options.equal == "length":
            return
        if self._options.equal == "prefix":
            mine, right = mine[:PREFIX_CHARACTERS], right[:PREFIX_CHARACTERS]
        if not right.startswith(mine):
            at = next((i for i, (a, b) in enumerate(zip(mine, right, strict=False)) if a != b), -1)
            at = len(right) if at < 0 else at
            yield (
                f"its text differs from the golden run's at character {at}: "
                f"{mine[at : at + 20]!r} instead of {right[at : at + 20]!r}"
            )

    def _dialect(self) -> Dialect:
        return DIALECTS[self._observation.scenario.api or "chat"]

    def _read(self, client: Account) -> Answer:
        return read_answer(client, self._observation.scenario.api)

    def _golden(self, client: Account) -> Golden:
        assert client.kind is not None
        key = self._observation.scenario.api or "chat", client.kind
        golden = self._reference.goldens.get(key)
        if golden is None:
            raise Undecided(self._reference.missing.get(key, "there is no golden answer"))
        return golden


def read_answer(client: Account, api: str | None) -> Answer:
    """What a client's bytes say, as an answer of the scenario's API."""
    if client.kind is None or client.seen.status != 200:
        return Answer()
    return DIALECTS[api or "chat"].read(client.seen.body, stream=client.stream)


def _length(answer: Answer) -> str:
    if answer.tokens is not None:
        return f"{answer.tokens} tokens"
    return f"{len(answer.text)} characters"


def exit_words(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "no exit"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"death by {signal.Signals(-code).name}"
    except ValueError:
        return f"death by signal {-code}"


def seen_words(client: Account, answer: Answer | None) -> str:
    """What a client saw, in a few words."""
    seen = client.seen
    if seen.status is None or seen.end is End.REFUSED:
        return seen.end.value
    words = str(seen.status) if seen.end is End.COMPLETE else f"{seen.status} {seen.end.value}"
    if answer is None or seen.status != 200:
        return words
    finish = f" {answer.finish}" if answer.finish else ""
    return f"{words}{finish}, {_length(answer)}"
