"""Make `store_0_2.tar.gz`: two store directories of schema 0.2, written by the code before stable operation names.

Run it with the code of commit 6fd48d3, not with the code beside it:

    git worktree add ../former 6fd48d3
    cd ../former && make setup && .venv/bin/python <this file> <path of the archive>

The archive has the same rows twice: `closed` is the directory of a store that was closed, `killed` that of a store
whose writer was killed, so that its redo log has to be replayed. Each has

- an effect of the world `order-1` that waits in its queue (on death: `ON_DEAD_EFFECT`)
- an item of the queue `letters` (on death: holdfast.durable.dead:post_notice)
- a timer of the world, and a task that no worker has leased

`tests/store/test_former_operation_names.py` opens the directories with the current code and imports the application
from here, so the top of this module uses only names that both versions have.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import holdfast as hf

UNIVERSE = "shop"
EFFECT = "card.charge"
LETTERS = "letters"
ON_DEAD_LETTER = "holdfast.durable.dead:post_notice"
ON_DEAD_EFFECT = "holdfast.roles.receipts:bereave"
# Past when the archive is read.
TIMER_S = 5


@hf.effect(EFFECT, attempts=1)
def charge(call: hf.Call, cents: int) -> str:
    return f"booked {cents}"


class Ordered(hf.Event):
    cents: int


class Reminded(hf.Event):
    text: str


class Order(hf.World):
    cents: int = 0
    outcome: str = ""
    reminder: str = ""

    @hf.on(Ordered)
    def ordered(self, event: Ordered, cx: hf.Context) -> None:
        self.cents += event.cents
        if self.cents == 600:
            cx.do(charge, self.cents)
            cx.after(TIMER_S, Reminded("pay"), key="pay")

    @hf.on(charge)
    def charged(self, receipt: hf.Receipt[str], cx: hf.Context) -> None:
        self.outcome = receipt.value if receipt.ok else f"{receipt.status}: {receipt.code}"

    @hf.on(Reminded)
    def reminded(self, event: Reminded, cx: hf.Context) -> None:
        self.reminder = event.text


@hf.task
def double(n: int) -> int:
    return 2 * n


app = hf.App(UNIVERSE, worlds=[Order], tasks=[double])


def fill(path: Path) -> int:
    """Fill a store and leave it open. Return the pid of its writer."""
    from holdfast.durable import queue

    # No role performs effects, fires timers or runs tasks.
    rt = app.open(str(path), roles=("orchestrator", "world"))
    order = rt.world(Order, "order-1")
    for cents in (100, 200, 300):
        order.send(Ordered(cents))
    order.wait_for(lambda state: state.cents == 600)
    rt.submit(double, 21)
    rt.store.transact(queue.put, LETTERS, b"a letter", 0, 0, "", ON_DEAD_LETTER)
    _fillers.append(rt)
    return int(rt.store._link.welcome.pid)


def main(archive: Path) -> None:
    with tempfile.TemporaryDirectory() as made:
        for name, kill in (("closed", False), ("killed", True)):
            # In a forked process: the client of a killed writer would start another one.
            child = os.fork()
            if not child:
                pid = fill(Path(made, name))
                if kill:
                    os.kill(pid, signal.SIGKILL)
                    os._exit(0)
                _fillers[0].close()
                os.kill(pid, signal.SIGTERM)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        time.sleep(2)  # the writer closes its log
        with tarfile.open(archive, "w:gz") as tar:
            for name in ("closed", "killed"):
                for file in ("data.mdb", "redo.0", "redo.1"):
                    tar.add(Path(made, name, file), f"{name}/{file}", filter=_anonymous)


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mode = 0o600
    return info


_fillers: list[hf.Runtime] = []

if __name__ == "__main__":
    with contextlib.suppress(FileNotFoundError):
        os.unlink(sys.argv[1])
    main(Path(sys.argv[1]))
