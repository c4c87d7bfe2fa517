"""Rolling deploys, forward and back, under load and with kills: two versions of an app on one store.

An outside client keeps the list of keys that were acknowledged, and compares it with the journals: each
is handled once, by code that knows it (invariant I7). The state of each version has a field that the other
lacks, so neither can repeat the entries of the other: no world is parked for that (J6).
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import codec
from holdfast import store as stores
from holdfast.app.handle import JournalEntry
from holdfast.app.runtime import Runtime
from holdfast.durable import queue
from holdfast.errors import CommitUnknown, HoldfastError
from holdfast.messages import Receipt
from holdfast.world import catalog, redrive
from holdfast.world.catalog import CODE_MISSING, Status, WorldRecord
from tests.process import rolling
from tests.process.conftest import LIMITS
from tests.process.watch import until, writer_of
from tests.processes import Proc

MODULES = (
    "holdfast.world.unknown",
    "holdfast.roles.orchestrator",
    "holdfast.authority.declarations",
    "holdfast.world.shape",
)

LEASE_S = "1"
WORLDS = 6
# Sent while a deploy rolls one way.
EVENTS = 60
WANTED = ("effect", "timer", "mail", "post")
LONG_S = 300.0


class Client:
    """Sends for both versions, and remembers what was acknowledged."""

    def __init__(self, store: stores.Store, seed: int) -> None:
        self.store = store
        self.versions = [rolling.first, rolling.second]
        self.runtimes = [Runtime(one.app, store, roles=()) for one in self.versions]
        self.random = random.Random(seed)
        # What became of an acknowledged key must be in the journals: its name, by which code.
        self.wanted: dict[str, str] = {}
        self.tasks: list[Any] = []
        self.sent = 0

    def send(self, count: int) -> None:
        for _ in range(count):
            self.sent += 1
            which = self.random.randrange(2)
            self._send(f"k{self.sent}", self.versions[which], self.runtimes[which])

    def _send(self, id: str, version: Any, runtime: Runtime) -> None:
        mark = ("old", "new")[version is rolling.second]
        choice = self.random.randrange(4)
        if choice == 0:
            submission = version.task.options(key=id)
            self.tasks.append(_acknowledged(lambda: runtime.submit(submission, id)))
            return
        what = WANTED[self.random.randrange(len(WANTED))]
        events = (rolling.Placed(id), version.note(id), version.asked(id, what))
        world = runtime.world(version.Ledger, f"w{self.random.randrange(WORLDS)}")
        _acknowledged(lambda: world.send(events[choice - 1], key=id))
        self.wanted[id] = "" if choice == 1 else mark
        if choice == 3:
            self.wanted[{"effect": f"{id}!", "timer": f"{id}~"}.get(what, f"{id}>")] = mark

    def unhandled(self) -> list[str]:
        """Acknowledged, and not (yet) in a journal as handled."""
        done = self.handled()
        return sorted(id for id in self.wanted if not done[id])

    def handled(self) -> Counter[str]:
        return Counter(name_of(entry) for entry in self.entries() if entry.outcome == "ok")

    def entries(self) -> list[JournalEntry]:
        runtime = self.runtimes[0]
        names = [f"w{n}" for n in range(WORLDS)] + ["mail"]
        worlds = [runtime.world(rolling.first.Ledger, name) for name in names]
        for world in worlds:
            world.create()
        return [entry for world in worlds for entry in world.journal()]


def parked(store: stores.Store) -> list[WorldRecord]:
    worlds = store.read(catalog.worlds, "roll", "", 100)
    return [one for one in worlds if one.status is not Status.ACTIVE]


def _acknowledged(call: Callable[[], Any]) -> Any:
    """What a call answers, repeated under the same key until it does, as a client retries."""
    deadline = time.monotonic() + LONG_S
    while True:
        try:
            return call()
        except HoldfastError as error:
            unsure = error.retryable or isinstance(error, CommitUnknown)
            if not unsure or time.monotonic() > deadline:
                raise


def name_of(entry: JournalEntry) -> str:
    """The key of what an entry handled; that of a receipt and of a timer is marked."""
    ingress = entry.step.ingress
    if ingress.kind.value == "receipt":
        return codec.unpack_as(Receipt, ingress.value).tag + "!"
    if ingress.kind.value == "inbox":
        return str(codec.unpack(ingress.value))
    id = str(codec.unpack(ingress.value[1:])["id"])
    return id + "~" if ingress.kind.value == "timer" else id


def roll(home: Path, client: Client, running: list[tuple[str, Proc]], to: str) -> int:
    """Replace each process by one of the other version, while the client sends; how many were killed."""
    kills = 0
    sender = threading.Thread(target=client.send, args=(EVENTS,))
    before = client.sent
    sender.start()
    try:
        for n in range(len(running)):
            reached = before + (n + 1) * EVENTS // (len(running) + 1)
            until(lambda reached=reached: client.sent >= reached, "the client sends", LONG_S)
            # In a good order at times; as a rule by force, whatever is under way.
            _, was = running[n]
            if client.random.randrange(4):
                assert was.kill() == -signal.SIGKILL
                kills += 1
            else:
                was.terminate()
                assert was.wait(LONG_S) == 0
            was.close()
            if n == 0:
                kills += writer_of(home).send(signal.SIGKILL)
            running[n] = (to, up(home, to))
    finally:
        sender.join(LONG_S)
    assert not sender.is_alive()
    return kills


def up(home: Path, version: str) -> Proc:
    argv = [sys.executable, "-m", "holdfast.cli", "up", f"tests.process.rolling:{version}"]
    return Proc.spawn([*argv, "--store", str(home), "--lease-s", LEASE_S], timeout_s=LONG_S)


def run(home: Path, rolls: int) -> None:
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(stores.open(home, limits=LIMITS))
        client = Client(store, seed=rolls)
        running = [("old", up(home, "old")), ("old", up(home, "old"))]
        stack.callback(lambda: [proc.close() for _, proc in running])
        kills = 0
        for _ in range(rolls):
            kills += roll(home, client, running, "new")
            kills += roll(home, client, running, "old")
            assert parked(store) == []
        # Both versions at once: whatever waits for either of them goes on.
        running.append(("new", up(home, "new")))
        until(lambda: not client.unhandled(), "all is handled", LONG_S, poll_s=0.2)
        for task in client.tasks:
            assert task.result(timeout=LONG_S)
        entries = client.entries()
        handled = client.handled()
        assert {id: handled[id] for id in client.wanted} == dict.fromkeys(client.wanted, 1)
        assert {entry.outcome for entry in entries} == {"ok"}, "nothing was given up or ignored"
        for entry in entries:
            mark = client.wanted[name_of(entry)]
            assert not mark or entry.step.code == mark, f"{entry} was handled by {entry.step.code}"
        assert store.read(queue.counts, redrive.failures("roll")).dead == 0
        assert parked(store) == []
        print(
            f"{rolls} rolls forward and back, {kills} kills: {len(client.wanted)} acknowledged keys and "
            f"what followed from them, {len(client.tasks)} tasks, {len(entries)} entries, 0 unhandled, 0 parked"
        )


@pytest.mark.timeout(900)
def test_after_kill_9_and_a_rollback_a_world_waits_for_the_version_that_made_its_entries(
    home: Path,
) -> None:
    """The older version lacks a field of the state: it handles nothing, and parks nothing."""
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(stores.open(home, limits=LIMITS))
        newer = Runtime(rolling.new, store, roles=())
        world = newer.world(rolling.second.Ledger, "w")
        world_id = world.create()

        def blocker() -> str:
            found = store.read(catalog.record, "roll", world_id).blocked_by
            return "" if found is None else found.code

        with up(home, "new") as first:
            for n in range(3):
                _acknowledged(lambda n=n: world.send(rolling.Placed(f"{n}"), key=f"{n}"))
            until(lambda: world.height() == 3, "the newer version handles them", LONG_S)
            assert first.kill() == -signal.SIGKILL
        with up(home, "old"):
            _acknowledged(lambda: world.send(rolling.Placed("3"), key="3"))
            until(lambda: blocker() == CODE_MISSING, "the older version gives it back", LONG_S)
            assert world.height() == 3
            with up(home, "new"):
                until(lambda: world.height() == 4, "the newer version goes on", LONG_S)
        assert world.state().seen == 4
        assert [entry.step.code for entry in world.journal()] == ["new"] * 4
        assert blocker() == ""
        assert parked(store) == []


@pytest.mark.timeout(900)
def test_a_rolling_deploy_forward_and_back_loses_no_acknowledged_event(home: Path) -> None:
    run(home, 1)


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_ten_rolling_deploys_forward_and_back_lose_no_acknowledged_event(home: Path) -> None:
    run(home, 10)
