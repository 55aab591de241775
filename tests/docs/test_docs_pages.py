"""The pages of docs/: that they are all there, say what is so, and name every option and field."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from dflash_trio.api.chat_request import known_fields
from dflash_trio.cli.option_table import OPTIONS

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_is_on_the_command_line_page(option) -> None:
    assert re.search(rf"[`>]{re.escape(option.flag)}[ `<]", read("command-line.md"))


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


def test_the_configuration_example_is_a_launch(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", read("command-line.md"), re.DOTALL)
    file = tmp_path / "launch.toml"
    file.write_text(example)

    from dflash_trio.cli import parse_command_line

    config = parse_command_line(["--config", str(file)], {}).config
    assert [model.name for model in config.models] == ["large", "small"]
