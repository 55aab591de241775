"""``python -m train_draft_lib``, for a machine that has the folder ``scripts`` and torch alone."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
