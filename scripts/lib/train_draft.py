"""Entry point of scripts/train-draft, for an interpreter that has torch."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from train_draft_lib.command import main

if __name__ == "__main__":
    sys.exit(main())
