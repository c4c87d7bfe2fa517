"""Rolling deploys and rollbacks under load and with kills: two versions of an app on one store.

A client records the acknowledged keys and compares them with the journals: each key is handled once, by code
that knows it (invariant I7). The state of each version has a field that the other version lacks, so neither
version can replay the entries of the other. No world is parked for that reason (J6).
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
from holdfast.app.runtime import Runtime
from holdfast.app.world_handle import JournalEntry
from holdfast.durable import queue
from holdfast.errors import CommitUnknown, HoldfastError
from holdfast.messages import IntentReceipt
from holdfast.world import catalog, redrive
from holdfast.world.catalog import CODE_MISSING, WorldRecord, WorldStatus
from tests.process import versioned_app
from tests.process.conftest import LIMITS
from tests.process.watch import until, writer_of
from tests.processes import Proc

MODULES = (
    "holdfast.world.unknown_events",
    "holdfast.workers.orchestrator",
    "holdfast.leadership.declarations",
    "holdfast.world.state_shape",
)

LEASE_S = "1"
WORLDS = 6
# Events sent during one roll.
EVENTS = 60
INTENT_KINDS = ("effect", "timer", "mail", "post")
LONG_S = 300.0


class DeployClient:
    """Sends events and tasks of both versions, and records the acknowledged keys."""

    def __init__(self, store: stores.Store, seed: int) -> None:
        self.store = store
        self.versions = [versioned_app.first, versioned_app.second]
        self.runtimes = [Runtime(one.app, store, roles=()) for one in self.versions]
        self.random = random.Random(seed)
        # For each acknowledged key, the code version that must handle it. Empty: either version.
        self.expected_code: dict[str, str] = {}
        self.tasks: list[Any] = []
        self.sent = 0

    def send(self, count: int) -> None:
        for _ in range(count):
            self.sent += 1
            which = self.random.randrange(2)
            self._send(f"k{self.sent}", self.versions[which], self.runtimes[which])

    def _send(self, id: str, version: Any, runtime: Runtime) -> None:
        code = ("old", "new")[version is versioned_app.second]
        choice = self.random.randrange(4)
        if choice == 0:
            submission = version.task.options(key=id)
            self.tasks.append(_retry_until_acknowledged(lambda: runtime.submit(submission, id)))
            return
        what = INTENT_KINDS[self.random.randrange(len(INTENT_KINDS))]
        events = (versioned_app.Placed(id), version.note(id), version.asked(id, what))
        world = runtime.world(version.Ledger, f"w{self.random.randrange(WORLDS)}")
        _retry_until_acknowledged(lambda: world.send(events[choice - 1], key=id))
        self.expected_code[id] = "" if choice == 1 else code
        if choice == 3:
            self.expected_code[{"effect": f"{id}!", "timer": f"{id}~"}.get(what, f"{id}>")] = code

    def unhandled(self) -> list[str]:
        """Acknowledged keys that no journal entry has handled yet."""
        done = self.handled()
        return sorted(id for id in self.expected_code if not done[id])

    def handled(self) -> Counter[str]:
        return Counter(key_of(entry) for entry in self.entries() if entry.outcome == "ok")

    def entries(self) -> list[JournalEntry]:
        runtime = self.runtimes[0]
        names = [f"w{n}" for n in range(WORLDS)] + ["mail"]
        worlds = [runtime.world(versioned_app.first.Ledger, name) for name in names]
        for world in worlds:
            world.create()
        return [entry for world in worlds for entry in world.journal()]


def parked(store: stores.Store) -> list[WorldRecord]:
    worlds = store.read(catalog.list_worlds, "roll", "", 100)
    return [one for one in worlds if one.status is not WorldStatus.ACTIVE]


def _retry_until_acknowledged(call: Callable[[], Any]) -> Any:
    """The result of a call, retried with the same key while its error is retryable."""
    deadline = time.monotonic() + LONG_S
    while True:
        try:
            return call()
        except HoldfastError as error:
            is_retryable = error.retryable or isinstance(error, CommitUnknown)
            if not is_retryable or time.monotonic() > deadline:
                raise


def key_of(entry: JournalEntry) -> str:
    """The key that an entry handled. Keys of receipts end with `!`, keys of timers with `~`."""
    ingress = entry.step.ingress
    if ingress.kind.value == "receipt":
        return codec.unpack_as(IntentReceipt, ingress.value).tag + "!"
    if ingress.kind.value == "inbox":
        return str(codec.unpack(ingress.value))
    id = str(codec.unpack(ingress.value[1:])["id"])
    return id + "~" if ingress.kind.value == "timer" else id


def roll(home: Path, client: DeployClient, running: list[tuple[str, Proc]], to: str) -> int:
    """Replace each process by one of the other version while the client sends. Returns the number of kills."""
    kills = 0
    sender = threading.Thread(target=client.send, args=(EVENTS,))
    before = client.sent
    sender.start()
    try:
        for n in range(len(running)):
            reached = before + (n + 1) * EVENTS // (len(running) + 1)
            until(lambda reached=reached: client.sent >= reached, "the client sends", LONG_S)
            # One process in four is terminated in order, the rest are killed.
            _, replaced = running[n]
            if client.random.randrange(4):
                assert replaced.kill() == -signal.SIGKILL
                kills += 1
            else:
                replaced.terminate()
                assert replaced.wait(LONG_S) == 0
            replaced.close()
            if n == 0:
                kills += writer_of(home).send(signal.SIGKILL)
            running[n] = (to, up(home, to))
    finally:
        sender.join(LONG_S)
    assert not sender.is_alive()
    return kills


def up(home: Path, version: str) -> Proc:
    argv = [sys.executable, "-m", "holdfast.cli", "up", f"tests.process.versioned_app:{version}"]
    return Proc.spawn([*argv, "--store", str(home), "--lease-s", LEASE_S], timeout_s=LONG_S)


def run(home: Path, rolls: int) -> None:
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(stores.open(home, limits=LIMITS))
        client = DeployClient(store, seed=rolls)
        running = [("old", up(home, "old")), ("old", up(home, "old"))]
        stack.callback(lambda: [proc.close() for _, proc in running])
        kills = 0
        for _ in range(rolls):
            kills += roll(home, client, running, "new")
            kills += roll(home, client, running, "old")
            assert parked(store) == []
        # Both versions run at once, so that all waiting events are handled.
        running.append(("new", up(home, "new")))
        until(lambda: not client.unhandled(), "all is handled", LONG_S, poll_s=0.2)
        for task in client.tasks:
            assert task.result(timeout=LONG_S)
        entries = client.entries()
        handled = client.handled()
        assert {id: handled[id] for id in client.expected_code} == dict.fromkeys(
            client.expected_code, 1
        )
        assert {entry.outcome for entry in entries} == {"ok"}, "nothing was given up or ignored"
        for entry in entries:
            mark = client.expected_code[key_of(entry)]
            assert not mark or entry.step.code == mark, f"{entry} was handled by {entry.step.code}"
        assert store.read(queue.counts, redrive.failed_events_queue("roll")).dead == 0
        assert parked(store) == []
        print(
            f"{rolls} rolls forward and back, {kills} kills: {len(client.expected_code)} acknowledged keys and "
            f"what followed from them, {len(client.tasks)} tasks, {len(entries)} entries, 0 unhandled, 0 parked"
        )


@pytest.mark.timeout(900)
def test_world_waits_after_rollback_for_the_version_of_its_entries(
    home: Path,
) -> None:
    """The older version lacks a field of the state. It neither handles events nor parks the world."""
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(stores.open(home, limits=LIMITS))
        newer = Runtime(versioned_app.new, store, roles=())
        world = newer.world(versioned_app.second.Ledger, "w")
        world_id = world.create()

        def blocker() -> str:
            found = store.read(catalog.get_record, "roll", world_id).blocked_by
            return "" if found is None else found.code

        with up(home, "new") as first:
            for n in range(3):
                _retry_until_acknowledged(
                    lambda n=n: world.send(versioned_app.Placed(f"{n}"), key=f"{n}")
                )
            until(lambda: world.height() == 3, "the newer version handles them", LONG_S)
            assert first.kill() == -signal.SIGKILL
        with up(home, "old"):
            _retry_until_acknowledged(lambda: world.send(versioned_app.Placed("3"), key="3"))
            until(lambda: blocker() == CODE_MISSING, "the older version gives it back", LONG_S)
            assert world.height() == 3
            with up(home, "new"):
                until(lambda: world.height() == 4, "the newer version goes on", LONG_S)
        assert world.state().seen == 4
        assert [entry.step.code for entry in world.journal()] == ["new"] * 4
        assert blocker() == ""
        assert parked(store) == []


@pytest.mark.timeout(900)
def test_rolling_deploy_and_rollback_lose_no_acknowledged_event(home: Path) -> None:
    run(home, 1)


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_ten_rolling_deploys_and_rollbacks_lose_no_acknowledged_event(home: Path) -> None:
    run(home, 10)
