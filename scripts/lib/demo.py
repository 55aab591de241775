"""Two small models behind one address: bootstrap, then become the server.

Signals. A terminal sends Ctrl-C to every process of the foreground group, and the server counts
signals: the first drains, the second ends requests early. So no parent may stand beside the
server and pass on what the server got already. This process *becomes* the server (exec): its
process id, its signals and its exit code are the server's own, whoever sends the signal and
however. Beside it lives one small child, the announcer. It ignores every signal to the group,
copies the server's output, says when the models are ready, and ends with the server, because
then its pipe ends.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shlex
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Sequence
from typing import BinaryIO, NoReturn
from urllib.parse import urlsplit

import bootstrap

USAGE = """\
usage: scripts/demo [--port N] [listener options of dflash-server]

Installs into .venv (once), then serves SmolLM2-135M, and Gemma-3-270M while that is busy.
PORT in the environment is a default for --port; else it is 8080.
Ctrl-C finishes the running answers and ends the demo.
"""

DRAFT = bootstrap.ROOT / "dflash_trio" / "drafts" / "smollm2-135m-instruct-dflash.gguf"

QUESTION = {
    "messages": [{"role": "user", "content": "Name three rivers and say where they flow."}],
    "stream": True,
    "max_tokens": 200,
}


def server_command(extra: Sequence[str]) -> list[str]:
    """The server's command line, with the caller's own options in it."""
    command = [str(bootstrap.VENV / "bin" / "dflash-server"), "--load-balancing"]
    if not _given(extra, "--port") and not _listens_on_unix_socket(extra):
        command += ["--port", os.environ.get("PORT") or "8080"]
    command += extra
    command += ["--model", str(bootstrap.SMOLLM2), "--model-name", "smollm2"]
    command += ["--target-device", "cpu:0", "--max-ctx", "2048", "--draft", str(DRAFT)]
    command += ["--model", str(bootstrap.GEMMA), "--model-name", "gemma"]
    command += ["--target-device", "cpu:1", "--max-ctx", "2048"]
    return command


def _given(extra: Sequence[str], *options: str) -> bool:
    return any(word.partition("=")[0] in options for word in extra)


def _listens_on_unix_socket(extra: Sequence[str]) -> bool:
    return any(word.removeprefix("--host=").startswith("unix:") for word in extra)


# ------------------------------------------------------------------------------ the announcer


class Announcer:
    """Reads the server's output for its address and says when it is ready to answer."""

    def __init__(self, output: BinaryIO, *, wants_key: bool) -> None:
        self._output = output
        self._wants_key = wants_key

    def run(self) -> None:
        waiting = False
        for line in self._output:
            text = line.decode("utf-8", "replace")
            _say(text)
            listens = re.search(r" listens on (\S.*)", text)
            if listens and not waiting:
                waiting = True
                # A daemon: it ends with the output, however far it came.
                threading.Thread(target=self._announce, args=[listens[1]], daemon=True).start()

    def _announce(self, address: str) -> None:
        address = address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        while not _is_healthy(address):
            time.sleep(0.1)
        time.sleep(0.1)  # lets the server's own last lines on loading go first
        _say(self._banner(address))

    def _banner(self, address: str) -> str:
        curl = ["curl", "-N"]
        url = address
        if address.startswith("unix:"):
            curl += ["--unix-socket", address.removeprefix("unix:")]
            url = "http://localhost"
        if address.startswith("https:"):
            curl.append("--insecure")
        curl += [f"{url}/v1/chat/completions", "-H", "Content-Type: application/json"]
        if self._wants_key:
            curl += ["-H", "Authorization: Bearer YOUR_KEY"]
        curl += ["-d", json.dumps(QUESTION)]
        return (
            "\nReady. SmolLM2 answers first, and Gemma while SmolLM2 is busy.\n\n"
            f"  Address: {address}\n\n"
            f"  An answer, streamed:\n\n    {shlex.join(curl)}\n\n"
            "Ctrl-C finishes the running answers and ends the demo.\n\n"
        )


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that is gone
        sys.stdout.write(text)
        sys.stdout.flush()


def _is_healthy(address: str) -> bool:
    try:
        connection = _connect(address)
        with contextlib.closing(connection):
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False


def _connect(address: str) -> http.client.HTTPConnection:
    if address.startswith("unix:"):
        connection = http.client.HTTPConnection("localhost", timeout=5)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(address.removeprefix("unix:"))
        return connection
    url = urlsplit(address)
    if url.scheme == "https":
        # Whatever certificate it is: this only asks whether the server has loaded its models.
        context = ssl._create_unverified_context()
        return http.client.HTTPSConnection(url.hostname or "", url.port, timeout=5, context=context)
    return http.client.HTTPConnection(url.hostname or "", url.port, timeout=5)


def become_server(command: Sequence[str], *, wants_key: bool) -> NoReturn:
    """Replace this process by the server, with an announcer behind its standard output."""
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        try:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_IGN)
            os.close(write_end)
            with os.fdopen(read_end, "rb") as output:
                Announcer(output, wants_key=wants_key).run()
        finally:
            os._exit(0)
    os.close(read_end)
    os.dup2(write_end, 1)
    os.close(write_end)
    os.execv(command[0], list(command))


def main() -> NoReturn:
    extra = sys.argv[1:]
    if _given(extra, "--help", "-h"):
        print(USAGE, end="")
        sys.exit(0)
    bootstrap.bootstrap_or_exit("scripts/demo", ["demo"])
    wants_key = _given(extra, "--api-key", "--api-key-file") or "DFLASH_API_KEY" in os.environ
    become_server(server_command(extra), wants_key=wants_key)


if __name__ == "__main__":
    main()
