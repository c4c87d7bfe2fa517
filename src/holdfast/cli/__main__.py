"""`python -m holdfast.cli`: the same as the console script."""

import sys

from holdfast.cli import main

if __name__ == "__main__":
    sys.exit(main())
