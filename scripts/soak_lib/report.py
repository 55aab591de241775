"""What a run found: violations, counts and figures; as a table for people and JSON for machines."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from attrs import Factory, define

SHOWN = 30
"""Violations in full on the terminal; the JSON has more."""
KEPT = 1000


@define
class Report:
    """Filled in by a run."""

    mode: str
    quiet: bool = False
    violations: list[dict[str, Any]] = Factory(list)
    violation_count: int = 0
    outcomes: dict[str, Counter[str]] = Factory(dict)
    """For each kind of client, how often it ended how."""
    figures: dict[str, Any] = Factory(dict)
    log_tail: list[str] = Factory(list)
    samples: list[dict[str, Any]] = Factory(list)
    _begin: float = Factory(time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._begin

    @property
    def requests(self) -> int:
        return sum(counter.total() for counter in self.outcomes.values())

    def violation(self, where: str, what: str) -> None:
        self.violation_count += 1
        if len(self.violations) < KEPT:
            self.violations.append({"at": round(self.elapsed, 2), "where": where, "what": what})
        if self.violation_count <= SHOWN:
            self.say(f"VIOLATION {where}: {what}")

    def outcome(self, kind: str, how: str) -> None:
        self.outcomes.setdefault(kind, Counter())[how] += 1

    def say(self, line: str) -> None:
        if not self.quiet:
            print(f"{self.elapsed:7.1f} s  {line}", flush=True)

    def table(self) -> str:
        """The final table."""
        lines = [self.mode, ""]
        if self.outcomes:
            width = max(map(len, self.outcomes))
            for kind, counter in sorted(self.outcomes.items()):
                ended = ", ".join(f"{how} {count}" for how, count in sorted(counter.items()))
                lines.append(f"  {kind:{width}}  {counter.total():6}  {ended}")
            lines.append("")
        width = max(map(len, self.figures), default=0)
        lines += [f"  {name:{width}}  {value}" for name, value in self.figures.items()]
        lines.append("")
        if self.log_tail and self.violation_count:
            lines += ["The end of the server's log:", *self.log_tail, ""]
        for violation in self.violations[:SHOWN]:
            lines.append(f"VIOLATION at {violation['at']} s, {violation['where']}: ")
            lines[-1] += violation["what"]
        lines.append(
            f"{self.violation_count} violations" if self.violation_count else "no violation"
        )
        return "\n".join(lines)

    def write_json(self, path: Path) -> None:
        path.write_text(
            json.dumps(
                {
                    "mode": self.mode,
                    "command": sys.argv,
                    "violation_count": self.violation_count,
                    "violations": self.violations,
                    "outcomes": self.outcomes,
                    "figures": self.figures,
                    "samples": self.samples,
                    "log_tail": self.log_tail,
                },
                indent=1,
            )
        )
