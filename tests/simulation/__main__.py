"""`python -m tests.simulation`: the simulator command without the `holdfast` command line."""

import sys

from tests.simulation.command import main

if __name__ == "__main__":
    sys.exit(main())
