"""Writes what of docs/ is made from the code: ``PYTHONPATH=scripts python -m docs_lib``.

The tables of options, the HTTP reference and the diagrams. Run it after changing an option, a field
or a table of transitions; a test says when that was forgotten.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from . import diagrams, http_reference, option_tables


def made() -> Mapping[Path, str]:
    """Each file's text, as the code has it now."""
    options = option_tables.PAGE.read_text(encoding="utf-8")
    return {
        option_tables.PAGE: option_tables.updated(options),
        http_reference.PAGE: http_reference.page(),
        **{diagrams.FOLDER / name: text for name, text in diagrams.files().items()},
    }


def main() -> int:
    for path, text in made().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
