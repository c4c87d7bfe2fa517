"""Create a store with rows of every kind, then close it or kill every process that has it open."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import msgspec

import holdfast as hf
from holdfast import store as stores
from holdfast.config import WriterLimits
from holdfast.durable import lease, queue
from holdfast.store.admin.raw_access import is_backend_row
from holdfast.store.api import Txn
from tests.process.watch import assert_no_client_left, writer_of
from tests.store.corruption import ROWS

LIMITS = WriterLimits(idle_exit_s=0.2, reader_check_s=0.2)
ACCOUNTS = 12
DEPOSITS = 15
TASKS = 120
WAITING = 8


class Deposited(hf.Event):
    amount: int
    note: str = ""


class Reminded(hf.Event):
    note: str


@hf.effect("bank.print", attempts=1)
def print_note(call: hf.Call, note: str) -> str:
    if note.endswith("0"):
        raise ValueError(note)
    return note


class Account(hf.World):
    balance: int = 0
    notes: tuple[str, ...] = ()

    @hf.on(Deposited)
    def deposited(self, event: Deposited, cx: hf.Context) -> None:
        self.balance += event.amount
        self.notes = (*self.notes[-20:], event.note)
        cx.reply(self.balance)
        if event.amount == 1:
            cx.after(3600, Reminded(event.note), key="reminder")
            cx.do(print_note, event.note)

    @hf.on(Reminded)
    def reminded(self, event: Reminded, cx: hf.Context) -> None:
        self.notes = (*self.notes[-20:], event.note)


@hf.task
def shout(text: str, times: int) -> str:
    return text.upper() * times


app = hf.App("corruption", worlds=[Account], effects=[print_note], tasks=[shout])


def fill(url: str) -> None:
    with app.open(url) as rt:
        handles = [rt.submit(shout, f"line {n} of the task", n % 40) for n in range(TASKS)]
        for n in range(ACCOUNTS):
            account = rt.world(Account, f"account-{n}")
            for m in range(DEPOSITS):
                account.ask(Deposited(m, f"deposit {m} of {n}"), timeout=60)
        for handle in handles:
            handle.result(60)


def submit_pending_work(url: str) -> None:
    """Submit events (some of them large) and tasks without a worker, so that they stay pending."""
    with app.open(url, roles=()) as rt:
        for n in range(ACCOUNTS):
            account = rt.world(Account, f"account-{n}")
            for m in range(WAITING):
                note = f"waiting {m} of {n}" * (400 if m == 0 else 1)
                account.send(Deposited(1, note), key=f"key {n} {m}" if m % 2 else None)
        for n in range(WAITING):
            rt.submit(shout, f"waiting task {n}", n)


def put_user_row(txn: Txn, n: int) -> None:
    txn.put(("user", n), b"a row of the user, number %d; " % n * (1 + n % 60))
    txn.append(("log",), b"entry %d" % n)


def main(home: Path, state: str) -> None:
    fill(str(home))
    submit_pending_work(str(home))
    assert_no_client_left(home)
    store = stores.open(home, limits=LIMITS)
    for n in range(150):
        store.transact(put_user_row, n)
        if n % 10 == 0:
            store.transact(queue.put_many, "mail", [b"item %d %d" % (n, m) for m in range(4)])
    store.transact(queue.claim, "mail", "clerk", 3, 10**12)
    store.transact(lease.acquire, "resource", "clerk", "1", 10**12)
    store.transact(lambda txn: txn.put(("large",), bytes(range(256)) * 300))
    rows = store.read(lambda txn: txn.scan(b"", b"\xff"))
    user_rows = [row for row in rows if not is_backend_row(row[0])]
    (home / ROWS).write_bytes(msgspec.msgpack.encode(user_rows))
    if state == "killed":
        writer_of(home).kill()
        (home / "writer.sock").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    store.close()
    assert_no_client_left(home, LIMITS.idle_exit_s)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
