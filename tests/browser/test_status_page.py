"""The status page in a real browser: what a person sees, and can do with it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import trio

from tests.browser.conftest import PATIENCE, OpenPage
from tests.support.running import ServerProcess, scripted_process
from tests.support.scripted import FileGate

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
playwright.expect.set_options(timeout=PATIENCE)
expect = playwright.expect

SAID = "Words &amp; no markup: <img src=x onerror=alert(1) 歪😀."
"""Without what ends the prompt of a scripted model."""
ENDLESS: dict[str, Any] = {"step_seconds": 0.05, "max_ctx": 4096}
"""Says something for three minutes, if nobody stops it: a page that is asked for anything fails the
test sooner."""


@contextlib.contextmanager
def serving(*models: dict[str, Any], **listener: Any) -> Iterator[ServerProcess]:
    with scripted_process(*models, **listener) as server:
        trio.run(server.until_ready)
        yield server
        assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def pair() -> Iterator[ServerProcess]:
    """A model that is busy for as long as one likes before one that answers at once."""
    first = {"name": "first", **ENDLESS}
    second = {"name": "second", "slots": 2, "answer": "2", "max_ctx": 8192}
    with serving(first, second, routing_queue_limit=5) as server:
        yield server


def ask(page: Any, text: str = "hi") -> Any:
    """Send a message with the keyboard, once the answer before it is whole; its answer's item."""
    # Until then the page takes none.
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    answers = page.locator("#messages .assistant")
    before = answers.count()
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    expect(answers).to_have_count(before + 1)
    return answers.nth(before)


def test_a_chat_streams_shows_who_answered_and_takes_nothing_for_html(
    open_page: OpenPage, tmp_path: Path
) -> None:
    # In the middle of the answer, which begins at five.
    gate = FileGate(tmp_path / "gate", position=15)
    model = {"name": "first", "answer": SAID, "max_ctx": 512, **gate.fields}
    with serving(model) as server, open_page(server.url) as page:
        said = ask(page)
        # The beginning is there while the end is not.
        expect(said.locator(".body")).to_contain_text("Words")
        assert "😀" not in said.locator(".body").text_content()
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        gate.open()
        expect(said.locator(".body")).to_have_text(SAID)
        expect(said.locator("h3")).to_have_text("first")
        expect(said.locator(".note")).to_contain_text("primary · first token after")
        expect(page.locator("#announcement")).to_have_text(f"first answered: {SAID}")
        assert page.locator("#messages img").count() == 0
        # The next message goes out with the conversation before it.
        expect(ask(page, "and now?").locator(".body")).to_have_text(SAID)
        rows = page.locator("#recent tbody tr")
        expect(rows).to_have_count(2)
        expect(rows.first).to_contain_text("completed")
        prompt, _, _ = rows.first.locator("td").last.text_content().partition(" in")
        assert int(prompt) > len(SAID.encode())


def test_the_models_their_slots_and_the_line_are_shown_as_they_change(
    open_page: OpenPage, pair: ServerProcess
) -> None:
    with open_page(pair.url) as page:
        cards = page.locator("#models li")
        expect(cards.locator("h3")).to_have_text(["first", "second"])
        expect(cards.first).to_contain_text("primary")
        expect(cards.first).to_contain_text("drains at shutdown")
        expect(cards.last).to_contain_text("ends answers at shutdown")
        expect(cards.first).to_contain_text("Slots: 0 of 1 reserved")
        with pair.busy_slot():
            expect(cards.first).to_contain_text("Slots: 1 of 1 reserved (1 decoding)")
            expect(cards.first.locator(".rate")).to_contain_text("tokens/s out")
            assert cards.first.locator(".bar .reserved").bounding_box()["width"] > 100
            expect(cards.last).to_contain_text("Slots: 0 of 2 reserved")
        expect(cards.first).to_contain_text("Slots: 0 of 1 reserved")
        expect(cards.first.locator(".rate")).to_contain_text("Idle")
        expect(page.locator("#queue")).to_contain_text("0 of 5 waiting")
        expect(page.locator("#recent tbody tr").first).to_contain_text("cancelled")


@pytest.mark.parametrize(("state", "told"), [("awake", ""), ("given-up", "given up, ")])
def test_a_draft_is_shown_with_how_often_it_guessed_right_and_whether_it_does_not_guess_now(
    open_page: OpenPage, pair: ServerProcess, state: str, told: str
) -> None:
    with urlopen(f"{pair.url}/status/json", timeout=PATIENCE) as response:
        status = json.load(response)
    guesses = {"proposed": 200, "accepted": 86, "acceptance": 0.43, "committed_per_step": 2.3}
    status["models"][0]["draft"] = {"kind": "prompt-lookup", "state": state, **guesses}
    stream = f"event: status\ndata: {json.dumps(status)}\n\n"

    def answer(route: Any) -> None:
        route.fulfill(body=stream, content_type="text/event-stream")

    with open_page("about:blank") as page:
        page.route("**/status/stream", answer)
        page.goto(pair.url)
        shown = page.locator("#models .draft")
        line = f"{told}43 % accepted, 86 of 200 tokens, 2.30 tokens a step"
        expect(shown.first).to_have_text(f"Draft (prompt-lookup): {line}")
        expect(shown.last).to_be_hidden()


def test_a_fallback_is_visible_with_its_reason(open_page: OpenPage, pair: ServerProcess) -> None:
    with open_page(pair.url) as page:
        with pair.busy_slot():
            said = ask(page)
            expect(said.locator("h3")).to_have_text("second")
            expect(said.locator(".note")).to_contain_text("fallback: the primary was busy")
        expect(page.locator("#recent")).to_contain_text("second (fallback: busy)")


def test_a_wait_is_visible_while_it_lasts_and_afterwards(open_page: OpenPage) -> None:
    only = {"name": "only", "answer": "1" * 3000, **ENDLESS}
    with serving(only) as server, open_page(server.url) as page:
        with server.busy_slot():
            said = ask(page)
            expect(said.locator(".note")).to_contain_text("1 of 32 waiting")
            expect(page.locator("#queue")).to_contain_text("1 of 32 waiting")
        expect(said.locator(".note")).to_contain_text("waited")
        expect(said.locator(".note")).to_contain_text("then the primary")
        expect(said.locator(".body")).to_contain_text("1")
        page.get_by_role("button", name="Stop").click()
        expect(said.locator(".note")).to_contain_text("· stopped")


class Told:
    """What the page says of its connection, also what it says for a moment only."""

    def __init__(self, page: Any) -> None:
        self._page = page
        page.evaluate(
            """() => {
                const told = window.told = [];
                const connection = document.getElementById("connection");
                new MutationObserver(() => told.push(connection.textContent))
                    .observe(connection, {childList: true, characterData: true, subtree: true});
            }"""
        )

    def forget(self) -> None:
        self._page.evaluate("() => { window.told.length = 0; }")

    def until(self, words: str) -> None:
        """Wait until it has said so, since the page was opened or was to forget."""
        for _ in range(PATIENCE // 20):
            told = self._page.evaluate("() => window.told")
            if any(words in each for each in told):
                return
            self._page.wait_for_timeout(20)
        raise AssertionError(f"{words!r} is not in {told}")


def test_a_server_that_shuts_down_says_so_and_is_found_again_when_it_is_back(
    open_page: OpenPage, tmp_path: Path
) -> None:
    # Between the first word and the last.
    gate = FileGate(tmp_path / "gate", position=10)
    model = {"answer": "the last words", "max_ctx": 4096, **gate.fields}
    with contextlib.ExitStack() as until_the_end:
        with serving(model) as server:
            page = until_the_end.enter_context(open_page(server.url, console=False))
            connection = page.locator("#connection")
            expect(connection).to_have_text("Live")
            told = Told(page)
            said = ask(page)
            expect(said.locator(".body")).to_contain_text("the")
            server.signal()
            told.until("The server is shutting down")
            # What has begun is finished.
            gate.open()
            expect(said.locator(".body")).to_have_text("the last words")
            assert trio.run(server.exit_code) == 0
        expect(connection).to_contain_text("The server has shut down. Trying again")
        unheard = ask(page, "anybody?")
        expect(unheard.locator(".note")).to_have_text("The server cannot be reached.")
        expect(page.get_by_label("Message")).to_have_value("anybody?")
        # It tries by itself, less and less often, or when it is told to.
        told.until("Trying again every 4 s")
        told.forget()
        page.get_by_role("button", name="Try now").click()
        told.until("Trying again every 1 s")
        until_the_end.enter_context(serving(model, port=server.port))
        expect(connection).to_have_text("Live")


def test_while_the_models_load_the_page_says_so_and_then_shows_them(
    open_page: OpenPage, tmp_path: Path
) -> None:
    gate = FileGate(tmp_path / "gate")
    late = {"name": "late", **gate.load_fields}
    with scripted_process(late) as server, open_page(server.url, console=False) as page:
        expect(page.locator("#connection")).to_have_text("The models are loading")
        gate.open()
        expect(page.locator("#models li")).to_contain_text("late")
        expect(page.locator("#connection")).to_have_text("Live")


def test_a_key_is_asked_for_first_and_kept_for_the_tab_only(open_page: OpenPage) -> None:
    keyed = {"api_keys": ["schlüssel"]}
    with serving({"answer": "yes"}, **keyed) as server, open_page(server.url) as page:
        key = page.get_by_label("Key", exact=True)
        expect(page.locator("#connection")).to_have_text("A key is needed")
        expect(key).to_be_focused()
        key.fill("schlüssel")
        page.keyboard.press("Enter")
        expect(page.locator("#connection")).to_have_text("Live")
        expect(key).to_be_hidden()
        expect(ask(page).locator(".body")).to_have_text("yes")
        kept = page.evaluate("() => [localStorage.length, document.cookie, location.href]")
        assert kept == [0, "", f"{server.url}/"]
        page.reload()
        expect(page.locator("#connection")).to_have_text("Live")
        page.get_by_role("button", name="Forget the key").click()
        expect(page.locator("#connection")).to_have_text("A key is needed")
        with open_page(server.url, console=False) as wrong:
            wrong.get_by_label("Key", exact=True).fill("wrong")
            wrong.keyboard.press("Enter")
            expect(wrong.locator("#connection")).to_have_text("The server does not take this key")
            expect(wrong.get_by_label("Key", exact=True)).to_be_focused()


def test_nothing_is_wider_than_the_screen_whatever_it_is_called_or_says(
    open_page: OpenPage,
) -> None:
    name = "a-model-with-a-name-" + "that-does-not-end-" * 5
    model = {"name": name, "answer": "w" * 300, "slots": 3, "max_ctx": 4096}
    with serving(model) as server, open_page(server.url, width=360) as page:
        expect(ask(page, "m" * 300).locator(".note")).to_contain_text("tokens")
        expect(page.locator("#recent tbody tr")).to_have_count(1)
        for width in (360, 390, 700, 820, 1010, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("() => document.documentElement.scrollWidth") <= width
            too_wide = page.evaluate(
                """() => [...document.querySelectorAll("body *")]
                    .filter((each) => each.getBoundingClientRect().right > window.innerWidth + 1)
                    .map((each) => each.outerHTML.slice(0, 80))"""
            )
            assert too_wide == []


def focused(page: Any) -> tuple[str, bool]:
    """What has the focus, by its id or text, and whether one can see that it has."""
    name, visible = page.evaluate(
        """() => {
            const at = document.activeElement;
            const style = getComputedStyle(at);
            const seen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
            return [at.id || at.textContent.trim(), seen];
        }"""
    )
    return name, visible


def test_everything_can_be_done_with_the_keyboard_alone_and_the_focus_is_seen(
    open_page: OpenPage,
) -> None:
    with serving({"answer": "w" * 1000, **ENDLESS}) as server, open_page(server.url) as page:
        expect(page.locator("#connection")).to_have_text("Live")
        stops = []
        for _ in range(3):
            page.keyboard.press("Tab")
            stops.append(focused(page))
        assert stops == [("Skip to the chat", True), ("prompt", True), ("send", True)]
        page.keyboard.press("Shift+Tab")
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        expect(page.get_by_label("Message")).to_have_value("one\ntwo")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        said = page.locator("#messages .assistant")
        expect(said.locator(".body")).to_contain_text("w")
        # Its button is disabled now; the focus is not lost with it.
        assert focused(page)[0] == "prompt"
        page.keyboard.press("Tab")
        assert focused(page) == ("stop", True)
        page.keyboard.press("Space")
        expect(said.locator(".note")).to_contain_text("stopped")
        expect(page.get_by_label("Message")).to_be_focused()
        # The conversation can be scrolled: it is a stop before the message.
        page.keyboard.press("Shift+Tab")
        assert focused(page) == ("messages", True)


CONTRASTS = """() => {
    const parse = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => {
        const [x, y, z] = [r, g, b].map((c) => {
            c /= 255;
            return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * x + 0.7152 * y + 0.0722 * z;
    };
    const ground = (each) => {
        for (let at = each; at; at = at.parentElement) {
            const colour = parse(getComputedStyle(at).backgroundColor);
            if (colour.length === 3 || colour[3] === 1) return colour;
        }
        return [255, 255, 255];
    };
    const found = [];
    for (const each of document.querySelectorAll("body *")) {
        const words = [...each.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
        if (!words || !each.checkVisibility() || each.closest("[disabled], noscript")) continue;
        const [a, b] = [light(parse(getComputedStyle(each).color)), light(ground(each))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        found.push([ratio, each.textContent.slice(0, 40)]);
    }
    return found;
}"""
"""For every visible text: its contrast with its ground as WCAG has it, and how it begins."""


def test_every_text_stands_out_from_its_ground_in_light_and_dark_and_every_field_has_a_label(
    open_page: OpenPage, pair: ServerProcess
) -> None:
    with open_page(pair.url, console=False) as page:
        room = ask(page, "x" * 5000)
        expect(room.locator(".note")).to_contain_text("does not fit the primary")
        expect(ask(page, "x" * 9000).locator(".note")).to_contain_text("tokens")
        expect(page.locator("#recent tbody tr").first).to_contain_text("refused (400)")
        for scheme, colour in (("light", "rgb(243, 244, 247)"), ("dark", "rgb(18, 21, 27)")):
            page.emulate_media(color_scheme=scheme)
            ground = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
            assert ground == colour
            contrasts = page.evaluate(CONTRASTS)
            assert len(contrasts) > 30
            assert [each for each in contrasts if each[0] < 4.5] == []
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("input, textarea")]
                .filter((each) => !each.labels.length).map((each) => each.id)"""
        )
        assert nameless == []
