"""Entry point of scripts/bench, for an interpreter that has the project's ``dev`` extras."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_lib.command import main

if __name__ == "__main__":
    sys.exit(main())
