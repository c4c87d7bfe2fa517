"""`holdfast errors list | show | redrive | drop`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast import store as stores
from holdfast.config import WriterLimits
from holdfast.durable import queue
from holdfast.ops import audit
from holdfast.store import schema, tuples
from holdfast.store.api import Store, Txn
from holdfast.tasks import operations
from holdfast.tasks.model import TaskSpec
from holdfast.tasks.operations import TaskToSubmit
from tests.cli.conftest import RunCommand

MODULES = ("holdfast.cli.errors",)
QUEUE = "shop/other"


@pytest.fixture
def letters(path: Path) -> Any:
    """Three letters of one error, and one of another."""
    with stores.open(path) as store:
        for n in range(3):
            store.transact(queue.add_dead_letter, QUEUE, b"x", "broken", f"letter {n}")
        store.transact(queue.add_dead_letter, QUEUE, b"x", "lost", "nobody")
        yield store


def test_errors_are_listed_shown_redriven_and_dropped_by_group(
    run: RunCommand, path: Path, letters: Store
) -> None:
    where = ("--universe", "shop", "--store", path)
    largest, other = run("errors", "list", *where, "--json").document["errors"]
    assert (largest["text"], largest["count"], other["text"]) == ("letter <n>", 3, "nobody")
    assert "letter <n>" in run("errors", "list", "--kind", "dead", *where).out
    assert run("errors", "list", "--kind", "task", *where).out == "no errors\n"
    group = ("dead", largest["group"])
    shown = run("errors", "show", *group, *where, "--json").document
    assert [one["seq"] for one in shown["subjects"]] == [1, 2, 3]
    dry = run("errors", "drop", *group, "--dry-run", *where, "--json").document
    assert dry == {"would_drop": ["other/1", "other/2", "other/3"]}
    dropped = run("errors", "drop", *group, "--limit", 2, *where, "--json").document
    assert dropped == {"dropped": 2, "refused": [], "stopped": False}
    assert run("errors", "redrive", *group, *where).out == "1 redriven\n"
    counts = letters.read(queue.counts, QUEUE)
    assert (counts.ready, counts.dead) == (1, 1)
    actions = [one.action for _, one in letters.read(audit.list_entries, "shop")]
    assert sorted(set(actions)) == ["errors.drop", "errors.redrive"]
    assert "error group" in run("errors", "show", *group, *where).error
    assert run("errors", "drop", "task", other["group"], *where).error.startswith("invalid")


def test_rebuild_of_a_consistent_store_groups_the_failures_of_an_older_version(
    run: RunCommand, path: Path
) -> None:
    limits = WriterLimits(idle_exit_s=0.05, reader_check_s=0.05)
    with stores.open(path, limits=limits) as store, hf.App("shop").open(store, roles=()):
        store.transact(queue.add_dead_letter, QUEUE, b"x", "broken", "letter 1")
        prefix = schema.key_prefix(schema.Space.STATISTIC, "shop")

        def age(txn: Txn) -> None:
            for key, _ in txn.scan(prefix, tuples.prefix_end(prefix)):
                txn.delete(key)

        store.transact(age)
        submitted = TaskToSubmit(b"\x92\x90\x80")
        store.transact(operations.submit, "shop", TaskSpec("print"), [submitted])
    where = ("--universe", "shop", "--store", path)
    assert run("errors", "list", *where).out == "no errors\n"
    rebuilt = run("store", "rebuild", *where, "--json").document
    assert (rebuilt["differences"], rebuilt["written"]) == ([], True)
    [group] = run("errors", "list", *where, "--json").document["errors"]
    assert (group["text"], group["count"]) == ("letter <n>", 1)
    assert not run("store", "rebuild", *where, "--json").document["written"]
