"""Which scenarios there are: a phase, a pattern of signals, and an API where it matters."""

from __future__ import annotations

import fnmatch
import signal
from collections.abc import Iterator, Mapping, Sequence

from attrs import frozen

from .options import CheckOptions, Policy, UsageError
from .phases import LOADING, PHASES
from .reference import Kind

SECOND_SIGNAL_AFTER = 0.4
"""Seconds to the second signal, from when new connections are refused after the first. That shows
that the first was taken: the kernel makes one of two equal signals that are both still pending."""

PATTERNS: Mapping[str, Sequence[tuple[float, signal.Signals]]] = {
    "term": [(0.0, signal.SIGTERM)],
    "int": [(0.0, signal.SIGINT)],
    "twice": [(0.0, signal.SIGTERM), (SECOND_SIGNAL_AFTER, signal.SIGTERM)],
    # The third comes at once, before the second can have ended everything. It is another signal,
    # because the kernel makes one of two equal ones that are not yet delivered.
    "thrice": [
        (0.0, signal.SIGTERM),
        (SECOND_SIGNAL_AFTER, signal.SIGTERM),
        (0.0, signal.SIGINT),
    ],
}
"""Each signal with the seconds to wait before it, from when new connections are refused."""

_BOTH: tuple[Policy, ...] = ("drain", "finalize")
_DRAIN: tuple[Policy, ...] = ("drain",)

# Where the policy ends everything at the first signal, nothing is left to leave, or for a second.
_CATALOGUE: tuple[tuple[str, str, tuple[Policy, ...]], ...] = (
    (LOADING, "term", _BOTH),
    (LOADING, "int", _BOTH),
    ("idle", "term", _BOTH),
    ("idle", "int", _BOTH),
    ("idle-keep-alive", "term", _BOTH),
    ("half-sent-body", "term", _BOTH),
    ("queued", "term", _BOTH),
    ("queued", "twice", _DRAIN),
    ("prefilling", "term", _BOTH),
    ("streaming", "term", _BOTH),
    ("streaming", "int", _BOTH),
    ("streaming", "twice", _DRAIN),
    ("streaming", "thrice", _DRAIN),
    ("non-streaming", "term", _BOTH),
    ("slow-reader", "term", _BOTH),
    ("zero-window", "term", _BOTH),
    ("zero-window", "twice", _BOTH),
    ("zero-window", "thrice", _BOTH),
    ("keep-alive-request", "term", _BOTH),
    ("disconnecting", "term", _DRAIN),
)


@frozen
class Scenario:
    """One server's life: clients in a phase, then signals."""

    phase: str
    pattern: str
    api: str | None = None
    """``None``: no request is made, so that it is the same on every API."""

    @property
    def name(self) -> str:
        return "/".join(part for part in (self.api, self.phase, self.pattern) if part)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The golden answers that it is measured against."""
        return PHASES[self.phase].kinds if self.phase in PHASES else ()


def scenarios(options: CheckOptions) -> list[Scenario]:
    """Those asked for, in the order of a server's life. UsageError when there are none."""
    every = [s for s in _all(options.apis, options.policy) if s.pattern in options.signals]
    if not options.scenarios:
        chosen = every
    else:
        for pattern in options.scenarios:
            if not any(_matches(scenario, pattern) for scenario in every):
                raise UsageError(f"no scenario is called {pattern!r}: see --list")
        chosen = [s for s in every if any(_matches(s, pattern) for pattern in options.scenarios)]
    if not chosen:
        raise UsageError("no scenario is left to run")
    return chosen


def _all(apis: Sequence[str], policy: Policy) -> Iterator[Scenario]:
    entries = [(phase, pattern) for phase, pattern, policies in _CATALOGUE if policy in policies]
    for phase, pattern in entries:
        if not Scenario(phase, pattern).kinds:
            yield Scenario(phase, pattern)
    for api in apis:
        for phase, pattern in entries:
            if Scenario(phase, pattern).kinds:
                yield Scenario(phase, pattern, api)


def _matches(scenario: Scenario, pattern: str) -> bool:
    names = (scenario.name, scenario.phase, f"{scenario.phase}/{scenario.pattern}")
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)
