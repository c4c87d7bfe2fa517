"""An adapter pool that stands still between its two commits: delivered there, not yet told here.

    python -m tests.process.courier STORE PEER_URL

It prints `ready`, then `delivered N` after each commit in the other store, and waits for its death.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from holdfast import store as stores
from holdfast.roles.crew import RunnerRole
from holdfast.roles.fabric import Fabric
from tests.process.conftest import LIMITS


class Halting:
    """A store whose commits are durable, and whose callers do not live to hear of them."""

    def __init__(self, url: str) -> None:
        self._store = stores.open(url, bootstrap=False, limits=LIMITS)

    def transact(self, fn: Any, *args: Any) -> Any:
        answers = self._store.transact(fn, *args)
        print(f"delivered {len(answers)}", flush=True)
        os.read(0, 1)
        return answers

    def close(self) -> None:
        self._store.close()


def main(url: str, peer: str) -> None:
    with stores.open(url, limits=LIMITS) as store:
        fabric = Fabric(
            store, universe="north", worker="courier", peers={"south": peer}, open=Halting
        )
        role = RunnerRole(fabric.runners)
        role.start()
        print("ready", flush=True)
        role.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
