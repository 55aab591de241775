"""What metrics, log lines and traces cost: CPU time of a server with them and without.

``python -m tests.api.observation_cost``: one server of a scripted model answers the same requests
in turns, with more and less of it watched: two processes that are alike differ by more than what is
measured here. Compared is the CPU time of the whole process (its threads included), which the
kernel counts in nanoseconds. A short and a long answer tell apart what a request costs and what a
token does. The model costs next to nothing; with ``--model FILE`` a server of a real one takes
turns, without any of it and with metrics and log lines, pair by pair.

``off``: meters and records do nothing, at ``--log-level warning``. The product has no such switch.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import logging
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import define

from dflash_trio.__main__ import main as dflash_server
from dflash_trio.api import connection
from dflash_trio.api.request_record import RequestRecord
from dflash_trio.config import ListenerConfig, ServerConfig
from dflash_trio.console import say
from dflash_trio.engine.step_meter import StepMeter
from dflash_trio.log_setup import set_up_logging
from dflash_trio.server import serve
from tests.support.collector import collector
from tests.support.scripted import answer, scripted_config, scripted_load

VARIANTS = ("off", "metrics", "metrics and log", "metrics, log and traces")
PAIR = ("off", "metrics and log")
SHORT, LONG = 1, 100
"""Tokens of the two answers."""
BURST = {SHORT: 40, LONG: 8}
"""Requests in a turn, after one that is not counted."""


# ------------------------------------------------------------------------------- the server

OBSERVERS: dict[type, tuple[str, ...]] = {
    StepMeter: (
        *("drafted", "decode_begins", "decode_ended", "step_ended"),
        *("delivery_begins", "delivered"),
    ),
    RequestRecord: (
        *("waits", "reserved", "first_token", "response_began", "all_said", "sent", "close"),
    ),
}


def observe(variant: str) -> None:
    """Let this process watch what the variant names, and no more."""
    for kind, names in OBSERVERS.items():
        for name in names:
            does = ORIGINALS[kind, name] if variant != "off" else _nothing
            setattr(kind, name, does)
    connection.new_trace = NEW_TRACE if "traces" in variant else _nothing  # type: ignore[assignment]
    logging.getLogger("dflash_trio").setLevel("INFO" if "log" in variant else "WARNING")


def _nothing(*_: Any, **__: Any) -> None:
    pass


ORIGINALS = {
    (kind, name): getattr(kind, name) for kind, names in OBSERVERS.items() for name in names
}
NEW_TRACE = connection.new_trace


def serve_in_turns(model: str | None) -> int:
    """A server that goes on to the next variant with each SIGUSR1: of all, or with a real
    ``model`` of the two that are compared then."""
    turns = itertools.cycle(VARIANTS if model is None else PAIR)
    signal.signal(signal.SIGUSR1, lambda *_: observe(next(turns)))
    if model is not None:
        return dflash_server([model, "--port", "0", "--max-ctx", "1024", "--log-format", "json"])
    set_up_logging("json", "info")
    load = scripted_load(script=answer("x" * 1000))
    config = ServerConfig((scripted_config("m"),), ListenerConfig("127.0.0.1", 0))
    return serve(config, [(config.models[0], load)])


@define
class Server:
    """A process that answers, and its CPU time."""

    process: subprocess.Popen[bytes]
    connection: http.client.HTTPConnection

    @property
    def cpu(self) -> float:
        """Seconds of all its threads so far."""
        return time.clock_gettime((~self.process.pid << 3) | 2)

    def ask(self, tokens: int) -> None:
        """A streamed answer of so many tokens, read to its end."""
        body = {"messages": [{"role": "user", "content": "hello there"}], "stream": True}
        body |= {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        self.connection.request("POST", "/v1/chat/completions", json.dumps(body))
        response = self.connection.getresponse()
        assert response.status == 200
        response.read()

    def scrape(self) -> None:
        self.connection.request("GET", "/metrics")
        self.connection.getresponse().read()

    def burst(self, tokens: int, requests: int) -> float:
        """CPU seconds for a request, of several in a row."""
        before = self.cpu
        for _ in range(requests):
            self.ask(tokens)
        return (self.cpu - before) / requests


@contextmanager
def started(command: list[str], env: dict[str, str]) -> Iterator[Server]:
    """A server that is ready. Its log goes to a file, as under a service manager."""
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **env},
        )
        assert process.stdout is not None
        try:
            port = re.search(rb":(\d+)", process.stdout.readline())
            assert port is not None, Path(log.name).read_text()
            connection = http.client.HTTPConnection("127.0.0.1", int(port[1]), timeout=60)
            while True:
                connection.request("GET", "/health")
                if (response := connection.getresponse()).read() and response.status == 200:
                    break
                time.sleep(0.05)
            yield Server(process, connection)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
            process.stdout.close()


# ----------------------------------------------------------------------------- the measuring


def measure(rounds: int) -> None:
    """Take turns, and print what each thing that is watched adds."""
    taken: dict[tuple[str, int], list[float]] = {}
    with collector() as collected:
        environ = {**collected.environ, "OTEL_BSP_SCHEDULE_DELAY": "5000"}
        with started(["-m", "tests.api.observation_cost", "--serve"], environ) as server:
            for turn in range(rounds + 1):
                for variant in VARIANTS:
                    server.process.send_signal(signal.SIGUSR1)
                    for tokens, requests in BURST.items():
                        # Comes after the signal, and lets the interpreter see what has changed.
                        server.ask(tokens)
                        cost = server.burst(tokens, requests)
                        if turn:
                            taken.setdefault((variant, tokens), []).append(cost)
            report(taken)
            before = server.cpu
            for _ in range(20):
                server.scrape()
            say(f"a scrape of /metrics: {(server.cpu - before) / 20 * 1e3:.2f} ms\n")


def report(taken: dict[tuple[str, int], list[float]]) -> None:
    request, token = split(*(statistics.median(taken["off", tokens]) for tokens in BURST))
    say(f"off: {request * 1e6:.0f} us a request and {token * 1e6:.1f} us a token\n")
    for name in VARIANTS[1:]:
        pairs = {
            tokens: [
                on - off for on, off in zip(taken[name, tokens], taken["off", tokens], strict=True)
            ]
            for tokens in BURST
        }
        request_more, token_more = split(*(statistics.median(pairs[tokens]) for tokens in BURST))
        low, _, high = (each * 1e6 for each in statistics.quantiles(pairs[LONG], n=4))
        share = statistics.median(pairs[LONG]) / statistics.median(taken["off", LONG])
        say(
            f"{name}: {request_more * 1e6:+.0f} us a request and "
            f"{token_more * 1e6:+.2f} us a token; {share:+.1%} of an answer of {LONG} tokens "
            f"(quartiles {low:+.0f} and {high:+.0f} us)\n"
        )


def split(short: float, long: float) -> tuple[float, float]:
    """What a request costs before its tokens, and what a token does."""
    token = (long - short) / (LONG - SHORT)
    return short - token * SHORT, token


def measure_model(path: str, rounds: int) -> None:
    """The CPU time of a real model's tokens, the server's all included, in pairs."""
    taken: dict[str, list[float]] = {name: [] for name in PAIR}
    with started(["-m", "tests.api.observation_cost", "--serve", "--model", path], {}) as server:
        server.ask(LONG)
        for turn in range(2 * rounds):
            server.process.send_signal(signal.SIGUSR1)
            server.ask(SHORT)  # lets the interpreter see what has changed
            taken[PAIR[turn % 2]].append(server.burst(LONG, 2) / LONG * 1000)
    ratios = [on / off for off, on in zip(taken["off"], taken["metrics and log"], strict=True)]
    chance = random.Random(1)
    means = sorted(statistics.fmean(chance.choices(ratios, k=rounds)) for _ in range(5000))
    say(
        f"{Path(path).name}: {statistics.median(taken['off']):.2f} s of CPU for 1000 tokens; with "
        f"metrics and log lines {statistics.fmean(ratios):.4f} times that "
        f"[{means[125]:.4f}, {means[-126]:.4f}] ({rounds} pairs)\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--model", help="a GGUF file whose tokens are measured, and nothing else")
    options: Any = parser.parse_args()
    if options.serve:
        sys.exit(serve_in_turns(options.model))
    if options.model is None:
        measure(options.rounds)
    else:
        measure_model(options.model, options.rounds)


if __name__ == "__main__":
    main()
