"""`holdfast verify` and tasks: their log is replayed, and the first difference named."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast import store as stores
from holdfast.store.api import Store, Txn
from holdfast.tasks import checkpoint
from holdfast.tasks import coordinator as tasks
from holdfast.tasks.coordinator import New, Report
from holdfast.tasks.rows import Spec, keys_of, lane, pack, pack_int
from holdfast.tasks.runs import lift, status_of
from holdfast.tasks.states import State
from tests.cli.conftest import Run

KEYS = keys_of("shop")


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with stores.open(str(path)) as store:
        store.transact(tasks.submit, "shop", Spec("pack"), [New(b"x")] * 10)
        leased = store.transact(tasks.lease, "shop", "w", ["default"], 5)
        reports = [Report(grant.seq, grant.lease) for grant in leased.grants[:3]]
        store.transact(tasks.settle, "shop", "w", store.generation, reports)
        yield store


def test_a_sound_store_of_tasks(run: Run, path: Path, store: Store) -> None:
    assert run("verify", "--store", path).code == 0


def test_a_sound_store_whose_log_was_cut(run: Run, path: Path, store: Store) -> None:
    for _ in range(3):
        store.transact(tasks.submit, "shop", Spec("pack"), [New(b"x")])
        assert checkpoint.make(store, "shop")
    assert run("verify", "--store", path).code == 0


def test_a_status_that_the_log_does_not_say(run: Run, path: Path, store: Store) -> None:
    def change(txn: Txn) -> None:
        status = status_of(txn, KEYS, pack_int(5))
        changed = replace(status, state=State.FAILED, worker="nobody")
        txn.put(KEYS.statuses + pack_int(5), pack(changed))

    store.transact(change)
    ran = run("verify", "--store", path)
    assert ran.code == 1
    first = ran.out.splitlines()[0]
    assert first == "task shop/1-5: state at height 2: found FAILED, expected LEASED"


def test_a_place_that_is_missing(run: Run, path: Path, store: Store) -> None:
    store.transact(lambda txn: lift(txn, KEYS.ready + lane("default", 0, 0), pack_int(6)))
    ran = run("verify", "--store", path, "--json")
    assert ran.code == 1
    [task, count] = ran.document["differences"]
    assert (task["where"], task["what"], task["found"]) == ("shop/1-6", "place", "none")
    assert (count["where"], count["what"]) == ("shop", "count of ready in default")
