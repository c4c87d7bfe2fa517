"""`python -m examples.demo`: the same as `holdfast demo`."""

import sys

from holdfast.cli import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))
