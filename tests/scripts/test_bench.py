"""scripts/bench: its figures on known data, its client byte by byte, and tiny runs."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit
from xml.etree import ElementTree

import psutil
import pytest
import trio

from tests.support.models import SMOLLM2

ROOT = Path(__file__).resolve().parent.parent.parent
BENCH = [sys.executable, ROOT / "scripts" / "lib" / "bench.py"]

Bench = Callable[[str], ModuleType]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Imports a module of the script's library."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return lambda name: importlib.import_module(f"bench_lib.{name}")


def run(*words: str | Path, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BENCH, *words], capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT
    )


# ------------------------------------------------------------------------------- its words


def test_the_command_can_be_started_and_explains_itself() -> None:
    assert os.access(ROOT / "scripts" / "bench", os.X_OK)
    assert run("--help").stdout.startswith("usage: scripts/bench")


def test_shell_syntax() -> None:
    bash = shutil.which("bash")
    assert bash
    subprocess.run([bash, "-n", ROOT / "scripts" / "bench"], check=True)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "name a --server"),
        (["--server", "a"], "NAME="),
        (["--server", "a=serve"], "{port}"),
        (["--server", "a=serve '{port}"], "quotation"),
        (["--url", "a=https://localhost:1"], "http://HOST:PORT"),
        (["--url", "a=http://h:1", "--url", "a=http://h:2"], "the same name"),
        (["--url", "a=http://h:1", "--baseline", "b"], "--baseline"),
        (["--url", "a=http://h:1", "--streams", "1,x"], "--streams"),
        (["--url", "a=http://h:1", "--streams", "0"], "--streams"),
        (["--url", "a=http://h:1", "--margin", "0"], "--margin"),
        (["--bare", "none.gguf"], "none.gguf"),
        (["--url", "a=http://h:1", "--prompts", "README.md"], "README.md"),
        (["--url", "a=http://h:1", "--prompts", "none.json"], "none.json"),
        (["--bare", "README.md", "--slots", "1"], "--slots"),
        (["--compare-llama-server", "README.md", "--llama-server", "none"], "build-llama-server"),
    ],
)
def test_wrong_arguments_are_one_line(
    bench: Bench, capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    with pytest.raises(SystemExit) as error:
        bench("command").main(words)
    assert error.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("scripts/bench: error: ")
    assert complaint in last


def test_both_servers_get_the_same_rooms_and_what_is_given_comes_last(bench: Bench) -> None:
    arguments = bench("arguments")
    words = ["--compare-llama-server", "README.md", "--bare", "README.md", "--streams", "8,1"]
    words += ["--llama-server", sys.executable, "--ctx", "512", "--threads", "3"]
    words += ["--device", "cuda:1", "--ours=--threads 5 --chunk 64", "--theirs=-t 6 -fa on"]
    parsed = arguments.parser().parse_args(words)
    assert parsed.streams == [1, 8]
    ours, theirs, bare = arguments.entries(parsed)
    our_line, their_line = " ".join(ours.command), " ".join(theirs.command)
    assert "--target-device cuda:1 --max-ctx 512 --max-concurrency 8 --prefix" in our_line
    assert our_line.endswith("--prefix-cache-slots 8 --threads 5 --chunk 64")
    assert "-c 4096 -np 8 --no-webui --device CUDA1 -ngl 999 -t 6 -fa on" in their_line
    assert "--prefix-cache-slots 0 --threads 5" in " ".join(bare.command)
    assert arguments.baseline_of(parsed, [ours, theirs, bare]) == theirs.name


# ----------------------------------------------------------------------------- its figures


def test_quantiles(bench: Bench) -> None:
    quantile = bench("figures").quantile
    assert quantile([4, 1, 3, 2, 5], 0.5) == 3
    assert quantile([1, 2], 0.5) == 1.5
    assert quantile([7], 0.95) == 7
    assert quantile(list(range(101)), 0.95) == pytest.approx(95)


def test_equal_ratios_leave_no_doubt(bench: Bench) -> None:
    # Pair by pair, the second is a tenth faster, whatever else the machine does.
    found = bench("figures").ratio_of_pairs([110, 55, 11, 220], [100, 50, 10, 200])
    assert found.value == pytest.approx(1.1)
    assert found.width == pytest.approx(0)


def test_the_interval_of_known_data(bench: Bench) -> None:
    ratio_of_pairs = bench("figures").ratio_of_pairs
    these = [100 * factor for factor in (0.9, 1.1) * 20]
    found = ratio_of_pairs(these, [100] * 40)
    # The logarithms have a standard deviation of 0.1, so their mean one of 0.1 / sqrt(40).
    assert found.value == pytest.approx((0.9 * 1.1) ** 0.5)
    assert found.width == pytest.approx(2 * 1.96 * 0.1003 / 40**0.5, rel=0.1)
    inverse = ratio_of_pairs([100] * 40, these)
    assert inverse.value == pytest.approx(1 / found.value)
    assert ratio_of_pairs(these[:8], [100] * 8).width > 1.8 * found.width


def test_one_pair_is_never_narrow(bench: Bench) -> None:
    found = bench("figures").ratio_of_pairs([110], [100])
    assert found.value == pytest.approx(1.1)
    assert not found.width <= 10


def request(figures: ModuleType, sent: float, first: float, gaps: list[float], tokens: int) -> Any:
    return figures.Request(sent, first, first + sum(gaps), gaps, tokens)


def test_a_summary_of_known_rounds(bench: Bench) -> None:
    figures = bench("figures")
    series = figures.Series("a")
    for slower in (1, 4):
        both = [
            request(figures, 0.0, 0.5 * slower, [0.25 * slower] * 2, 3),
            request(figures, 0.0, 0.5 * slower, [0.5 * slower], 3),
        ]
        series.rounds.append(figures.Round(both, cpu_seconds=0.6 * slower))
    found = figures.summary(series, series)
    assert found["tokens_per_second"] == pytest.approx(3)  # of 6 and 1.5
    assert found["ratio_interval"] == [1, 1]
    assert found["ttft_median_ms"] == pytest.approx(1250)
    assert found["gap_max_ms"] == pytest.approx(2000)
    assert found["cpu_seconds_per_1000_tokens"] == pytest.approx(250)
    assert found["peak_rss_mib"] is None


def test_prompts_are_the_same_for_all_and_new_each_time(bench: Bench) -> None:
    workload = bench("workload")
    work = workload.Workload(3, words=24, shared_words=40, tokens=8, requests=2)
    first = workload.prompts_of(work, 1, "round 0")
    assert first == workload.prompts_of(work, 1, "round 0")
    assert [len(stream) for stream in first] == [2, 2, 2]
    others = [workload.prompts_of(work, 1, f"round {n}") for n in range(1, 20)]
    everything = [p.split() for turn in [first, *others] for stream in turn for p in stream]
    assert {len(words) for words in everything} == {64}
    assert len({tuple(words[:40]) for words in everything}) == 1
    assert len({tuple(words[40:]) for words in everything}) == 120
    assert workload.prompts_of(work, 2, "round 0")[0][0].split()[:40] != everything[0][:40]


def test_given_prompts_are_asked_in_turn(bench: Bench, tmp_path: Path) -> None:
    arguments, workload = bench("arguments"), bench("workload")
    path = tmp_path / "prompts.json"
    path.write_text('["a", "b", "c"]')
    given = arguments.prompts_in(arguments.parser().parse_args(["--prompts", str(path)]).prompts)
    work = workload.Workload(2, words=24, shared_words=0, tokens=8, prompts=given)
    rounds = [workload.prompts_of(work, 1, f"round {number}") for number in range(3)]
    assert rounds == [[["a"], ["b"]], [["c"], ["a"]], [["b"], ["c"]]]


def test_the_plot_is_well_formed_and_shows_everybody(bench: Bench) -> None:
    figures, rounds = bench("figures"), bench("rounds")
    results = []
    for streams in (1, 4):
        series = [figures.Series("a & b"), figures.Series("c")]
        for each in series:
            answered = [request(figures, 0.0, 0.01, [0.1], 2)] * streams
            each.rounds.append(figures.Round(answered))
        work = bench("workload").Workload(streams, 5, 0, 2)
        results.append(rounds.Measured(work, series, series[0]))
    tree = ElementTree.fromstring(bench("plot").svg(results))
    texts = [element.text for element in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a & b", "c", "1", "4"} <= set(texts)
    assert len(list(tree.iter("{http://www.w3.org/2000/svg}polyline"))) == 4


# ------------------------------------------------------------------------------ its client

EVENTS = [
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
    b": keep-alive\n\n",
    b'data: {"choices":[{"delta":{"content": "\\"b"}}]}\n\n',
    b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":2}}}\n\n',
    b"data: [DONE]\n\n",
]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(data: bytes, size: int) -> bytes:
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


async def ask(
    bench: Bench, serve: Callable[[trio.SocketStream], Awaitable[None]], times: int = 1
) -> list[Any]:
    """What the client makes of a server that talks as ``serve`` does."""
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listener.socket.getsockname()[1]
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        async with bench("stream").Client(urlsplit(f"http://127.0.0.1:{port}")) as client:
            asked = client.request_bytes("POST", "/v1/chat/completions", b"{}")
            found = [await client.stream(asked) for _ in range(times)]
        nursery.cancel_scope.cancel()
    return found


@pytest.mark.parametrize("chunk", [1, 7, 64, 10_000])
@pytest.mark.parametrize("piece", [1, 50, 10_000])
async def test_the_client_reads_a_stream_however_it_is_cut(
    bench: Bench, chunk: int, piece: int
) -> None:
    answer = HEAD + chunked(b"".join(EVENTS), chunk)

    async def serve(stream: trio.SocketStream) -> None:
        while await stream.receive_some():
            for at in range(0, len(answer), piece):
                await stream.send_all(answer[at : at + piece])

    for found in await ask(bench, serve, times=2):
        assert (found.tokens, found.prompt_tokens, found.cached_tokens) == (3, 7, 2)
        assert len(found.gaps) == 1
        assert found.sent <= found.first <= found.last


async def test_a_connection_that_was_closed_without_a_word_is_made_anew(bench: Bench) -> None:
    asked = []

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            asked.append(await stream.receive_some())
            await stream.send_all(HEAD + chunked(b"".join(EVENTS), 40))

    found = await ask(bench, serve, times=3)
    assert [each.tokens for each in found] == [3, 3, 3]
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (b"", "no response"),
        (b"HTTP/1.1 503 X\r\nContent-Length: 4\r\n\r\nbusy", "status 503: busy"),
        (HEAD + chunked(EVENTS[1], 50), "no usage chunk"),
        (HEAD + b"3\r\nda", "was cut"),
        (HEAD + chunked(b'data: {"error":{"message":"lost"}}\n\n', 50), "lost"),
    ],
)
async def test_an_answer_that_cannot_be_measured_is_an_error(
    bench: Bench, answer: bytes, complaint: str
) -> None:
    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some()
            await stream.send_all(answer)

    with pytest.raises(ExceptionGroup) as group:
        await ask(bench, serve)
    (error,) = group.value.exceptions
    assert isinstance(error, bench("stream").BadAnswer)
    assert complaint in str(error)


# ---------------------------------------------------------------------------- a tiny run


def scripted(name: str, **model: Any) -> str:
    """The words of ``--server`` for a scripted one, whose port is filled in by the script."""
    fields = {"slots": 2, "step_seconds": 0.002, "answer": "abcdefgh" * 20, **model}
    specification = json.dumps({"models": [fields], "listener": {"port": 0}})
    specification = specification.replace('"port": 0', '"port": {port}')
    command = [sys.executable, "-m", "tests.support.scripted_server", specification]
    return f"{name}={shlex.join(command)}"


TINY = ["--streams", "1,2", "--words", "5", "--tokens", "12", "--requests", "2"]
TINY += ["--min-pairs", "2", "--max-pairs", "2", "--seed", "4", "--sample-seconds", "0.05"]


@pytest.mark.real
def test_two_servers_side_by_side(tmp_path: Path) -> None:
    out, plot = tmp_path / "bench.json", tmp_path / "bench.svg"
    words = ["--server", scripted("fast"), "--server", scripted("slow", step_seconds=0.04), *TINY]
    result = run(*words, "--json", out, "--plot", plot, "--device-note", "a note")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "a note" in result.stdout
    rows = [line for line in result.stdout.splitlines() if line.startswith(("| 1 |", "| 2 |"))]
    assert len(rows) == 4
    page = json.loads(out.read_text())
    assert [work["streams"] for work in page["workloads"]] == [1, 2]
    fast, slow = page["workloads"][1]["servers"]
    assert (fast["rounds"], fast["tokens"]) == (2, 2 * 2 * 2 * 12)
    assert slow["ratio"] < 1
    assert slow["gap_median_ms"] > 15
    assert 1 <= slow["tokens_per_event"] < 2  # a late reader finds several tokens in one piece
    assert slow["peak_rss_mib"] > 10
    assert slow["cpu_seconds_per_1000_tokens"] > 0
    assert ElementTree.parse(plot)
    pids = [int(line.split()[-1]) for line in result.stderr.splitlines() if "is ready" in line]
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.real
def test_a_server_that_does_not_start_shows_its_log() -> None:
    broken = shlex.join([sys.executable, "-c", "raise SystemExit('no luck on {port}')"])
    result = run("--server", scripted("good"), "--server", f"bad={broken}", *TINY)
    assert result.returncode == 1
    assert "bad ended with exit code 1" in result.stderr
    assert "no luck on" in result.stderr
    assert "Nothing was measured" in result.stdout


@pytest.mark.real
def test_a_signal_ends_it_and_its_servers() -> None:
    words = ["--server", scripted("a"), "--server", scripted("b"), *TINY, "--max-pairs", "500"]
    words += ["--min-pairs", "500"]
    with subprocess.Popen(
        [*BENCH, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stderr is not None
        assert any("pair 1:" in line for line in process.stderr)
        servers = psutil.Process(process.pid).children()
        assert len(servers) == 2
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "stopped by SIGTERM" in errors
    assert "| 1 | a |" in output
    assert not any(server.is_running() for server in servers)


@pytest.mark.real
def test_the_bare_loop_is_one_of_them(models: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    words = ["--bare", models[SMOLLM2], "--ctx", "256", "--shared-words", "80", "--json", out]
    words += ["--device-note", "none", "--streams", "2", "--words", "5", "--tokens", "3"]
    words += ["--requests", "2", "--min-pairs", "1", "--max-pairs", "1", "--threads", "1"]
    result = run(*words, timeout=250)
    assert result.returncode == 0, result.stdout + result.stderr
    (bare,) = json.loads(out.read_text())["workloads"][0]["servers"]
    assert bare["tokens"] == 2 * 2 * 3
    assert bare["cached_tokens_mean"] >= 70
    assert bare["prompt_tokens_mean"] > 85
