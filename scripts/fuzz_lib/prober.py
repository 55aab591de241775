"""Asks a server for its health every 50 ms, in a process of its own: one that is not busy.

``python prober.py PORT [PID]`` prints a line with the status, the seconds and the server's own CPU
seconds meanwhile for each answer, until its standard input ends. Without the server's process id,
all seconds count as its own.
"""

from __future__ import annotations

import select
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
from soak_lib.monitor import ask

INTERVAL = 0.05


def main() -> None:
    port, *pids = map(int, sys.argv[1:])
    server = psutil.Process(pids[0]) if pids else None

    def busy() -> float:
        return sum(server.cpu_times()[:2]) if server is not None else 0.0

    while not select.select([sys.stdin], [], [], INTERVAL)[0]:
        before = busy()
        probe = ask(port, "/health")
        own = busy() - before if server is not None else probe.seconds
        print(probe.status, probe.seconds, min(own, probe.seconds), flush=True)


if __name__ == "__main__":
    main()
