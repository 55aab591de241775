"""``python -m dflash_trio.testing``: the same as ``dflash-shutdown-check``."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
