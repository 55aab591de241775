"""The shutdown check: what a server does to its clients when it is told to stop.

For any server command with an OpenAI-like API. As a command it is ``dflash-shutdown-check``; as a
library::

    options = CheckOptions(server=("my-server", "--port", "{port}"), policy="drain")
    results = trio.run(check, options)
    assert all_right(results), table(results)

It imports nothing of the server beside it: servers are known by their sockets and processes only.
"""

from .options import CheckOptions, Equal, Policy, UsageError
from .report import as_json, as_junit, table
from .runner import Observation, Result, all_right, check
from .scenarios import Scenario, scenarios
from .server_under_test import ServerFailed
from .verdicts import Verdict

__all__ = [
    "CheckOptions",
    "Equal",
    "Observation",
    "Policy",
    "Result",
    "Scenario",
    "ServerFailed",
    "UsageError",
    "Verdict",
    "all_right",
    "as_json",
    "as_junit",
    "check",
    "scenarios",
    "table",
]
