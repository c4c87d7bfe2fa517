"""`python -m holdfast.sim`, for when the command line is not there yet."""

import sys

from holdfast.sim.command import main

if __name__ == "__main__":
    sys.exit(main())
