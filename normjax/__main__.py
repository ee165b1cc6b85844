"""`python -m normjax` is the `normjax` command."""

import sys

from normjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
