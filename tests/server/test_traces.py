"""Traces around the server's life: when they are on, what a bad collector costs, how they end."""

from __future__ import annotations

import json
import logging
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from dflash_trio.api.request_trace import SpanData, TracedRequest
from dflash_trio.trace_settings import TraceSettings, read_trace_settings
from dflash_trio.traces import (
    FLUSH_BOUND,
    HURRIED_FLUSH_BOUND,
    OncePerInterval,
    Traces,
    start_traces,
    strip_variables,
)
from tests.support.collector import collector
from tests.support.http_client import PATIENCE
from tests.support.running import ENDLESS, ServerProcess, scripted_process
from tests.support.scripted import FileGate

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
HERE = {ENDPOINT: "http://127.0.0.1:4318"}
RATIO = {"OTEL_TRACES_SAMPLER": "traceidratio"}


def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


# ------------------------------------------------------------------------ what is on, and said


@pytest.mark.parametrize(
    ("environ", "endpoint"),
    [
        ({}, None),
        ({ENDPOINT: "  "}, None),
        (HERE, "http://127.0.0.1:4318"),
        ({TRACES_ENDPOINT: "https://c/v1/traces"}, "https://c/v1/traces"),
        ({ENDPOINT: " https://me:secret@c:1/x "}, "https://c:1/x"),
        ({TRACES_ENDPOINT: "https://me:secret@c:1/x?key=secret#s"}, "https://c:1/x"),
        ({**HERE, TRACES_ENDPOINT: " "}, "http://127.0.0.1:4318"),
        ({**HERE, "OTEL_SDK_DISABLED": " True "}, None),
        ({**HERE, "OTEL_SDK_DISABLED": "False"}, "http://127.0.0.1:4318"),
        ({**HERE, "OTEL_TRACES_EXPORTER": "none"}, None),
        ({**HERE, "OTEL_TRACES_EXPORTER": "None"}, None),
        ({**HERE, "OTEL_TRACES_EXPORTER": "OTLP,"}, "http://127.0.0.1:4318"),
        ({**HERE, "OTEL_EXPORTER_OTLP_PROTOCOL": "HTTP/protobuf"}, "http://127.0.0.1:4318"),
        ({**HERE, **RATIO, "OTEL_TRACES_SAMPLER_ARG": "0.1"}, "http://127.0.0.1:4318"),
        (
            {**HERE, "OTEL_BSP_SCHEDULE_DELAY": "", "OTEL_EXPORTER_OTLP_TIMEOUT": "2.5"},
            HERE[ENDPOINT],
        ),
        ({**HERE, "OTEL_METRICS_EXPORTER": "none"}, "http://127.0.0.1:4318"),
    ],
)
def test_an_endpoint_turns_traces_on_and_the_sdks_switches_turn_them_off_without_a_word(
    environ: dict[str, str], endpoint: str | None
) -> None:
    assert read_trace_settings(environ) == TraceSettings(endpoint)


@pytest.mark.parametrize(
    ("environ", "on", "words"),
    [
        ({**HERE, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, False, "asks for grpc"),
        ({**HERE, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"}, False, "http/json"),
        ({**HERE, "OTEL_TRACES_EXPORTER": "console"}, False, "OTEL_TRACES_EXPORTER names console"),
        ({**HERE, "OTEL_TRACES_EXPORTER": "console,otlp"}, True, "names console"),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, False, "traces are off without"),
        ({**HERE, "OTEL_METRICS_EXPORTER": "otlp"}, True, "metrics are not pushed"),
        ({"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://c"}, False, "the log is not pushed"),
        ({**HERE, "OTEL_CONFIG_FILE": "x.yaml"}, True, "its file is not read"),
        ({**HERE, "OTEL_BSP_EXPORT_TIMEOUT": "100"}, True, "has no use for it"),
        ({**HERE, "OTEL_SDK_DISABLED": "1"}, True, "OTEL_SDK_DISABLED is 1, which is none of true"),
        ({**HERE, "OTEL_TRACES_SAMPLER": "jaeger_remote"}, True, "is jaeger_remote, which is none"),
        (
            {**HERE, "OTEL_TRACES_SAMPLER_ARG": "0.1"},
            True,
            "OTEL_TRACES_SAMPLER_ARG is set, but only",
        ),
        ({**HERE, "OTEL_EXPORTER_OTLP_COMPRESSION": "lz4"}, True, "is lz4, which is none of none"),
        ({**HERE, "OTEL_EXPORTER_OTLP_TIMEOUT": "10000"}, True, "counts in seconds"),
        *(
            ({**HERE, **RATIO, name: value}, False, f"{name} is {value}, which is no")
            for name, values in {
                "OTEL_TRACES_SAMPLER_ARG": ["x", "-0.1", "7", "nan"],
                "OTEL_BSP_SCHEDULE_DELAY": ["x", "0", "-5", "1.5", "99999999999999999"],
                "OTEL_BSP_MAX_QUEUE_SIZE": ["x", "-1", "9" * 30],
                "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": ["x", "0"],
                "OTEL_EXPORTER_OTLP_TIMEOUT": ["x", "0", "-1", "nan", "inf", "1e300"],
            }.items()
            for value in values
        ),
        (
            {**HERE, "OTEL_BSP_MAX_QUEUE_SIZE": "511"},
            False,
            "OTEL_BSP_MAX_QUEUE_SIZE is 511, and OTEL_BSP_MAX_EXPORT_BATCH_SIZE 512",
        ),
        ({**HERE, "OTEL_BSP_MAX_QUEUE_SIZE": "512"}, True, ""),
        ({**HERE, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "2049"}, False, "has to fit into the queue"),
        (
            {**HERE, "OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE": "/no/such"},
            False,
            "which is not there",
        ),
        *(
            ({ENDPOINT: value}, False, f"{ENDPOINT} is set, but traces are off: it is no URL")
            for value in (
                "localhost:4318",
                "secret",
                "http://",
                "http://[::1",
                "http://c:99999",
                "http://c:x",
                "unix:///x",
                "http://c\x1b[31m",
                "http://c d",
            )
        ),
        ({ENDPOINT: "http://c?key=secret"}, False, "it has a query"),
    ],
)
def test_what_is_set_and_not_served_is_said_by_name(
    environ: dict[str, str], on: bool, words: str
) -> None:
    settings = read_trace_settings(environ)
    assert (settings.endpoint is not None) == on
    told = "\n".join(settings.warnings)
    assert words in told
    assert not words or any(name in told for name in environ)
    assert "secret" not in told


def test_without_the_extra_a_start_says_so_and_serves(tmp_path: Path) -> None:
    # Before the installed one on the path, and with nothing in it.
    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry" / "__init__.py").touch()
    env = {**HERE, "PYTHONPATH": str(tmp_path)}
    with scripted_process({"answer": "yes"}, env=env) as server:
        trio.run(server.until_ready)
        assert trio.run(server.chat).status == 200
    assert f"WARNING {ENDPOINT} is set, but traces are off: OpenTelemetry is not" in server.log
    assert "dflash-trio[otel]" in server.log


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ({"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "-1"}, "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT must be"),
        ({"OTEL_PROPAGATORS": "b3"}, "OTEL_PROPAGATORS: Propagator b3 not found"),
    ],
)
def test_a_variable_that_the_sdk_cannot_use_costs_the_traces_and_not_the_start(
    variable: dict[str, str], words: str
) -> None:
    env = {**HERE, **variable}
    with scripted_process({"answer": "yes"}, env=env) as server:
        trio.run(server.until_ready)
        assert trio.run(server.chat).status == 200
    assert f"WARNING traces are off: {words}" in server.log
    assert "Traceback" not in server.log


def test_variables_reach_the_sdk_as_they_were_understood() -> None:
    environ = {"OTEL_A": " x ", "OTEL_B": "  ", "OTEL_C": "", "OTEL_D": "y", "D": " "}
    strip_variables(environ)
    assert environ == {"OTEL_A": "x", "OTEL_D": "y", "D": " "}


def test_nothing_of_opentelemetry_is_imported_unless_it_is_wanted() -> None:
    env = {"PYTHONPROFILEIMPORTTIME": "1", ENDPOINT: ""}
    with scripted_process({"answer": "yes"}, env=env) as server:
        trio.run(server.until_ready)
        assert trio.run(server.chat).status == 200
        server.signal()
        assert trio.run(server.exit_code) == 0
    assert "dflash_trio.traces" in server.log
    assert "opentelemetry" not in server.log
    assert "google.protobuf" not in server.log


def test_what_a_launch_comes_to_names_the_endpoint_and_warns(smollm2: Path) -> None:
    env = {**HERE, "OTEL_LOGS_EXPORTER": "otlp", "PATH": "/bin:/usr/bin"}
    command = [sys.executable, "-m", "dflash_trio", str(smollm2), "--check"]
    said = subprocess.run(command, env=env, capture_output=True, check=True).stdout.decode()
    assert "  traces    to http://127.0.0.1:4318\n" in said
    assert "OTEL_LOGS_EXPORTER is set, but the log is not pushed" in said
    command += ["--log-format", "json"]
    whole = json.loads(subprocess.run(command, env=env, capture_output=True, check=True).stdout)
    assert whole["traces"] == "http://127.0.0.1:4318"


def test_a_sampler_that_raises_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = Traces(StuckExporter())  # type: ignore[arg-type]

    def raising(*_: Any, **__: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(traces._tracer.sampler, "should_sample", raising)  # type: ignore[attr-defined]
    request = TracedRequest(SpanData("x", 1, 2, {}), None, {}, tuple)
    assert traces.export(request) is None
    trio.run(traces.flush, trio.Event())


# -------------------------------------------------------------------------- a bad collector


PATIENT = {"OTEL_EXPORTER_OTLP_TIMEOUT": str(int(3 * PATIENCE))}
"""The exporter's own bound in seconds: longer than any test waits."""


PATIENT_END = {
    "dflash_trio.traces.FLUSH_BOUND": PATIENCE,
    "dflash_trio.traces.HURRIED_FLUSH_BOUND": PATIENCE,
    "dflash_trio.routing.drain.CUT_GRACE": PATIENCE,
}
"""Bounds of a shutdown that no busy machine reaches."""


async def until_logged(server: ServerProcess, words: str) -> None:
    with trio.fail_after(PATIENCE):
        while words not in server.log:  # noqa: ASYNC110
            await trio.sleep(0.005)


def test_keys_of_the_collectors_stay_out_of_the_log() -> None:
    env = {
        TRACES_ENDPOINT: f"http://me:secret@127.0.0.1:{closed_port()}/v1/traces?key=secret",
        "OTEL_EXPORTER_OTLP_HEADERS": "no value but a secret,key=secret%0d%0awith a line",
        "OTEL_BSP_SCHEDULE_DELAY": "5",
    }
    for headers in (env["OTEL_EXPORTER_OTLP_HEADERS"], "key=secret"):
        env["OTEL_EXPORTER_OTLP_HEADERS"] = headers
        with scripted_process({"answer": "yes"}, env=env) as server:
            trio.run(server.until_ready)
            assert trio.run(server.chat).status == 200
            trio.run(until_logged, server, "spans batch")
        assert "secret" not in server.log
        assert ("in OTEL_EXPORTER_OTLP_HEADERS or" in server.log) == (headers != "key=secret")
    assert "(Connection refused)" in server.log


async def test_an_sdk_that_fails_at_its_end_fails_no_shutdown(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_trio.traces.FLUSH_BOUND", PATIENCE)

    class Failing(StuckExporter):
        def shutdown(self) -> None:
            raise OSError("gone")

    traces = Traces(Failing())  # type: ignore[arg-type]
    await traces.flush(trio.Event())
    assert "the last spans could not be sent: gone" in caplog.text


def test_a_collector_that_hangs_slows_no_request_and_no_shutdown_beyond_the_bound() -> None:
    limits = {"OTEL_BSP_MAX_QUEUE_SIZE": "8", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "4", **PATIENT}
    with collector(hangs=True) as collected:
        env = {**collected.environ, **limits}
        with scripted_process({"answer": "yes"}, env=env) as server:
            trio.run(server.until_ready)

            async def ask_many() -> None:
                with trio.fail_after(PATIENCE):
                    for _ in range(30):
                        assert (await server.chat()).status == 200

            trio.run(ask_many)
            assert collected.asked.wait(PATIENCE)
            server.signal()
            # It may take its bound, and not the exporter's patience.
            assert trio.run(server.exit_code) == 0
    assert "the collector did not take the last spans in time" in server.log
    assert server.log.count("Queue full") == 1
    assert "Traceback" not in server.log


def test_a_collector_that_is_not_there_is_told_once_and_ends_nothing_late() -> None:
    env = {ENDPOINT: f"http://127.0.0.1:{closed_port()}", "OTEL_BSP_SCHEDULE_DELAY": "5", **PATIENT}
    with scripted_process({"answer": "yes"}, env=env) as server:
        trio.run(server.until_ready)
        for _ in range(3):
            assert trio.run(server.chat).status == 200
            trio.run(server.until_idle)
        server.signal()
        assert trio.run(server.exit_code) == 0
    assert server.log.count("encountered while exporting") <= 1
    assert "Traceback" not in server.log


class StuckExporter:
    """Takes what it gets, and never returns."""

    def __init__(self) -> None:
        self.stuck = threading.Event()
        self.end = threading.Event()

    def export(self, _: Any) -> None:
        self.stuck.set()
        self.end.wait(30)

    def shutdown(self) -> None:
        pass


@pytest.mark.parametrize(("hurried", "bound"), [(False, FLUSH_BOUND), (True, HURRIED_FLUSH_BOUND)])
async def test_the_flush_is_given_up_at_its_bound_which_a_second_signal_shortens(
    hurried: bool, bound: float, autojump_clock: trio.testing.MockClock
) -> None:
    exporter = StuckExporter()
    traces = Traces(exporter)  # type: ignore[arg-type]
    with traces._tracer.start_as_current_span("x"):
        pass
    signal = trio.Event()
    if hurried:
        signal.set()
    began = trio.current_time()
    # The clock jumps, since nobody but the thread has anything to do.
    await traces.flush(signal)
    assert trio.current_time() - began == pytest.approx(bound)
    exporter.end.set()


@pytest.mark.parametrize("signals", [1, 2])
def test_what_runs_at_the_shutdown_is_told_to_the_collector_before_the_end(
    signals: int, tmp_path: Path
) -> None:
    gate = FileGate(tmp_path / "gate", position=50)
    model = {"answer": "y" * 100, **gate.fields} if signals == 1 else ENDLESS
    with collector() as collected:
        # Nothing is sent before the end by itself.
        env = {**collected.environ, "OTEL_BSP_SCHEDULE_DELAY": "600000"}
        with scripted_process(model, env=env, bounds=PATIENT_END) as server:
            trio.run(server.until_ready)

            async def stream_and_stop() -> None:
                async with server.streaming() as exchange:
                    server.signal()
                    await until_logged(server, "shutting down")
                    gate.open()
                    if signals == 2:
                        # Only now: two that wait together are one.
                        server.signal()
                    assert (await exchange.read_rest()).complete
                assert await server.exit_code() == 0

            trio.run(stream_and_stop)
    (span,) = [each for each in collected.servers() if each.name.startswith("POST")]
    assert span.attributes["dflash.outcome"] == "completed"
    reasons = span.attributes["gen_ai.response.finish_reasons"]
    if signals == 1:
        assert reasons == ["stop"]
    else:
        assert reasons == ["length"]
        assert span.attributes["dflash.ended_by"] == "server_shutdown"
    assert set(collected.parts(span)) == {"prefill", "decode", "drain"}


# ---------------------------------------------------------------------------------- its parts


def test_complaints_come_once_in_an_interval() -> None:
    times = iter([0.0, 1.0, 59.0, 60.0, 61.0])
    once = OncePerInterval(60.0, lambda: next(times))
    record = logging.makeLogRecord({})
    assert [once.filter(record) for _ in range(5)] == [True, False, False, True, False]


def test_without_an_endpoint_there_is_nothing_to_start() -> None:
    assert start_traces(TraceSettings()) is None


def test_the_page_names_every_attribute_and_no_other() -> None:
    root = Path(__file__).parent.parent.parent
    name = r"((?:http|url|network|error|gen_ai|dflash)\.[a-z_.]+)"
    said = set(re.findall(rf'"{name}"', (root / "dflash_trio/api/request_trace.py").read_text()))
    page = set(re.findall(rf"`{name}`", (root / "docs/traces.md").read_text()))
    assert said == page
    assert len(said) > 30
