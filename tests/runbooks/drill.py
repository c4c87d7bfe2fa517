"""Plays a fault of the drill by hand: `python -m tests.runbooks.drill NAME`.

It breaks a system in a new directory, prints the complaint, and judges each time when Enter is pressed. The newcomer uses
another terminal in that directory, with the variables that it prints.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.runbooks.drill_faults import DRILLS
from tests.runbooks.drill_variants import VARIANTS
from tests.runbooks.fault_scene import FaultScene

PLAYED = DRILLS | VARIANTS


def main(name: str) -> None:
    with tempfile.TemporaryDirectory(prefix="drill-") as path:
        os.chdir(path)
        os.environ["HOLDFAST_STORE"] = f"{path}/store"
        with FaultScene(Path(path), f"{path}/store") as scene:
            drill = PLAYED[name](scene)
            print(f"cd {path}; export HOLDFAST_STORE={scene.store}\n\n{drill.complaint}")
            while input("Press Enter for the judge. ") or not drill.judge():
                print("It does not move, or something is missing.")
            print("It moves, and nothing is lost.")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in PLAYED:
        sys.exit(f"usage: python -m tests.runbooks.drill {'|'.join(PLAYED)}")
    main(sys.argv[1])
