"""`holdfast store info`."""

from pathlib import Path

from holdfast import store as stores
from holdfast.cli.store import last_commit_no, queue_counts
from holdfast.config import OUTCOMES_KEPT
from holdfast.durable import queue
from holdfast.store.api import Store
from holdfast.store.schema import Space
from tests.cli.conftest import Run


def test_info_tells_what_the_queues_hold(run: Run, path: Path, letters: list[int]) -> None:
    ran = run("store", "info", "--store", path)
    assert ran.code == 0
    assert ran.out.splitlines()[-2].split() == [
        "queue", "ready", "delayed", "claimed", "dead", "done",
    ]  # fmt: skip
    assert ran.out.splitlines()[-1].split() == ["mail", "1", "0", "0", "3", "0"]


def test_info_as_json(run: Run, path: Path, store: Store, letters: list[int]) -> None:
    told = run("store", "info", "--store", f"lmdb:{path}", "--json").document
    assert told["url"] == store.url
    assert told["generation"] == store.generation
    assert told["commit_no"] == 5
    assert told["bytes"] > 0
    assert told["queues"] == [
        {"queue": "mail", "ready": 1, "delayed": 0, "claimed": 0, "dead": 3, "done": 0}
    ]


def test_a_store_in_memory_cannot_be_looked_at(run: Run) -> None:
    assert run("store", "info", "--store", "memory:").error.startswith("invalid: ")


def test_the_commit_number_survives_the_wrap_of_the_ring() -> None:
    with stores.open("memory:") as store:
        assert store.read(last_commit_no) == 0
        for n in range(1, OUTCOMES_KEPT + 3):
            store.transact(lambda txn: txn.put((int(Space.APP_STATE), "sim"), b""))
            if n in (1, 2, OUTCOMES_KEPT - 1, OUTCOMES_KEPT, OUTCOMES_KEPT + 1):
                assert store.read(last_commit_no) == n


def test_queues_are_found_by_name_without_reading_their_items() -> None:
    names = ["a", "a\0b", "b", "ä"]
    with stores.open("memory:") as store:
        for name in names:
            store.transact(queue.put_many, name, [b"x"] * 3)
        found = store.read(queue_counts, 100)
        assert [name for name, _ in found] == names
        assert {counts.ready for _, counts in found} == {3}
        assert [name for name, _ in store.read(queue_counts, 2)] == names[:2]
