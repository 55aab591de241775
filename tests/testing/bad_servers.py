"""A small server that shuts down rightly, unless it is told to have one fault.

``python -m tests.testing.bad_servers FAULT PLACE POLICY``; the place is a port or a Unix socket's
path, ``right`` is no fault. It speaks all the APIs, has one slot, and no status page: what a
foreign server looks like to the harness.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import h11
import trio

STEP = 0.01
PREFILL_PER_CHARACTER = 0.0004
CUT_GRACE = 1.0


def chat(text: str | None, finish: str | None, whole: bool) -> Any:
    delta = {"message" if whole else "delta": {"content": text} if text else {}}
    return {"choices": [{"index": 0, "finish_reason": finish, **delta}]}


def encode(api: str, kind: str, text: str = "", finish: str = "") -> bytes:
    """One event (``delta``, ``end``) or the ``whole`` answer; ``finish``: stop or length."""
    if api == "chat":
        if kind == "whole":
            return json.dumps(chat(text, finish, True)).encode()
        data = json.dumps(chat(text or None, finish or None, False))
        return f"data: {data}\n\n".encode() + (b"data: [DONE]\n\n" if kind == "end" else b"")
    if api == "completions":
        choice = {"index": 0, "text": text, "finish_reason": finish or None}
        data = json.dumps({"choices": [choice]})
        if kind == "whole":
            return data.encode()
        return f"data: {data}\n\n".encode() + (b"data: [DONE]\n\n" if kind == "end" else b"")
    if api == "messages":
        reason = "max_tokens" if finish == "length" else "end_turn"
        if kind == "whole":
            content = [{"type": "text", "text": text}]
            return json.dumps({"content": content, "stop_reason": reason}).encode()
        if kind == "delta":
            delta = {"type": "text_delta", "text": text}
            return named({"type": "content_block_delta", "index": 0, "delta": delta})
        end = named({"type": "message_delta", "delta": {"stop_reason": reason}})
        return end + named({"type": "message_stop"})
    status = "incomplete" if finish == "length" else "completed"
    part = {"type": "output_text", "text": text}
    response: dict[str, Any] = {"status": status, "output": [{"content": [part]}]}
    if finish == "length":
        response["incomplete_details"] = {"reason": "max_output_tokens"}
    if kind == "whole":
        return json.dumps(response).encode()
    if kind == "delta":
        return named({"type": "response.output_text.delta", "delta": text})
    return named({"type": f"response.{status}", "response": response})


def named(event: dict[str, Any]) -> bytes:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()


def words_of(prompt: str, count: int) -> Iterator[str]:
    state = zlib.crc32(prompt.encode())
    for _ in range(count):
        state = zlib.crc32(b"x", state)
        yield f"{state % 9973} "


class Server:
    def __init__(self, fault: str, policy: str) -> None:
        self.fault = fault
        self.policy = policy
        self.slot = trio.Lock()
        self.draining = False
        self.finalizing = False
        self.interruptible: set[trio.CancelScope] = set()
        """Connections between requests, and requests that wait."""
        self.accepting = trio.CancelScope()
        self.asked = False
        """Whether somebody has asked if it is ready, and been told that it is not."""
        self.memory: mmap.mmap | None = None

    def listen(self, place: str) -> socket.socket:
        sock = socket.socket(socket.AF_INET if place.isdigit() else socket.AF_UNIX)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        sock.bind(("127.0.0.1", int(place)) if place.isdigit() else place)
        sock.listen()
        if self.fault == "leaves-port":
            sock.set_inheritable(True)
            subprocess.Popen(["sleep", "60"], start_new_session=True, close_fds=False)
        return sock

    async def run(self, place: str) -> int:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with trio.open_nursery() as outer:
                outer.start_soon(self.watch, signals, outer.cancel_scope)
                async with trio.open_nursery() as connections:
                    sock = trio.socket.from_stdlib_socket(self.listen(place))
                    with sock, self.accepting:
                        while True:
                            peer, _ = await sock.accept()
                            connections.start_soon(self.serve, trio.SocketStream(peer))
                outer.cancel_scope.cancel()
        return 3 if self.fault == "exit-3" else 0

    async def watch(self, signals: AsyncIterator[int], everything: trio.CancelScope) -> None:
        count = 0
        async for _ in signals:
            count += 1
            if self.fault == "cuts":
                everything.cancel()
            if count == 1 and self.fault != "ignores":
                self.draining = True
                self.finalizing = self.policy == "finalize"
                if self.fault != "listens-on":
                    self.accepting.cancel()
                for scope in list(self.interruptible):
                    scope.cancel()
            elif count == 2:
                self.finalizing = True
                self.accepting.cancel()
                everything.deadline = trio.current_time() + CUT_GRACE
            elif count == 3:
                os._exit(130)

    async def interruptibly(self, what: Any, *, spared: bool = False) -> bool:
        """Await ``what()``; False when draining ended it."""
        with trio.CancelScope() as scope:
            if not spared:
                self.interruptible.add(scope)
            try:
                await what()
            finally:
                self.interruptible.discard(scope)
        return not scope.cancelled_caught

    async def serve(self, stream: trio.SocketStream) -> None:
        async with stream:
            with contextlib.suppress(trio.BrokenResourceError, h11.RemoteProtocolError):
                await self.exchanges(stream, h11.Connection(h11.SERVER))

    async def exchanges(self, stream: trio.SocketStream, http: h11.Connection) -> None:
        while True:
            request: list[Any] = []

            async def read(request: list[Any] = request) -> None:
                while not (request and isinstance(request[-1], h11.EndOfMessage)):
                    event = http.next_event()
                    if event is h11.NEED_DATA:
                        http.receive_data(await stream.receive_some())
                    else:
                        request.append(event)
                        if isinstance(event, h11.ConnectionClosed):
                            return

            spared = self.fault == "keeps-idle"
            if not await self.interruptibly(read, spared=spared):
                return
            if not isinstance(request[-1], h11.EndOfMessage):
                return
            body = b"".join(bytes(e.data) for e in request if isinstance(e, h11.Data))
            await self.answer(stream, http, request[0].target.decode(), body)
            if http.our_state is not h11.DONE or (self.draining and not spared):
                return
            http.start_next_cycle()

    async def answer(
        self, stream: trio.SocketStream, http: h11.Connection, path: str, body: bytes
    ) -> None:
        apis = {"/v1/chat/completions": "chat"}
        if self.fault != "chat-only":
            apis |= {f"/v1/{api}": api for api in ("messages", "responses", "completions")}
        if path == "/health":
            # No time to load: who asks at any speed sees it loading once, and then ready.
            status, self.asked = (200 if self.asked else 503), True
            return await self.whole(stream, http, status, b"{}")
        if path not in apis:
            return await self.whole(stream, http, 404, b"{}")
        if self.draining:
            return await self.whole(stream, http, 503, b"{}")
        spared = self.fault in ("forgets-waiters", "serves-waiters")
        if not await self.interruptibly(self.slot.acquire, spared=spared):
            return await self.whole(stream, http, 503, b"{}")
        try:
            if self.draining and self.fault == "forgets-waiters":
                return None
            return await self.generate(stream, http, apis[path], json.loads(body))
        finally:
            self.slot.release()

    async def whole(
        self, stream: trio.SocketStream, http: h11.Connection, status: int, body: bytes
    ) -> None:
        headers = [("content-length", str(len(body)))]
        if status == 503 and self.draining:
            headers.append(("connection", "close"))
        data = http.send(h11.Response(status_code=status, headers=headers)) or b""
        data += http.send(h11.Data(data=body)) or b""
        await stream.send_all(data + (http.send(h11.EndOfMessage()) or b""))

    async def generate(
        self, stream: trio.SocketStream, http: h11.Connection, api: str, body: dict[str, Any]
    ) -> None:
        prompt = json.dumps([body.get(name) for name in ("messages", "input", "prompt")])
        count = body.get("max_tokens") or body["max_output_tokens"]
        end = trio.current_time() + PREFILL_PER_CHARACTER * len(prompt)
        while trio.current_time() < end and self.fault != "hasty":
            if self.finalizing:
                return await self.whole(stream, http, 503, b"{}")
            await trio.sleep(STEP)
        text = ""
        if body["stream"]:
            head = h11.Response(status_code=200, headers=[("content-type", "text/event-stream")])
            await stream.send_all(http.send(head) or b"")
        for word in words_of(prompt, count):
            if self.finalizing:
                break
            await trio.sleep(0 if self.fault == "hasty" else STEP)
            text += "wrong " if self.draining and self.fault == "wrong-text" else word
            if body["stream"]:
                said = text[-6:] if self.draining and self.fault == "wrong-text" else word
                await stream.send_all(http.send(h11.Data(data=encode(api, "delta", said))) or b"")
        finish = "stop" if self.draining and self.fault == "wrong-finish" else "length"
        if not body["stream"]:
            return await self.whole(stream, http, 200, encode(api, "whole", text, finish))
        data = b""
        if not (self.draining and self.fault == "no-terminal-event"):
            data = http.send(h11.Data(data=encode(api, "end", "", finish))) or b""
        await stream.send_all(data + (http.send(h11.EndOfMessage()) or b""))
        return None


def main() -> int:
    fault, place, policy = sys.argv[1:]
    server = Server(fault, policy)
    if fault == "leaves-child":
        subprocess.Popen(["sleep", "60"], start_new_session=True)
    if fault == "leaves-shared-memory":
        path = Path(f"/dev/shm/{os.environ['BAD_SERVER_NAME']}-{os.getpid()}")
        path.write_bytes(bytes(4096))
        with path.open("r+b") as file:
            server.memory = mmap.mmap(file.fileno(), 4096)
    code = trio.run(server.run, place)
    if not place.isdigit() and fault != "leaves-socket-file":
        Path(place).unlink()
    return code


if __name__ == "__main__":
    sys.exit(main())
