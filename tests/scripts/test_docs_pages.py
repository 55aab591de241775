"""The pages of docs/: that they are all there, say what is so, and name every option and field."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dflash_trio.api.chat_request import known_fields
from dflash_trio.cli.option_table import OPTIONS

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
PROSE = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(DOCS / page for page in PAGES)]


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_is_on_the_command_line_page(option) -> None:
    assert re.search(rf"[`>]{re.escape(option.flag)}[ `<]", read("command-line.md"))


def test_the_tables_of_options_are_up_to_date() -> None:
    code = (
        "import sys; sys.path.insert(0, 'scripts/lib'); import option_tables as o; "
        "page = o.PAGE.read_text(encoding='utf-8'); sys.exit(o.updated(page) != page)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert result.returncode == 0, "run .venv/bin/python scripts/lib/option_tables.py"


def test_every_chat_field_is_on_the_api_page() -> None:
    page = read("http-api.md")
    missing = [name for name in known_fields() if not re.search(rf"`{name}[`.]", page)]
    assert missing == []


def test_the_navigation_has_every_page_once() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    def pages(entries: list) -> list[str]:
        found = []
        for entry in entries:
            for target in entry.values():
                found += pages(target) if isinstance(target, list) else [target]
        return found

    assert sorted(pages(config["nav"])) == PAGES


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.name)
def test_links_between_files_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            assert (path.parent / target).is_file(), target


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.name)
def test_examples_use_options_that_exist(path: Path) -> None:
    known = {option.flag: option for option in OPTIONS}
    for block in re.findall(r"```\w*\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
        for command in re.findall(r"^dflash-server (.*?[^\\])$", block, re.DOTALL | re.MULTILINE):
            for flag in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", command):
                assert flag in known, flag
                assert known[flag].available, flag


def test_the_configuration_example_is_a_launch(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", read("command-line.md"), re.DOTALL)
    file = tmp_path / "launch.toml"
    file.write_text(example)

    from dflash_trio.cli import parse_command_line

    config = parse_command_line(["--config", str(file)], {}).config
    assert [model.name for model in config.models] == ["large", "small"]
