"""The status page for everybody: axe-core's rules in every state, and what axe cannot see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

import pytest

from tests.browser.conftest import OpenPage
from tests.browser.test_status_page import ENDLESS, ask, expect, serving
from tests.support.running import ServerProcess, scripted_process

pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")

RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
SIZES = [(1280, 800), (390, 844), (320, 640)]
"""A desk, a phone, and a page that is zoomed to four times its size."""


def violations(page: Any) -> list[str]:
    """What axe finds wrong, a line for each element."""
    # The package's own wrapper reports no more than this, and has no types.
    page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8"))
    options = {"runOnly": RULES, "resultTypes": ["violations"]}
    found = page.evaluate("(options) => axe.run(document, options)", options)
    return [
        f"{rule['id']}: {node['html'][:100]}"
        for rule in found["violations"]
        for node in rule["nodes"]
    ]


def check(page: Any) -> None:
    """Hold axe's rules in light and dark, at every size, and let nothing be wider than the page."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        for width, height in SIZES:
            page.set_viewport_size({"width": width, "height": height})
            assert violations(page) == [], f"{scheme}, {width} wide"
            assert page.evaluate("() => document.documentElement.scrollWidth") <= width


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    first = {"name": "first", **ENDLESS}
    second = {"name": "second", "slots": 2, "answer": "an answer", "max_ctx": 8192}
    with serving(first, second, routing_queue_limit=5) as server:
        yield server


def test_a_page_that_shows_all_it_has_breaks_no_rule(
    open_page: OpenPage, server: ServerProcess
) -> None:
    with open_page(server.url, console=False) as page, server.busy_slot():
        expect(page.locator("#connection")).to_have_text("Live")
        expect(ask(page).locator(".note")).to_contain_text("fallback")
        expect(ask(page, "x" * 9000).locator(".note")).to_contain_text("tokens")
        expect(page.locator("#recent tbody tr").first).to_contain_text("refused")
        check(page)


def test_a_page_that_breaks_a_rule_is_found(open_page: OpenPage, server: ServerProcess) -> None:
    with open_page(server.url) as page:
        expect(page.locator("#connection")).to_have_text("Live")
        page.evaluate("() => document.querySelector('label[for=prompt]').remove()")
        assert any(found.startswith("label: <textarea") for found in violations(page))


def _loading() -> Any:
    return scripted_process({"name": "late", "load_seconds": 120.0})


def _keyed() -> Any:
    return scripted_process({"answer": "x"}, api_keys=["k"])


@pytest.mark.parametrize(
    ("start", "says"), [(_loading, "The models are loading"), (_keyed, "A key is needed")]
)
def test_a_page_that_cannot_show_anything_yet_breaks_no_rule(
    start: Callable[[], Any], says: str, open_page: OpenPage
) -> None:
    with start() as server, open_page(server.url, console=False) as page:
        expect(page.locator("#connection")).to_have_text(says)
        check(page)


def test_a_page_whose_server_is_gone_breaks_no_rule(open_page: OpenPage) -> None:
    with scripted_process({"answer": "x"}) as server, open_page(server.url, console=False) as page:
        expect(page.locator("#connection")).to_have_text("Live")
        server.process.kill()
        expect(page.get_by_role("button", name="Try now")).to_be_visible()
        expect(ask(page, "anybody?").locator(".note")).to_contain_text("cannot be reached")
        check(page)


REACHABLE = """() => [...document.querySelectorAll("a[href], button, input, textarea, [tabindex]")]
    .filter((each) => each.checkVisibility() && !each.disabled && each.tabIndex >= 0)
    .map((each) => each.id || each.textContent.trim())"""


FOCUSED = """() => {
    const at = document.activeElement;
    return at === document.body ? null : at.id || at.textContent.trim();
}"""


def test_the_tab_key_reaches_everything_in_the_order_in_which_it_is_read(
    open_page: OpenPage, server: ServerProcess
) -> None:
    with open_page(server.url) as page:
        expect(page.locator("#connection")).to_have_text("Live")
        with server.busy_slot():
            expect(ask(page).locator(".note")).to_contain_text("fallback")
        # The note is there with the answer's first word, and other buttons once it is over.
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        wanted = page.evaluate(REACHABLE)
        assert len(wanted) > 3
        reached = []
        # It begins where the focus is, and passes the browser's own controls as it comes round.
        while len(reached) < len(wanted) + 1:
            page.keyboard.press("Tab")
            reached.append(page.evaluate(FOCUSED))
        reached = [each for each in reached if each is not None][: len(wanted)]
        first = reached.index(wanted[0])
        assert reached[first:] + reached[:first] == wanted


EDGES = """() => {
    const light = (colour) => {
        const [x, y, z] = colour.match(/[\\d.]+/g).map(Number).map((c) => {
            c /= 255;
            return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * x + 0.7152 * y + 0.0722 * z;
    };
    const ground = (at) => {
        for (; at; at = at.parentElement) {
            const colour = getComputedStyle(at).backgroundColor;
            if (!colour.startsWith("rgba")) return colour;
        }
        return "rgb(255, 255, 255)";
    };
    const ratio = (one, other) => {
        const [a, b] = [light(one), light(other)];
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    };
    return [...document.querySelectorAll("button, input, textarea")]
        .filter((each) => each.checkVisibility() && !each.disabled)
        .map((each) => {
            const style = getComputedStyle(each);
            const around = ground(each.parentElement);
            return [ratio(style.borderTopColor, around), each.id];
        });
}"""
"""For each control the contrast of its edge with what is around it."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_control_can_be_told_from_what_is_around_it(
    scheme: str, open_page: OpenPage, server: ServerProcess
) -> None:
    with open_page(server.url) as page:
        expect(page.locator("#connection")).to_have_text("Live")
        page.emulate_media(color_scheme=scheme)
        edges = page.evaluate(EDGES)
        assert {name for _, name in edges} >= {"prompt", "send"}
        assert [edge for edge in edges if edge[0] < 3] == []
