"""``/``: a page that anybody may have, that holds no data, and that can do nothing but its own."""

from __future__ import annotations

import re
import threading
from html.parser import HTMLParser
from importlib import resources
from typing import Any

import pytest
import trio

from dflash_trio.api.status_page import StatusPage
from tests.support.http_client import PATIENCE, Answer, connect, request
from tests.support.running import running
from tests.support.scripted import Gate, answer, scripted_config, scripted_load

FOLDER = resources.files("dflash_trio.api") / "page"
FILES = {each.name: each.read_text("utf-8") for each in FOLDER.iterdir()}


def one_model(**fields: Any) -> tuple[Any, Any]:
    return scripted_config("m"), scripted_load(**{"script": answer("four"), **fields})


class References(HTMLParser):
    """What a page has the browser fetch, and what in it a strict policy would forbid."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inline: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.found += [given[name] or "" for name in ("src", "href") if name in given]
        self.inline += [name for name in given if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(tag)


async def page_files(port: int, **headers: str) -> dict[str, Answer]:
    """Every file that the shell and the scripts name, by its name."""
    shell = await request(port, "GET", "/", **headers)
    assert shell.status == 200
    found: dict[str, Answer] = {}
    wanted = [path for path in References(shell.text).found if path.startswith("page/")]
    while wanted:
        path = wanted.pop()
        folder, _, name = path.rpartition("/")
        if name not in found:
            found[name] = await request(port, "GET", f"/{path}", **headers)
            assert found[name].status == 200, path
            imports = re.findall(r'from "\./([\w.]+)"', found[name].text)
            wanted += [f"{folder}/{each}" for each in imports]
    return found


def assert_locked_down(response: Answer) -> None:
    headers = response.headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    for name in ("frame-ancestors", "base-uri", "form-action"):
        assert policy[name] == "'none'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


async def test_the_shell_and_all_its_files_are_there_locked_down_and_nothing_is_left_over() -> None:
    async with running(one_model()) as server:
        shell = await request(server.port, "GET", "/")
        files = await page_files(server.port)
        head = await request(server.port, "HEAD", "/")
    assert shell.headers["content-type"] == "text/html; charset=utf-8"
    assert shell.headers["cache-control"] == "no-cache"
    assert_locked_down(shell)
    assert files.keys() == FILES.keys() - {"index.html"}
    kinds = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    for name, file in files.items():
        kind = file.headers["content-type"].partition(";")[0]
        assert kind == kinds[name.rpartition(".")[2]]
        assert "immutable" in file.headers["cache-control"]
        assert_locked_down(file)
    assert (head.status, head.body) == (200, b"")


def test_nothing_of_it_comes_from_elsewhere_or_stands_inline_and_it_stays_small() -> None:
    parsed = References(FILES["index.html"])
    assert parsed.inline == []
    assert all(re.match(r"(\{\{files\}\}/|#|status/json$)", path) for path in parsed.found)
    for name, text in FILES.items():
        beyond = text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(https?:)?//[\w.]+\.\w|@import|url\(", beyond), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        assert "localStorage" not in text
        assert "cookie" not in text
    assert sum(len(text.encode()) for text in FILES.values()) < 40_000


async def test_the_shell_needs_no_key_knows_that_one_is_wanted_and_data_wants_it() -> None:
    async with running(one_model(), api_keys=(b"k",)) as server:
        port = server.port
        assert 'data-keyed="true"' in (await request(port, "GET", "/")).text
        assert await page_files(port)
        for path in ("/status/json", "/status/stream", "/props", "/v1/models", "/metrics"):
            assert (await request(port, "GET", path)).status == 401, path
        assert (await request(port, "GET", "/page/x/y")).error["code"] == "not_found"
    async with running(one_model()) as server:
        assert 'data-keyed="false"' in (await request(server.port, "GET", "/")).text


@pytest.mark.parametrize("path", ["/", "/page/x/main.js", "/status/stream"])
async def test_on_a_local_server_without_keys_no_foreign_name_or_page_gets_it(path: str) -> None:
    async with running(one_model()) as server:
        for headers in ({"host": "evil.example"}, {"origin": "https://evil.example"}):
            refused = await request(server.port, "GET", path, **headers)
            assert (refused.status, refused.error["code"]) == (403, "forbidden")


async def test_files_of_other_versions_and_unknown_ones_are_not_found() -> None:
    version = StatusPage(keyed=False).version
    async with running(one_model()) as server:
        for path in (f"/page/{'0' * 16}/main.js", f"/page/{version}/index.html", "/page/", "/page"):
            missing = await request(server.port, "GET", path)
            assert (missing.status, missing.error["code"]) == (404, "not_found")
        assert (await request(server.port, "GET", f"/page/{version}/main.js")).status == 200


async def test_while_the_models_load_the_page_is_there_and_data_says_loading() -> None:
    loaded = threading.Event()
    load = scripted_load(on_runner=lambda _: loaded.wait(PATIENCE))  # type: ignore[arg-type,return-value]
    async with running((scripted_config(), load), wait_ready=False) as server:
        assert (await request(server.port, "GET", "/")).status == 200
        assert await page_files(server.port)
        for path in ("/status/stream", "/status/json"):
            waiting = await request(server.port, "GET", path)
            assert (waiting.status, waiting.error["code"]) == (503, "model_loading")
            assert waiting.headers["retry-after"] == "5"
        loaded.set()


async def test_once_the_server_shuts_down_the_page_is_refused_as_everything_new_is() -> None:
    gate = Gate(open=False)
    async with (
        running(one_model(before_decode=gate)) as server,
        server.chatting("x"),
        connect(server.port) as exchange,
    ):
        await trio.to_thread.run_sync(gate.reached.wait)
        assert (await exchange.request("GET", "/")).status == 200
        # Its connection is still there, as one is in the moment before idle ones are closed.
        server.server._router._draining.set()
        refused = await exchange.request("GET", "/")
        assert (refused.status, refused.error["code"]) == (503, "server_shutting_down")
        assert refused.headers["connection"] == "close"
        gate.open()
