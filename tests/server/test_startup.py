"""Launches that cannot start: one line, the right exit code, and nothing left behind."""

from __future__ import annotations

import contextlib
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from tests.engine.written_models import write_model
from tests.support.http_client import PATIENCE, request
from tests.support.running import server_process


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dflash_trio", "--port=0", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def start(redirection: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A server in the place of the shell that set up its streams."""
    command = shlex.join([sys.executable, "-m", "dflash_trio", *arguments])
    return subprocess.Popen(["sh", "-c", f"exec {command} {redirection}"])


def refused(result: subprocess.CompletedProcess[str]) -> str:
    """The one line of a refusal."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("dflash-server: error: ")
    return lines[0]


@pytest.mark.real
@pytest.mark.parametrize("check", [(), ("--check",)])
@pytest.mark.parametrize(
    ("content", "says"),
    [(b"\xff\xfe", "UTF-8"), (b"{% if %}", "bad chat template"), (None, "does not exist")],
)
def test_a_template_that_cannot_be_used_is_refused_before_anything_loads(
    smollm2: Path, tmp_path: Path, content: bytes | None, says: str, check: tuple[str, ...]
) -> None:
    template = tmp_path / "chat.jinja"
    if content is not None:
        template.write_bytes(content)
    line = refused(launch(str(smollm2), "--chat-template-file", str(template), *check))
    assert says in line
    assert str(template) in line


@pytest.mark.real
def test_certificates_that_cannot_be_used_are_refused_by_the_check_too(
    smollm2: Path, tmp_path: Path
) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    tls = ("--tls-cert", str(junk), "--tls-key", str(junk))
    for check in ((), ("--check",)):
        assert "--tls-cert" in refused(launch(str(smollm2), *tls, *check))


@pytest.mark.real
def test_layers_for_a_gpu_that_is_not_there_are_refused(smollm2: Path) -> None:
    devices = launch("--list-devices").stdout
    if not devices.startswith("cpu:0"):
        pytest.skip("this machine has a GPU: auto would use it")
    assert "--gpu-layers 20" in refused(launch(str(smollm2), "--gpu-layers", "20"))


@pytest.mark.real
async def test_a_pool_beyond_what_the_slots_can_use_is_shown_as_it_is_with_a_warning(
    smollm2: Path,
) -> None:
    arguments = [str(smollm2), "--port=0", "--max-ctx=512", "--kv-pool-tokens=1000000"]
    with server_process(arguments) as server:
        await server.until_ready()
        status = await server.status()
        assert status["models"][0]["kv_pool"]["total"] == 512
        assert "--kv-pool-tokens 1000000 is more than" in server.log
        server.signal()
        assert await server.exit_code() == 0


@pytest.mark.real
def test_a_taken_port_is_refused_before_anything_loads(smollm2: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = subprocess.run(
            [sys.executable, "-m", "dflash_trio", str(smollm2), f"--port={port}"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    line = refused(result)
    assert str(port) in line


@pytest.mark.real
async def test_a_signal_while_a_real_model_loads_exits_0(smollm2: Path) -> None:
    with server_process([str(smollm2), "--port=0", "--max-concurrency=8"]) as server:
        server.signal(signal.SIGINT)
        assert await server.exit_code() == 0
    assert "Traceback" not in server.log


@pytest.mark.real
async def test_a_signal_at_any_moment_of_the_start_ends_the_server(
    smollm2: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    for delay in (0.15, 0.3, 0.45, 0.6, 0.8, 1.0, 1.3):
        redirection = f">/dev/null 2>{shlex.quote(str(log))}"
        process = start(redirection, str(smollm2), "--port=0", "--max-ctx=512")
        try:
            # The moment is what is tried here; whatever it hits, the outcome is the same.
            await trio.sleep(delay)
            process.send_signal(signal.SIGTERM)
            with trio.fail_after(PATIENCE):
                await trio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
        finally:
            process.kill()
            process.wait()
        # -15: so early that Python itself was not up yet.
        assert process.returncode in (0, -signal.SIGTERM), (delay, log.read_text())
        assert "Traceback" not in log.read_text()


@pytest.mark.real
@pytest.mark.parametrize("redirection", [">&-", ">/dev/full", "2>&-", ">&- 2>&-"])
async def test_a_server_whose_terminal_is_gone_serves_all_the_same(
    smollm2: Path, redirection: str
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = start(redirection, str(smollm2), f"--port={port}")
    try:
        with trio.fail_after(PATIENCE):
            while True:
                assert process.poll() is None
                with contextlib.suppress(OSError):
                    if (await request(port, "GET", "/health")).status == 200:
                        break
                await trio.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        with trio.fail_after(PATIENCE):
            code = await trio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
        assert code == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("check", [(), ("--check",)])
@pytest.mark.parametrize(
    ("option", "says"),
    [
        (("--max-ctx=16777216", "--max-concurrency=256"), "does not fit into the memory"),
        (("--cpu-moe",), "--cpu-moe keeps experts on the CPU"),
        (("--ds4-fused-decode",), "--ds4-fused-decode is for the architecture deepseek4"),
        (("--ds4-expert-top-k=6",), "--ds4-expert-top-k is for the architecture deepseek4"),
        (("--ds4-prefill=exact",), "--ds4-prefill is for the architecture deepseek4"),
        (("--target-devices=sycl:7,sycl:8",), "there is no device sycl:7 here"),
    ],
)
def test_a_model_that_cannot_be_placed_as_asked_is_refused_before_anything_loads(
    tmp_path: Path, option: tuple[str, ...], says: str, check: tuple[str, ...]
) -> None:
    path = write_model(tmp_path / "model.gguf")
    line = refused(launch(str(path), *option, *check))
    assert says in line
    assert "model block 1 (model)" in line


def test_what_is_loaded_is_set_aside_for_good() -> None:
    code = (
        "import gc; from dflash_trio.server import set_garbage_aside; set_garbage_aside(); "
        "print(gc.get_freeze_count(), len(gc.get_objects()))"
    )
    frozen, left = map(int, subprocess.check_output([sys.executable, "-c", code]).split())
    assert frozen > 10_000
    assert left < 100
