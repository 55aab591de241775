"""What of docs/ is made from the code is what the code makes of it."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import get_args
from xml.etree import ElementTree

import pytest

from dflash_trio.api.openapi import openapi_document
from dflash_trio.engine.sequence import LAWFUL
from dflash_trio.routing.reservation import Phase

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def docs_lib(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("docs_lib.__main__")


def test_what_is_checked_in_is_what_the_code_says(docs_lib: ModuleType) -> None:
    stale = [
        path.relative_to(ROOT).as_posix()
        for path, text in docs_lib.made().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    assert stale == [], "run PYTHONPATH=scripts .venv/bin/python -m docs_lib"


def test_no_diagram_is_left_over(docs_lib: ModuleType) -> None:
    folder = ROOT / "docs" / "diagrams"
    assert set(folder.iterdir()) <= set(docs_lib.made())


def test_every_route_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "http-reference.md").read_text(encoding="utf-8")
    for path, methods in openapi_document(keyed=False)["paths"].items():
        for method in methods:
            assert f"\n## `{method.upper()} {path}`\n" in page


def test_a_transition_that_has_no_words_is_no_diagram(docs_lib: ModuleType) -> None:
    diagrams = importlib.import_module("docs_lib.diagrams")
    table = {before.value: {after.value for after in all_} for before, all_ in LAWFUL.items()}
    diagrams.checked(diagrams._SEQUENCE, table)
    table["paused"].add("decoding")
    with pytest.raises(diagrams.Mismatch, match="decoding"):
        diagrams.checked(diagrams._SEQUENCE, table)
    table["paused"] = {"prefilling"}
    with pytest.raises(diagrams.Mismatch, match="retired"):
        diagrams.checked(diagrams._SEQUENCE, table)


@pytest.mark.parametrize("name", ["sequence.svg", "drain.svg", "health.svg"])
def test_a_diagram_keeps_its_boxes_and_words_within_its_borders(name: str) -> None:
    root = ElementTree.fromstring((ROOT / "docs" / "diagrams" / name).read_text(encoding="utf-8"))
    left, top, width, height = map(float, root.attrib["viewBox"].split())
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        # About seven units a character, in the middle of which it is anchored.
        half = len(text.text or "") * 3.5
        assert left <= float(text.attrib["x"]) - half
        assert float(text.attrib["x"]) + half <= left + width
        assert top + 10 <= float(text.attrib["y"]) <= top + height


def test_the_page_on_a_reservations_life_has_every_phase() -> None:
    page = (ROOT / "docs" / "life-of-a-reservation.md").read_text(encoding="utf-8")
    for phase in get_args(Phase):
        assert f"\n| `{phase}` |" in page
