"""Mail between two stores in real processes: pools killed between the two commits, missing stores."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.app.runtime import Runtime
from holdfast.app.world_handle import WorldHandle
from holdfast.durable import inbox, queue
from holdfast.store.api import Store, Txn
from holdfast.world import catalog
from holdfast.world.messaging import outbox
from tests.process import mail_app
from tests.process.conftest import LIMITS
from tests.process.mail_app import Office, Write
from tests.process.watch import KILLS, assert_no_process_left, until
from tests.processes import Proc

UP = [sys.executable, "-m", "holdfast.cli", "up", "tests.process.mail_app:north"]
STALLED_MAIL_WORKER = [sys.executable, "-m", "tests.process.stalled_mail_worker"]
EACH = 5

Up = Callable[..., Proc]


@pytest.fixture
def south_home(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "south"
    yield path
    assert_no_process_left(path, LIMITS.idle_exit_s, slack_s=10)


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    with stores.open(home, limits=LIMITS) as opened:
        yield opened


@pytest.fixture
def north(store: Store) -> Iterator[Runtime]:
    """The runtime that hosts the worlds. Another process delivers their mail."""
    runtime: Runtime = mail_app.north.open(store, roles=("orchestrator", "world"))
    with runtime:
        yield runtime


@pytest.fixture
def south(south_home: Path) -> Iterator[Runtime]:
    with stores.open(south_home, limits=LIMITS) as opened:
        runtime: Runtime = mail_app.south.open(opened, roles=("orchestrator", "world"))
        with runtime:
            yield runtime


@pytest.fixture
def up(home: Path, south_home: Path, store: Store) -> Iterator[Up]:
    with contextlib.ExitStack() as running:

        def up(*options: str, ready: str | None = "ready") -> Proc:
            argv = [*UP, "--store", str(home), "--role", "adapter", *options]
            return running.enter_context(Proc.spawn(argv, ready=ready))

        yield up


def lane_counts(store: Store) -> queue.QueueCounts:
    return store.read(queue.counts, outbox.peer_queue_name("north", "south"))


def test_mail_has_one_delivery_and_receipt_when_the_pool_is_killed_between(
    up: Up, home: Path, south_home: Path, north: Runtime, south: Runtime, store: Store
) -> None:
    ada: WorldHandle[Office] = north.world(Office, "ada")
    bob: WorldHandle[Office] = south.world(Office, "bob")
    delivered = 0
    for kill in range(KILLS):
        for n in range(EACH):
            ada.send(Write(kill * EACH + n))
        until(lambda: ada.state().sent == (kill + 1) * EACH, "the sending")  # noqa: B023
        with Proc.spawn([*STALLED_MAIL_WORKER, str(home), str(south_home)]) as mail_worker:
            line = mail_worker.expect("delivered")
            delivered += int(str(line).split()[-1])
            mail_worker.kill()
    assert delivered >= KILLS
    assert ada.state().answers == 0, "the pool was killed before the reply"

    up("--peer", f"south={south_home}")
    total = KILLS * EACH
    until(lambda: ada.state().answers >= total, "all receipts", timeout_s=40)
    until(lambda: len(bob.state().read) >= total, "all mail")
    assert sorted(bob.state().read) == list(range(total)), "each once, and no other"
    state = ada.state()
    assert (state.answers, len(state.told)) == (total, total), "one receipt for each intent"
    statuses = Counter(state.told.values())
    assert set(statuses) <= {"ok", "already_enqueued"}
    assert statuses["already_enqueued"] >= KILLS, "what was delivered before a death was known"
    assert lane_counts(store) == queue.QueueCounts(done=total)


def test_mail_to_a_missing_store_waits_without_blocking_other_stores(
    up: Up, tmp_path: Path, south_home: Path, north: Runtime, store: Store
) -> None:
    ada: WorldHandle[Office] = north.world(Office, "ada")
    west_home = tmp_path / "west"
    pool = up("--peer", f"south={south_home}", "--peer", f"west={west_home}")
    for n in range(20):
        ada.send(Write(n))
    ada.send(Write(20, universe="west"))
    until(lambda: lane_counts(store).delayed, "a first look at a store that is not there")
    assert not south_home.exists()
    with stores.open(west_home, limits=LIMITS) as peer_store:
        until(lambda: peer_store.read(_inbox_depth, "west"), "mail to a store that came later")
    assert ada.state().answers <= 1
    with stores.open(south_home, limits=LIMITS) as peer_store:
        until(
            lambda: peer_store.read(_inbox_depth, "south") == 20,
            "mail to the store that is there now",
        )
    until(lambda: ada.state().answers == 21, "all receipts")
    assert set(ada.state().told.values()) == {"ok"}
    pool.terminate()
    assert pool.wait() == 0
    assert_no_process_left(west_home, LIMITS.idle_exit_s, slack_s=10)


def _inbox_depth(txn: Txn, universe: str) -> int:
    found = catalog.find_id(txn, universe, "Office", "bob")
    return 0 if found is None else inbox.depth(txn, catalog.subject_of(universe, found))


@pytest.mark.parametrize("peer", ["south", "south=", "=./x", "a/b=./x", "north=./x"])
def test_pool_with_an_invalid_peer_option_does_not_start(up: Up, peer: str) -> None:
    wrong = up("--peer", peer, ready=None)
    assert wrong.wait() != 0
    assert "holdfast" in wrong.errors[-1]


def test_duplicate_peer_option_is_refused(up: Up) -> None:
    wrong = up("--peer", "south=./x", "--peer", "south=./y", ready=None)
    assert wrong.wait() != 0
    assert "twice" in wrong.errors[-1]
