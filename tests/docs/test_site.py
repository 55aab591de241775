"""The site builds strictly, fetches nothing from elsewhere, and every link leads somewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

SECONDS = 120
"""A build takes one or two, where nobody else wants the machine."""

FETCHED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "object": "data",
}
FETCHED_LINKS = {"stylesheet", "icon", "preload", "preconnect", "modulepreload", "manifest"}


def build(checkout: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """The pages of that checkout into that folder; skips the test where the extra is missing."""
    for module in ("mkdocs", "material"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: it is in the extra `docs`")
    # Never with --quiet: it hides the warnings, and then does not count them.
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=checkout,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    # Links and anchors that lead nowhere, and pages that nobody finds, are warnings of its own.
    result = build(ROOT, folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


class References(HTMLParser):
    """What a page has a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in FETCHED:
            self.fetched.append(values.get(FETCHED[tag]) or "")
        elif tag == "link" and FETCHED_LINKS & set((values.get("rel") or "").split()):
            self.fetched.append(values.get("href") or "")


def test_every_page_is_built(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages <= {path.stem for path in site.glob("*.html")}


def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        references = References()
        references.feed(text)
        assert references.fetched
        for reference in references.fetched:
            assert not re.match(r"(?:[a-z]+:)?//", reference), f"{page.name}: {reference}"
            if reference and not reference.startswith("data:"):
                base = site if reference.startswith("/") else page.parent
                assert (base / reference.partition("?")[0].lstrip("/")).is_file(), reference
        # Material would fetch Mermaid for these.
        assert 'class="mermaid"' not in text


def test_no_stylesheet_fetches_anything_from_elsewhere(site: Path) -> None:
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert not re.search(r"url\(\s*['\"]?(?:https?:)?//", text), sheet.name
        assert "@import" not in text


def test_the_reference_and_the_diagrams_are_in_it(site: Path) -> None:
    assert "POST /v1/chat/completions" in (site / "http-reference.html").read_text()
    assert 'src="diagrams/sequence.svg"' in (site / "life-of-a-reservation.html").read_text()


# ------------------------------------------------- files that are read where they lie


def headings(path: Path) -> set[str]:
    """The anchors of a Markdown file, as they are made where repositories are read."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
    anchors: set[str] = set()
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        anchors.add(re.sub(r"[^\w\s-]", "", title).strip().lower().replace(" ", "-"))
    return anchors


def links() -> Iterator[tuple[str, Path, str, str]]:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("dflash_trio/**/*.md")]
    for path in sorted(pages):
        text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
        targets = re.findall(r"\]\(([^)\s]+)[^)]*\)|(?:src|href)=\"([^\"]+)\"", text)
        for target in (first or second for first, second in targets):
            if not re.match(r"[a-z]+:", target):
                file, _, anchor = target.partition("#")
                yield f"{path.relative_to(ROOT)} -> {target}", path, file, anchor


def test_every_link_between_files_leads_to_a_file_and_a_heading() -> None:
    """Also in the README and the changelog, which the site does not have."""
    broken = []
    for name, path, file, anchor in links():
        target = (path.parent / file).resolve() if file else path
        missing = anchor and target.suffix == ".md" and anchor not in headings(target)
        if not target.exists() or missing:
            broken.append(name)
    assert broken == []
    assert len(list(links())) > 150


def test_a_strict_build_counts_what_leads_nowhere(tmp_path: Path) -> None:
    """So that the settings, and the way it is called, are not without effect one day."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Here\n\n[gone](index.md#gone)\n")
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    (tmp_path / "mkdocs.yml").write_text(text.partition("\nnav:\n  - Home")[0])
    result = build(tmp_path, tmp_path / "site")
    assert result.returncode == 1
    assert "#gone" in result.stderr
